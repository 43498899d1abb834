"""Many clients' data side by side: rows of shared tensors, padded and masked, in the order each would have alone."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from protofed.data.augment import Moves, apply, moves
from protofed.data.federation import Federation, Samples
from protofed.method import Batch, LocalData
from protofed.ops import random

KEPT = 64  # groups of clients whose rows are remembered
TOGETHER = 16384  # samples of all clients in one forward pass outside of training


class Plan(NamedTuple):
    """One epoch of M clients: step by step (S, M, B) which samples, which of them are real, and what moves them."""

    rows: Tensor
    mask: Tensor
    moves: Moves | tuple[()]

    def step(self, number: int) -> "Plan":
        moved = Moves(*(m[number] for m in self.moves)) if self.moves else ()
        return Plan(self.rows[number], self.mask[number], moved)


class StackedData:
    """The samples of all clients of one architecture in one tensor, whatever their domain."""

    def __init__(self, federation: Federation, members: Sequence[int]) -> None:
        self.federation, self.members = federation, list(members)
        domains = sorted({federation.domain(i) for i in members})
        self.train = _joined([federation.train_part(d) for d in domains])
        self.test = _joined([federation.test_part(d) for d in domains])
        sizes = [len(federation.train_part(d).y) for d in domains]
        tests = [len(federation.test_part(d).y) for d in domains]
        self._start = dict(zip(domains, _starts(sizes), strict=True))
        self._test_start = dict(zip(domains, _starts(tests), strict=True))
        self._black = torch.stack([federation.black(d).expand(_channels(self.train.x), 1, 1) for d in domains])
        self._domain_place = {d: place for place, d in enumerate(domains)}
        self._rows: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def rows(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Training rows (M, N) of these clients, padded, and how many are real (M,)."""
        name = tuple(numbers)
        if name not in self._rows:
            rows = [self.federation.train_rows(i) + self._start[self.federation.domain(i)] for i in numbers]
            if len(self._rows) >= KEPT:
                self._rows.clear()
            self._rows[name] = _pad(rows, self.federation.device)
        return self._rows[name]

    def test_rows(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Own test rows (M, T), padded, and how many are real (M,)."""
        rows = [self.federation.test_rows(i) + self._test_start[self.federation.domain(i)] for i in numbers]
        return _pad(rows, self.federation.device)

    def global_rows(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Rows (M, T) of the whole test part of each client's domain, padded, and how many are real (M,)."""
        device = self.federation.device
        parts = [
            torch.arange(len(self.federation.global_test(d).y), device=device) + self._test_start[d]
            for d in (self.federation.domain(i) for i in numbers)
        ]
        return _pad(parts, device)

    def steps(self, client: int) -> int:
        """Training steps of a client in an epoch."""
        return -(-self.federation.used(client) // self.federation.batch_size)

    def keys(self, what: str, round: int, numbers: Sequence[int]) -> Tensor:
        """Keys (M, 2) of these clients."""
        made = [random.key(self.federation.seed, what, round, i) for i in numbers]
        return torch.stack(made).to(self.federation.device)

    def epoch(self, numbers: Sequence[int], keys: Tensor, epoch: int) -> Plan:
        """What `Federation.epoch` gives, for all at once; keys are those of the order."""
        rows, sizes = self.rows(numbers)
        most, batch = rows.shape[1], self.federation.batch_size
        key = random.fold(keys, epoch)
        place = torch.arange(most, device=rows.device)
        draw = torch.where(place < sizes[:, None], random.bits(key, most), random.WORD + 1)  # padding comes last
        rows = rows.gather(1, torch.argsort(draw, dim=1, stable=True))
        used = torch.tensor([self.federation.used(i) for i in numbers], device=rows.device)
        steps = max(1, -(-max(self.federation.used(i) for i in numbers) // batch))
        cut = steps * batch

        def dealt(tensor: Tensor) -> Tensor:  # (M, N) becomes (S, M, B)
            fitted = torch.nn.functional.pad(tensor[:, :cut], (0, max(0, cut - tensor.shape[1])))
            return fitted.reshape(len(numbers), steps, batch).movedim(1, 0).contiguous()

        mask = (torch.arange(cut, device=rows.device) < used[:, None]).float()
        made: Moves | tuple[()] = ()
        if self.federation.augmentations:
            made = Moves(*map(dealt, moves(random.fold(key, 1), used[:, None], most)))
        return Plan(dealt(rows), dealt(mask), made)

    def batch(self, plan: Plan, black: Tensor) -> Batch:
        """The samples (M, B, ...) of one step of a plan."""
        rows = plan.rows.flatten()
        x, y = self.train.x[rows], self.train.y[rows]
        if plan.moves:
            filling = black.repeat_interleave(plan.rows.shape[1], 0)
            x = apply(x, self.federation.augmentations, Moves(*(m.flatten() for m in plan.moves)), filling)
        shape = plan.rows.shape
        return Batch(x.reshape(*shape, *x.shape[1:]), y.reshape(shape), plan.mask)

    def black(self, numbers: Sequence[int]) -> Tensor:
        """What fills the margin of each client's images (M, C, 1, 1)."""
        return self._black[[self._domain_place[self.federation.domain(i)] for i in numbers]]

    def local(self, numbers: Sequence[int], round: int) -> LocalData:
        """What the clients know of their own data, stacked."""
        rows, sizes = self.rows(numbers)
        mask = (torch.arange(rows.shape[1], device=rows.device) < sizes[:, None]).float()
        wide = max(1, TOGETHER // len(numbers))
        batches = [
            Batch(self.train.x[r], self.train.y[r], m)
            for r, m in zip(rows.split(wide, 1), mask.split(wide, 1), strict=True)
        ]
        return LocalData(batches, self.federation.counts[list(numbers)], self.keys("train", round, numbers))


def _joined(parts: Sequence[Samples]) -> Samples:
    return parts[0] if len(parts) == 1 else Samples(torch.cat([p.x for p in parts]), torch.cat([p.y for p in parts]))


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:i]) for i in range(len(sizes))]


def _channels(x: Tensor) -> int:
    return x.shape[1] if x.ndim == 4 else 1


def _pad(rows: list[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    sizes = torch.tensor([len(r) for r in rows], device=device)
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), sizes
