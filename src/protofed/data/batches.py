"""All clients' data as tensors on one device, in batches whose order depends only on seed, round and client."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from protofed.data.domain import Domain, client_names
from protofed.data.scaling import Scaler
from protofed.errors import UserError
from protofed.method import Batch, LocalData
from protofed.ops import random

if TYPE_CHECKING:
    from protofed.data.split import Split

CHUNK = 512  # samples in one forward pass outside training


class Samples(NamedTuple):
    """Inputs (N, ...) and labels (N,)."""

    x: Tensor
    y: Tensor

    def __repr__(self) -> str:
        return f"<Samples: {len(self.y)} of shape {tuple(self.x.shape[1:])}>"  # no data: it may end up in a log


class Federation:
    """The data of all clients. Samples are shared tensors; a client is a list of row numbers."""

    edition = 0
    """Changes whenever other clients' samples are held, if not all are."""

    def __init__(
        self,
        domains: Sequence[Domain],
        split: "Split",
        *,
        seed: int,
        batch_size: int,
        drop_last: bool = False,
        normalize: str = "auto",
        augmentations: Sequence[str] = (),
        device: torch.device | str = "cpu",
        scales: Sequence[Scaler] = (),
    ) -> None:
        """`scales`: a scaler per domain; by default from its own training part, as `normalize` says."""
        self.seed, self.batch_size, self.drop_last = seed, batch_size, drop_last
        self.augmentations = list(augmentations)
        self.device = torch.device(device)
        self.split, self.class_names = split, domains[0].class_names
        self.classes = len(self.class_names)
        self.names = client_names(domains, split.domain)
        self.shapes = [domain.shape for domain in domains]
        self.check_augmentations()
        self.counts = torch.tensor(split.counts(domains), dtype=torch.float32, device=self.device)
        self._scalers: list[Scaler] = []
        self._train: list[Samples] = []
        self._test: list[Samples] = []
        self._black: list[Tensor] = []
        self._train_rows: list[Tensor] = [torch.empty(0)] * len(split.train)
        self._test_rows: list[Tensor] = [torch.empty(0)] * len(split.test)
        self._validation_rows: list[Tensor] = [torch.empty(0, dtype=torch.int64, device=self.device)] * len(split.test)
        self._official: list[int] = []  # how many of each domain's test samples are in its test part
        for number, domain in enumerate(domains):
            scale = scales[number] if scales else Scaler.of(domain, normalize)
            self._scalers.append(scale)
            members = np.flatnonzero(split.domain == number)
            used = np.unique(np.concatenate([split.train[i] for i in members] or [np.empty(0, np.int64)]))
            official = len(domain.y_test)  # a test row beyond these is a held-back training sample
            tests = np.concatenate([split.test[i] for i in members] or [np.empty(0, np.int64)])
            back = [split.validation[i] for i in members] if split.validation else []
            held = np.unique(np.concatenate([tests[tests >= official] - official, *back]))
            for i in members:  # keep only samples that a client holds
                self._train_rows[i] = self._rows(np.searchsorted(used, split.train[i]))
                moved = official + np.searchsorted(held, split.test[i] - official)
                self._test_rows[i] = self._rows(np.where(split.test[i] < official, split.test[i], moved))
                if split.validation:
                    self._validation_rows[i] = self._rows(official + np.searchsorted(held, split.validation[i]))
            self._train.append(self._samples(scale(domain.x_train[used]), domain.y_train[used]))
            x_test = torch.cat([scale(domain.x_test), scale(domain.x_train[held])])
            self._test.append(self._samples(x_test, np.concatenate([domain.y_test, domain.y_train[held]])))
            self._official.append(official)
            self._black.append(self.black_of(domain, scale))
        self._more_rows: dict[str, list[Tensor]] = {}  # each client's rows in additional tests, by name
        self._used_by = [self._used(len(rows)) for rows in self._train_rows]
        self.widest = max(1, min(batch_size, max(self._used_by, default=1)))  # size of the largest batch
        self.even = all(used % self.widest == 0 for used in self._used_by)  # whether all batches have this size

    def check_augmentations(self) -> None:
        """Raise if samples that are to be augmented are not images."""
        odd = [shape for shape in self.shapes if len(shape) != 3]
        if self.augmentations and odd:
            raise UserError(
                f"data.augment = {self.augmentations!r} is for images, but the samples have shape {odd[0]}. "
                "Use data.augment = []."
            )

    def black_of(self, domain: Domain, scale: Scaler) -> Tensor:
        """The scaled value of a domain's black pixel."""
        if len(domain.shape) != 3:
            return torch.zeros(())
        return scale(np.zeros((1, *domain.shape), dtype=domain.x_train.dtype))[0, ..., :1, :1].to(self.device)

    def _rows(self, rows: np.ndarray) -> Tensor:
        return torch.from_numpy(rows.astype(np.int64)).to(self.device)

    def _samples(self, x: Tensor, y: np.ndarray) -> Samples:
        return Samples(x.to(self.device), torch.from_numpy(y.astype(np.int64)).to(self.device))

    @property
    def clients(self) -> int:
        return len(self.split.train)

    @property
    def sizes(self) -> list[int]:
        """Training samples of every client."""
        return [len(rows) for rows in self._train_rows]

    @property
    def total(self) -> int:
        """Training samples of all clients."""
        return int(self.counts.sum())

    @property
    def most_of_a_class(self) -> int:
        """The most training samples that any client has of one class."""
        return int(self.counts.max())

    def class_counts(self, clients: int | Sequence[int]) -> Tensor:
        """Training samples per class (C,) of one client, or (K, C) of several."""
        return self.counts[clients if isinstance(clients, int) else list(clients)]

    def counts_now(self, clients: int | Sequence[int]) -> Tensor:
        """The same for the samples that they train on in this round."""
        return self.class_counts(clients)

    @property
    def examples(self) -> Sequence[int]:
        """The clients that are checked before a run: all of them, if their samples are in memory."""
        return range(self.clients)

    def of_each(self, ask: Callable[[int], Any]) -> Sequence[Any]:
        """The result of a function for every client."""
        return [ask(client) for client in range(self.clients)]

    def hold(self, clients: Sequence[int]) -> bool:
        """Make the samples of these clients ready; returns whether their memory has moved."""
        return False

    def turn(self, round: int) -> bool:
        """Let clients train on the samples of this round; returns whether those have changed."""
        return False

    def domain(self, client: int) -> int:
        return int(self.split.domain[client])

    def words(self, what: str, round: int, client: int) -> tuple[int, int]:
        """The words of a client's key in a round, for its "order" or its "train"ing."""
        return random.words(self.seed, what, round, client)

    def shape(self, client: int) -> tuple[int, ...]:
        return self.shapes[self.domain(client)]

    def scaled(self, domain: int, x: np.ndarray) -> Tensor:
        """A domain's inputs as its models see them, on the CPU."""
        return self._scalers[domain](x)

    def blank(self, client: int, samples: int) -> Tensor:
        """Some all-zero inputs of a client's shape and type, on the CPU."""
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
        """The rows of `train_part` that a client trains on."""
        return self._train_rows[client]

    def test_rows(self, client: int, on: str = "own") -> Tensor:
        """The rows of `test_part` for a client's tests, its "validation" samples, or an additional test."""
        if on in self._more_rows:
            return self._more_rows[on][client]
        return (self._validation_rows if on == "validation" else self._test_rows)[client]

    def replace_train(self, samples: Mapping[int, Samples]) -> None:
        """Let some clients train on other samples, the same number as before; the rest keep theirs."""
        for number, part in enumerate(self._train):
            mine = {client: new for client, new in samples.items() if self.domain(client) == number}
            start = len(part.y)
            for client, new in mine.items():
                self._train_rows[client] = torch.arange(start, start + len(new.y), device=self.device)
                self.counts[client] = torch.bincount(new.y, minlength=self.classes).to(self.counts)
                start += len(new.y)
            self._train[number] = joined([part, *mine.values()])

    def replace_tests(self, on: str, samples: Mapping[int, Samples]) -> None:
        """Test some clients on other samples, the same number as before; `on` is "own" or "validation"."""
        rows = self._validation_rows if on == "validation" else self._test_rows
        for number, part in enumerate(self._test):
            mine = {client: new for client, new in samples.items() if self.domain(client) == number}
            start = len(part.y)
            for client, new in mine.items():
                rows[client] = torch.arange(start, start + len(new.y), device=self.device)
                start += len(new.y)
            self._test[number] = joined([part, *mine.values()])

    def add_tests(self, name: str, changed: Sequence[Samples], used: Sequence[Tensor]) -> None:
        """Also test all clients on changed samples: `changed` has each domain's whole test part, of which clients keep
        the rows that are `used`."""
        first = [len(part.y) for part in self._test]
        self._test = [joined(parts) for parts in zip(self._test, changed, strict=True)]
        self._more_rows[name] = [
            rows[used[self.domain(client)][rows]] + first[self.domain(client)]
            for client, rows in enumerate(self._test_rows)
        ]

    def train_part(self, domain: int) -> Samples:
        """All training samples of a domain that a client holds."""
        return self._train[domain]

    def test_part(self, domain: int) -> Samples:
        """All test samples of a domain; those held back from training come last."""
        return self._test[domain]

    def black(self, domain: int) -> Tensor:
        """The scaled value of a domain's black pixel."""
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
        """What a client knows about its own data."""
        x, y = self.train(client)
        batches = [
            Batch(a, b, torch.ones(len(b), device=self.device))
            for a, b in zip(torch.split(x, CHUNK), torch.split(y, CHUNK), strict=True)
        ]
        key = torch.tensor(self.words("train", round, client)).to(self.device)
        return LocalData(batches, self.counts_now(client), key)

    def _used(self, samples: int) -> int:
        """How many of a client's samples an epoch uses."""
        whole = samples // self.batch_size * self.batch_size
        return whole if self.drop_last and whole else samples

    def smallest_batch(self, client: int) -> int:
        used = self._used_by[client]
        return used % self.batch_size or min(used, self.batch_size)

    def epoch(self, client: int, round: int, epoch: int) -> Iterator[Batch]:
        """One pass over a client's training samples, ordered by seed, round, client and epoch."""
        rows, samples = self._train_rows[client], self._train[self.domain(client)]
        if not len(rows):
            return iter(())  # else torch.split would make one batch of nothing, on which weights would decay
        key = random.fold(torch.tensor(self.words("order", round, client)).to(self.device), epoch)
        rows = rows[random.permutation(key, len(rows))][: self._used(len(rows))]
        x, y = samples.x[rows], samples.y[rows]
        if self.augmentations:
            from protofed.data.augment import augment  # few experiments augment images

            x = augment(x, self.augmentations, random.fold(key, 1), self._black[self.domain(client)])
        mask = torch.ones(len(y), device=self.device)
        parts = (torch.split(tensor, self.batch_size) for tensor in (x, y, mask))
        return map(Batch, *parts)

    def drawn(self, client: int, key: Tensor, rate: float) -> Batch:
        """A batch that contains each of a client's training samples with this probability, independently; it may be
        empty."""
        rows, samples = self._train_rows[client], self._train[self.domain(client)]
        rows = rows[~random.at_least(key, len(rows), rate)]
        x, y = samples.x[rows], samples.y[rows]
        if self.augmentations and len(y):
            from protofed.data.augment import augment  # few experiments augment images

            x = augment(x, self.augmentations, random.fold(key, 1), self._black[self.domain(client)])
        return Batch(x, y, torch.ones(len(y), device=self.device))


def joined(parts: Sequence[Samples]) -> Samples:
    """These parts concatenated."""
    return parts[0] if len(parts) == 1 else Samples(*(torch.cat(column) for column in zip(*parts, strict=True)))
