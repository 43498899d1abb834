"""Classes that appear over time: clients that train on their samples of some classes first, and of others later."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from protofed.data import Incremental
from protofed.data.batches import Federation
from protofed.errors import UserError
from protofed.ops import random


def classes_by_task(plan: Incremental, classes: int, seed: int) -> list[list[int]]:
    """The classes that appear in each task."""
    first = plan.first or -(-classes // plan.tasks)
    if classes - first < plan.tasks - 1:
        given = f"incremental.tasks = {plan.tasks} with incremental.first = {plan.first}"
        given = given if plan.first else f"incremental.tasks = {plan.tasks}"
        raise UserError(f"{given}, but there are {classes} classes: every task needs one. Use fewer.")
    order = np.arange(classes)
    if plan.order == "random":
        order = random.permutation(random.key(seed, "order of classes"), classes).numpy()
    if plan.first:
        parts = [order[:first], *np.array_split(order[first:], plan.tasks - 1)]
    else:
        parts = np.array_split(order, plan.tasks)
    return [sorted(part.tolist()) for part in parts]


class GrowingFederation(Federation):
    """A federation in which `turn` sets what clients train on. Before the first turn they have all of their samples;
    class counts and tests are always those of all tasks."""

    def __init__(self, whole: Federation, plan: Incremental, rounds: int) -> None:
        vars(self).update(vars(whole))
        self.plan, self.rounds = plan, rounds
        self.tasks = classes_by_task(plan, self.classes, self.seed)
        self._all_rows = whole._train_rows
        self._turns = [self._rows_of(number) for number in range(len(self.tasks))]
        self._now, self._counts_now = -1, self.counts
        self.even = all(self._used(len(rows)) % self.widest == 0 for turn in self._turns for rows in turn)

    def _rows_of(self, task: int) -> list[Tensor]:
        """What each client trains on in a task, in the order that its samples have."""
        new = torch.tensor(self.tasks[task], device=self.device)
        old = [label for part in self.tasks[:task] for label in part] if self.plan.keep else []
        found = []
        for client, rows in enumerate(self._all_rows):
            y = self._train[self.domain(client)].y[rows]
            chosen = torch.isin(y, new)
            for label in old:
                places = (y == label).nonzero().flatten()
                key = random.key(self.seed, "kept samples", client, label)
                chosen[places[random.permutation(key, len(places)).to(places.device)[: self.plan.keep]]] = True
            found.append(rows[chosen])
        return found

    def turn(self, round: int) -> bool:
        now = self.plan.task(round, self.rounds)
        if now == self._now:
            return False
        self._now, self._train_rows = now, self._turns[now]
        self._used_by = [self._used(len(rows)) for rows in self._train_rows]
        labels = [self.train(client).y for client in range(self.clients)]
        counts = torch.stack([torch.bincount(y, minlength=self.classes) for y in labels])
        self._counts_now = counts.to(self.counts)
        self.edition += 1
        return True

    @property
    def sizes(self) -> list[int]:
        return [len(rows) for rows in self._all_rows]

    def counts_now(self, clients: int | Sequence[int]) -> Tensor:
        return self._counts_now[clients if isinstance(clients, int) else list(clients)]

    def smallest_batch(self, client: int) -> int:
        """Of all tasks in which the client has samples."""
        used = [self._used(len(turn[client])) for turn in self._turns]
        sizes = [many % self.batch_size or min(many, self.batch_size) for many in used if many]
        return min(sizes, default=0)
