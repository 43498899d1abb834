"""Many clients' data side by side: rows of shared tensors, padded and masked, in the order each would have alone."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from protofed.data.augment import Moves, apply, moves
from protofed.data.federation import Federation, Samples
from protofed.data.lanes import Lanes
from protofed.method import Batch
from protofed.ops import random

KEPT = 64  # groups of clients whose rows are remembered


class Plan(NamedTuple):
    """What clients or lanes train on, step by step (S, M, B): which samples, which are real, and what moves them."""

    rows: Tensor
    mask: Tensor
    moves: Moves | tuple[()]

    def step(self, number: int) -> "Plan":
        moved = Moves(*(m[number] for m in self.moves)) if self.moves else ()
        return Plan(self.rows[number], self.mask[number], moved)


class LazyBatches(Sequence[Batch]):
    """Batches that are gathered when they are looked at: most methods look at none before they train."""

    def __init__(self, samples: Samples, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._samples, self._parts = samples, parts
        self.looked = False

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        self.looked = True
        rows, mask = self._parts[index]
        return Batch(self._samples.x[rows], self._samples.y[rows], mask)


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

    def test_rows(self, numbers: Sequence[int], on: str = "own") -> tuple[Tensor, Tensor]:
        """Own test rows (M, T), or those of validation samples, padded, and how many are real (M,)."""
        rows = [self.federation.test_rows(i, on) + self._test_start[self.federation.domain(i)] for i in numbers]
        return _pad(rows, self.federation.device)

    def global_rows(self, client: int) -> Tensor:
        """Rows (T,) of the whole test part of a client's domain."""
        domain = self.federation.domain(client)
        return (
            torch.arange(len(self.federation.global_test(domain).y), device=self.federation.device)
            + (self._test_start[domain])
        )

    def keys(self, what: str, round: int, numbers: Sequence[int]) -> Tensor:
        """Keys (M, 2) of these clients."""
        words = [random.words(self.federation.seed, what, round, i) for i in numbers]
        return torch.tensor(words).to(self.federation.device)

    def epoch(self, numbers: Sequence[int], keys: Tensor, epoch: int) -> Plan:
        """What `Federation.epoch` gives, for all at once; keys are those of the order."""
        rows, sizes = self.rows(numbers)
        most, batch = rows.shape[1], self.federation.widest
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

    def feed(self, numbers: Sequence[int], keys: Tensor, epochs: int, lanes: Lanes) -> Plan:
        """What the lanes (T, W) train on, where the clients take so many epochs one behind the other.

        A lane that waits gets a batch like any other, so that nothing odd comes of it; what comes of it is not used.
        """
        plans = [self.epoch(numbers, keys, epoch) for epoch in range(epochs)]
        own = np.array([max(1, self.federation.steps(i)) for i in numbers])[lanes.who]
        time = lanes.step // own * len(plans[0].rows) + lanes.step % own
        index, who = self._here(np.stack([time, lanes.who]))

        def along(parts: Sequence[Tensor]) -> Tensor:
            return (parts[0] if len(parts) == 1 else torch.cat(list(parts)))[index, who]

        moved = Moves(*map(along, zip(*(p.moves for p in plans), strict=True))) if plans[0].moves else ()
        return Plan(along([p.rows for p in plans]), along([p.mask for p in plans]), moved)

    def _here(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.federation.device)

    def parts(self, numbers: Sequence[int], together: int) -> list[tuple[Tensor, Tensor]]:
        """Training rows and masks (M, n) of these clients, in parts of so many samples at most."""
        rows, sizes = self.rows(numbers)
        mask = (torch.arange(rows.shape[1], device=rows.device) < sizes[:, None]).float()
        wide = max(1, together // len(numbers))
        return list(zip(rows.split(wide, 1), mask.split(wide, 1), strict=True))


def _joined(parts: Sequence[Samples]) -> Samples:
    return parts[0] if len(parts) == 1 else Samples(torch.cat([p.x for p in parts]), torch.cat([p.y for p in parts]))


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:i]) for i in range(len(sizes))]


def _channels(x: Tensor) -> int:
    return x.shape[1] if x.ndim == 4 else 1


def _pad(rows: list[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    sizes = torch.tensor([len(r) for r in rows], device=device)
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), sizes
