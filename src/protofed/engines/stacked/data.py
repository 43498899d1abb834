"""Many clients' data next to each other: rows of shared tensors, padded and masked, in each client's own order."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from protofed.data.augment import Moves, apply, moves
from protofed.data.batches import Federation, Samples, joined
from protofed.engines.stacked.packing import Lanes
from protofed.method import Batch
from protofed.ops import random

KEPT = 64  # groups of clients whose rows are cached


class BatchPlan(NamedTuple):
    """What clients or lanes train on, step by step (S, M, B): the samples, which are real, and how to augment them."""

    rows: Tensor
    mask: Tensor
    moves: Moves | tuple[()]

    def step(self, number: int) -> "BatchPlan":
        moved = Moves(*(m[number] for m in self.moves)) if self.moves else ()
        return BatchPlan(self.rows[number], self.mask[number], moved)


class LazyBatches(Sequence[Batch]):
    """Batches that are gathered on first use: most methods use none before they train."""

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
    """The samples of all clients of one architecture, from every domain, in one tensor."""

    def __init__(self, federation: Federation, members: Sequence[int]) -> None:
        self.federation, self.edition = federation, federation.edition
        domains = sorted({federation.domain(i) for i in members})
        self.train, starts = _placed([federation.train_part(d) for d in domains])
        self.test, test_starts = _placed([federation.test_part(d) for d in domains])
        self._start = dict(zip(domains, starts, strict=True))
        self._test_start = dict(zip(domains, test_starts, strict=True))
        self._black = torch.stack([federation.black(d).expand(_channels(self.train.x), 1, 1) for d in domains])
        self._domain_place = {d: place for place, d in enumerate(domains)}
        self._rows: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def rows(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Training rows (M, N) of these clients, padded, and the number of real ones (M,)."""
        name = tuple(numbers)
        if name not in self._rows:
            rows = [self.federation.train_rows(i) + self._start[self.federation.domain(i)] for i in numbers]
            if len(self._rows) >= KEPT:
                self._rows.clear()
            self._rows[name] = _pad(rows, self.federation.device)
        return self._rows[name]

    def test_rows(self, numbers: Sequence[int], on: str = "own") -> tuple[Tensor, Tensor]:
        """Own test or validation rows (M, T), padded, and the number of real ones (M,)."""
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
        words = [self.federation.words(what, round, i) for i in numbers]
        return torch.tensor(words).to(self.federation.device)

    def epoch(self, numbers: Sequence[int], keys: Tensor, epoch: int) -> BatchPlan:
        """What `Federation.epoch` returns, for all clients at once; the keys are those of the order."""
        rows, sizes = self.rows(numbers)
        most, batch = rows.shape[1], self.federation.widest
        key = random.fold(keys, epoch)
        place = torch.arange(most, device=rows.device)
        draw = torch.where(place < sizes[:, None], random.bits(key, most), random.WORD + 1)  # padding sorts last
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
        return BatchPlan(dealt(rows), dealt(mask), made)

    def batch(self, plan: BatchPlan, black: Tensor) -> Batch:
        """The samples (M, B, ...) of one step of a plan."""
        rows = plan.rows.flatten()
        x, y = self.train.x[rows], self.train.y[rows]
        if plan.moves:
            filling = black.repeat_interleave(plan.rows.shape[1], 0)
            x = apply(x, self.federation.augmentations, Moves(*(m.flatten() for m in plan.moves)), filling)
        shape = plan.rows.shape
        return Batch(x.reshape(*shape, *x.shape[1:]), y.reshape(shape), plan.mask)

    def black(self, numbers: Sequence[int]) -> Tensor:
        """What the margin of each client's images is filled with (M, C, 1, 1)."""
        return self._black[[self._domain_place[self.federation.domain(i)] for i in numbers]]

    def feed(self, numbers: Sequence[int], keys: Tensor, epochs: int, lanes: Lanes) -> BatchPlan:
        """What the lanes (T, W) train on, when clients take several epochs in sequence.

        An idle lane gets a batch like any other, so its numbers stay ordinary; its result is not used.
        """
        plans = [self.epoch(numbers, keys, epoch) for epoch in range(epochs)]
        own = np.array([max(1, self.federation.steps(i)) for i in numbers])[lanes.who]
        time = lanes.step // own * len(plans[0].rows) + lanes.step % own
        index, who = self._here(np.stack([time, lanes.who]))

        def along(parts: Sequence[Tensor]) -> Tensor:
            return (parts[0] if len(parts) == 1 else torch.cat(list(parts)))[index, who]

        moved = Moves(*map(along, zip(*(p.moves for p in plans), strict=True))) if plans[0].moves else ()
        return BatchPlan(along([p.rows for p in plans]), along([p.mask for p in plans]), moved)

    def _here(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.federation.device)

    def parts(self, numbers: Sequence[int], together: int) -> list[tuple[Tensor, Tensor]]:
        """Training rows and masks (M, n) of these clients, in parts of bounded size."""
        rows, sizes = self.rows(numbers)
        mask = (torch.arange(rows.shape[1], device=rows.device) < sizes[:, None]).float()
        wide = max(1, together // len(numbers))
        return list(zip(torch.split(rows, wide, 1), torch.split(mask, wide, 1), strict=True))


def _placed(parts: Sequence[Samples]) -> tuple[Samples, list[int]]:
    """All parts in one, each different one once, and the row where each starts."""
    rows: dict[int, int] = {}
    kept: list[Samples] = []
    for part in parts:
        if id(part) not in rows:
            rows[id(part)] = sum(len(other.y) for other in kept)
            kept.append(part)
    return joined(kept), [rows[id(part)] for part in parts]


def _channels(x: Tensor) -> int:
    return x.shape[1] if x.ndim == 4 else 1


def _pad(rows: list[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    sizes = torch.tensor([len(r) for r in rows], device=device)
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), sizes
