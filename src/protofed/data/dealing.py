"""How samples are dealt to clients: the building blocks of partitions."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from protofed.data.domain import Domain, client_names
from protofed.data.split import Split, data_fingerprint
from protofed.errors import UserError

Test = Literal["share", "own", "slice", "all"]
"""share: each class's test samples dealt, disjoint, as its training samples are. own: all test samples of the client's
classes. slice: an equal part of the test set, disjoint. all: the whole test set. Only share and slice are disjoint."""

Order = Literal["random", "file"]

CHOICE, POOL, TRAIN, TEST = range(4)  # purposes of random streams


def stream(seed: int, purpose: int, part: int = 0) -> np.random.Generator:
    if seed < 0:
        raise UserError(f"seed = {seed} is negative. Use 0 or more.")
    # A separate word makes these streams independent of others from the same seed.
    return np.random.default_rng([seed, 0x5EED_DA7A, purpose, part])


def only_domain(domains: Sequence[Domain], clients: int, name: str) -> Domain:
    """The only domain, for partitions that support just one."""
    refuse_computed(domains, name)
    if len(domains) != 1:
        names = ", ".join(domain.name for domain in domains) or "none"
        raise UserError(
            f"The {name} partition deals out one domain, got {len(domains)} ({names}). "
            "Use the 'domain' partition, or give one domain."
        )
    if clients < 1:
        raise UserError(f"clients = {clients}: there must be at least one. Set clients to 1 or more.")
    if clients > len(domains[0].y_train):
        raise UserError(
            f"clients = {clients}, but {domains[0].name} has {len(domains[0].y_train)} training samples. "
            "Use fewer clients or more data."
        )
    return domains[0]


def refuse_computed(domains: Sequence[Domain], name: str) -> None:
    """Raise if there are no samples to deal out."""
    if any(domain.computed is not None for domain in domains):
        raise UserError(
            f"partition.name = {name!r} deals out samples, but {domains[0].name} computes each client's own when it is "
            "drawn. Use partition = 'natural'."
        )


def per_class(labels: np.ndarray, classes: int) -> np.ndarray:
    return np.bincount(labels, minlength=classes).astype(np.int64)


def ordered(size: int, order: Order, rng: np.random.Generator) -> np.ndarray:
    return rng.permutation(size) if order == "random" else np.arange(size)


def deal_rows(labels: np.ndarray, rows: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, ...]:
    """Hand out each class's `rows`, in their order, in consecutive runs of counts (clients, classes)."""
    clients, classes = counts.shape
    grouped = rows[np.argsort(labels[rows], kind="stable")]
    have = per_class(labels[rows], classes)
    taken = counts.sum(0)
    # The n-th sample dealt from a class lies n places after the class's first.
    first = np.repeat(np.cumsum(have) - have, taken)
    place = np.arange(taken.sum()) - np.repeat(np.cumsum(taken) - taken, taken)
    owner = np.repeat(np.tile(np.arange(clients), classes), counts.T.ravel())
    return by_owner(grouped[first + place], owner, clients)


def by_owner(rows: np.ndarray, owner: np.ndarray, clients: int) -> tuple[np.ndarray, ...]:
    """The rows of each owner, ascending."""
    rows = rows[np.lexsort((rows, owner))]
    return tuple(np.split(rows, np.cumsum(np.bincount(owner, minlength=clients))[:-1]))


def apportion(total: int, weights: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Whole shares (clients,) of `total` by largest remainder, ties at random; at least one each if that suffices."""
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


def apportion_classes(have: np.ndarray, weights: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Split each class's samples (classes,) in proportion to weights (clients, classes)."""
    return np.stack([apportion(int(n), w, rng) for n, w in zip(have, weights.T, strict=True)], axis=1)


def tests_of(
    mode: Test, size: int, domain: Domain, train: tuple[np.ndarray, ...], seed: int, order: Order
) -> tuple[tuple[np.ndarray, ...], list[str]]:
    """The test rows of every client by one of the four rules, and notes for the user."""
    rng = stream(seed, TEST)
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
        return tuple(ordered(total, order, rng)[: each * clients].reshape(clients, each)), notes
    counts = np.stack([per_class(domain.y_train[rows], domain.classes) for rows in train])
    if mode == "own":
        return tuple(np.flatnonzero(row[domain.y_test] > 0) for row in counts), notes
    shares = apportion_classes(per_class(domain.y_test, domain.classes), counts, rng)
    return deal_rows(domain.y_test, rng.permutation(total), shares), notes


def listed(numbers: np.ndarray, names: Sequence[str]) -> str:
    """A list of clients by their names, or as "client 3, 7"."""
    plain = [names[number].removeprefix("client ") for number in numbers[:5]]
    first = "client " if plain and all(name.isdigit() for name in plain) else ""
    return (
        first + ", ".join(plain if first else [names[number] for number in numbers[:5]]) + ", ..." * (len(numbers) > 5)
    )


def make_split(
    domains: Sequence[Domain],
    domain: np.ndarray,
    train: tuple[np.ndarray, ...],
    test: tuple[np.ndarray, ...],
    notes: Sequence[str] = (),
) -> Split:
    """The last step of every partition: every client must have training data and should have test data."""
    names = client_names(domains, domain)
    empty = np.flatnonzero([len(rows) == 0 for rows in train])
    if len(empty):
        raise UserError(
            f"clients = {len(train)}: {len(empty)} of them would have no training sample ({listed(empty, names)}). "
            "Use fewer clients or more data."
        )
    untested = np.flatnonzero([len(rows) == 0 for rows in test])
    if len(untested):
        notes = [*notes, f"{len(untested)} of {len(test)} clients have no test sample ({listed(untested, names)})."]
    return Split(domain, train, test, tuple(notes), data_fingerprint(domains))


def split_one(
    domain: Domain, train: tuple[np.ndarray, ...], test: tuple[np.ndarray, ...], notes: Sequence[str] = ()
) -> Split:
    return make_split([domain], np.zeros(len(train), dtype=np.int64), train, test, notes)
