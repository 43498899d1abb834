"""A schedule reaches the clients of every engine, and a resumed run goes on with it."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from small_runs import StopAfter, final_state, lines, small

from protofed import run
from protofed.runs.loop import Interrupted
from protofed.runs.setup import prepare

ENGINES: tuple[Literal["reference", "stacked"], ...] = ("reference", "stacked")
COSINE = ("optimizer.schedule=cosine", "optimizer.warmup=1", "rounds=4", "model=mlp_digits")


@pytest.mark.parametrize("engine", ["reference", "stacked"])
def test_stopped_and_resumed_equals_never_stopped(engine: str) -> None:
    plan = small(*COSINE, f"engine={engine}")
    run(plan, "whole")
    with pytest.raises(Interrupted):
        run(plan, "cut", watch=StopAfter(2))
    run(plan, "cut", resume=True)
    assert final_state(Path("cut")) == final_state(Path("whole"))
    assert [line["lr"] for line in lines(Path("whole"))] == [plan.scheduled.rate(round) for round in range(4)]
    assert len({line["lr"] for line in lines(Path("whole"))}) == 3  # warm-up, its end, and two on the way down


def test_both_engines_train_with_the_rate_of_the_round() -> None:
    """A round's rate alone differs from that of a run without a schedule: the same rate gives the same weights."""
    later = small(*COSINE)
    plain = small("rounds=4", "model=mlp_digits", f"optimizer.lr={later.scheduled.rate(3)}")
    for engine in ENGINES:
        found = []
        for plan in (later, plain):
            made = prepare(replace(plan, engine=replace(plan.engine, name=engine))).engine
            server = plan.method.init_server(made.specs()[0])
            found.append(made.train(plan.method, server, [0, 1, 2], 3).clients[1].params)
        for name, weights in found[0].items():
            assert torch.equal(weights, found[1][name]), (engine, name)
