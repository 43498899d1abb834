"""Who gets which samples. A partition is a frozen dataclass: its fields are the config keys, calling it makes a Split.

Randomness comes from the seed alone, and choosing, train order and test order have streams of their own, so that
another test rule leaves the training data as it is. Nothing is drawn without an upper bound on the number of draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Lt

from protofed.data.dealing import (
    CHOICE,
    TEST,
    TRAIN,
    Order,
    Test,
    apportion_classes,
    by_owner,
    deal,
    make_split,
    only,
    ordered,
    per_class,
    split_one,
    stream,
    tests_of,
)
from protofed.data.dirichlet import Dirichlet, DirichletFedPR, DirichletMPFedCL
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
    """Where a class has fewer training samples than its clients want: refuse, or give each of them fewer."""

    def __call__(self, domains: Sequence[Domain], clients: int, seed: int) -> Split:
        domain = only(domains, clients, "nway_kshot")
        classes = domain.classes
        if self.ways > classes:
            raise UserError(
                f"partition.ways = {self.ways}, but {domain.name} has {classes} classes. Use at most {classes}."
            )
        rng = stream(seed, CHOICE)
        fewest = max(min(2, self.ways), self.ways - self.spread)
        # The paper's code leaves out the largest number where the range reaches the number of classes.
        most = max(fewest, min(classes, self.ways + self.spread + 1) - 1)
        n = rng.integers(fewest, most, clients, endpoint=True)
        low, high = (self.shots - self.spread + 1, self.shots + self.spread) if self.spread else (self.shots,) * 2
        k = np.maximum(1, rng.integers(low, high, clients, endpoint=True))
        # The n classes whose random numbers are the smallest: a choice without replacement for all clients at once.
        holds = rng.random((clients, classes)).argsort(1).argsort(1) < n[:, None]

        counts = holds * k[:, None]
        have = per_class(domain.y_train, classes)
        notes = []
        if self.short == "fewer" and (scarce := np.flatnonzero(counts.sum(0) > have)).size:
            most_each = np.maximum(1, have[scarce] // holds.sum(0)[scarce])  # where that is too many, it is refused
            counts[:, scarce] = np.minimum(counts[:, scarce], most_each)
            fewer = ", ".join(f"{domain.class_names[c]} ({each})" for c, each in zip(scarce, most_each, strict=True))
            notes.append(f"partition.short = fewer: so many samples at most of the classes that are scarce: {fewer}.")
        self._enough("shots", "training", domain, have, counts, self.spread)
        train = deal(domain.y_train, stream(seed, TRAIN).permutation(len(domain.y_train)), counts)

        rng = stream(seed, TEST)
        have = per_class(domain.y_test, classes)
        if self.test_shots:
            shares = holds * np.int64(self.test_shots)
            self._enough("test_shots", "test", domain, have, shares, 0)
        else:
            shares = apportion_classes(have, holds.astype(np.int64), rng)
        test = deal(domain.y_test, rng.permutation(len(domain.y_test)), shares)
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
        # The class that allows the fewest each: a number that is small enough for it is so for all of them.
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
        domain = only(domains, clients, "iid")
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
        domain = only(domains, clients, "shards")
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
    """At most so many training samples per class and client; 0: all there are."""
    test_per_class: Annotated[int, Ge(0)] = 0
    """At most so many test samples per class and client; 0: all there are."""
    order: Order = "random"
    """random: drawn; file: the first of each class."""

    def __call__(self, domains: Sequence[Domain], clients: int, seed: int) -> Split:
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
                    members, deal(labels, ordered(len(labels), self.order, rng), counts), strict=True
                ):
                    into[client] = rows
        return make_split(domains, owner, tuple(train), tuple(test), notes)


@dataclass(frozen=True)
class Natural:
    """One owner (a writer, a hospital) is one client, with the samples that came from there."""

    key: str = ""
    """Which of the data's owner columns; empty: the only one there is."""
    min_size: Annotated[int, Ge(2)] = 20
    """Owners with fewer training samples are left out."""
    test_fraction: Annotated[float, Ge(0), Lt(1)] = 0.2
    """Held back from an owner's training samples where the test part has none of that owner's."""

    def __call__(self, domains: Sequence[Domain], clients: int, seed: int) -> Split:
        found = [(d, owner) for d, domain in enumerate(domains) for owner in self._owners(domain)]
        if not 1 <= clients <= len(found):
            raise UserError(
                f"clients = {clients}: {len(found)} owners have at least partition.min_size = {self.min_size} training "
                f"samples. Use at most {len(found)} clients, or a smaller partition.min_size."
            )
        chosen = np.sort(stream(seed, CHOICE).choice(len(found), clients, replace=False))
        rng = stream(seed, TEST)
        sorters = [[np.argsort(ids, kind="stable") for ids in self._ids(domain)] for domain in domains]
        train, test = [], []
        for d, owner in (found[i] for i in chosen):
            rows, own = (
                sorter[slice(*(np.searchsorted(ids, owner, side, sorter=sorter) for side in ("left", "right")))]
                for ids, sorter in zip(self._ids(domains[d]), sorters[d], strict=True)
            )
            if len(own) == 0 and self.test_fraction:
                out = min(len(rows) - 1, max(1, round(self.test_fraction * len(rows))))
                rows = rng.permutation(rows)
                # Rows past the test part are rows of the train part: see Split.test.
                own, rows = np.sort(rows[:out]) + len(domains[d].y_test), np.sort(rows[out:])
            train.append(rows)
            test.append(own)
        domain = np.array([found[i][0] for i in chosen])
        return make_split(domains, domain, tuple(train), tuple(test))

    def _ids(self, domain: Domain) -> tuple[np.ndarray, np.ndarray]:
        known = ", ".join(sorted(domain.ids)) or "none"
        if self.key and self.key not in domain.ids:
            raise UserError(
                f"partition.key = {self.key!r}: {domain.name} has no such owner column (it has: {known}). Use one of "
                "these, or another partition."
            )
        if not self.key and len(domain.ids) != 1:
            raise UserError(
                f"partition.key = '': {domain.name} has {len(domain.ids)} owner columns ({known}). "
                "Set partition.key to one of them, or use another partition."
            )
        return domain.ids[self.key or next(iter(domain.ids))]

    def _owners(self, domain: Domain) -> list[np.generic]:
        names, sizes = np.unique(self._ids(domain)[0], return_counts=True)
        return list(names[sizes >= self.min_size])


@dataclass(frozen=True)
class File:
    """The split of another run, as it was saved."""

    path: str = ""
    """A saved split (.npz), or the folder of a run that has one (partition.npz)."""

    def __call__(self, domains: Sequence[Domain], clients: int, seed: int) -> Split:
        if not self.path:
            raise UserError("partition.path = '': which split? Set it to a run folder or to its partition.npz.")
        path = Path(self.path).expanduser()
        split = Split.load(path / "partition.npz" if path.is_dir() else path)
        split.check(domains, clients)
        return split


PARTITIONS: dict[str, type] = {
    "nway_kshot": NWayKShot,
    "dirichlet": Dirichlet,
    "dirichlet_mpfedcl": DirichletMPFedCL,
    "dirichlet_fedpr": DirichletFedPR,
    "iid": Iid,
    "shards": Shards,
    "domain": OneDomain,
    "natural": Natural,
    "file": File,
}
