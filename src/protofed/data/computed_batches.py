"""Batches of clients whose samples are computed when they are drawn: only those of one cohort are in memory."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from protofed.data.batches import Federation, Samples
from protofed.data.computed import CohortSamples, Computed
from protofed.data.domain import Domain
from protofed.data.scaling import Scaler
from protofed.data.split import Split
from protofed.errors import UserError

LOOKED_AT = 100  # clients whose samples and models are checked before a run, evenly spaced
T = TypeVar("T")
NONE = np.zeros(0, np.int64)


class Asked(Sequence[T], Generic[T]):
    """The values of a function for every number below n, each computed when it is asked for."""

    def __init__(self, ask: Callable[[int], T], n: int) -> None:
        self.ask, self.n = ask, n

    def __len__(self) -> int:
        return self.n

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return [self.ask(i) for i in range(*index.indices(self.n))]
        if not 0 <= index < self.n:
            raise IndexError(index)
        return self.ask(index)

    def __iter__(self) -> Iterator[T]:
        return map(self.ask, range(self.n))


class DrawnSplit(Split):
    """A split of computed data: every client has the samples that are computed for it."""

    def __init__(self, computed: Computed, clients: int, seed: int, fingerprint: str) -> None:
        owned = np.broadcast_to(np.int64(0), (clients,))
        parts = {"domain": owned, "train": Asked(lambda i: NONE, clients), "test": Asked(lambda i: NONE, clients)}
        for name, part in {**parts, "notes": (), "fingerprint": fingerprint, "validation": ()}.items():
            object.__setattr__(self, name, part)
        object.__setattr__(self, "computed", computed)
        object.__setattr__(self, "seed", seed)

    computed: Computed
    seed: int

    def __repr__(self) -> str:
        return f"<DrawnSplit: {self.clients} clients of {self.computed.train} training samples each>"

    @property
    def hash(self) -> str:
        return hashlib.sha256(f"{self.computed.about} {self.clients} {self.seed}".encode()).hexdigest()

    def counts(self, domains: Sequence[Domain]) -> np.ndarray:
        raise UserError("counting every client's classes would compute all samples. Leave it out for computed data.")

    def hold_back(self, share: float, domains: Sequence[Domain], seed: int) -> "Split":
        if share:
            raise UserError(
                f"evaluate.validation = {share} holds back samples of lists, but these are computed. Set it to 0."
            )
        return self

    def arrays(self, domains: Sequence[Domain], client: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        mine = self.computed.draw(self.seed, [client])
        return mine.x[0], mine.y[0], mine.x_test[0], mine.y_test[0]

    def save(self, path: str | Path, domains: Sequence[Domain] | None = None) -> None:
        raise UserError("computed data has no partition to save: who has what follows from the seed.")


class DrawnFederation(Federation):
    """The data of all clients. Only the clients that were held last have theirs in memory, in buffers that stay in
    place."""

    def __init__(
        self,
        domain: Domain,
        split: DrawnSplit,
        *,
        batch_size: int,
        drop_last: bool = False,
        normalize: str = "auto",
        augmentations: Sequence[str] = (),
        device: torch.device | str = "cpu",
        most: int = LOOKED_AT,
    ) -> None:
        """`most`: clients that are held at once."""
        self.computed = split.computed
        self.seed, self.batch_size, self.drop_last = split.seed, batch_size, drop_last
        self.augmentations, self.device = list(augmentations), torch.device(device)
        self.split, self.class_names, self.classes = split, domain.class_names, domain.classes
        self.shapes = [domain.shape]
        self.check_augmentations()
        many = split.clients
        self.names = Asked(lambda client: f"client {client}", many)  # type: ignore[assignment]
        self._scalers = [Scaler.of(domain, normalize)]
        self._black = [self.black_of(domain, self._scalers[0])]
        self._official = [len(domain.y_test)]
        self._common = self._samples(self._scalers[0](domain.x_test), domain.y_test)
        self._validation_rows = Asked(lambda client: self._rows(NONE), many)  # type: ignore[assignment]
        self._train_rows = Asked(lambda client: self._slot(client, self.computed.train, 0), many)  # type: ignore[assignment]
        self._test_rows = Asked(self._test_slot, many)  # type: ignore[assignment]
        self._more_rows = {}
        self._used_by = Asked(lambda client: self._used(self.computed.train), many)  # type: ignore[assignment]
        self.widest = max(1, min(batch_size, self._used(self.computed.train)))
        self.even = self._used(self.computed.train) % self.widest == 0
        self._slots: dict[int, int] = {}
        self._most = 0
        self._grow(max(1, min(many, max(most, LOOKED_AT))))

    def _grow(self, most: int) -> None:
        """Make room for this many clients at once."""
        self._most = most
        inputs = self._common.x.new_zeros(most * self.computed.train, *self.shapes[0])
        tests = self._common.x.new_zeros(most * self.computed.test, *self.shapes[0])
        labels = torch.zeros(len(inputs) + len(tests), dtype=torch.int64, device=self.device)
        self._train = [Samples(inputs, labels[: len(inputs)])]
        self._test = [Samples(*(torch.cat(p) for p in zip(self._common, (tests, labels[len(inputs) :]), strict=True)))]
        self._per_class = torch.zeros(most, self.classes, device=self.device)

    def hold(self, clients: Sequence[int]) -> bool:
        if all(client in self._slots for client in clients):
            return False
        moved = len(clients) > self._most
        if moved:
            self._grow(len(clients))
        self._slots = {}  # if this is interrupted, no client's samples are taken for another's
        drawn = self.computed.draw(self.seed, clients)
        self._put(self._train[0], 0, drawn.x, drawn.y)
        self._put(self._test[0], self._official[0], drawn.x_test, drawn.y_test)
        self._per_class[: len(clients)] = self._counted(drawn)
        self._slots = {int(client): slot for slot, client in enumerate(clients)}
        self.edition += 1
        return moved

    def _put(self, into: Samples, start: int, x: np.ndarray, y: np.ndarray) -> None:
        flat = x.reshape(-1, *x.shape[2:])
        into.x[start : start + len(flat)] = self._scalers[0](flat).to(self.device)
        into.y[start : start + len(flat)] = torch.from_numpy(y.reshape(-1).astype(np.int64)).to(self.device)

    def _counted(self, drawn: CohortSamples) -> Tensor:
        """Training samples per class (K, C)."""
        y = torch.from_numpy(drawn.y.astype(np.int64))
        counts = torch.zeros(len(y), self.classes).scatter_add_(1, y, torch.ones(y.shape))
        return counts.to(self.device)

    def _slot(self, client: int, each: int, start: int) -> Tensor:
        """The rows of one client, whose samples are computed now if they are not here."""
        self.hold([client])
        first = start + self._slots[client] * each
        return torch.arange(first, first + each, device=self.device)

    def _test_slot(self, client: int) -> Tensor:
        return self._slot(client, self.computed.test, self._official[0])

    @property
    def clients(self) -> int:
        return self.split.clients

    @property
    def examples(self) -> Sequence[int]:
        some = min(self.clients, LOOKED_AT)
        return [i * self.clients // some for i in range(some)]

    @property
    def sizes(self) -> Sequence[int]:  # type: ignore[override]
        return Asked(lambda client: self.computed.train, self.clients)

    @property
    def total(self) -> int:
        return self.clients * self.computed.train

    @property
    def most_of_a_class(self) -> int:
        return self.computed.train

    def domain(self, client: int) -> int:
        return 0

    def class_counts(self, clients: int | Sequence[int]) -> Tensor:
        if isinstance(clients, int):
            return self.class_counts([clients])[0]
        if all(client in self._slots for client in clients):
            return self._per_class[[self._slots[client] for client in clients]]
        parts = [clients[i : i + LOOKED_AT] for i in range(0, len(clients), LOOKED_AT)]
        return torch.cat([self._counted(self.computed.draw(self.seed, some)) for some in parts])

    def of_each(self, ask: Callable[[int], Any]) -> Sequence[Any]:
        self.hold(self.examples)
        for client in self.examples:
            ask(client)
        return Asked(ask, self.clients)

    def replace_train(self, samples: Any) -> None:
        raise UserError("attack changes samples of lists, but these are computed. Use attack.kind = 'none'.")
