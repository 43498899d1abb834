"""The result of a partition: which client has which samples. Saved with a run, checked, reusable by other runs."""

import hashlib
import io
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from protofed.atomic import write_atomically
from protofed.data.domain import Domain
from protofed.data.readers.files import check_unpacked
from protofed.errors import UserError
from protofed.ops import random


def digest(arrays: Iterable[np.ndarray]) -> str:
    """The sha256 of integer arrays: lengths and values as 8-byte little-endian numbers, so every platform agrees."""
    total = hashlib.sha256()
    for array in arrays:
        # The length goes first: otherwise moving a number from one array to the next would not change the digest.
        total.update(np.array([array.size], dtype="<i8").tobytes())
        total.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
    return total.hexdigest()


def data_fingerprint(domains: Sequence[Domain]) -> str:
    """The sha256 of every domain's samples, labels and shapes: row numbers mean the same samples."""
    total = hashlib.sha256()
    for domain in domains:
        for x in (domain.x_train, domain.x_test):
            total.update(f"{x.dtype.str} {x.shape}".encode())
            total.update(np.ascontiguousarray(x).data)
        total.update(digest((domain.y_train, domain.y_test, np.array([domain.classes]))).encode())
        if domain.computed is not None:
            total.update(domain.computed.about.encode())
    return total.hexdigest()


def _flat(parts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """All rows concatenated, and the offsets (clients + 1,) where each client's rows begin and end."""
    offsets = np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)
    return np.concatenate([*parts, np.zeros(0, np.int64)]).astype(np.int64), offsets


def _cut(flat: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, ...]:
    if offsets[0] != 0 or offsets[-1] != len(flat) or (np.diff(offsets) < 0).any():
        raise ValueError("offsets do not fit the rows")
    return tuple(np.split(flat, offsets[1:-1]))


def _drawn(rows: np.ndarray, y: np.ndarray, share: float, key: Tensor) -> np.ndarray:
    """A random choice of rows that leaves at least one of every class."""
    different = np.unique(rows)
    wanted = max(1, int(share * len(different) + 0.5))
    order = different[random.permutation(key, len(different)).numpy()]
    kept = Counter(y[different].tolist())
    taken: list[int] = []
    for row in order.tolist():
        if len(taken) < wanted and kept[int(y[row])] > 1:
            kept[int(y[row])] -= 1
            taken.append(row)
    return np.sort(np.array(taken, dtype=np.int64))


