"""Who takes part in a round: chosen at random, by size, by loss, or by the user's own function."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from protofed.config.experiment import Experiment
from protofed.engines import Engine, Trained
from protofed.errors import UserError
from protofed.importing import MEMORY, error_in_words, own_function
from protofed.ops import random
from protofed.runs.cohort import cohort_size, draw_cohort, taking_part
from protofed.runs.stragglers import on_time

Totals = dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """What a user's own function chooses the clients of a round from."""

    round: int
    """Counted from 0."""
    clients: Sequence[int]
    """Who may take part, in ascending order."""
    size: int
    """Number that take part according to the experiment's `participation`; the function may return more or fewer."""
    samples: dict[int, int]
    """Training samples of every client."""
    losses: dict[int, float]
    """The mean loss of each client when it last trained; clients that never did are missing."""
    rounds: dict[int, int]
    """The number of rounds in which each client took part; clients that never did are missing."""
    seed: int
    """For `numpy.random.default_rng`: different in every round, the same when the run is repeated or resumed."""


Choose = Callable[[Turn], Iterable[int]]


def own_rule(name: str, handed: Choose | None = None) -> Choose:
    """A function by its import path, or as a script gives it."""
    if handed is not None:
        return handed
    if name.startswith(MEMORY):
        raise UserError(
            f"selection.rule = {name!r} was handed in by a script, and only that script can hand it in again. Run the "
            "script, or name a function by import path."
        )
    return own_function("selection.rule", name, "that chooses clients")


class Selector:
    """Draws every round's cohort from the experiment and from what the run remembers of earlier rounds."""

    def __init__(self, experiment: Experiment, engine: Engine, handed: Choose | None = None) -> None:
        """`handed`: a function that is not named by an import path."""
        self.experiment, self.rule = experiment, experiment.selection.rule
        if self.rule == "random":
            return
        self.there, self.size = list(taking_part(experiment)), cohort_size(experiment)
        self.samples = dict(zip(self.there, engine.samples(self.there), strict=True))
        self.own = None if self.rule in ("size", "power_of_choice") else own_rule(self.rule, handed)

    def cohort(self, round: int, totals: Totals) -> list[int]:
        """The clients of a round that answer in time."""
        return on_time(self.experiment, round, self._drawn(round, totals))

    def _drawn(self, round: int, totals: Totals) -> list[int]:
        """The clients that are asked to take part."""
        if self.rule == "random":
            return draw_cohort(self.experiment, round)
        if self.own is not None:
            return self._chosen(self.own, round, totals)
        if self.rule == "size":
            return sorted(self._by_size(round, self.size))
        wanted = self.experiment.selection.candidates or 2 * self.size
        losses = _numbers(totals.get("losses", {}), float)
        drawn = self._by_size(round, max(self.size, min(wanted, len(self.there))))
        drawn.sort(key=lambda number: -losses.get(number, math.inf))  # equal ones stay as drawn
        return sorted(drawn[: self.size])

    def remembered(self, before: Totals, trained: Trained, cohort: Sequence[int]) -> Totals:
        """Remember what later rounds need of this one: each client's loss."""
        if self.rule in ("random", "size") or trained.secure:
            return {}
        total, weight = (part.tolist() for part in trained.loss)
        new = {str(n): t / w for n, t, w in zip(cohort, total, weight, strict=True) if w > 0}
        return {"losses": before.get("losses", {}) | new}

    def _by_size(self, round: int, many: int) -> list[int]:
        """Draw this many clients one after another in proportion to their samples; those without any come last."""
        key = random.key(self.experiment.seed, "cohort", round)
        draws = (random.bits(key, len(self.there)).double() + 0.5) / (random.WORD + 1)
        # The smallest of -log(u) / samples is each client with a chance proportional to its samples, and so on.
        waits = [
            -math.log(u) / self.samples[number] if self.samples[number] else math.inf
            for u, number in zip(draws.tolist(), self.there, strict=True)
        ]
        return [self.there[i] for i in np.argsort(waits, kind="stable")[:many].tolist()]

    def _chosen(self, own: Choose, round: int, totals: Totals) -> list[int]:
        turn = Turn(
            round=round,
            clients=tuple(self.there),
            size=self.size,
            samples=dict(self.samples),
            losses=_numbers(totals.get("losses", {}), float),
            rounds=_numbers(totals["participations"], int),
            seed=random.seed(self.experiment.seed, "selection", round),
        )
        try:
            found = [int(number) for number in own(turn)]
        except Exception as error:
            raise UserError(
                f"selection.rule = {self.rule!r}: calling it for round {round + 1} raises {error_in_words(error)}."
            ) from error
        odd = [number for number in found if number not in self.samples]
        if not found or odd or len(set(found)) < len(found):
            got = f"client {odd[0]}, which may not take part" if odd else "nobody" if not found else "a client twice"
            raise UserError(
                f"selection.rule = {self.rule!r} chose {got} in round {round + 1}. It should return different numbers "
                "from turn.clients, at least one."
            )
        return sorted(found)


def _numbers(table: dict[str, Any], kind: Callable[[Any], Any]) -> dict[int, Any]:
    """A table of a checkpoint, whose keys JSON made strings."""
    return {int(number): kind(value) for number, value in table.items()}
