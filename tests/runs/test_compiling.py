"""Whether training steps are compiled: decided by a trial, kept in the run's folder, and said."""

import json
from pathlib import Path

import pytest
import torch

from protofed import Experiment, run
from protofed.engines.stacked.engine import StackedEngine
from protofed.methods import METHODS
from protofed.runs import compiling
from protofed.runs.setup import prepare
from protofed.runs.watch import Watch

SMALL = ("clients=4", "rounds=2", "partition.shots=5", "batch_size=4", "model=mlp_digits")


class Notes(Watch):
    def __init__(self) -> None:
        self.told: list[str] = []

    def note(self, text: str) -> None:
        self.told.append(text)


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What trials will say, uncompiled and then compiled; and a compiler that leaves all as it is."""
    trials = [1000.0, 10.0]
    monkeypatch.setattr(StackedEngine, "guess", lambda self, *_: 1e6)
    monkeypatch.setattr(StackedEngine, "trial", lambda self, *_: trials.pop(0))
    monkeypatch.setattr(torch._inductor, "compile", lambda traced, inputs: traced)
    return trials


def test_a_long_run_is_compiled_and_says_so(seconds: list[float], tmp_path: Path) -> None:
    notes = Notes()
    run(Experiment.load("demo", *SMALL), tmp_path / "out", watch=notes)
    kept = json.loads((tmp_path / "out" / "engine.json").read_text())
    assert (kept["compiled"], kept["training_s"], kept["compiled_training_s"]) == (True, 2000.0, 20.0)
    assert any(note.startswith("compiling the training step (20 s or so, once): some 2000 s") for note in notes.told)
    assert seconds == []


def test_what_is_not_faster_compiled_is_not_compiled(seconds: list[float], tmp_path: Path) -> None:
    seconds[1] = 2000.0
    notes = Notes()
    run(Experiment.load("demo", *SMALL), tmp_path / "out", watch=notes)
    assert json.loads((tmp_path / "out" / "engine.json").read_text())["compiled"] is False
    assert "compiling does not make it faster here; continuing without" in notes.told


def test_a_resumed_run_keeps_its_choice_without_another_trial(seconds: list[float], tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(Experiment.load("demo", *SMALL), out)
    (out / "summary.json").unlink()
    notes = Notes()
    run(Experiment.load("demo", *SMALL), out, resume=True, watch=notes)  # a trial would find nothing to tell
    assert any(note.startswith("compiling the training step") for note in notes.told)


def test_without_a_compiler_one_line_says_what_is_lost(
    seconds: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None)
    notes = Notes()
    run(Experiment.load("demo", *SMALL), tmp_path / "out", watch=notes)
    assert any("no C++ compiler" in note and "twice as long" in note for note in notes.told)


def test_a_short_run_tries_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StackedEngine, "trial", lambda self, *_: pytest.fail("there was a trial"))
    run(Experiment.load("demo", *SMALL), tmp_path / "out")
    assert not (tmp_path / "out" / "engine.json").exists()


@pytest.mark.usefixtures("traced")
def test_a_trial_tells_roughly_the_time_and_changes_nothing() -> None:
    plan = Experiment.load("demo", *SMALL)
    engine = prepare(plan).engine
    assert isinstance(engine, StackedEngine)
    server = plan.method.init_server(engine.specs()[0])
    assert 0 < engine.trial(plan.method, server, [0, 1, 2, 3]) < 60
    assert not engine.clients
    assert engine.guess(plan.method, 10) == pytest.approx(10 * engine.guess(plan.method, 1))
    more = 1 + 10 / plan.local_epochs  # FedRep's epochs of the head come before those of the body
    assert engine.guess(METHODS["fedrep"](), 1) == pytest.approx(more * engine.guess(plan.method, 1))
