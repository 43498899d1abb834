"""Who gets which samples. A partition is a frozen dataclass: its fields are the config keys, calling it makes a Split.

Randomness comes only from the seed. Choosing, train order and test order have separate streams, so another test rule
leaves the training data unchanged. The number of draws always has an upper bound.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge

from protofed.data.dealing import (
    CHOICE,
    TEST,
    TRAIN,
    Order,
    Test,
    apportion_classes,
    by_owner,
    deal_rows,
    make_split,
    only_domain,
    ordered,
    per_class,
    refuse_computed,
    split_one,
    stream,
    tests_of,
)
from protofed.data.domain import Domain
from protofed.data.split import Split
from protofed.errors import UserError


@dataclass(frozen=True)
class NWayKShot:
    """Each client has a few classes and about as many samples of each; tested on its own classes (FedProto)."""

    ways: Annotated[int, Ge(1)] = 3
    """Classes per client, around which the number is drawn."""
    shots: Annotated[int, Ge(1)] = 100
    """Training samples per class, around which one number per client is drawn."""
    spread: Annotated[int, Ge(0)] = 2
    """How far ways and shots may go up or down; the paper calls it a standard deviation, its code draws uniformly."""
    test_shots: Annotated[int, Ge(0)] = 0
    """Test samples per class and client; 0: each class's test samples are dealt evenly to the clients that have it."""
    short: Literal["refuse", "fewer"] = "refuse"
    """If a class has fewer training samples than its clients want: refuse, or give each of them fewer."""

    def __call__(self, domains: Sequence[Domain], clients: int, seed: int) -> Split:
        domain = only_domain(domains, clients, "nway_kshot")
        classes = domain.classes
        if self.ways > classes:
            raise UserError(
                f"partition.ways = {self.ways}, but {domain.name} has {classes} classes. Use at most {classes}."
            )
        rng = stream(seed, CHOICE)
        fewest = max(min(2, self.ways), self.ways - self.spread)
        # The paper's code leaves out the largest number if the range reaches the number of classes.
        most = max(fewest, min(classes, self.ways + self.spread + 1) - 1)
        n = rng.integers(fewest, most, clients, endpoint=True)
        low, high = (self.shots - self.spread + 1, self.shots + self.spread) if self.spread else (self.shots,) * 2
        k = np.maximum(1, rng.integers(low, high, clients, endpoint=True))
        # The n classes with the smallest random numbers: a choice without replacement for all clients at once.
        holds = rng.random((clients, classes)).argsort(1).argsort(1) < n[:, None]

        counts = holds * k[:, None]
        have = per_class(domain.y_train, classes)
        notes = []
        if self.short == "fewer" and (scarce := np.flatnonzero(counts.sum(0) > have)).size:
            most_each = np.maximum(1, have[scarce] // holds.sum(0)[scarce])  # refused below if even that is too many
            counts[:, scarce] = np.minimum(counts[:, scarce], most_each)
            fewer = ", ".join(f"{domain.class_names[c]} ({each})" for c, each in zip(scarce, most_each, strict=True))
            notes.append(f"partition.short = fewer: scarce classes have at most this many samples: {fewer}.")
        self._enough("shots", "training", domain, have, counts, self.spread)
        train = deal_rows(domain.y_train, stream(seed, TRAIN).permutation(len(domain.y_train)), counts)

        rng = stream(seed, TEST)
        have = per_class(domain.y_test, classes)
        if self.test_shots:
            shares = holds * np.int64(self.test_shots)
            self._enough("test_shots", "test", domain, have, shares, 0)
        else:
            shares = apportion_classes(have, holds.astype(np.int64), rng)
        test = deal_rows(domain.y_test, rng.permutation(len(domain.y_test)), shares)
        if self.ways + self.spread > most:
            notes.append(
                f"partition.ways = {self.ways}, partition.spread = {self.spread}: with {classes} classes a client gets "
                f"{fewest} to {most}; the mean here is {n.mean():.2f}."
            )
        return split_one(domain, train, test, notes)

    def _enough(self, key: str, part: str, domain: Domain, have: np.ndarray, counts: np.ndarray, spread: int) -> None:
        short = np.flatnonzero(counts.sum(0) > have)
        if len(short) == 0:
            return
        holders = np.count_nonzero(counts, axis=0)
        # The class that allows the fewest each: a number that is small enough for it is small enough for all.
        worst = short[np.argmin(have[short] / holders[short])]
        fit = have[worst] // holders[worst] - spread
        remedy = f"partition.{key} = {fit} or fewer, or fewer clients" if fit >= 1 else "fewer clients or more data"
        if key == "shots" and have[worst] >= holders[worst]:
            remedy += ", or partition.short = fewer"
        raise UserError(
            f"partition.{key} = {getattr(self, key)}: class {domain.class_names[worst]!r} has {have[worst]} {part} "
            f"samples, but {holders[worst]} clients want {counts[:, worst].sum()} of them. Use {remedy}."
        )


@dataclass(frozen=True)
class Iid:
    """All samples shuffled and cut evenly."""

    test: Test = "share"
    """Which test samples a client gets: share, own, slice or all."""
    test_size: Annotated[int, Ge(0)] = 0
    """With test = slice: samples per client; 0: as many as there are."""

    def __call__(self, domains: Sequence[Domain], clients: int, seed: int) -> Split:
        domain = only_domain(domains, clients, "iid")
        rows = stream(seed, TRAIN).permutation(len(domain.y_train))
        train = tuple(np.sort(part) for part in np.array_split(rows, clients))
        test, notes = tests_of(self.test, self.test_size, domain, train, seed, "random")
        return split_one(domain, train, test, notes)


@dataclass(frozen=True)
class Shards:
    """The samples sorted by class and cut into equal shards, dealt at random (FedAvg's pathological split)."""

    per_client: Annotated[int, Ge(1)] = 2
    """Shards per client: about as many classes, at most."""
    test: Test = "share"
    """Which test samples a client gets: share, own, slice or all."""
    test_size: Annotated[int, Ge(0)] = 0
    """With test = slice: samples per client; 0: as many as there are."""

    def __call__(self, domains: Sequence[Domain], clients: int, seed: int) -> Split:
        domain = only_domain(domains, clients, "shards")
        size, shards = len(domain.y_train), clients * self.per_client
        if shards > size:
            raise UserError(
                f"partition.per_client = {self.per_client}: {clients} clients want {shards} shards, but {domain.name} "
                f"has {size} training samples. Use fewer shards or fewer clients."
            )
        rows = stream(seed, TRAIN).permutation(size)
        rows = rows[np.argsort(domain.y_train[rows], kind="stable")]
        dealt = stream(seed, CHOICE).permutation(shards) // self.per_client
        train = by_owner(rows, dealt[np.arange(size) * shards // size], clients)
        test, notes = tests_of(self.test, self.test_size, domain, train, seed, "random")
        return split_one(domain, train, test, notes)


@dataclass(frozen=True)
class OneDomain:
    """Client i has domain i modulo their number, all classes; clients of one domain share it evenly, disjoint."""

    train_per_class: Annotated[int, Ge(0)] = 0
    """The most training samples per class and client; 0: all there are."""
    test_per_class: Annotated[int, Ge(0)] = 0
    """The most test samples per class and client; 0: all there are."""
    order: Order = "random"
    """random: drawn; file: the first of each class."""

    def __call__(self, domains: Sequence[Domain], clients: int, seed: int) -> Split:
        refuse_computed(domains, "domain")
        if not domains or clients < len(domains):
            raise UserError(
                f"clients = {clients}: the domain partition gives each client one of the {len(domains)} domains. "
                f"Use at least {max(len(domains), 1)} clients, or fewer domains."
            )
        owner = np.arange(clients) % len(domains)
        train: list[np.ndarray] = [np.zeros(0, np.int64)] * clients
        test = list(train)
        notes: list[str] = []
        for d, domain in enumerate(domains):
            members = np.flatnonzero(owner == d)
            for key, purpose, labels, limit, into in (
                ("train_per_class", TRAIN, domain.y_train, self.train_per_class, train),
                ("test_per_class", TEST, domain.y_test, self.test_per_class, test),
            ):
                rng = stream(seed, purpose, d)
                have = per_class(labels, domain.classes)
                wanted = np.minimum(have, limit * len(members)) if limit else have
                if limit and (have < limit * len(members)).any():
                    notes.append(
                        f"partition.{key} = {limit}: {domain.name} has only {have.min()} of class "
                        f"{domain.class_names[have.argmin()]!r} and {len(members)} client(s); they get what there is."
                    )
                even = np.ones((len(members), domain.classes), dtype=np.int64)
                counts = apportion_classes(wanted, even, rng)
                for client, rows in zip(
                    members, deal_rows(labels, ordered(len(labels), self.order, rng), counts), strict=True
                ):
                    into[client] = rows
        return make_split(domains, owner, tuple(train), tuple(test), notes)


@dataclass(frozen=True)
class File:
    """The split of another run, as it was saved."""

    path: str = ""
    """A saved split (.npz), or the folder of a run that has one (partition.npz)."""

    def __call__(self, domains: Sequence[Domain], clients: int, seed: int) -> Split:
        if not self.path:
            raise UserError("partition.path = '': which split? Set it to a run folder or to its partition.npz.")
        path = Path(self.path).expanduser()
        refuse_computed(domains, "file")
        split = Split.load(path / "partition.npz" if path.is_dir() else path)
        split.check(domains, clients)
        return split
