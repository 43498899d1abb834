"""New clients: held out of training by an experiment, or with data of their own, and what prototypes do for them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import protofed as command

import protofed
from protofed import Experiment, UserError, run
from protofed.data.sources import load
from protofed.joining.newcomer import few_shots
from protofed.runs.cohort import draw_cohort, held_out

HELD = ("clients=8", "held_out_clients=2", "join.steps=40", "join.shots=4", "record.clients=3")
SETTING = ("partition.shots=15", "method.init=common", "method.candidates=own", "model=cnn_digits")


def plan(*overrides: str) -> Experiment:
    return Experiment.load("demo", "rounds=6", *HELD, *SETTING, *overrides)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of FedProto in which two of eight clients are held out."""
    folder = tmp_path_factory.mktemp("join") / "run"
    run(plan(), folder)
    return folder


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples of a newcomer: three classes to train on, all ten to be tested on; labels are numbers."""
    (digits,) = load(plan().data, None)
    keep = np.isin(digits.y_train, [1, 4, 7])
    path = tmp_path_factory.mktemp("data") / "mine.npz"
    np.savez(
        path,
        x_train=digits.x_train[keep][:60],
        y_train=digits.y_train[keep][:60],
        x_test=digits.x_test,
        y_test=digits.y_test,
    )
    return path


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "clients.jsonl").read_text().splitlines()]


def test_held_out_clients_take_no_part_and_join_after_the_last_round(finished: Path) -> None:
    out = held_out(plan())
    assert len(out) == 2
    assert all(not set(draw_cohort(plan("participation=0.5"), round)) & set(out) for round in range(20))
    lines = records(finished)
    joined = [line for line in lines if line.get("held_out")]
    others = [line for line in lines if not line.get("held_out")]
    assert sorted(line["client"] for line in joined) == out
    assert len(others) == 6
    assert all(line["rounds"] == 6 for line in others)
    summary = json.loads((finished / "summary.json").read_text())
    assert (summary["clients"], summary["clients_trained"], summary["held_out_clients"]) == (8, 6, 2)
    assert (summary["held_out_steps"], summary["held_out_shots"]) == (40, 4)
    assert summary["accuracy_mean"] == pytest.approx(np.mean([line["accuracy"] for line in others]))
    for name in ("head", "proto", "alone"):
        expected = np.mean([line[f"{name}_own"] for line in joined])
        assert summary[f"held_out_{name}_mean"] == pytest.approx(expected)
    for line in joined:
        assert line["steps"] == 40
        assert line["train"] == 4 * len(line["classes"])
    with np.load(finished / "views.npz") as views:
        assert not set(np.unique(views["client"])) & set(out)
    assert "held-out, by prototype" in command("table", str(finished), "--columns", "held-out-proto,held-out").stdout


def test_the_same_run_again_gives_the_same_newcomers(finished: Path) -> None:
    run(plan(), "again")
    clock = {"seconds"}
    first, second = (json.loads((folder / "summary.json").read_text()) for folder in (finished, Path("again")))
    assert {k: v for k, v in first.items() if k not in clock} == {k: v for k, v in second.items() if k not in clock}


def test_a_held_out_client_joins_later_as_it_did_in_the_run(finished: Path) -> None:
    number = held_out(plan())[0]
    done = protofed.join(finished, client=number)
    (before,) = (line for line in records(finished) if line["client"] == number)
    assert {key: done.records[0][key] for key in ("head", "proto", "alone", "unseen", "classes")} == {
        key: before[key] for key in ("head", "proto", "alone", "unseen", "classes")
    }
    more = protofed.join(finished, client=number, steps=5, seeds=[0, 1], lam=[4.0, 0.0])
    assert len(more.records) == 2
    assert all(record["steps"] == 5 and record["lam"] in (4.0, 0.0) for record in more.records)


def test_a_newcomer_with_its_own_file_needs_only_the_run(
    finished: Path, mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prototypes help one who has few samples and takes few steps; the run's data is not asked for."""
    monkeypatch.setattr("protofed.joining.join.prepare_split", None)
    done = protofed.join(finished, data=mine, steps=40, shots=4, lam=[8.0], seeds=[0, 1, 2])
    assert done.records[0]["classes"] == [1, 4, 7]
    assert done.records[0]["train"] == 12
    arrays = dict(np.load(mine))
    np.savez("text.npz", **{k: v.astype(str) if k[0] == "y" else v for k, v in arrays.items()})  # classes by name
    named = protofed.join(finished, data="text.npz", steps=40, shots=4, lam=[8.0])
    assert named.records[0] == done.records[0] | {"domain": "text.npz"}
    head, alone, unseen = done.mean("head"), done.mean("alone"), done.mean("unseen")
    assert head is not None
    assert alone is not None
    assert unseen is not None  # the file has test samples of classes that it never trains on
    assert head > alone + 0.02
    told = json.loads(command("join", str(finished), "--data", str(mine), "--epochs", "2", "--json").stdout)
    assert told["records"][0]["steps"] == 2 * np.ceil(told["records"][0]["train"] / 8)


