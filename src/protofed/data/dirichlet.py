"""Label skew by Dirichlet shares: the rules of FedNH, MP-FedCL and FedPR."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Ge, Gt, Le

from protofed.data.dealing import (
    CHOICE,
    POOL,
    TRAIN,
    Order,
    Test,
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

RESCUE = 300
"""More Dirichlet draws if the last allowed one leaves a client empty: with alpha 0.05 and 100 clients, one draw in
thirty leaves no client empty."""


def dirichlet_counts(
    totals: np.ndarray, clients: int, alpha: float, swap: bool, rng: np.random.Generator
) -> np.ndarray:
    """One draw of counts (clients, classes): class by class, in Dirichlet shares, past clients that have enough."""
    columns: list[np.ndarray] = []
    sizes, kinds = np.zeros(clients, dtype=np.int64), np.zeros(clients, dtype=np.int64)
    for c, total in enumerate(totals):
        full = sizes >= totals.sum() / clients
        shares = np.where(full, 0.0, rng.dirichlet(np.full(clients, alpha)))
        if not shares.sum() > 0:
            # At a small alpha all remaining shares can be 0 in floating point; in the limit, one client gets all.
            shares = np.zeros(clients)
            shares[rng.choice(clients if full.all() else np.flatnonzero(~full))] = 1.0
        edges = np.cumsum(shares)
        column = np.diff((edges / edges[-1] * total).astype(np.int64), prepend=0)
        if swap and c >= 2:
            chunks = column.tolist()
            # One after another, as in the paper's code: a later exchange can move the samples of an earlier one.
            for place, client in enumerate(np.flatnonzero(kinds <= 1).tolist(), start=1):
                chunks[client], chunks[-place] = chunks[-place], chunks[client]
            column = np.array(chunks, dtype=np.int64)
        sizes += column
        kinds += column > 0
        columns.append(column)
    return np.stack(columns, axis=1)


@dataclass(frozen=True)
class _Rule:
    """How the Dirichlet partitions differ."""

    name: str
    alpha: float
    samples: int
    order: Order
    swap: bool
    min_size: int
    min_classes: int
    attempts: int
    strict: bool
    test: Test
    test_size: int


def _dirichlet(rule: _Rule, domains: Sequence[Domain], clients: int, seed: int) -> Split:
    domain = only_domain(domains, clients, rule.name)
    size = len(domain.y_train)
    if rule.samples > size:
        raise UserError(
            f"partition.samples = {rule.samples} in all, but {domain.name} has {size} training samples. "
            f"Use at most {size}, or 0 for all."
        )
    if rule.min_classes > domain.classes:
        raise UserError(
            f"partition.min_classes = {rule.min_classes}, but {domain.name} has {domain.classes} classes. "
            f"Use at most {domain.classes}."
        )
    pool = ordered(size, rule.order, stream(seed, POOL))[: rule.samples or size]
    least = rule.min_size if rule.strict else 1
    if clients * least > len(pool):
        raise UserError(
            f"clients = {clients}: at least {least} samples each are more than the {len(pool)} there are. "
            "Use fewer clients or more samples."
        )
    totals = per_class(domain.y_train[pool], domain.classes)
    counts, notes = _redraw(rule, totals, clients, stream(seed, CHOICE))
    train = deal_rows(domain.y_train, stream(seed, TRAIN).permutation(pool), counts)
    test, more = tests_of(rule.test, rule.test_size, domain, train, seed, rule.order)
    return split_one(domain, train, test, [*notes, *more])


def _redraw(rule: _Rule, totals: np.ndarray, clients: int, rng: np.random.Generator) -> tuple[np.ndarray, list[str]]:
    """The first draw that gives every client enough; after `attempts` draws, one that leaves no client empty."""
    draws = rule.attempts + (0 if rule.strict else RESCUE)
    for draw in range(1, draws + 1):
        counts = dirichlet_counts(totals, clients, rule.alpha, rule.swap, rng)
        sizes = counts.sum(1)
        small = (sizes < rule.min_size) | (np.count_nonzero(counts, axis=1) < rule.min_classes)
        if not small.any():
            return counts, []
        if draw >= rule.attempts and not rule.strict and sizes.min() > 0:
            return counts, [
                f"partition.alpha = {rule.alpha:g}: after {draw} draws {np.count_nonzero(small)} of {clients} clients "
                f"still have fewer than {rule.min_size} samples or {rule.min_classes} classes; "
                "kept, as FedNH's code does."
            ]
    goal = f"{rule.min_size} or more samples of {rule.min_classes} or more classes" if rule.strict else "a sample"
    raise UserError(
        f"partition.alpha = {rule.alpha:g}: none of {draws} draws gave each of {clients} clients {goal}. "
        "Use a larger partition.alpha, fewer clients or more samples."
    )


@dataclass(frozen=True)
class Dirichlet:
    """Each class is dealt in Dirichlet shares to clients that are not full yet, two classes each (FedNH)."""

    alpha: Annotated[float, Gt(0), Le(1e6)] = 0.3
    """Small: few clients share a class; large: all do, evenly."""
    samples: Annotated[int, Ge(0)] = 0
    """Training samples to deal out in total, drawn at random; 0: all there are."""
    min_size: Annotated[int, Ge(1)] = 10
    """Draw again if a client has fewer samples."""
    min_classes: Annotated[int, Ge(1)] = 2
    """Draw again if a client has fewer classes."""
    attempts: Annotated[int, Ge(1), Le(100_000)] = 3
    """Number of draws, after which the last is kept; if it leaves a client empty, up to 300 more."""
    test: Test = "share"
    """Which test samples a client gets: share, own, slice or all."""
    test_size: Annotated[int, Ge(0)] = 0
    """With test = slice: samples per client; 0: as many as there are."""

    def __call__(self, domains: Sequence[Domain], clients: int, seed: int) -> Split:
        rule = _Rule(name="dirichlet", order="random", swap=True, strict=False, **vars(self))
        return _dirichlet(rule, domains, clients, seed)


@dataclass(frozen=True)
class DirichletMPFedCL:
    """The first samples of the file in Dirichlet shares; tested on slices of the test set, all classes (MP-FedCL)."""

    alpha: Annotated[float, Gt(0), Le(1e6)] = 0.05
    """Small: few clients share a class; large: all do, evenly."""
    samples: Annotated[int, Ge(0)] = 2000
    """Training samples to deal out in total; 0: all there are."""
    order: Order = "file"
    """file: the first samples, and test slices in the order of the file; random: drawn."""
    min_size: Annotated[int, Ge(1)] = 10
    """Draw again if a client has fewer samples."""
    attempts: Annotated[int, Ge(1), Le(100_000)] = 5000
    """Draws before giving up."""
    test: Test = "slice"
    """Which test samples a client gets: share, own, slice or all."""
    test_size: Annotated[int, Ge(0)] = 100
    """With test = slice: samples per client; 0: as many as there are."""

    def __call__(self, domains: Sequence[Domain], clients: int, seed: int) -> Split:
        rule = _Rule(name="dirichlet_mpfedcl", swap=False, min_classes=1, strict=True, **vars(self))
        return _dirichlet(rule, domains, clients, seed)


@dataclass(frozen=True)
class DirichletFedPR:
    """Samples drawn at random in Dirichlet shares; everyone is tested on the whole test set (FedPR)."""

    alpha: Annotated[float, Gt(0), Le(1e6)] = 0.05
    """Small: few clients share a class; large: all do, evenly."""
    samples: Annotated[int, Ge(0)] = 2000
    """Training samples to deal out in total, drawn at random; 0: all there are."""
    min_size: Annotated[int, Ge(1)] = 1
    """Draw again if a client has fewer samples."""
    min_classes: Annotated[int, Ge(1)] = 1
    """Draw again if a client has fewer classes."""
    attempts: Annotated[int, Ge(1), Le(100_000)] = 5000
    """Draws before giving up."""
    test: Test = "all"
    """Which test samples a client gets: share, own, slice or all."""
    test_size: Annotated[int, Ge(0)] = 0
    """With test = slice: samples per client; 0: as many as there are."""

    def __call__(self, domains: Sequence[Domain], clients: int, seed: int) -> Split:
        rule = _Rule(name="dirichlet_fedpr", order="random", swap=False, strict=True, **vars(self))
        return _dirichlet(rule, domains, clients, seed)
