"""Robust rules and attacks in whole runs: on every engine, resumed, in a federation, and as reports show them."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ROOT
from command import protofed
from federated import set_up, workers
from federated import small as federated
from torch.utils._pytree import tree_leaves
from typer.testing import CliRunner

from protofed import Experiment, UserError, run
from protofed.cli import app
from protofed.config.sections import Robust
from protofed.engines.wire import encode
from protofed.explain.explain import explain
from protofed.method import Mean
from protofed.remote.server.serve import serve
from protofed.remote.settings import experiment_hash
from protofed.robust.combine import combine
from protofed.robust.rules import RULES
from protofed.runs.folder import CENTRES, RunFolder, State
from protofed.runs.loop import Interrupted
from protofed.runs.watch import Watch

SMALL = (
    "clients=6", "rounds=2", "model=mlp_digits", "local_epochs=1", "engine=reference", "record.enabled=false",
    "device=cpu", "evaluate.own=0", "evaluate.pm=0",
)  # fmt: skip
MANY = ("clients=10", "partition=dirichlet", "partition.alpha=5", "batch_size=16", "optimizer.lr=0.2")


def small(*overrides: str) -> Experiment:
    return Experiment.load("demo", *SMALL, *overrides)


def state_of(folder: Path) -> State:
    state, remarks = RunFolder(folder).restore()
    assert state is not None
    assert not remarks
    return state


def test_an_attack_that_ruins_a_mean_is_held_off_by_a_median() -> None:
    common = ("method=fedavg", "rounds=4", *MANY)
    attacked = (*common, "attack.kind=sign_flip", "attack.share=0.3")
    alone = run(small(*common), "alone").summary["global_accuracy"]
    mean = run(small(*attacked), "mean").summary["global_accuracy"]
    median = run(small(*attacked, "robust.rule=median"), "median").summary["global_accuracy"]
    assert alone > 0.7
    assert mean < 0.3
    assert median > 0.65


def test_numbers_are_those_of_honest_clients() -> None:
    result = run(small("attack.kind=backdoor", "attack.share=0.34", "method.inference=proto", "evaluate.own=1"), "out")
    clients = {record["client"]: record for record in result.clients}
    bad = {number for number, record in clients.items() if record.get("attacker")}
    assert len(bad) == result.summary["attackers"] == 2
    honest = [record["accuracy_proto"] for number, record in clients.items() if number not in bad]
    assert result.summary["accuracy_mean"] == pytest.approx(sum(honest) / 4)
    assert 0 <= result.summary["attack_success"] <= 1
    assert result.rounds[-1]["attack_success"] == result.summary["attack_success"]


def test_a_backdoor_without_attackers_says_how_often_the_trigger_alone_misleads() -> None:
    plain, none = run(small(), "plain"), run(small("attack.kind=backdoor", "attack.share=0"), "none")
    assert plain.summary["accuracy_mean"] == none.summary["accuracy_mean"]
    assert none.summary["attack_success"] < 0.5  # and not the accuracy under another name
    assert "attackers" not in none.summary


@pytest.mark.parametrize("rule", ["none", "clip", "trimmed"])
def test_engines_agree_under_every_rule_and_an_attack(rule: str) -> None:
    plan = ("method=fednh", "participation=0.9", f"robust.rule={rule}", "attack.kind=sign_flip")
    run(small(*plan), "one")
    run(small(*plan, "engine=stacked", "engine.chunk=2", "engine.threads=1", "engine.compile=never"), "many")
    one, many = state_of(Path("one")), state_of(Path("many"))
    for a, b in zip(tree_leaves(one.server), tree_leaves(many.server), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)
    for a, b in zip(tree_leaves(one.centres), tree_leaves(many.centres), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


class StopAfter(Watch):
    def __init__(self, round: int) -> None:
        self.last = round

    def round(self, line: dict[str, Any]) -> None:
        if line["round"] == self.last:
            raise KeyboardInterrupt


@pytest.mark.parametrize("changes", [("robust.rule=centred_clip",), ("attack.kind=sign_flip", "robust.rule=median")])
def test_a_run_that_counts_from_the_last_centres_resumes_to_the_same_bits(changes: tuple[str, ...]) -> None:
    plan = small("method=fedpr", "rounds=4", "participation=0.5", *changes)
    run(plan, "whole")
    with pytest.raises(Interrupted):
        run(plan, "cut", watch=StopAfter(2))
    assert list(Path("cut").rglob(CENTRES))
    run(plan, "cut", resume=True)
    whole, cut = state_of(Path("whole")), state_of(Path("cut"))
    assert encode(whole.server, whole=True) == encode(cut.server, whole=True)
    assert encode(whole.centres, whole=True) == encode(cut.centres, whole=True)


def test_damaged_centres_fall_back_to_the_checkpoint_before() -> None:
    plan = small("method=fedavg", "rounds=4", "robust.rule=clip")
    run(plan, "whole")
    with pytest.raises(Interrupted):
        run(plan, "cut", watch=StopAfter(3), checkpoint_seconds=0)
    newest = max(Path("cut").rglob(CENTRES))
    raw = bytearray(newest.read_bytes())
    raw[-3] ^= 1
    newest.write_bytes(raw)
    state, remarks = RunFolder(Path("cut")).restore()
    assert state is not None
    assert state.round == 2
    assert remarks
    run(plan, "cut", resume=True)
    assert encode(state_of(Path("cut")).server, whole=True) == encode(state_of(Path("whole")).server, whole=True)


def test_uploads_too_large_for_arithmetic_end_a_mean_with_the_true_reason_and_no_robust_run() -> None:
    plan = ("method=fednh", "attack.kind=scale", "attack.share=0.1", "attack.factor=1e30")
    with pytest.raises(UserError, match=r"attack\.kind = 'scale' is on, and robust\.rule = 'none' did not hold it off"):
        run(small(*plan), "none")
    for rule in ("clip", "median", "multi_krum"):
        assert run(small(*plan, f"robust.rule={rule}"), rule).summary["accuracy_mean"] > 0.3


@pytest.mark.parametrize("rule", RULES)
def test_a_small_site_cannot_move_a_model_far(rule: str) -> None:
    """It has 0.6 % of the data and sends a thousand times what it should."""
    generator = torch.Generator().manual_seed(0)
    model = torch.randn(1, 50, generator=generator) + 0.3 * torch.randn(12, 50, generator=generator)
    samples = torch.tensor([6.0, *[90.0] * 11])
    assert samples[0] / samples.sum() == pytest.approx(0.006, abs=1e-4)
    honest = (model[1:] * samples[1:, None]).sum(0) / samples[1:].sum()
    model[0] *= 1000

    def moved(name: str) -> float:
        up, _ = combine(Robust(rule=name), Mean.of(model, samples), {})  # type: ignore[arg-type]
        return float((up.value - honest).norm() / honest.norm())

    assert moved("none") > 4  # several times its norm
    assert moved(rule) < (0.5 if rule in ("krum", "median") else 0.2)  # as far as an honest client may


def test_experiments_without_a_rule_or_an_attack_are_what_they_were() -> None:
    plain, said = small(), small("robust.rule=none", "robust.passes=5", "attack.kind=none", "attack.share=0.2")
    assert experiment_hash(plain) == experiment_hash(said)
    assert "robust" not in plain.to_toml()
    assert "attack" not in plain.to_toml()
    assert not said.by_client
    changed = small("robust.rule=trimmed", "robust.tolerate=0.1", "attack.kind=swap")
    assert Experiment.from_dict(changed.to_dict()) == changed
    assert changed.to_dict()["robust"] == {"rule": "trimmed", "tolerate": 0.1}


FEDERATED = {
    "clip": ("method=fedproto",),
    "centred_clip": ("method=fednh", "model=mlp_digits"),
    "median": ("method=fedavg", "model=mlp_digits"),
    "krum": ("method=fedpr", "model=mlp_digits"),
}


@pytest.mark.parametrize("rule", FEDERATED)
def test_a_federation_equals_its_simulation_under_a_rule(rule: str, tmp_path: Path) -> None:
    experiment = federated(f"robust.rule={rule}", *FEDERATED[rule], "evaluate.own=0", "record.enabled=false")
    run(experiment, tmp_path / "sim")
    said: list[str] = []
    result = serve(set_up(tmp_path, experiment), workers(tmp_path), said.append, pause=0.01)
    alone, together = state_of(tmp_path / "sim"), state_of(result.folder)
    assert encode(alone.server, whole=True) == encode(together.server, whole=True)
    assert encode(alone.centres, whole=True) == encode(together.centres, whole=True)
    run(federated(*FEDERATED[rule], "evaluate.own=0", "record.enabled=false"), tmp_path / "mean")
    assert encode(state_of(tmp_path / "mean").server, whole=True) != encode(alone.server, whole=True)


def test_real_clients_are_not_told_to_attack(tmp_path: Path) -> None:
    server = set_up(tmp_path, federated("attack.kind=scale"))
    with pytest.raises(UserError, match=r"is for simulations, and this is a real federation\. Remove \[attack\]"):
        serve(server, workers(tmp_path, 0), str, pause=0.01)


def test_what_stays_client_by_client_can_only_be_clipped() -> None:
    with pytest.raises(UserError, match=r"robust\.rule = 'median' replaces a mean over clients, but .* Use .*'clip'"):
        run(small("method=fesem", "robust.rule=median"), "refused")
    assert not Path("refused").exists()
    done = protofed("run", "demo", "method=mpfedcl", "model=mlp_digits", "robust.rule=krum", "--out", "refused")
    assert done.returncode == 2
    assert "robust.rule = 'krum'" in done.stderr + done.stdout
    result = run(
        small("method=mpfedcl", "robust.rule=clip", "attack.kind=scale", "attack.factor=1e30", "rounds=1"), "clipped"
    )
    assert result.summary["accuracy_mean"] > 0.2


def test_clients_that_join_later_are_neither_attackers_nor_compared() -> None:
    result = run(small("held_out_clients=2", "attack.kind=label_flip", "attack.share=0.3", "robust.rule=median"), "out")
    assert result.summary["attackers"] == 1
    assert result.summary["held_out_head_mean"] is not None


def learns(*overrides: str) -> str:
    plan = Experiment.load("demo", "method=fedproto", "clients=3", "rounds=2", "partition.shots=3", *overrides)
    return " | ".join(explain(plan)["private"]["server_learns"])


def test_explain_says_what_a_rule_lets_the_server_see() -> None:
    assert "robust" not in learns()
    assert "compares the uploads of single clients" in learns("robust.rule=krum")
    clipped = learns("robust.rule=clip")
    assert "its distance from the last aggregate, to bound it by 2 times the median" in clipped
    assert "there is no last aggregate" in clipped
    assert "to bound it by robust.norm" in learns("robust.rule=centred_clip", "robust.norm=4")


def test_tables_and_reports_show_the_attack_and_the_rule() -> None:
    for name, rule in {"mean": "none", "median": "median"}.items():
        run(small("attack.kind=backdoor", f"robust.rule={rule}"), f"runs/{name}")
    table = CliRunner().invoke(app, ["table", "runs", "--columns", "accuracy,attack"])
    assert table.exit_code == 0, table.output
    assert "backdoor success" in table.output
    assert "backdoor" in CliRunner().invoke(app, ["table", "runs"]).output
    assert "left out" not in table.output
    assert "rule=median" in table.output
    assert "passes" not in table.output  # keys that nobody changed
    page = CliRunner().invoke(app, ["report", "runs", "--out", "page.html"])
    assert page.exit_code == 0, page.output
    assert "backdoor success" in Path("page.html").read_text()
    shutil.rmtree("runs")


def test_the_page_names_every_rule_and_attack() -> None:
    page = (ROOT / "docs" / "robust.md").read_text()
    kinds = re.findall(r"`(\w+)`", page)
    assert set(RULES) <= set(kinds)
    assert {"sign_flip", "scale", "noise", "label_flip", "swap", "backdoor", "collude"} <= set(kinds)