def test_a_shared_model_is_where_a_newcomer_starts(mine: Path) -> None:
    """With FedNH one step is enough to be far better than alone, for classes never seen too."""
    changes = ("method=fednh", "model=cnn_digits", "clients=4", "held_out_clients=0", "optimizer.lr=0.05")
    run(plan(*changes, "partition.ways=10", "partition.spread=0", "rounds=8"), "out")
    done = protofed.join("out", data=mine, steps=1)
    head, alone, unseen = done.mean("head"), done.mean("alone"), done.mean("unseen")
    assert head is not None
    assert alone is not None
    assert unseen is not None
    assert head > alone + 0.3
    assert unseen > 0.5
    with pytest.raises(UserError, match="shares its model"):
        protofed.join("out", data=mine, model="cnn_digits_8", steps=1)


def test_what_a_newcomer_is_before_it_trains(finished: Path, tmp_path: Path) -> None:
    """With FedAvg the global model itself; with FedProto the common first weights."""
    shared = run(plan("method=fedavg"), tmp_path / "fedavg")
    for line in (line for line in records(shared.folder) if line.get("held_out")):
        whole = protofed.join(shared.folder, client=line["client"], steps=1)
        assert whole.records[0]["start"] == line["start"]
    summary = shared.summary
    starts = [line["start_own"] for line in records(shared.folder) if line.get("held_out")]
    assert summary["held_out_start_mean"] == pytest.approx(np.mean(starts))
    assert summary["held_out_start_mean"] > 0.15
    first = json.loads((finished / "summary.json").read_text())["held_out_start_mean"]
    assert first < summary["held_out_start_mean"]


def test_a_newcomer_of_pfedfda_mixes_a_head_of_its_own(tmp_path: Path) -> None:
    """It takes no step: the method computes the head, as after the last round."""
    out = run(plan("method=pfedfda", "method.candidates=all"), tmp_path / "run")
    joined = [line for line in records(out.folder) if line.get("held_out")]
    assert all(line["head"] != line["start"] for line in joined)
    assert np.mean([line["head"] for line in joined]) > np.mean([line["start"] for line in joined])
    assert all(line["steps"] == 40 for line in joined), "that is what it takes alone"


def test_few_takes_so_many_of_each_class() -> None:
    y = np.repeat([0, 1, 2], [10, 3, 0])
    rows = few_shots(np.arange(13), y, 5, 0, "x")
    assert np.bincount(y[rows]).tolist() == [5, 3]
    assert np.array_equal(rows, few_shots(np.arange(13), y, 5, 0, "x"))
    assert not np.array_equal(rows, few_shots(np.arange(13), y, 5, 1, "x"))
    assert len(few_shots(np.arange(13), y, 0, 0, "x")) == 13


def test_bad_input_is_one_line(finished: Path, mine: Path) -> None:
    (digits,) = load(plan().data, None)
    x, y = digits.x_train[:20], digits.y_train[:20]
    np.savez("other.npz", x_train=x, y_train=y + 90, x_test=x, y_test=y + 90)
    np.savez("bytes.npz", x_train=(x * 255).astype(np.uint8), y_train=y, x_test=(x * 255).astype(np.uint8), y_test=y)
    taking = next(i for i in range(8) if i not in held_out(plan()))
    cases = [
        (("nowhere", "--data", str(mine)), "is not a run"),
        ((str(finished),), "needs one of"),
        ((str(finished), "--client", str(taking)), "was not held out"),
        ((str(finished), "--client", "99"), "was not held out"),
        ((str(finished), "--data", "missing.npz"), "was not found"),
        ((str(finished), "--data", "other.npz"), "that the run does not know"),
        ((str(finished), "--data", "bytes.npz"), "samples of type uint8"),
        ((str(finished), "--data", str(mine), "--model", "resnet18"), "Name a model of that width with --model."),
        ((str(finished), "--data", str(mine), "--model", "nonsense"), "is unknown"),
        ((str(finished), "--data", str(mine), "--lam", "x"), "numbers with commas"),
        ((str(finished), "--data", str(mine), "--steps", "3", "--epochs", "1"), "Give one of them"),
    ]
    for words, message in cases:
        done = command("join", *words)
        assert done.returncode == 2, words
        assert message in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1
    for change, message in (
        ("held_out_clients=8", "leaves nobody"),
        ("method=fesem", "something of its own"),
        ("join.shots=-1", "join.shots"),
    ):
        with pytest.raises(UserError, match=message):
            run(plan(change), "bad")
    with pytest.raises(UserError, match="does not have"):
        run(plan("method=fedavg", "join.lam=[4]"), "bad")
    assert not Path("bad").exists()
