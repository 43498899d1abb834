"""Readings by name: every method in both presets, on all clients and on a tenth of them, and resumed."""

from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

from protofed.errors import UserError
from protofed.experiment import Experiment
from protofed.folder import RunFolder
from protofed.methods import METHODS
from protofed.results import Watch
from protofed.run import Interrupted, run
from test_run import final_state

ALL = {
    *("local", "fedavg", "fedprox", "fedper", "fedrep", "fesem", "ditto", "fedbabu", "fedrod", "creff"),
    *("fedproto", "fednh", "fedpr", "mpfedcl", "spfedcl", "dpfedcl"),
}


class StopAfterOne(Watch):
    def round(self, line: dict[str, object]) -> None:
        if line["round"] == 1:
            raise KeyboardInterrupt


def plan(method: str, *changes: str) -> Experiment:
    few = ["model=cnn_digits", "rounds=2", "clients=4", "local_epochs=1", "partition.shots=3"]
    few += ["evaluate.own=0", "evaluate.gm=0", "evaluate.pm=0", "record.enabled=false", "engine.threads=1"]
    quick = {"creff": ["method.head_epochs=3", "method.steps=3"], "fedrep": ["method.head_epochs=2"]}
    return Experiment.load("demo", f"method={method}", *few, *quick.get(method, []), *changes)


def test_there_are_sixteen() -> None:
    assert set(METHODS) == ALL
    assert all(set(kind.presets) == {"paper", "official"} for kind in METHODS.values())


@pytest.mark.parametrize("who", [("participation=1.0",), ("clients=10", "participation=0.1")], ids=["all", "tenth"])
@pytest.mark.parametrize("preset", ["paper", "official"])
@pytest.mark.parametrize("method", sorted(ALL))
def test_every_method_runs_in_both_presets_and_resumes(method: str, preset: str, who: tuple[str, ...]) -> None:
    experiment = plan(method, f"method.preset={preset}", *who)
    with pytest.raises(Interrupted):
        run(experiment, "cut", watch=StopAfterOne())
    run(experiment, "cut", resume=True)
    run(experiment, "whole")
    assert final_state(Path("cut")) == final_state(Path("whole"))
    state, _ = RunFolder(Path("whole")).restore()
    assert state is not None
    assert all(torch.isfinite(t).all() for t in tree_leaves(state.server) if t.is_floating_point())


@pytest.mark.parametrize("method", sorted(ALL))
@pytest.mark.parametrize("preset", ["paper", "official"])
def test_a_preset_is_its_fields(method: str, preset: str) -> None:
    experiment = Experiment.load("demo", f"method={method}", f"method.preset={preset}")
    assert experiment.method == METHODS[method].preset(preset)
    assert Experiment.from_dict(experiment.to_dict()).method == experiment.method
    given = Experiment.load("demo", f"method={method}", f"method.preset={preset}", "method.inference=head")
    assert given.method.inference == "head"


def test_a_preset_leaves_the_files_own_fields_behind_but_not_those_beside_it() -> None:
    changed = Experiment.load("demo", "method.preset=official", "method.lam=0.5").method
    assert changed == METHODS["fedproto"].preset("official", lam=0.5)
    with pytest.raises(UserError, match=r"method.preset = 'papr' is unknown.*paper"):
        Experiment.load("demo", "method.preset=papr")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (("method=fednh", "method.rho=1.5"), r"method.rho = 1.5 should be less than 1"),
        (("method=fednh", "method.rho=0.0"), r"method.rho = 0.0 should be greater than 0"),
        (
            ("method=mpfedcl", "method.clusters=9"),
            r"method.clusters = 9.*no client has more than \d samples of one class",
        ),
        (("method=fedavg", "model=['mlp_digits', 'cnn_digits']"), r"averages one architecture.*Use fedproto"),
        (("method=fednh", "method.start=orthogonal", "model.dim=4"), r"wide as there are classes.*'separated'"),
    ],
)
def test_what_a_method_cannot_serve_is_said_before_training(changes: tuple[str, ...], said: str) -> None:
    name = changes[0].removeprefix("method=")
    with pytest.raises(UserError, match=said):
        run(plan(name, *changes[1:]), "out")
    assert not Path("out").exists()
