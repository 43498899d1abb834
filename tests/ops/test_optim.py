"""Step sizes over the rounds, by hand."""

import math
import tomllib

import pytest

from protofed import Experiment, UserError
from protofed.config.experiment import SCHEDULE
from protofed.ops.optim import Optimizer


def rates(optimizer: Optimizer, rounds: int, run: int | None = None) -> list[float]:
    scheduled = optimizer.over(run or rounds)
    return [scheduled.rate(round) for round in range(rounds)]


def test_a_cosine_takes_all_rounds_of_the_run_and_stays_after_them() -> None:
    middle = (1 + math.cos(math.pi / 4)) / 2
    found = rates(Optimizer(lr=0.4, schedule="cosine"), 6, run=4)
    assert found == pytest.approx([0.4, 0.4 * middle, 0.2, 0.4 * (1 - middle)] + [0.4 * (1 - middle)] * 2)
    assert rates(Optimizer(lr=0.4, schedule="cosine", floor=0.5), 3, run=4)[2] == pytest.approx(0.3)


def test_a_cosine_with_a_horizon_does_not_depend_on_the_rounds_of_the_run() -> None:
    short = Optimizer(lr=0.4, schedule="cosine", horizon=4)
    assert rates(short, 6, run=100) == rates(Optimizer(lr=0.4, schedule="cosine"), 6, run=4)


def test_steps_multiply_after_every_so_many_rounds() -> None:
    found = rates(Optimizer(lr=1.0, schedule="step", every=2, drop=0.5), 5)
    assert found == [1.0, 1.0, 0.5, 0.5, 0.25]


def test_a_warm_up_rises_in_equal_parts_before_the_schedule_begins() -> None:
    assert rates(Optimizer(lr=0.4, warmup=4), 6) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])
    stepped = Optimizer(lr=0.4, warmup=2, schedule="step", every=1, drop=0.5)
    assert rates(stepped, 5) == pytest.approx([0.2, 0.4, 0.4, 0.2, 0.1])
    cosine = Optimizer(lr=0.4, warmup=2, schedule="cosine")
    assert rates(cosine, 6)[2:] == rates(Optimizer(lr=0.4, schedule="cosine"), 4)
    assert rates(cosine, 1) == [0.2]  # a run that ends within its warm-up


def test_a_schedule_goes_together_with_a_decay() -> None:
    found = rates(Optimizer(lr=1.0, lr_decay=0.5, warmup=2), 3)
    assert found == [0.5, 0.5, 0.25]


def test_experiments_without_a_schedule_are_written_as_before() -> None:
    assert not set(SCHEDULE) & set(Experiment.load("demo").to_dict()["optimizer"])
    plan = Experiment.load("demo", "optimizer.schedule=step", "optimizer.every=7")
    written = plan.to_dict()["optimizer"]
    assert {key: written[key] for key in SCHEDULE if key in written} == {"schedule": "step", "every": 7}
    assert Experiment.from_dict(tomllib.loads(plan.to_toml())) == plan


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            ["optimizer.schedule=cosine", "optimizer.warmup=5", "optimizer.horizon=5"],
            r"optimizer.warmup = 5 leaves nothing of optimizer.horizon = 5 to go down in\. Use a shorter warm-up",
        ),
        (["optimizer.floor=0.1"], "optimizer.floor = 0.1 is for optimizer.schedule = 'cosine', and it is 'constant'"),
        (
            ["optimizer.schedule=cosine", "optimizer.every=3"],
            "optimizer.every = 3 is for optimizer.schedule = 'step', and it is 'cosine'. Set the schedule, or leave",
        ),
        (["optimizer.schedule=linear"], "optimizer.schedule = 'linear' should be 'constant', 'cosine' or 'step'"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_in_one_line(keys: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Experiment.load("demo", "rounds=20", *keys)
