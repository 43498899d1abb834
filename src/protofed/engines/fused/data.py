"""The clients of several runs as one federation, in which each keeps its own samples, order and keys."""

from collections.abc import Sequence

import torch
from torch import Tensor

from protofed.data.batches import Federation, Samples


class JointFederation(Federation):
    """Client i of run r has the number starts[r] + i. All runs have the same data set, batch size and augmentation."""

    def __init__(self, runs: Sequence[Federation]) -> None:
        first = runs[0]
        self.runs = list(runs)
        self.starts = [sum(run.clients for run in runs[:number]) for number in range(len(runs))]
        self.rounds = [0] * len(runs)  # that each run is in
        self.owners = [(number, i) for number, run in enumerate(runs) for i in range(run.clients)]
        self.batch_size, self.drop_last, self.augmentations = first.batch_size, first.drop_last, first.augmentations
        self.device, self.class_names, self.classes = first.device, first.class_names, first.classes
        self.counts = torch.cat([run.counts for run in runs])
        self.names = [name for run in runs for name in run.names]
        self.shapes = [shape for run in runs for shape in run.shapes]
        firsts = [sum(len(run.shapes) for run in runs[:number]) for number in range(len(runs))]
        self._domains = [firsts[number] + runs[number].domain(i) for number, i in self.owners]
        self._black = [black for run in runs for black in run._black]
        self._official = [many for run in runs for many in run._official]
        self._train = _shared([part for run in runs for part in run._train])
        self._test = _shared([part for run in runs for part in run._test])
        self._train_rows = [rows for run in runs for rows in run._train_rows]
        self._test_rows = [rows for run in runs for rows in run._test_rows]
        self._validation_rows = [rows for run in runs for rows in run._validation_rows]
        self._more_rows = {}
        self._used_by = [used for run in runs for used in run._used_by]
        self.widest = max(run.widest for run in runs)
        self.even = all(used % self.widest == 0 for used in self._used_by)

    @property
    def clients(self) -> int:
        return len(self.owners)

    def domain(self, client: int) -> int:
        return self._domains[client]

    def words(self, what: str, round: int, client: int) -> tuple[int, int]:
        """The words of a client's key in the round that its own run is in."""
        run, mine = self.owners[client]
        return self.runs[run].words(what, self.rounds[run], mine)


def _shared(parts: Sequence[Samples]) -> list[Samples]:
    """The same samples in one place only."""
    kept: list[Samples] = []
    found = []
    for part in parts:
        same = next((other for other in kept if _same(part.x, other.x) and _same(part.y, other.y)), None)
        if same is None:
            kept.append(part)
        found.append(same or part)
    return found


def _same(left: Tensor, right: Tensor) -> bool:
    return left is right or (left.shape == right.shape and torch.equal(left, right))
