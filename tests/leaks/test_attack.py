"""`protofed attack` on whole runs: uploads as they were sent, what each protection hides, and bad input."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import protofed
from torch.utils._pytree import tree_leaves

from protofed import Experiment, UserError, run
from protofed.leaks import views
from protofed.leaks.attack import Attacked, Options, attack_run
from protofed.leaks.uploads import AGAIN, prototypes_of, recomputed, sum_of
from protofed.privacy.accounting import spent
from protofed.privacy.release import noised_sum
from protofed.report import html
from protofed.report.gather import gather
from protofed.runs.saved import read_checkpoint
from protofed.runs.setup import prepare
from protofed.runs.store import ClientStore

SMALL = (
    "clients=4", "rounds=2", "model=mlp_digits", "local_epochs=1", "engine=reference", "record.enabled=false",
    "device=cpu", "evaluate.own=0", "evaluate.gm=0", "engine.threads=1", "partition.ways=4", "partition.spread=0",
    "partition.shots=10",
)  # fmt: skip
FEW = Options(clients=2, classes=2, steps=40)
Make = Callable[..., Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Runs by their changes to the demo, each made once."""
    folders: dict[tuple[str, ...], Path] = {}

    def make(*overrides: str) -> Path:
        if overrides not in folders:
            folders[overrides] = tmp_path_factory.mktemp("runs") / "run"
            run(Experiment.load("demo", *SMALL, *overrides), folders[overrides])
        return folders[overrides]

    return make


@pytest.fixture(scope="module")
def plain(made: Make) -> Attacked:
    """The uploads of FedProto, attacked."""
    return attack_run(made(), FEW)


@pytest.mark.parametrize("method", ["fedproto", "fednh", "fedpr", "spfedcl", "classmeans", "fedgh"])
def test_uploads_are_those_that_were_sent(made: Make, method: str) -> None:
    """After one round, the server that aggregates them is the server of the checkpoint."""
    folder = made(f"method={method}", "rounds=1", "method.init=common")
    saved = read_checkpoint(folder)
    experiment, engine = saved.experiment, prepare(saved.experiment).reference
    clients = recomputed(saved, engine)
    assert clients.kept
    assert clients.numbers == [0, 1, 2, 3]
    up = sum_of([clients.uploads[number] for number in clients.numbers])
    before = experiment.method.init_server(engine.specs()[0])
    after = experiment.method.aggregate(before, up, torch.arange(4))
    pairs = list(zip(tree_leaves(after), tree_leaves(saved.state.server), strict=True))
    assert pairs
    assert all(torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6) for ours, theirs in pairs)


@pytest.mark.parametrize("method", [("method.source=inloop",), ("method=fedpac",)])
def test_what_was_not_kept_is_trained_once_more(made: Make, method: tuple[str, ...]) -> None:
    saved = read_checkpoint(made(*method))
    engine = prepare(saved.experiment).reference
    clients = recomputed(saved, engine)
    assert not clients.kept
    assert AGAIN in clients.notes
    again = engine.update(saved.experiment.method, 1, _down(saved, 1), saved.state.round).up
    for ours, theirs in zip(tree_leaves(clients.uploads[1]), tree_leaves(again), strict=True):
        assert torch.equal(ours, theirs)
    sent = prototypes_of(clients.uploads[1], engine)
    assert sent is not None
    assert int((sent.weight > 0).sum()) == 4


def _down(saved: Any, number: int) -> Any:
    from protofed.ops.trees import deal

    return deal(saved.experiment.method.broadcast(saved.state.server, torch.tensor([number])), 0)


def test_what_a_server_sees_of_a_plain_run(plain: Attacked) -> None:
    told = plain.told
    assert told["singly"]
    assert told["view"] == "each upload singly"
    assert (told["holdings"]["classes"], told["holdings"]["classes_right"]) == ("seen", 1.0)
    assert told["holdings"]["counts"] == "not sent"  # FedProto's prototypes count alike
    assert all(len(line["classes"]) == 4 and line["samples"] is None for line in told["holdings"]["clients"])
    assert told["model"] == {"whose": "own", "sent": False, "public": False}
    assert told["epsilon"] is None
    assert json.loads((plain.folder / "attack.json").read_text()) == told
    assert plain.picture is not None
    assert plain.picture.read_bytes().startswith(b"\x89PNG")


