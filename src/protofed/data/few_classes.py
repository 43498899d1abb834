"""Partitions in which each client has a few classes, or in which clients have different amounts of data."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Ge, Gt

from protofed.data.dealing import (
    CHOICE,
    TRAIN,
    Order,
    Test,
    apportion,
    apportion_classes,
    by_owner,
    deal_rows,
    only_domain,
    ordered,
    per_class,
    split_one,
    stream,
    tests_of,
)
from protofed.data.domain import Domain
from protofed.data.split import Split
from protofed.errors import UserError

FINE = 1_000_000  # shares are whole numbers of these


@dataclass(frozen=True)
class FewClasses:
    """Each client has a few classes, and a class is dealt out to the clients that have it (PFLlib's pathological)."""

    ways: Annotated[int, Ge(1)] = 2
    """Classes per client."""
    alpha: Annotated[float, Ge(0)] = 0.0
    """How unevenly a class is dealt to its clients: by Dir(alpha) (the extended Dirichlet split); 0: evenly."""
    order: Order = "random"
    """random: clients and samples are drawn; file: the first clients that have room get a class, and the first of its
    samples, as in PFLlib, where groups of clients have the same classes."""
    test: Test = "share"
    """Which test samples a client gets: share, own, slice or all."""
    test_size: Annotated[int, Ge(0)] = 0
    """With test = slice: samples per client; 0: as many as there are."""

    def __call__(self, domains: Sequence[Domain], clients: int, seed: int) -> Split:
        domain = only_domain(domains, clients, "classes")
        if self.ways > domain.classes:
            raise UserError(
                f"partition.ways = {self.ways}, but {domain.name} has {domain.classes} classes. Use at most "
                f"{domain.classes}."
            )
        rng = stream(seed, CHOICE)
        holds = self._holders(clients, domain.classes, rng)
        weights = holds.astype(np.int64)
        if self.alpha:
            drawn = np.stack([rng.dirichlet(np.full(clients, self.alpha)) for _ in range(domain.classes)], 1)
            weights = holds * np.maximum(1, np.rint(drawn * FINE).astype(np.int64))
        rng = stream(seed, TRAIN)
        counts = apportion_classes(per_class(domain.y_train, domain.classes), weights, rng)
        train = deal_rows(domain.y_train, ordered(len(domain.y_train), self.order, rng), counts)
        test, notes = tests_of(self.test, self.test_size, domain, train, seed, self.order)
        if unused := [name for name, held in zip(domain.class_names, holds.sum(0), strict=True) if not held]:
            notes.append(f"partition.ways = {self.ways}: no client has the classes {', '.join(unused)}.")
        return split_one(domain, train, test, notes)

    def _holders(self, clients: int, classes: int, rng: np.random.Generator) -> np.ndarray:
        """Which classes each client has (clients, classes)."""
        holds = np.zeros((clients, classes), dtype=bool)
        room = np.full(clients, self.ways)
        if self.order == "file":
            for label in range(classes):
                chosen = np.flatnonzero(room > 0)[: -(-clients * self.ways // classes)]
                holds[chosen, label] = True
                room[chosen] -= 1
            return holds
        for done, label in enumerate(rng.permutation(classes)):
            wanted = -(-int(room.sum()) // (classes - done))  # as many clients for every class as divide evenly
            chosen = np.lexsort((rng.random(clients), -room))[:wanted]  # those with the most room, ties at random
            chosen = chosen[room[chosen] > 0]
            holds[chosen, label] = True
            room[chosen] -= 1
        return holds


@dataclass(frozen=True)
class Quantity:
    """Clients have all classes and different amounts of data, by Dir(alpha)."""

    alpha: Annotated[float, Gt(0)] = 0.5
    """Small: a few clients have nearly everything; large: all have about as much."""
    test: Test = "share"
    """Which test samples a client gets: share, own, slice or all."""
    test_size: Annotated[int, Ge(0)] = 0
    """With test = slice: samples per client; 0: as many as there are."""

    def __call__(self, domains: Sequence[Domain], clients: int, seed: int) -> Split:
        domain = only_domain(domains, clients, "quantity")
        drawn = stream(seed, CHOICE).dirichlet(np.full(clients, self.alpha))
        rng = stream(seed, TRAIN)
        total = len(domain.y_train)
        sizes = apportion(total, np.maximum(1, np.rint(drawn * FINE).astype(np.int64)), rng)
        train = by_owner(rng.permutation(total), np.repeat(np.arange(clients), sizes), clients)
        test, notes = tests_of(self.test, self.test_size, domain, train, seed, "random")
        return split_one(domain, train, test, notes)
