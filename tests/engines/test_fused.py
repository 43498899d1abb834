"""Runs that are trained together have the results that each has by itself."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from protofed.config.experiment import Experiment
from protofed.engines.fused.engine import Fusion, RunEngine
from protofed.engines.fused.method import FusedMethod, method_kind, numbers_of
from protofed.engines.resources import torch_settings
from protofed.engines.stacked.cache import OFTEN
from protofed.engines.stacked.engine import StackedEngine
from protofed.errors import UserError
from protofed.method import Batch, Client, Model, Tree
from protofed.methods import METHODS
from protofed.methods.local import Local
from protofed.runs.folder import RunFolder
from protofed.runs.loop import carry_out
from protofed.runs.probes import NO_PROBES
from protofed.runs.setup import Prepared, prepare
from protofed.runs.watch import Watch
from protofed.sweep.fused import Seat, _worth_it, seats

SMALL = ("clients=6", "rounds=3", "model=mlp_digits", "partition.shots=4", "record.enabled=false", "local_epochs=1")


class Kept(Watch):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def plans(*differences: str, same: tuple[str, ...] = ()) -> list[Experiment]:
    return [Experiment.load("demo", *SMALL, *same, *words.split()) for words in differences]


def engine_of(prepared: Prepared) -> StackedEngine:
    assert isinstance(prepared.engine, StackedEngine)
    return prepared.engine


def fused(experiments: list[Experiment], out: Path) -> tuple[Fusion, dict[int, Any], Kept]:
    """All of them together; their results or errors."""
    prepared, watch = [prepare(plan, cores=1) for plan in experiments], Kept()
    engines, rounds = [engine_of(one) for one in prepared], [plan.rounds for plan in experiments]
    fusion, found = Fusion([plan.method for plan in experiments], engines, rounds), {}

    def work(number: int) -> Callable[[RunEngine], None]:
        def carry(engine: RunEngine) -> None:
            folder, here = RunFolder(out / f"fused {number}"), prepared[number]._replace(engine=engine)
            try:
                found[number] = carry_out(experiments[number], folder, here, watch, threading.Event())
            except UserError as error:
                found[number] = error

        return carry

    with mock.patch.dict(OFTEN, cpu=1):  # traced from the second round on; alone, steps run as they are
        fusion.run([work(number) for number in range(len(experiments))])
    return fusion, found, watch


def alone(plan: Experiment, out: Path) -> Any:
    return carry_out(plan, RunFolder(out), prepare(plan, cores=1), Watch(), threading.Event())


def assert_same(found: Any, expected: Any) -> None:
    """Every number of every round and client, but for times."""

    def numbers(record: dict[str, Any]) -> dict[str, Any]:
        return {key: v for key, v in record.items() if not key.startswith("seconds") and key != "parts"}

    for here, there in zip([*found.rounds, *found.clients], [*expected.rounds, *expected.clients], strict=True):
        for key, value in numbers(there).items():
            close = pytest.approx(value, rel=1e-5, abs=1e-6) if isinstance(value, float) else value
            assert here[key] == close, key


CASES = {
    "seeds": ("method=fedproto", ("seed=0", "seed=1", "seed=2")),
    "numbers of the method": ("method=fedproto", ("method.lam=0.1", "method.lam=4", "method.lam=4 seed=1")),
    "step sizes": ("method=fedproto", ("optimizer.lr=0.01", "optimizer.lr=0.1 optimizer.lr_decay=0.9")),
    "schedules": ("method=fedproto", ("optimizer.schedule=cosine", "optimizer.warmup=2", "rounds=4")),
    "selection": ("method=fedproto participation=0.5", ("selection.rule=size", "selection.rule=power_of_choice")),
    "an early end": (
        "method=fedbabu evaluate.validation=0.2 rounds=6 stopping.patience=1",
        ("stopping.min_gain=0.9", "seed=1", "seed=2 stopping.min_gain=0.5"),
    ),
    "stragglers": (
        "method=fedproto stragglers.slowest=0.1 local_epochs=3",
        ("stragglers.share=0.6", "seed=1 stragglers.share=0.9 rounds=2", "seed=2 stragglers.deadline=0.4"),
    ),
    "stragglers and none": ("method=fedavg local_epochs=2", ("stragglers.deadline=0.5", "seed=0", "seed=1")),
    "rounds": ("method=fedproto", ("rounds=1", "rounds=4", "seed=1 rounds=2")),
    "partitions and cohorts": ("method=fednh", ("participation=0.5", "partition.ways=5 clients=9 seed=3")),
    "temperatures": ("method=mpfedcl", ("method.temperature=0.05", "method.temperature=0.5")),
    "global models": ("method=fedavg", ("seed=0", "seed=1 participation=0.5")),
    "phases and pulls": ("method=ditto method.preset=official optimizer.clip=1", ("method.lam=0.1", "method.lam=2")),
    "two phases": ("method=fedrod", ("seed=0", "seed=1")),
    "last phases": ("method=fedbabu", ("seed=0", "seed=1 rounds=2")),
    "memory of its own": ("method=fednh method.scored_by=downloaded participation=0.5", ("seed=0", "method.rho=0.5")),
    "architectures": ('method=fedproto model=["mlp_digits","cnn_digits"]', ("seed=0", "seed=1")),
    "validation": ("method=fedper evaluate.validation=0.2 evaluate.pm=1", ("seed=0", "seed=1")),
    "uneven batches": ("method=fedproto batch_size=64", ("partition.shots=2", "partition.shots=9")),
}


@pytest.mark.parametrize("case", CASES)
def test_runs_that_are_trained_together_equal_each_by_itself(case: str, tmp_path: Path) -> None:
    same, differences = CASES[case]
    experiments = plans(*differences, same=tuple(same.split()))
    fusion, found, _ = fused(experiments, tmp_path)
    assert not fusion.apart
    for number, plan in enumerate(experiments):
        assert_same(found[number], alone(plan, tmp_path / f"alone {number}"))


def test_a_run_whose_loss_is_not_a_number_ends_alone(tmp_path: Path) -> None:
    experiments = plans("seed=0", "seed=1 optimizer.lr=1e30", "seed=2", same=("method=fedproto",))
    fusion, found, _ = fused(experiments, tmp_path)
    assert not fusion.apart
    assert isinstance(found[1], UserError)
    assert "no longer a number in round" in str(found[1])
    for number in (0, 2):
        assert_same(found[number], alone(experiments[number], tmp_path / f"alone {number}"))


@dataclass(frozen=True)
class Picky(Local):
    """Its loss asks about a number, which stacked clients of several runs cannot answer."""

    lam: float = 1.0

    def loss(self, model: Model, client: Client, batch: Batch, down: Tree) -> Tensor | tuple[Tensor, Tree]:
        loss = super().loss(model, client, batch, down)
        assert isinstance(loss, Tensor)
        return loss * 2 if self.lam > 1 else loss


def test_what_cannot_be_trained_together_goes_on_one_after_another_and_says_so(tmp_path: Path) -> None:
    one, other = plans("seed=0", "seed=1")
    experiments = [replace(one, method=Picky(lam=1.0)), replace(other, method=Picky(lam=2.0))]
    fusion, found, watch = fused(experiments, tmp_path)
    assert fusion.apart
    assert [note for note in watch.notes if note.startswith("runs cannot be trained together (")]
    for number, plan in enumerate(experiments):
        assert_same(found[number], alone(plan, tmp_path / f"alone {number}"))


def test_equal_numbers_stay_numbers() -> None:
    """So that methods of one setting run through the same operations together and alone."""
    one, other = METHODS["fedproto"](lam=2.0), METHODS["fedproto"](lam=3.0)
    assert FusedMethod.of([one, one]).names == ()
    assert FusedMethod.of([one, other]).names == ("lam",)
    assert numbers_of(one) == {"lam": 2.0}
    down = FusedMethod.of([one, other]).joined([one, other], [{}, {}], [2, 1], "cpu").rows
    assert down[1]["lam"].tolist() == [2.0, 2.0, 3.0]


def test_methods_of_one_kind_differ_in_numbers_only() -> None:
    kind = method_kind(METHODS["fedproto"](lam=2.0))
    assert kind == method_kind(METHODS["fedproto"](lam=3.0))
    assert kind != method_kind(METHODS["fedproto"](aggregation="weighted"))
    assert kind != method_kind(METHODS["fedpr"]())
    assert method_kind(METHODS["fedbabu"](tune_lr=0.1)) != method_kind(METHODS["fedbabu"](tune_lr=0.2))  # of a phase


def test_the_seconds_of_runs_add_up_to_those_of_all(tmp_path: Path) -> None:
    import time

    experiments = plans("seed=0", "seed=1", "seed=2", same=("method=fedproto",))
    started = time.perf_counter()
    _, found, _ = fused(experiments, tmp_path)
    wall = time.perf_counter() - started
    assert 0 < sum(result.summary["seconds"] for result in found.values()) < wall
    assert all(line["seconds"] >= sum(line["parts"].values()) - 1e-6 for line in found[0].rounds)


def test_what_was_tried_counts_for_no_round(tmp_path: Path) -> None:
    both = plans("seed=0", "seed=1", same=("engine.compile=never",))
    orders = [(plan, RunFolder(tmp_path / str(plan.seed)), Kept()) for plan in both]
    with torch_settings(False, 1, "fp32"), mock.patch.dict(OFTEN, cpu=1):
        found = [seat for seat in seats(orders, None, 1, NO_PROBES) if isinstance(seat, Seat)]
        fusion = Fusion([plan.method for plan in both], [seat.engine for seat in found], [3, 3])
        _worth_it(fusion, found)
    assert [seat.engine.clock.take() for seat in found] == [{}, {}]


def test_an_interrupt_reaches_every_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiments = plans("seed=0", "seed=1", same=("method=fedproto", "rounds=50"))
    prepared = [prepare(plan, cores=1) for plan in experiments]
    fusion = Fusion([plan.method for plan in experiments], [engine_of(one) for one in prepared], [50, 50])
    trained, usual = [], fusion.engine.share

    def share(*given: Any) -> Any:
        trained.append(1)
        if len(trained) == 3:
            raise KeyboardInterrupt
        return usual(*given)

    monkeypatch.setattr(fusion.engine, "share", share)
    ended: list[str] = []

    def work(engine: RunEngine) -> None:
        here = prepared[engine.number]._replace(engine=engine)
        folder = RunFolder(tmp_path / str(engine.number))
        try:
            carry_out(experiments[engine.number], folder, here, Watch(), threading.Event())
        except Exception as error:
            ended.append(str(error))

    fusion.run([work, work])
    assert ended == ["stopped after round 2 of 50"] * 2
    for number in range(2):
        state, _ = RunFolder(tmp_path / str(number)).restore(torch.device("cpu"), None)
        assert state is not None
        assert state.round == 2
