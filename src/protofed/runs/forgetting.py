"""Classes that appear over time: how well each task's classes are known after every task, and what was forgotten."""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch

from protofed.config.experiment import Experiment
from protofed.data.incremental import classes_by_task
from protofed.metrics import Correct, Tally, add, judged_by, spread
from protofed.runs.cohort import taking_part
from protofed.runs.measured_clients import honest_of, measured_at_end, together_measured
from protofed.runs.setup import Prepared

Line = dict[str, Any]
GLOBAL = "global_"  # in front of the names of the global model's numbers


class Tasks:
    """Measures every task's classes: the clients' own models on their own tests, all of them in one count, and the
    global model, if there is one, on the global test set."""

    def __init__(self, experiment: Experiment, prepared: Prepared) -> None:
        self.plan, self.rounds = experiment.incremental, experiment.rounds
        self.method, self.engine = experiment.method, prepared.engine
        if self.plan.on:
            self.classes = classes_by_task(self.plan, self.engine.specs()[0].classes, experiment.seed)
            everyone = measured_at_end(experiment, prepared, taking_part(experiment))
            self.clients = honest_of(experiment, self.engine, everyone)

    def line(self, server: Any, done: int) -> Line:
        """The numbers for a round's line after `done` rounds: its task and, if that has ended but is not the last one,
        how well all classes so far are known."""
        if not self.plan.on:
            return {}
        now = self.plan.task(done - 1, self.rounds)
        if self.plan.task(done, self.rounds) == now or not self.clients:
            return {"task": now + 1}
        own = [
            reduce(add, self.engine.evaluate(self.method, server, some, on="own", who="personal"))
            for some in together_measured(self.clients, len(self.clients))
        ]
        return {"task": now + 1} | self.known(reduce(add, own), self.engine.global_tally(self.method, server), now)

    def known(self, own: Tally, whole: Tally | None, now: int) -> Line:
        """The accuracies on this task's classes: of all of them together, and of each earlier task's."""
        found = self._known(own[judged_by(self.method)], now, "")
        return found | (self._known(whole[self.method.inference], now, GLOBAL) if whole else {})

    def _known(self, correct: Correct, now: int, prefix: str) -> Line:
        def on(classes: Sequence[int]) -> float | None:
            weight = torch.zeros_like(correct.samples)
            weight[list(classes)] = 1
            return correct.accuracy(weight)

        so_far = self.classes[: now + 1]
        return {
            f"{prefix}accuracy_seen": on([label for part in so_far for label in part]),
            f"{prefix}accuracy_per_task": [on(part) for part in so_far],
        }

    def summary(self, lines: Sequence[Line], own: Tally, whole: Tally | None) -> Line:
        """How well every task's classes are known at the end, and how much of them was forgotten, given the lines of
        all rounds."""
        if not self.plan.on:
            return {}
        now = self.plan.task(max(0, len(lines) - 1), self.rounds)  # the last task, if the run did not end early
        last = self.known(own, whole, now)
        found = dict(last)
        for prefix in ("", GLOBAL) if whole else ("",):
            key = f"{prefix}accuracy_per_task"
            measured = [line for line in lines if isinstance(line.get(key), list)]
            ends = [*(line for line in measured if len(line[key]) <= now), last]
            found[f"{prefix}accuracy_incremental"] = spread([line[f"{prefix}accuracy_seen"] for line in ends]).mean
            found[f"{prefix}forgetting"] = forgetting([line[key] for line in ends])
        return found


def forgetting(after: Sequence[Sequence[float | None]]) -> float | None:
    """By how much the accuracy on a task's classes was at best higher than it is at the end, averaged over all tasks
    but the last; `after` has, for the end of each task, the accuracy on its classes and on those of every earlier one.
    None where nothing can be compared."""
    lost = []
    for task, final in enumerate(after[-1][:-1] if after else []):
        before = [number for row in after[task:-1] if (number := row[task]) is not None]
        if before and final is not None:
            lost.append(max(before) - final)
    return sum(lost) / len(lost) if lost else None