def test_the_same_seed_gives_the_same_numbers_and_another_one_others(plain: Attacked) -> None:
    assert attack_run(plain.folder, FEW).told == plain.told
    other = attack_run(plain.folder, Options(clients=2, classes=2, steps=40, seed=1)).told
    assert other["membership"] != plain.told["membership"]
    attack_run(plain.folder, FEW)


def test_counts_are_seen_where_they_are_sent(made: Make) -> None:
    weighted = attack_run(made("method.aggregation=weighted"), FEW).told["holdings"]
    assert weighted["counts"] == "seen per class"
    assert all(line["samples"] == [10 if n else 0 for n in line["samples"]] for line in weighted["clients"])
    assert {line["samples_in_all"] for line in weighted["clients"]} == {40}
    by_model = attack_run(made("method=fednh", "method.alpha=uniform", "method.weighting=samples"), FEW).told
    assert by_model["holdings"]["counts"] == "seen in all"
    assert by_model["model"]["sent"]


def test_a_sample_alone_is_found_and_one_among_a_hundred_hardly(tmp_path: Path) -> None:
    """On real digits, by both attacks: inversion and membership."""
    plan = ("clients=2", "rounds=4", "partition.shots=110", "partition.ways=3", "method.init=common")
    folder = tmp_path / "run"
    run(Experiment.load("demo", *SMALL, *plan), folder)
    told = attack_run(folder, Options(clients=2, classes=2, steps=200)).told
    members = {line["size"]: line["likelihood"] for line in told["membership"]}
    assert set(members) == {None, 1, 2, 5, 20, 100}
    assert members[1]["auc"] > 0.97
    assert members[1]["auc"] > members[5]["auc"] > members[100]["auc"]
    found = {line["size"]: line for line in told["reconstruction"]}
    gain = {size: line["likely"]["correlation"] - line["likely"]["other_correlation"] for size, line in found.items()}
    assert gain[1] > max(0.05, gain[100] + 0.03)
    assert found[1]["likely"]["nearer_than_others"] > max(0.6, found[100]["likely"]["nearer_than_others"])
    assert found[1]["likely"]["correlation"] > found[1]["guess"]["correlation"]


def test_another_clients_model_tells_less(made: Make) -> None:
    """Every client begins with weights of its own, and has seen other classes."""
    mine = attack_run(made(), FEW).told
    other = attack_run(made(), Options(clients=2, classes=2, steps=40, model="other")).told
    area = [next(line for line in told["membership"] if line["size"] == 1)["distance"]["auc"] for told in (mine, other)]
    assert area[0] > 0.95 > area[1]
    attack_run(made(), FEW)


@pytest.mark.skipif(importlib.util.find_spec("Crypto") is None, reason="needs pycryptodome: protofed[secure]")
def test_under_a_secure_sum_nothing_is_seen_singly(made: Make, plain: Attacked) -> None:
    told = attack_run(made("privacy.secure_sum=true"), FEW).told
    assert not told["singly"]
    assert told["view"] == "only the sum over the round's clients"
    held = told["holdings"]
    assert (held["classes"], held["counts"], held["classes_right"]) == ("not seen", "not seen", None)
    assert held["clients"] == []
    area = [{line["size"]: line["likelihood"]["auc"] for line in t["membership"]} for t in (told, plain.told)]
    assert area[0][1] < area[1][1]