# No __eq__: comparing tuples of arrays raises; two splits are equal if their hashes are.
@dataclass(frozen=True, eq=False, repr=False)
class Split:
    """For each client, its domain and the row numbers of its train and test samples there."""

    domain: np.ndarray
    """(clients,) int64: the number of each client's domain."""
    train: tuple[np.ndarray, ...]
    """One int64 array of rows of the domain's train part per client."""
    test: tuple[np.ndarray, ...]
    """One int64 array of rows of the domain's test part per client. If a partition holds samples back for testing, the
    numbers continue into the train part: row len(y_test) + r is train row r. Code that forgets this gets an IndexError,
    never a wrong sample."""
    notes: tuple[str, ...] = ()
    """Warnings for the user."""
    fingerprint: str = ""
    """Fingerprint of the data that the split was made for; empty if unknown, and then not checked."""
    validation: tuple[np.ndarray, ...] = ()
    """One int64 array per client: rows of the domain's train part that are held back to choose a round by. May be
    empty."""

    def __post_init__(self) -> None:
        if not len(self.domain) == len(self.train) == len(self.test) or len(self.validation) not in (0, self.clients):
            raise ValueError("a split has one domain, one train part and one test part per client")
        # Frozen, so bypass __setattr__: store int64 whatever integers were given.
        object.__setattr__(self, "domain", np.asarray(self.domain, dtype=np.int64))
        object.__setattr__(self, "train", tuple(np.asarray(rows, dtype=np.int64) for rows in self.train))
        object.__setattr__(self, "test", tuple(np.asarray(rows, dtype=np.int64) for rows in self.test))
        object.__setattr__(self, "validation", tuple(np.asarray(rows, dtype=np.int64) for rows in self.validation))

    def __repr__(self) -> str:
        sizes = [sum(map(len, part)) for part in (self.train, self.test)]
        return f"<Split: {self.clients} clients, {sizes[0]} training and {sizes[1]} test samples>"

    @property
    def clients(self) -> int:
        return len(self.train)

    @property
    def hash(self) -> str:
        """The sha256 of the assignment; notes and fingerprint are left out."""
        return digest((self.domain, *self.train, *self.test, *self.validation))

    def counts(self, domains: Sequence[Domain]) -> np.ndarray:
        """Train samples (clients, classes)."""
        classes = max(domain.classes for domain in domains)
        rows = [
            np.bincount(domains[d].y_train[part], minlength=classes)
            for d, part in zip(self.domain, self.train, strict=True)
        ]
        return np.stack(rows).astype(np.int64)

    def hold_back(self, share: float, domains: Sequence[Domain], seed: int) -> "Split":
        """Turn a share of every client's training samples into its validation part, at least one if it has two of a
        class; every class keeps one. Samples held back before are drawn again; a share of 0 undoes it."""
        trains = self.train
        if self.validation:
            trains = tuple(np.concatenate(parts) for parts in zip(self.train, self.validation, strict=True))
        if not share:
            return replace(self, train=trains, validation=())
        held = [
            _drawn(rows, domains[d].y_train, share, random.key(seed, "validation", client))
            for client, (d, rows) in enumerate(zip(self.domain, trains, strict=True))
        ]
        left = tuple(rows[~np.isin(rows, some)] for rows, some in zip(trains, held, strict=True))
        return replace(self, train=left, validation=tuple(held))

    def arrays(self, domains: Sequence[Domain], client: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """One client's x_train, y_train, x_test, y_test (copies), held-back test samples included."""
        domain, train, test = domains[self.domain[client]], self.train[client], self.test[client]
        own, held = test[test < len(domain.y_test)], test[test >= len(domain.y_test)] - len(domain.y_test)
        return (
            domain.x_train[train],
            domain.y_train[train],
            np.concatenate([domain.x_test[own], domain.x_train[held]]),
            np.concatenate([domain.y_test[own], domain.y_train[held]]),
        )

    def save(self, path: str | Path, domains: Sequence[Domain] | None = None) -> None:
        """One .npz without pickles, whole or not at all; with `domains`, also their fingerprint and the counts."""
        train, train_offsets = _flat(self.train)
        test, test_offsets = _flat(self.test)
        held, held_offsets = _flat(self.validation)
        validation: dict[str, Any] = {"validation": held, "validation_offsets": held_offsets} if self.validation else {}
        known: dict[str, Any] = {} if domains is None else {"counts": self.counts(domains)}
        content = io.BytesIO()
        np.savez_compressed(
            content,
            domain=self.domain,
            train=train,
            train_offsets=train_offsets,
            test=test,
            test_offsets=test_offsets,
            **validation,
            notes=np.array(self.notes, dtype=np.str_),
            fingerprint=np.array(data_fingerprint(domains) if domains is not None else self.fingerprint),
            hash=np.array(self.hash),
            **known,
        )
        write_atomically(Path(path), content.getvalue())

    @staticmethod
    def load(path: str | Path) -> "Split":
        """Read what `save` wrote; a missing, damaged or changed file is a UserError."""
        if not Path(path).is_file():
            raise UserError(f"There is no split at {path}. Give the partition.npz of a run, or make a new split.")
        check_unpacked(Path(path))
        try:
            with np.load(path, allow_pickle=False) as stored:
                split = Split(
                    domain=stored["domain"],
                    train=_cut(stored["train"], stored["train_offsets"]),
                    test=_cut(stored["test"], stored["test_offsets"]),
                    notes=tuple(str(note) for note in stored["notes"]),
                    fingerprint=str(stored["fingerprint"]),
                    validation=_cut(stored["validation"], stored["validation_offsets"])
                    if "validation" in stored
                    else (),
                )
                expected = str(stored["hash"])
        except Exception as error:  # zip, zlib and numpy each raise different errors on a damaged file
            raise UserError(
                f"The split at {path} cannot be read ({type(error).__name__}). "
                "Copy it again from its run, or make a new one."
            ) from error
        if split.hash != expected:
            raise UserError(
                f"The split at {path} was changed after it was written: its hash is {split.hash[:12]}, "
                f"the file says {expected[:12]}. Copy it again from its run, or make a new one."
            )
        return split

    def check(self, domains: Sequence[Domain], clients: int) -> None:
        """Raise a UserError unless this split was made for this data and this number of clients."""
        if self.clients != clients:
            raise UserError(
                f"The split has {self.clients} clients, but clients = {clients}. Set clients = {self.clients}, "
                "or make a new split."
            )
        here = data_fingerprint(domains)
        if self.fingerprint and self.fingerprint != here:
            raise UserError(
                f"The split was made for other data: fingerprint {self.fingerprint[:12]}, but the data here has "
                f"{here[:12]}. Use the data settings of the run it came from, or make a new split."
            )
        for client in range(clients):
            d = int(self.domain[client])
            if not 0 <= d < len(domains):
                raise UserError(
                    f"The split gives client {client} domain {d}, but the data has {len(domains)}. Make a new split."
                )
            train, test = len(domains[d].y_train), len(domains[d].y_test)
            for part, rows, size in (
                ("train", self.train[client], train),
                ("test", self.test[client], test + train),
                ("validation", self.validation[client] if self.validation else np.zeros(0, np.int64), train),
            ):
                if len(rows) and not 0 <= rows.min() <= rows.max() < size:
                    raise UserError(
                        f"The split gives client {client} {part} rows {rows.min()} to {rows.max()}, but "
                        f"{domains[d].name} has rows 0 to {size - 1}. Make a new split for this data."
                    )
