"""Who gets which samples. A partition is a frozen dataclass: its fields are the config keys, calling it makes a Split.

Randomness comes from the seed alone, and choosing, train order and test order have streams of their own, so that
another test rule leaves the training data as it is. Nothing is drawn without an upper bound on the number of draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Gt, Le, Lt

from protofed.data.domain import Domain
from protofed.data.split import Split, fingerprint
from protofed.errors import UserError

Test = Literal["share", "own", "slice", "all"]
"""share: each class's test samples dealt, disjoint, as its training samples are. own: all test samples of the client's
classes. slice: an equal part of the test set, disjoint. all: the whole test set. Only share and slice are disjoint."""

Order = Literal["random", "file"]

CHOICE, POOL, TRAIN, TEST = range(4)

RESCUE = 300
"""Further Dirichlet draws where the last allowed one leaves a client empty: at alpha 0.05 and 100 clients one in thirty
leaves nobody so."""


def _rng(seed: int, stream: int, part: int = 0) -> np.random.Generator:
    if seed < 0:
        raise UserError(f"seed = {seed} is negative. Use 0 or more.")
    # A word of its own keeps these streams apart from others that are drawn from the same seed.
    return np.random.default_rng([seed, 0x5EED_DA7A, stream, part])


def _only(domains: Sequence[Domain], clients: int, name: str) -> Domain:
    """The one domain of a partition that knows no other."""
    if len(domains) != 1:
        names = ", ".join(domain.name for domain in domains) or "none"
        raise UserError(
            f"The {name} partition deals out one domain, got {len(domains)} ({names}). "
            "Use the 'domain' partition, or give one domain."
        )
    if clients < 1:
        raise UserError(f"clients = {clients}: there must be at least one. Set clients to 1 or more.")
    return domains[0]


def _per_class(labels: np.ndarray, classes: int) -> np.ndarray:
    return np.bincount(labels, minlength=classes).astype(np.int64)


def _order(size: int, order: Order, rng: np.random.Generator) -> np.ndarray:
    return rng.permutation(size) if order == "random" else np.arange(size)


def _deal(labels: np.ndarray, rows: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, ...]:
    """Hand out each class's `rows`, in their order, in consecutive runs of counts (clients, classes)."""
    clients, classes = counts.shape
    grouped = rows[np.argsort(labels[rows], kind="stable")]
    have = _per_class(labels[rows], classes)
    taken = counts.sum(0)
    # The n-th sample handed out of a class lies n places after that class's first.
    first = np.repeat(np.cumsum(have) - have, taken)
    place = np.arange(taken.sum()) - np.repeat(np.cumsum(taken) - taken, taken)
    owner = np.repeat(np.tile(np.arange(clients), classes), counts.T.ravel())
    return _by_owner(grouped[first + place], owner, clients)


def _by_owner(rows: np.ndarray, owner: np.ndarray, clients: int) -> tuple[np.ndarray, ...]:
    """The rows of each owner, ascending."""
    rows = rows[np.lexsort((rows, owner))]
    return tuple(np.split(rows, np.cumsum(np.bincount(owner, minlength=clients))[:-1]))