@pytest.mark.parametrize("where", ["client", "sum", "server"])
def test_the_bound_does_not_exceed_what_is_claimed(made: Make, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("dp_accounting", reason="needs dp-accounting: pip install 'protofed[privacy]'")
    if where == "sum":
        pytest.importorskip("Crypto", reason="needs pycryptodome: protofed[secure]")
    answers: set[int] = set()

    def released(*words: Any) -> Any:
        answers.add(words[4])
        return noised_sum(*words)

    monkeypatch.setattr(views, "noised_sum", released)
    folder = made(
        "privacy.unit=client", "privacy.epsilon=4", "privacy.clip=2", f"privacy.where={where}", "data.normalize=half",
        *(("privacy.secure_sum=true",) if where == "sum" else ()),
    )  # fmt: skip
    told = attack_run(folder, FEW).told
    epsilon = told["epsilon"]
    summary = json.loads((folder / "summary.json").read_text())
    every, one = epsilon["all_releases"], epsilon["one_release"]
    assert every["releases"] == 2
    assert every["claimed"] == pytest.approx(summary["epsilon_spent"])
    assert one["claimed"] == pytest.approx(spent(summary["privacy"]["noise"], 1, 1e-5))
    assert 0 < one["lower_bound"] <= one["claimed"]
    assert 0 < every["lower_bound"] <= every["claimed"]
    assert epsilon["length"] <= 2 + 1e-6
    assert told["singly"] == (where == "client")
    assert answers == {2 if where == "sum" else 1}  # of four clients, three must answer, and one may tell its noise
    assert told["view"].endswith("with noise")
    assert told["membership"][0]["likelihood"]["auc"] < 0.8


def test_a_run_that_its_budget_ended_is_attacked_as_it_stands(made: Make) -> None:
    pytest.importorskip("dp_accounting", reason="needs dp-accounting: pip install 'protofed[privacy]'")
    noise = ("privacy.unit=client", "privacy.epsilon=4", "privacy.noise=1.5", "privacy.clip=2", "data.normalize=half")
    told = attack_run(made(*noise, "rounds=9"), FEW).told
    assert told["round"] == told["epsilon"]["all_releases"]["releases"] == 1
    assert told["epsilon"]["all_releases"]["claimed"] <= 4


def test_noise_that_is_too_small_is_found_out(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mechanism that adds a third of the noise that it accounts for."""
    pytest.importorskip("dp_accounting", reason="needs dp-accounting: pip install 'protofed[privacy]'")
    from protofed.leaks import audit

    folder = made(
        "privacy.unit=client", "privacy.epsilon=4", "privacy.clip=2", "privacy.where=client", "data.normalize=half"
    )
    monkeypatch.setattr(
        audit, "noised_sum", lambda layout, units, noise, draw: noised_sum(layout, units, noise / 3, draw)
    )
    one = attack_run(folder, FEW).told["epsilon"]["one_release"]
    assert one["lower_bound"] > one["claimed"]


NETS = """
from torch import nn


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(64, 12)
        self.fc = nn.Linear(12, 10)

    def forward(self, x):
        return self.fc(self.a(x.flatten(1)).tanh())
"""


def test_a_frozen_encoder_is_public_and_single_samples_are_audited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pictures are found through the encoder, and the noise that hides a sample is audited for single samples."""
    pytest.importorskip("dp_accounting", reason="needs dp-accounting: pip install 'protofed[privacy]'")
    (tmp_path / "leaknets.py").write_text(NETS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PROTOFED_CACHE", str(tmp_path / "cache"))
    plan = ("model=leaknets:Small", "model.frozen=true", "rounds=1", "data.normalize=half")
    budget = ("privacy.unit=sample", "privacy.epsilon=3", "privacy.delta=1e-3", "privacy.where=client")
    run(Experiment.load("demo", *SMALL, *plan, *budget), tmp_path / "run")
    told = attack_run(tmp_path / "run", FEW).told
    assert told["kind"] == "pictures"
    assert told["model"]["public"]
    one = told["epsilon"]["one_release"]
    assert told["epsilon"]["unit"] == "sample"
    assert 0 < one["lower_bound"] <= one["claimed"] == pytest.approx(3, rel=0.01)


def test_tables_give_numbers_and_no_picture(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(Experiment.load("demo", *SMALL, "data=spiral", "model=mlp_spiral", "partition.ways=2"), folder)
    done = attack_run(folder, FEW)
    assert done.told["kind"] == "numbers"
    assert done.picture is None
    assert not (folder / "attack.png").exists()
    for line in done.told["reconstruction"]:
        assert line["likely"]["psnr"] is line["likely"]["ssim"] is None
        assert line["likely"]["error"] >= 0


def test_the_command_prints_a_table_and_the_report_shows_it(made: Make) -> None:
    folder = made()
    done = protofed("attack", str(folder), "--clients", "1", "--classes", "1", "--steps", "5")
    assert done.returncode == 0, done.stderr
    for word in ("each upload singly", "as sent (10)", "PSNR", "attack.json", "attack.png", "which is not sent"):
        assert word in done.stdout
    as_json = protofed("attack", str(folder), "--clients", "1", "--classes", "1", "--steps", "5", "--json")
    assert json.loads(as_json.stdout) == json.loads((folder / "attack.json").read_text())
    shown = html.data(gather([folder]))
    (figure,) = (some for some in shown["figures"] if some["id"] == "leaks")
    assert figure["missing"] == ""
    rows = [dict(zip(figure["table"][0], row, strict=True)) for row in figure["table"][1:]]
    assert [row["samples"] for row in rows] == ["as sent (10)", "1", "2", "5"]
    assert {row["epsilon claimed"] for row in rows} == {"none"}


AUC = '{"auc": 0.5, "tpr_at_0.01": null, "tpr_at_0.001": null}'


@pytest.mark.parametrize(
    "damage",
    [
        "[]",
        '{"membership": 3}',
        "{",
        "[" * 100_000,
        '{"reconstruction": ' * 5000,
        *(
            f'{{"reconstruction": [], "membership": [{{"samples": {samples}, "size": 1, "distance": {AUC}, '
            f'"likelihood": {AUC}}}], "epsilon": null, "view": "", "holdings": {{"classes": "", "counts": ""}}, '
            '"model": {"sent": true, "public": true}}'
            for samples in ('"x"', "NaN", "Infinity", "0", "-1", "1" + 400 * "0")
        ),
    ],
)
def test_a_damaged_file_is_left_out_of_a_report(tmp_path: Path, damage: str) -> None:
    from written import write_run

    folder = write_run(tmp_path / "run")
    (folder / "attack.json").write_text(damage)
    shown = html.data(gather([folder]))
    assert any("attack.json cannot be read" in why for _, why in shown["remarks"])
    (figure,) = (some for some in shown["figures"] if some["id"] == "leaks")
    assert "protofed attack RUN" in figure["missing"]


def refused(*words: str) -> str:
    done = protofed("attack", *words)
    assert done.returncode != 0
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    return done.stderr


def test_bad_input_is_refused_in_one_line(made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "is not a run" in refused(str(tmp_path))
    assert "kept no models" in refused(str(made("record.models=false")))
    assert "send no prototypes" in refused(str(made("method=fedavg", "rounds=1")))
    assert "no other client of the last round has client" in refused(str(made("clients=1")), "--model", "other")
    assert "changed from task to task ([incremental])" in refused(str(made("incremental.tasks=2")))
    assert "cuda:99" in refused(str(made()), "--device", "cuda:99")
    monkeypatch.setattr(ClientStore, "__len__", lambda self: 0)
    assert "these stay with the clients" in refused(str(made()))


def test_a_run_that_has_not_begun_has_sent_nothing(made: Make, tmp_path: Path) -> None:
    from small_runs import StopAfter

    with pytest.raises(RuntimeError):
        run(Experiment.load("demo", *SMALL), tmp_path / "run", watch=StopAfter(1, RuntimeError))
    with pytest.raises(UserError, match="has finished no round, so nothing was sent"):
        attack_run(tmp_path / "run", FEW)


def test_code_that_somebody_else_names_is_not_imported(made: Make, tmp_path: Path) -> None:
    import shutil

    folder = shutil.copytree(made(), tmp_path / "theirs")
    plan = folder / "experiment.toml"
    plan.write_text(plan.read_text().replace('name = "mlp_digits"', 'name = "strangers_nets:Net"'))
    said = refused(str(folder))
    assert "--trust" in said
    assert "strangers_nets:Net" in said
