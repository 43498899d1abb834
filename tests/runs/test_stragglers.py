"""Clients that are late take fewer steps: the same ones on every engine, and when a run is repeated or resumed."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from small_runs import StopAfter, final_state, lines, small

from protofed import Experiment, UserError, run
from protofed.engines import Engine
from protofed.local import steps_in_time
from protofed.runs.loop import Interrupted
from protofed.runs.selection import Selector
from protofed.runs.setup import prepare
from protofed.runs.stragglers import on_time, paces_of

LATE = ("model=mlp_digits", "stragglers.share=0.6", "stragglers.slowest=0.1", "record.enabled=false")


def test_steps_by_hand() -> None:
    assert [steps_in_time(pace, 3, 4) for pace in (1.0, 0.5, 0.34, 0.01, 0.999)] == [12, 6, 4, 1, 11]
    assert steps_in_time(0.5, 3, 0) == 0  # without samples
    assert steps_in_time(1 / 3, 1, 3) == 1


def test_speeds_follow_seed_round_and_client() -> None:
    paces = paces_of(small(*LATE))
    assert paces is not None
    drawn = [paces(round, range(40)) for round in range(3)]
    assert drawn[0] != drawn[1]
    assert paces(1, [7, 3]) == [drawn[1][7], drawn[1][3]]
    every = [pace for found in drawn for pace in found]
    slow = [pace for pace in every if pace < 1]
    assert 0.45 < len(slow) / len(every) < 0.75
    assert min(slow) >= 0.1
    assert 0.4 < sum(slow) / len(slow) < 0.7  # the mean of 0.1 to 1 is 0.55
    assert paces(3, range(40)) == [1.0] * 40  # after the last round of three
    short = paces_of(small(*LATE, "stragglers.deadline=0.5"))
    assert short is not None
    assert short(0, range(40)) == [0.5 * pace for pace in drawn[0]]
    assert paces_of(small()) is None
    assert "stragglers" not in small().to_dict()


@pytest.mark.parametrize(
    ("method", "more"),
    [("fedavg", ()), ("fedproto", ("method.source=inloop", "local_epochs=3")), ("fedrep", ("method.head_epochs=2",))],
)
def test_both_engines_cut_the_same_steps(method: str, more: tuple[str, ...]) -> None:
    """Losses are sums over the steps that were taken, uploads of what came of them."""
    found: list[Any] = []
    for name in ("reference", "stacked"):
        plan = small(f"method={method}", *LATE, *more, f"engine={name}", "engine.ordered=true")
        engine = prepare(plan).engine
        server = plan.method.init_server(engine.specs()[0])
        found.append(engine.train(plan.method, server, list(range(6)), 1))
    one, other = found
    assert torch.equal(one.loss.weight, other.loss.weight)  # samples seen, over all steps
    torch.testing.assert_close(one.loss.total, other.loss.total, rtol=1e-4, atol=1e-4)
    for number in range(6):
        for key, weights in one.clients[number].params.items():
            torch.testing.assert_close(weights, other.clients[number].params[key], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(one.up, other.up, rtol=1e-3, atol=1e-3)
    plan = small(f"method={method}", "model=mlp_digits", *more, "engine=reference")
    whole = prepare(plan).engine.train(plan.method, server, list(range(6)), 1)
    paces = paces_of(small(*LATE))
    assert paces is not None
    fewer = [a < b for a, b in zip(one.loss.weight.tolist(), whole.loss.weight.tolist(), strict=True)]
    assert fewer == [pace < 1 for pace in paces(1, range(6))]
    assert True in fewer
    assert False in fewer


def test_a_client_that_is_cut_off_is_where_it_was_after_so_many_steps() -> None:
    """Half of two epochs is one epoch."""
    half = small("model=mlp_digits", "local_epochs=2", "stragglers.deadline=0.5", "engine=reference")
    once = small("model=mlp_digits", "local_epochs=1", "engine=reference")
    found = []
    for plan in (half, once):
        engine = prepare(plan).engine
        found.append(engine.train(plan.method, plan.method.init_server(engine.specs()[0]), [0, 1], 0))
    for number in (0, 1):
        for key, weights in found[0].clients[number].params.items():
            assert torch.equal(weights, found[1].clients[number].params[key])


def test_stopped_and_resumed_equals_never_stopped() -> None:
    plan = small(*LATE, "participation=0.7")
    run(plan, "whole")
    with pytest.raises(Interrupted):
        run(plan, "cut", watch=StopAfter(2))
    run(plan, "cut", resume=True)
    assert final_state(Path("cut")) == final_state(Path("whole"))


@pytest.mark.parametrize("late", ["partial", "drop"])
def test_resumed_equals_never_stopped_with_a_choice_of_clients_a_schedule_and_an_early_end(late: str) -> None:
    choice = ("participation=0.5", "selection.rule=power_of_choice", "selection.candidates=4", "rounds=6")
    rate = ("optimizer.schedule=cosine", "optimizer.warmup=2")
    end = ("evaluate.validation=0.3", "stopping.patience=2", "stopping.min_gain=0.9")
    plan = small(*LATE, f"stragglers.late={late}", *choice, *rate, *end)
    run(plan, "whole")
    assert 3 <= len(lines(Path("whole"))) < 6  # it ended early
    with pytest.raises(Interrupted):
        run(plan, "cut", watch=StopAfter(1))
    with pytest.raises(Interrupted):
        run(plan, "cut", resume=True, watch=StopAfter(2))
    run(plan, "cut", resume=True)
    assert final_state(Path("cut")) == final_state(Path("whole"))


def test_those_that_are_late_may_be_left_out_even_all_of_them() -> None:
    plan = small(*LATE, "stragglers.late=drop")
    paces = paces_of(plan)
    assert paces is not None
    for round in range(3):
        wanted = [number for number, pace in enumerate(paces(round, range(6))) if pace == 1]
        assert on_time(plan, round, list(range(6))) == wanted
        assert Selector(plan, cast(Engine, None)).cohort(round, {}) == wanted
    run(plan, "out")
    assert [line["clients"] for line in lines(Path("out"))] == [len(on_time(plan, r, list(range(6)))) for r in range(3)]
    nobody = run(small(*LATE, "stragglers.late=drop", "stragglers.deadline=0.9"), "nobody")
    assert [line["clients"] for line in nobody.rounds] == [0, 0, 0]
    assert [line["loss"] for line in nobody.rounds] == [None] * 3
    assert nobody.summary["clients_trained"] == 0


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["stragglers.late=drop"], "have no effect while nobody is late"),
        (["stragglers.share=0.5", "stragglers.slowest=1.0"], "makes slow clients as fast as all others"),
        (
            ["stragglers.share=0.5", "stragglers.late=drop", "privacy.unit=client", "privacy.epsilon=8"],
            "stragglers.late = 'drop' changes who takes part",
        ),
        (["stragglers.share=0.5", "evaluate.theory=5"], "evaluate.theory is about clients that take all their steps"),
    ],
)
def test_what_does_not_go_together_is_refused(keys: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Experiment.load("demo", *keys)
