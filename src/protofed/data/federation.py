"""Everyone's data as tensors on one device: batches in an order that depends on seed, round and client alone."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from protofed.data.augment import augment
from protofed.data.domain import Domain
from protofed.data.scaling import Scaler
from protofed.data.split import Split
from protofed.errors import UserError
from protofed.method import Batch, LocalData
from protofed.ops import random

CHUNK = 512  # samples in one forward pass outside of training


class Samples(NamedTuple):
    """Inputs (N, ...) and labels (N,)."""

    x: Tensor
    y: Tensor


class Federation:
    """The data of all clients. Samples are shared tensors; a client is a list of row numbers."""

    def __init__(
        self,
        domains: Sequence[Domain],
        split: Split,
        *,
        seed: int,
        batch_size: int,
        drop_last: bool = False,
        normalize: str = "auto",
        augmentations: Sequence[str] = (),
        device: torch.device | str = "cpu",
        scales: Sequence[Scaler] = (),
    ) -> None:
        """`scales`: how each domain is scaled; by default by its own training part, as `normalize` says."""
        self.seed, self.batch_size, self.drop_last = seed, batch_size, drop_last
        self.augmentations = list(augmentations)
        self.device = torch.device(device)
        self.split, self.class_names = split, domains[0].class_names
        self.classes = len(self.class_names)
        self.shapes = [domain.shape for domain in domains]
        odd = [shape for shape in self.shapes if len(shape) != 3]
        if self.augmentations and odd:
            raise UserError(
                f"data.augment = {self.augmentations!r} is for images, but the samples have shape {odd[0]}. "
                "Use data.augment = []."
            )
        self.counts = torch.tensor(split.counts(domains), dtype=torch.float32, device=self.device)
        self._scalers: list[Scaler] = []
        self._train: list[Samples] = []
        self._test: list[Samples] = []
        self._black: list[Tensor] = []
        self._train_rows: list[Tensor] = [torch.empty(0)] * len(split.train)
        self._test_rows: list[Tensor] = [torch.empty(0)] * len(split.test)
        self._validation_rows: list[Tensor] = [torch.empty(0, dtype=torch.int64, device=self.device)] * len(split.test)
        self._official: list[int] = []  # test samples of each domain that are in its test part
        for number, domain in enumerate(domains):
            scale = scales[number] if scales else Scaler.of(domain, normalize)
            self._scalers.append(scale)
            members = np.flatnonzero(split.domain == number)
            used = np.unique(np.concatenate([split.train[i] for i in members] or [np.empty(0, np.int64)]))
            official = len(domain.y_test)  # a test row beyond them is a training sample held back
            tests = np.concatenate([split.test[i] for i in members] or [np.empty(0, np.int64)])
            back = [split.validation[i] for i in members] if split.validation else []
            held = np.unique(np.concatenate([tests[tests >= official] - official, *back]))
            for i in members:  # only the samples that somebody holds are kept
                self._train_rows[i] = self._rows(np.searchsorted(used, split.train[i]))
                moved = official + np.searchsorted(held, split.test[i] - official)
                self._test_rows[i] = self._rows(np.where(split.test[i] < official, split.test[i], moved))
                if split.validation:
                    self._validation_rows[i] = self._rows(official + np.searchsorted(held, split.validation[i]))
            self._train.append(self._samples(scale(domain.x_train[used]), domain.y_train[used]))
            x_test = torch.cat([scale(domain.x_test), scale(domain.x_train[held])])
            self._test.append(self._samples(x_test, np.concatenate([domain.y_test, domain.y_train[held]])))
            self._official.append(official)
            black = np.zeros((1, *domain.shape), dtype=domain.x_train.dtype)
            self._black.append(
                scale(black)[0, ..., :1, :1].to(self.device) if len(domain.shape) == 3 else torch.zeros(())
            )
        self._used_by = [self._used(len(rows)) for rows in self._train_rows]
        self.widest = max(1, min(batch_size, max(self._used_by, default=1)))  # samples of the largest batch there is
        self.even = all(used % self.widest == 0 for used in self._used_by)  # whether no batch has fewer

    def _rows(self, rows: np.ndarray) -> Tensor:
        return torch.from_numpy(rows.astype(np.int64)).to(self.device)

    def _samples(self, x: Tensor, y: np.ndarray) -> Samples:
        return Samples(x.to(self.device), torch.from_numpy(y.astype(np.int64)).to(self.device))

    @property
    def clients(self) -> int:
        return len(self.split.train)

    def domain(self, client: int) -> int:
        return int(self.split.domain[client])

    def shape(self, client: int) -> tuple[int, ...]:
        return self.shapes[self.domain(client)]

    def scaled(self, domain: int, x: np.ndarray) -> Tensor:
        """Inputs of a domain as its models see them, on the CPU."""
        return self._scalers[domain](x)

    def blank(self, client: int, samples: int) -> Tensor:
        """So many inputs of a client's shape and type, of zeros, on the CPU."""
        return torch.zeros(samples, *self.shape(client), dtype=self._train[self.domain(client)].x.dtype)

    def train(self, client: int) -> Samples:
        """A client's training samples in the order of the split."""
        rows, samples = self._train_rows[client], self._train[self.domain(client)]
        return Samples(samples.x[rows], samples.y[rows])

    def test(self, client: int, on: str = "own") -> Samples:
        """A client's own test samples, or its validation samples."""
        rows, samples = self.test_rows(client, on), self._test[self.domain(client)]
        return Samples(samples.x[rows], samples.y[rows])

    def train_rows(self, client: int) -> Tensor:
        """Which samples of `train_part` a client trains on."""
        return self._train_rows[client]

    def test_rows(self, client: int, on: str = "own") -> Tensor:
        """Which samples of `test_part` a client is tested on, or are its "validation" samples."""
        return (self._validation_rows if on == "validation" else self._test_rows)[client]

    def train_part(self, domain: int) -> Samples:
        """All training samples of a domain that somebody holds."""
        return self._train[domain]

    def test_part(self, domain: int) -> Samples:
        """All test samples of a domain, those held back from training behind the others."""
        return self._test[domain]

    def black(self, domain: int) -> Tensor:
        """What a black pixel of a domain has become."""
        return self._black[domain]

    def used(self, client: int) -> int:
        """How many of a client's samples an epoch uses."""
        return self._used_by[client]

    def steps(self, client: int) -> int:
        """Training steps of a client in an epoch."""
        return -(-self._used_by[client] // self.widest)

    def global_test(self, domain: int) -> Samples:
        """The test part of a domain."""
        x, y = self._test[domain]
        return Samples(x[: self._official[domain]], y[: self._official[domain]])

    def local(self, client: int, round: int) -> LocalData:
        """What a client knows of its own data."""
        x, y = self.train(client)
        batches = [
            Batch(a, b, torch.ones(len(b), device=self.device))
            for a, b in zip(x.split(CHUNK), y.split(CHUNK), strict=True)
        ]
        key = random.key(self.seed, "train", round, client).to(self.device)
        return LocalData(batches, self.counts[client], key)

    def _used(self, samples: int) -> int:
        """How many of a client's samples an epoch uses."""
        whole = samples // self.batch_size * self.batch_size
        return whole if self.drop_last and whole else samples

    def smallest_batch(self, client: int) -> int:
        used = self._used_by[client]
        return used % self.batch_size or min(used, self.batch_size)

    def epoch(self, client: int, round: int, epoch: int) -> Iterator[Batch]:
        """One pass over a client's training samples in the order of this seed, round, client and epoch."""
        rows, samples = self._train_rows[client], self._train[self.domain(client)]
        key = random.fold(random.key(self.seed, "order", round, client).to(self.device), epoch)
        rows = rows[random.permutation(key, len(rows))][: self._used(len(rows))]
        x, y = samples.x[rows], samples.y[rows]
        if self.augmentations:
            x = augment(x, self.augmentations, random.fold(key, 1), self._black[self.domain(client)])
        mask = torch.ones(len(y), device=self.device)
        parts = (tensor.split(self.batch_size) for tensor in (x, y, mask))
        return map(Batch, *parts)