def _apportion(total: int, weights: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Whole shares (clients,) of `total` by largest remainder, ties at random; at least one each where it suffices."""
    if weights.sum() == 0:
        return np.zeros(len(weights), dtype=np.int64)
    shares, remainder = np.divmod(total * weights, weights.sum())
    first = np.lexsort((rng.random(len(weights)), -remainder))
    shares[first[: total - shares.sum()]] += 1
    if total >= np.count_nonzero(weights):
        for client in np.flatnonzero((weights > 0) & (shares == 0)):
            shares[shares.argmax()] -= 1
            shares[client] = 1
    return shares


def _apportion_classes(have: np.ndarray, weights: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Each class's samples (classes,) in the shares of weights (clients, classes)."""
    return np.stack([_apportion(int(n), w, rng) for n, w in zip(have, weights.T, strict=True)], axis=1)


def _tests(
    mode: Test, size: int, domain: Domain, train: tuple[np.ndarray, ...], seed: int, order: Order = "random"
) -> tuple[tuple[np.ndarray, ...], list[str]]:
    """The test rows of every client by one of the four rules, and what to tell the user about it."""
    rng = _rng(seed, TEST)
    clients, total = len(train), len(domain.y_test)
    notes = (
        [f"partition.test_size = {size} has no effect with partition.test = {mode!r}."]
        if size and mode != "slice"
        else []
    )
    if mode == "all":
        return (np.arange(total),) * clients, notes
    if mode == "slice":
        each = size or total // clients
        if each == 0 or each * clients > total:
            smaller = f"partition.test_size = {total // clients}, " if total >= clients else ""
            raise UserError(
                f"partition.test_size = {size}: {clients} clients want {max(each, 1)} test samples each, but "
                f"{domain.name} has {total}. Use {smaller}fewer clients or partition.test = 'all'."
            )
        return tuple(_order(total, order, rng)[: each * clients].reshape(clients, each)), notes
    counts = np.stack([_per_class(domain.y_train[rows], domain.classes) for rows in train])
    if mode == "own":
        return tuple(np.flatnonzero(row[domain.y_test] > 0) for row in counts), notes
    shares = _apportion_classes(_per_class(domain.y_test, domain.classes), counts, rng)
    return _deal(domain.y_test, rng.permutation(total), shares), notes


def _listed(numbers: np.ndarray) -> str:
    return ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")


def _split(
    domains: Sequence[Domain],
    domain: np.ndarray,
    train: tuple[np.ndarray, ...],
    test: tuple[np.ndarray, ...],
    notes: Sequence[str] = (),
) -> Split:
    """The last step of every partition: nobody may be without training data; nobody should be without test data."""
    empty = np.flatnonzero([len(rows) == 0 for rows in train])
    if len(empty):
        raise UserError(
            f"clients = {len(train)}: {len(empty)} of them would have no training sample (client {_listed(empty)}). "
            "Use fewer clients or more data."
        )
    untested = np.flatnonzero([len(rows) == 0 for rows in test])
    if len(untested):
        notes = [*notes, f"{len(untested)} of {len(test)} clients have no test sample (client {_listed(untested)})."]
    return Split(domain, train, test, tuple(notes), fingerprint(domains))


def _split_one(
    domain: Domain, train: tuple[np.ndarray, ...], test: tuple[np.ndarray, ...], notes: Sequence[str] = ()
) -> Split:
    return _split([domain], np.zeros(len(train), dtype=np.int64), train, test, notes)


# --- FedProto ---------------------------------------------------------------------------------------------------------


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

    def __call__(self, domains: Sequence[Domain], clients: int, seed: int) -> Split:
        domain = _only(domains, clients, "nway_kshot")
        classes = domain.classes
        if self.ways > classes:
            raise UserError(
                f"partition.ways = {self.ways}, but {domain.name} has {classes} classes. Use at most {classes}."
            )
        rng = _rng(seed, CHOICE)
        fewest = max(min(2, self.ways), self.ways - self.spread)
        # The paper's code leaves out the largest number where the range reaches the number of classes.
        most = max(fewest, min(classes, self.ways + self.spread + 1) - 1)
        n = rng.integers(fewest, most, clients, endpoint=True)
        low, high = (self.shots - self.spread + 1, self.shots + self.spread) if self.spread else (self.shots,) * 2
        k = np.maximum(1, rng.integers(low, high, clients, endpoint=True))
        # The n classes whose random numbers are the smallest: a choice without replacement for all clients at once.
        holds = rng.random((clients, classes)).argsort(1).argsort(1) < n[:, None]

        counts = holds * k[:, None]
        have = _per_class(domain.y_train, classes)
        self._enough("shots", "training", domain, have, counts, self.spread)
        train = _deal(domain.y_train, _rng(seed, TRAIN).permutation(len(domain.y_train)), counts)

        rng = _rng(seed, TEST)
        have = _per_class(domain.y_test, classes)
        if self.test_shots:
            shares = holds * np.int64(self.test_shots)
            self._enough("test_shots", "test", domain, have, shares, 0)
        else:
            shares = _apportion_classes(have, holds.astype(np.int64), rng)
        test = _deal(domain.y_test, rng.permutation(len(domain.y_test)), shares)
        notes = []
        if self.ways + self.spread > most:
            notes.append(
                f"partition.ways = {self.ways}, partition.spread = {self.spread}: with {classes} classes a client gets "
                f"{fewest} to {most}; the mean here is {n.mean():.2f}."
            )
        return _split_one(domain, train, test, notes)

    def _enough(self, key: str, part: str, domain: Domain, have: np.ndarray, counts: np.ndarray, spread: int) -> None:
        short = np.flatnonzero(counts.sum(0) > have)
        if len(short) == 0:
            return
        holders = np.count_nonzero(counts, axis=0)
        # The class that allows the fewest each: a number that is small enough for it is so for all of them.
        worst = short[np.argmin(have[short] / holders[short])]
        fit = have[worst] // holders[worst] - spread
        remedy = f"partition.{key}={fit} or fewer, or fewer clients" if fit >= 1 else "fewer clients or more data"
        raise UserError(
            f"partition.{key}={getattr(self, key)}: class {domain.class_names[worst]!r} has {have[worst]} {part} "
            f"samples, but {holders[worst]} clients want {counts[:, worst].sum()} of them. Use {remedy}."
        )


# --- Dirichlet --------------------------------------------------------------------------------------------------------


def _dirichlet_counts(
    totals: np.ndarray, clients: int, alpha: float, swap: bool, rng: np.random.Generator
) -> np.ndarray:
    """One draw of counts (clients, classes): class by class, in Dirichlet shares, past clients that have enough."""
    columns: list[np.ndarray] = []
    sizes, kinds = np.zeros(clients, dtype=np.int64), np.zeros(clients, dtype=np.int64)
    for c, total in enumerate(totals):
        full = sizes >= totals.sum() / clients
        shares = np.where(full, 0.0, rng.dirichlet(np.full(clients, alpha)))
        if not shares.sum() > 0:
            # At a small alpha every share that is left can be 0 in floating point; one client with all is the limit.
            shares = np.zeros(clients)
            shares[rng.choice(clients if full.all() else np.flatnonzero(~full))] = 1.0
        edges = np.cumsum(shares)
        column = np.diff((edges / edges[-1] * total).astype(np.int64), prepend=0)
        if swap and c >= 2:
            chunks = column.tolist()
            # One after another, as in the paper's code: a later exchange can move what an earlier one brought.
            for place, client in enumerate(np.flatnonzero(kinds <= 1).tolist(), start=1):
                chunks[client], chunks[-place] = chunks[-place], chunks[client]
            column = np.array(chunks, dtype=np.int64)
        sizes += column
        kinds += column > 0
        columns.append(column)
    return np.stack(columns, axis=1)


@dataclass(frozen=True)
class _Rule:
    """What the Dirichlet partitions differ in."""

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
    domain = _only(domains, clients, rule.name)
    size = len(domain.y_train)
    if rule.samples > size:
        raise UserError(
            f"partition.samples = {rule.samples}, but {domain.name} has {size} training samples. "
            f"Use at most {size}, or 0 for all."
        )
    if rule.min_classes > domain.classes:
        raise UserError(
            f"partition.min_classes = {rule.min_classes}, but {domain.name} has {domain.classes} classes. "
            f"Use at most {domain.classes}."
        )
    pool = _order(size, rule.order, _rng(seed, POOL))[: rule.samples or size]
    least = rule.min_size if rule.strict else 1
    if clients * least > len(pool):
        raise UserError(
            f"clients = {clients}: at least {least} samples each are more than the {len(pool)} there are. "
            "Use fewer clients or more samples."
        )
    totals = _per_class(domain.y_train[pool], domain.classes)
    counts, notes = _redraw(rule, totals, clients, _rng(seed, CHOICE))
    train = _deal(domain.y_train, _rng(seed, TRAIN).permutation(pool), counts)
    test, more = _tests(rule.test, rule.test_size, domain, train, seed, rule.order)
    return _split_one(domain, train, test, [*notes, *more])


def _redraw(rule: _Rule, totals: np.ndarray, clients: int, rng: np.random.Generator) -> tuple[np.ndarray, list[str]]:
    """The first draw that gives every client enough; after `attempts` draws one that leaves nobody empty will do."""
    draws = rule.attempts + (0 if rule.strict else RESCUE)
    for draw in range(1, draws + 1):
        counts = _dirichlet_counts(totals, clients, rule.alpha, rule.swap, rng)
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

    alpha: Annotated[float, Gt(0)] = 0.3
    """Small: few clients share a class; large: all do, evenly."""
    samples: Annotated[int, Ge(0)] = 0
    """So many training samples, drawn at random, are dealt; 0: all."""
    min_size: Annotated[int, Ge(1)] = 10
    """Draw again where a client has fewer samples."""
    min_classes: Annotated[int, Ge(1)] = 2
    """Draw again where a client has fewer classes."""
    attempts: Annotated[int, Ge(1), Le(100_000)] = 3
    """Draws, after which the last is kept as it is; where it leaves a client empty, up to 300 more."""
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

    alpha: Annotated[float, Gt(0)] = 0.05
    """Small: few clients share a class; large: all do, evenly."""
    samples: Annotated[int, Ge(0)] = 2000
    """So many training samples are dealt; 0: all."""
    order: Order = "file"
    """file: the first samples, and test slices in the order of the file; random: drawn."""
    min_size: Annotated[int, Ge(1)] = 10
    """Draw again where a client has fewer samples."""
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

    alpha: Annotated[float, Gt(0)] = 0.05
    """Small: few clients share a class; large: all do, evenly."""
    samples: Annotated[int, Ge(0)] = 2000
    """So many training samples, drawn at random, are dealt; 0: all."""
    min_size: Annotated[int, Ge(1)] = 1
    """Draw again where a client has fewer samples."""
    min_classes: Annotated[int, Ge(1)] = 1
    """Draw again where a client has fewer classes."""
    attempts: Annotated[int, Ge(1), Le(100_000)] = 5000
    """Draws before giving up."""
    test: Test = "all"
    """Which test samples a client gets: share, own, slice or all."""
    test_size: Annotated[int, Ge(0)] = 0
    """With test = slice: samples per client; 0: as many as there are."""

    def __call__(self, domains: Sequence[Domain], clients: int, seed: int) -> Split:
        rule = _Rule(name="dirichlet_fedpr", order="random", swap=False, strict=True, **vars(self))
        return _dirichlet(rule, domains, clients, seed)


# --- Without label skew, or with little -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Iid:
    """All samples shuffled and cut evenly."""

    test: Test = "share"
    """Which test samples a client gets: share, own, slice or all."""
    test_size: Annotated[int, Ge(0)] = 0
    """With test = slice: samples per client; 0: as many as there are."""

    def __call__(self, domains: Sequence[Domain], clients: int, seed: int) -> Split:
        domain = _only(domains, clients, "iid")
        rows = _rng(seed, TRAIN).permutation(len(domain.y_train))
        train = tuple(np.sort(part) for part in np.array_split(rows, clients))
        test, notes = _tests(self.test, self.test_size, domain, train, seed)
        return _split_one(domain, train, test, notes)


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
        domain = _only(domains, clients, "shards")
        size, shards = len(domain.y_train), clients * self.per_client
        if shards > size:
            raise UserError(
                f"partition.per_client = {self.per_client}: {clients} clients want {shards} shards, but {domain.name} "
                f"has {size} training samples. Use fewer shards or fewer clients."
            )
        rows = _rng(seed, TRAIN).permutation(size)
        rows = rows[np.argsort(domain.y_train[rows], kind="stable")]
        dealt = _rng(seed, CHOICE).permutation(shards) // self.per_client
        train = _by_owner(rows, dealt[np.arange(size) * shards // size], clients)
        test, notes = _tests(self.test, self.test_size, domain, train, seed)
        return _split_one(domain, train, test, notes)


# --- Feature skew and natural owners ----------------------------------------------------------------------------------


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
            for key, stream, labels, limit, into in (
                ("train_per_class", TRAIN, domain.y_train, self.train_per_class, train),
                ("test_per_class", TEST, domain.y_test, self.test_per_class, test),
            ):
                rng = _rng(seed, stream, d)
                have = _per_class(labels, domain.classes)
                wanted = np.minimum(have, limit * len(members)) if limit else have
                if limit and (have < limit * len(members)).any():
                    notes.append(
                        f"partition.{key}={limit}: {domain.name} has only {have.min()} of class "
                        f"{domain.class_names[have.argmin()]!r} for {len(members)} clients; they get what there is."
                    )
                even = np.ones((len(members), domain.classes), dtype=np.int64)
                counts = _apportion_classes(wanted, even, rng)
                for client, rows in zip(
                    members, _deal(labels, _order(len(labels), self.order, rng), counts), strict=True
                ):
                    into[client] = rows
        return _split(domains, owner, tuple(train), tuple(test), notes)


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
        chosen = np.sort(_rng(seed, CHOICE).choice(len(found), clients, replace=False))
        rng = _rng(seed, TEST)
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
        return _split(domains, domain, tuple(train), tuple(test))

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


# --- Used again -------------------------------------------------------------------------------------------------------


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
