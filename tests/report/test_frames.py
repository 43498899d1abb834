"""Runs as data frames: a row for each run, round and client, with the labels of the sweep in front."""

import warnings
from pathlib import Path
from typing import Any

import pytest

import protofed
from protofed import UserError, run
from protofed.report.frames import Loaded
from protofed.sweep import Sweep, run_sweep
from protofed.sweep.run import place

TINY = ["rounds=2", "clients=4", "partition.shots=4", "model=mlp_digits", "evaluate.pm_clients=1"]
LABELS = ["experiment", "method", "seed", "optimizer.lr", "clients"]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("swept")
    raw = {
        "experiment": "demo",
        "seeds": [0, 1],
        "changes": TINY,
        "methods": {"local": [], "strong": ["method=fedproto", "method.lam=4"]},
        "parameters": {"optimizer.lr": [0.05], "clients": [4]},
    }
    plan = Sweep.load(raw)
    for cell, folder in place(plan.cells(), out):
        run(cell.experiment, folder)
    assert {outcome.status for outcome in run_sweep(plan, out, jobs=1)} == {"kept"}
    return out


def test_every_row_begins_with_the_labels_of_the_sweep(swept: Path) -> None:
    found = protofed.load(swept, pandas=False)
    assert [len(table) for table in found[:3]] == [4, 8, 16]
    for table in found[:3]:
        assert all(list(row)[:5] == LABELS for row in table)
        assert [(row["method"], row["seed"]) for row in table[:: len(table) // 4]] == [
            ("local", 0), ("local", 1), ("strong", 0), ("strong", 1),
        ]  # fmt: skip
        assert all((row["optimizer.lr"], row["clients"]) == (0.05, 4) for row in table)
    run, line, client = found.runs[2], found.rounds[5], found.clients[11]
    assert run["run.method"] == "fedproto"
    assert run["accuracy_mean"] == protofed.Result(Path(run["folder"]), {}).rounds[-1]["accuracy_mean"]
    assert (line["round"], line["round.clients"]) == (2, 4)
    assert line["bytes_up"] == sum(value for key, value in line.items() if key.startswith("bytes_up_by."))
    assert client["client"] == 3
    assert 0 <= client["accuracy"] <= 1
    assert repr(found) == "<Loaded: 4 runs, 8 rounds, 16 clients; 0 folders left out>"


def test_data_frames_where_pandas_is_there(swept: Path) -> None:
    pytest.importorskip("pandas")
    found = protofed.load(swept)
    means = found.rounds.groupby(["method", "round"])["accuracy_mean"].mean()
    rows = [row["accuracy_mean"] for row in protofed.load(swept, pandas=False).rounds]
    assert means["strong", 2] == pytest.approx((rows[5] + rows[7]) / 2)
    assert list(found.clients.columns[:5]) == LABELS


def test_without_pandas_the_error_says_what_to_do(swept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protofed.report.frames.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install pandas\. Or load\(\.\.\., pandas=False\)"):
        protofed.load(swept)


def test_what_is_left_out_is_said(swept: Path, tmp_path: Path) -> None:
    one = next(path for path in swept.iterdir() if path.is_dir())
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "experiment.toml").write_text((one / "experiment.toml").read_text())
    with pytest.warns(UserWarning, match="left out: .*half: unfinished: 0 of 2 rounds") as caught:
        found = protofed.load([one, tmp_path / "half"], pandas=False)
    assert caught[0].filename == __file__, "the line that called it"
    assert [out.folder.name for out in found.left_out] == ["half"]
    with pytest.raises(UserError, match="there is no finished run to load"):
        protofed.load(tmp_path / "half", pandas=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(protofed.load(one, pandas=False), Loaded)


@pytest.mark.parametrize(
    ("runs", "said"), [(None, "runs is NoneType"), (["a", 3], "there is no folder 'a'"), ([3], "int")]
)
def test_what_is_no_folder_is_refused(runs: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        protofed.load(runs)
