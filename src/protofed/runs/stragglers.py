"""Clients that are too slow for a round's deadline: how much of their work each has done by then."""

from collections.abc import Callable, Sequence

from protofed.config.experiment import Experiment
from protofed.ops import random

Paces = Callable[[int, Sequence[int]], list[float]]


def paces_of(experiment: Experiment) -> Paces | None:
    """The share of its steps that each of some clients takes in a round; None: all clients take all of them. It depends
    only on seed, round and client. After the last round, no client is late.

    It depends on seed, round and client alone. After the last round nobody is late."""
    late = experiment.stragglers
    if not late.on:
        return None

    def paces(round: int, cohort: Sequence[int]) -> list[float]:
        if round >= experiment.rounds:
            return [1.0] * len(cohort)
        found = []
        for number in cohort:
            slow, speed = random.uniform(random.key(experiment.seed, "stragglers", round, number), 2).tolist()
            speed = late.slowest + (1 - late.slowest) * speed if slow < late.share else 1.0
            found.append(min(1.0, late.deadline * speed))
        return found

    return paces


def on_time(experiment: Experiment, round: int, cohort: list[int]) -> list[int]:
    """The clients of a cohort that answer by the deadline."""
    paces = paces_of(experiment) if experiment.stragglers.late == "drop" else None
    if paces is None:
        return cohort
    return [number for number, pace in zip(cohort, paces(round, cohort), strict=True) if pace == 1]
