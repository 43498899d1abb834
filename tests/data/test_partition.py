"""Who gets what: the rules of the papers, for every seed, in bounded time."""

import time
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from protofed.data import PARTITIONS
from protofed.data import dirichlet as module
from protofed.data.dealing import apportion
from protofed.data.dirichlet import Dirichlet, DirichletFedPR, DirichletMPFedCL
from protofed.data.domain import Domain
from protofed.data.few_classes import FewClasses, Quantity
from protofed.data.groups import ClassGroups
from protofed.data.natural import Natural
from protofed.data.partition import (
    File,
    Iid,
    NWayKShot,
    OneDomain,
    Shards,
)
from protofed.data.split import Split
from protofed.errors import UserError

MNIST_TRAIN = (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)
MNIST_TEST = (980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009)

seeds = st.integers(0, 2**32)
quick = settings(max_examples=40, deadline=None)


def labels(per_class: tuple[int, ...], seed: int = 0) -> np.ndarray:
    y = np.repeat(np.arange(len(per_class)), per_class).astype(np.uint8)
    return np.random.default_rng(seed).permutation(y)


def domain(train: Any, test: Any, name: str = "toy", ids: dict | None = None) -> Domain:
    """Per class so many samples; the inputs do not matter here."""
    y, t = labels(tuple(train), 1), labels(tuple(test), 2)
    x = [np.zeros((len(part), 1), dtype=np.uint8) for part in (y, t)]
    return Domain(name, x[0], y, x[1], t, tuple(f"class{c}" for c in range(len(train))), ids or {})


def even(classes: int = 10, train: int = 60, test: int = 20, name: str = "toy") -> Domain:
    return domain((train,) * classes, (test,) * classes, name)


@pytest.fixture(scope="module")
def mnist() -> Domain:
    return domain(MNIST_TRAIN, MNIST_TEST, "mnist")


def disjoint(parts: tuple[np.ndarray, ...]) -> bool:
    rows = np.concatenate(parts)
    return len(np.unique(rows)) == len(rows)


def valid(split: Split, domains: list[Domain], clients: int) -> None:
    split.check(domains, clients)
    assert all(len(rows) for rows in split.train)
    for rows in (*split.train, *split.test):
        assert rows.dtype == np.int64
        assert len(np.unique(rows)) == len(rows)
    for d in range(len(domains)):
        assert disjoint(tuple(rows for i, rows in enumerate(split.train) if split.domain[i] == d))


def dealt_tests(split: Split, data: Domain) -> np.ndarray:
    """Test samples (clients, classes)."""
    return np.stack([np.bincount(data.y_test[rows], minlength=data.classes) for rows in split.test])


OTHERS = ("domain", "natural", "groups", "file", "flwr")  # flwr needs another package: test_flower.py
ONE = {name: kind for name, kind in PARTITIONS.items() if name not in OTHERS}
SMALL: dict[str, Any] = {
    "nway_kshot": NWayKShot(ways=3, shots=5),
    "dirichlet": Dirichlet(),
    "dirichlet_mpfedcl": DirichletMPFedCL(samples=300, alpha=0.5, test_size=10),
    "dirichlet_fedpr": DirichletFedPR(samples=300, alpha=0.5),
    "iid": Iid(),
    "shards": Shards(),
    "classes": FewClasses(),
    "quantity": Quantity(),
}


# --- Common to all ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ONE)
@given(clients=st.integers(1, 8), seed=seeds)
@settings(max_examples=25, deadline=None)
def test_one_domain_partitions_are_valid_and_repeatable(name: str, clients: int, seed: int) -> None:
    data = even()
    before = np.random.get_state()[1].copy()
    split = SMALL[name]([data], clients, seed)
    valid(split, [data], clients)
    assert split.hash == SMALL[name]([data], clients, seed).hash
    assert (np.random.get_state()[1] == before).all()


@pytest.mark.parametrize("name", ONE)
def test_another_seed_gives_another_split(name: str) -> None:
    assert len({SMALL[name]([even()], 6, seed).hash for seed in range(20)}) == 20


@pytest.mark.parametrize("name", ONE)
def test_one_domain_partitions_point_to_the_domain_partition(name: str) -> None:
    with pytest.raises(UserError, match=rf"{name} partition .* got 2 \(a, b\).*'domain' partition"):
        ONE[name]()([even(name="a"), even(name="b")], 4, 0)
    with pytest.raises(UserError, match="got 0"):
        ONE[name]()([], 4, 0)
    with pytest.raises(UserError, match="clients = 0"):
        ONE[name]()([even()], 0, 0)
    with pytest.raises(UserError, match="seed = -1"):
        SMALL[name]([even()], 4, -1)


@pytest.mark.parametrize("name", ONE)
def test_more_clients_than_the_data_can_feed(name: str) -> None:
    data = domain((4, 4), (4, 4))
    small: dict[str, Any] = {
        **SMALL,
        "nway_kshot": NWayKShot(ways=2, shots=2),
        "dirichlet_mpfedcl": DirichletMPFedCL(samples=0),
        "dirichlet_fedpr": DirichletFedPR(samples=0),
    }
    with pytest.raises(UserError, match="fewer clients") as error:
        small[name]([data], 50, 0)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "kind"), PARTITIONS.items())
def test_settings_are_frozen_documented_and_checked(name: str, kind: type) -> None:
    assert is_dataclass(kind)
    made = TypeAdapter(kind).validate_python({})
    with pytest.raises(FrozenInstanceError):
        made.anything = 1
    bad: Any = {"int": -1, "float": -0.5, "str": 7, "Literal": "none"}
    for field in fields(kind):
        wrong = bad.get(type(field.default).__name__) if field.name not in ("test", "order") else "none"
        with pytest.raises(ValidationError):
            TypeAdapter(kind).validate_python({field.name: wrong})


# --- FedProto ---------------------------------------------------------------------------------------------------------


@given(
    ways=st.integers(1, 10),
    spread=st.integers(0, 6),
    shots=st.integers(1, 12),
    clients=st.integers(1, 12),
    test_shots=st.integers(0, 2),
    seed=seeds,
)
@settings(max_examples=150, deadline=None)
def test_nway_kshot(ways: int, spread: int, shots: int, clients: int, test_shots: int, seed: int) -> None:
    data = even(10, train=12 * 18, test=24)
    split = NWayKShot(ways, shots, spread, test_shots)([data], clients, seed)
    valid(split, [data], clients)
    counts, tests = split.counts([data]), dealt_tests(split, data)
    n = np.count_nonzero(counts, axis=1)
    fewest = max(min(2, ways), ways - spread)
    assert n.min() >= fewest
    assert n.max() <= max(fewest, min(10, ways + spread + 1) - 1)
    k = counts.max(1)
    assert (counts[counts > 0] == np.repeat(k, n)).all(), "one k per client"
    low, high = (shots - spread + 1, shots + spread) if spread else (shots, shots)
    assert max(1, low) <= k.min() <= k.max() <= max(1, high)
    assert disjoint(split.test)
    assert ((tests > 0) == (counts > 0)).all(), "tested on the own classes, all of them"
    if test_shots:
        assert (tests[counts > 0] == test_shots).all()
    else:
        assert (tests.sum(0) == np.where(counts.any(0), 24, 0)).all(), "all of a class that somebody has is dealt"
        assert (np.array([np.ptp(column[column > 0]) for column in tests.T if column.any()]) <= 1).all(), "evenly"


def test_nway_kshot_draws_the_whole_range_of_the_paper(mnist: Domain) -> None:
    split = NWayKShot(shots=10)([mnist], 300, 0)
    counts = split.counts([mnist])
    assert set(np.count_nonzero(counts, axis=1)) == {2, 3, 4, 5}
    assert set(counts.max(1)) == {9, 10, 11, 12}
    assert np.count_nonzero(counts, axis=1).mean() == pytest.approx(3.5, abs=0.2), "a half-range: 3.5, not 3"


@pytest.mark.parametrize("seed", range(20))
def test_nway_kshot_in_the_papers_setting(mnist: Domain, seed: int) -> None:
    for spread in (1, 2, 3):
        for ways in (3, 4, 5):
            valid(NWayKShot(ways, 100, spread, 40)([mnist], 20, seed), [mnist], 20)


def test_nway_kshot_says_when_the_range_is_clipped() -> None:
    notes = NWayKShot(ways=9, shots=5)([even()], 4, 0).notes
    assert len(notes) == 1
    assert "7 to 9" in notes[0]
    assert NWayKShot(ways=3, shots=5)([even()], 4, 0).notes == ()


def test_nway_kshot_errors_name_key_class_and_remedy() -> None:
    with pytest.raises(UserError, match=r"partition\.ways = 11, but toy has 10 classes\. Use at most 10"):
        NWayKShot(ways=11)([even()], 4, 0)
    data = domain((500, 500, 30), (50, 50, 50))
    with pytest.raises(UserError, match=r"partition\.shots = 100: class 'class2' has 30 .* (\d+) clients want (\d+)"):
        NWayKShot(ways=3, spread=0)([data], 4, 0)
    with pytest.raises(
        UserError, match=r"Use partition\.shots = 7 or fewer, or fewer clients, or partition\.short = fewer"
    ):
        NWayKShot(ways=3, spread=0)([data], 4, 0)
    NWayKShot(ways=3, spread=0, shots=7)([data], 4, 0)  # the remedy works
    with pytest.raises(UserError, match=r"partition\.test_shots = 40: class 'class0' has 20 test samples"):
        NWayKShot(ways=10, shots=5, spread=0, test_shots=40)([even()], 4, 0)


def test_nway_kshot_gives_fewer_of_a_scarce_class_if_told_so() -> None:
    data = domain((500, 500, 30), (50, 50, 50))
    plenty = NWayKShot(ways=3, spread=0, shots=7)([data], 4, 0)
    split = NWayKShot(ways=3, spread=0, short="fewer")([data], 4, 0)
    valid(split, [data], 4)
    assert split.counts([data]).tolist() == [[100, 100, 7]] * 4
    assert split.notes == ("partition.short = fewer: scarce classes have at most this many samples: class2 (7).",)
    assert NWayKShot(ways=3, spread=0, shots=7, short="fewer")([data], 4, 0).hash == plenty.hash, "nothing is scarce"
    with pytest.raises(UserError, match=r"fewer clients or more data\.$"):
        NWayKShot(ways=3, spread=0, short="fewer")([domain((500, 500, 3), (50, 50, 50))], 4, 0)


# --- Dirichlet --------------------------------------------------------------------------------------------------------


def literal_dirichlet(y: np.ndarray, classes: int, clients: int, alpha: float, swap: bool, seed: int) -> np.ndarray:
    """The rule as the digest of FedNH's code tells it, with lists of samples; returns counts (clients, classes)."""
    rng = np.random.default_rng(seed)
    holdings: list[list[int]] = [[] for _ in range(clients)]
    for c in range(classes):
        p = rng.dirichlet(np.full(clients, alpha))
        for i in range(clients):
            if len(holdings[i]) >= len(y) / clients:
                p[i] = 0
        edges = np.cumsum(p)
        edges = (edges / edges[-1] * (y == c).sum()).astype(int)
        pieces = [list(piece) for piece in np.split(np.flatnonzero(y == c), edges[:-1])]
        if swap and c >= 2:
            back = clients - 1
            for i in [i for i in range(clients) if len(set(y[holdings[i]])) <= 1]:
                pieces[i], pieces[back] = pieces[back], pieces[i]
                back -= 1
        for i in range(clients):
            holdings[i] += pieces[i]
    return np.stack([np.bincount(y[rows].astype(int), minlength=classes) for rows in holdings])


@given(clients=st.integers(1, 15), alpha=st.floats(0.05, 5), swap=st.booleans(), seed=seeds)
@quick
def test_dirichlet_counts_are_those_of_the_literal_rule(clients: int, alpha: float, swap: bool, seed: int) -> None:
    y = labels((40, 10, 0, 25, 60, 5))
    fast = module.dirichlet_counts(np.bincount(y), clients, alpha, swap, np.random.default_rng(seed))
    assert (fast == literal_dirichlet(y, 6, clients, alpha, swap, seed)).all()


@given(
    totals=st.lists(st.integers(0, 200), min_size=1, max_size=12),
    clients=st.integers(1, 30),
    alpha=st.sampled_from([1e-300, 1e-9, 1e-3, 0.05, 0.3, 1.0, 1e6]),
    swap=st.booleans(),
    seed=seeds,
)
@quick
def test_dirichlet_deals_every_sample_at_any_alpha(
    totals: list[int], clients: int, alpha: float, swap: bool, seed: int
) -> None:
    counts = module.dirichlet_counts(np.array(totals), clients, alpha, swap, np.random.default_rng(seed))
    assert (counts >= 0).all()
    assert (counts.sum(0) == totals).all()
    if not swap:
        before_last = [row.sum() - (row[row > 0][-1] if row.any() else 0) for row in counts]
        assert (np.array(before_last) < max(sum(totals) / clients, 1)).all(), "nothing more for a client that is full"


@pytest.mark.parametrize(
    ("partition", "clients", "tries"),
    [
        (Dirichlet(alpha=0.3), 100, 40),
        (Dirichlet(alpha=1.0, test="all"), 100, 20),
        (Dirichlet(alpha=0.05), 100, 20),
        (DirichletMPFedCL(), 5, 100),
        (DirichletMPFedCL(), 10, 100),
        (DirichletMPFedCL(alpha=0.1), 40, 10),
        (DirichletFedPR(), 5, 100),
        (DirichletFedPR(), 10, 100),
    ],
)
def test_dirichlet_settings_of_the_papers_succeed(mnist: Domain, partition: Any, clients: int, tries: int) -> None:
    for seed in range(tries):
        split = partition([mnist], clients, seed)
        sizes = np.array([len(rows) for rows in split.train])
        assert sizes.sum() == (getattr(partition, "samples", 0) or len(mnist.y_train))
        assert sizes.min() >= (1 if split.notes else partition.min_size)
        assert disjoint(split.train)


def test_dirichlet_keeps_what_falls_short_and_says_so(mnist: Domain) -> None:
    split = Dirichlet(alpha=0.05)([mnist], 100, 0)
    assert len(split.notes) == 1
    assert "partition.alpha = 0.05" in split.notes[0]
    counts = split.counts([mnist])
    short = (counts.sum(1) < 10) | (np.count_nonzero(counts, axis=1) < 2)
    assert f" {short.sum()} of 100 clients" in split.notes[0]


@pytest.mark.parametrize(
    ("partition", "clients"),
    [
        (Dirichlet(alpha=1e-3), 200),
        (DirichletMPFedCL(alpha=0.01, attempts=300), 60),
        (DirichletFedPR(alpha=0.001, attempts=300), 100),
    ],
)
def test_dirichlet_gives_up_in_bounded_time(mnist: Domain, partition: Any, clients: int) -> None:
    start = time.perf_counter()
    with pytest.raises(UserError, match=r"partition\.alpha = .*: none of \d+ draws .*larger partition\.alpha"):
        partition([mnist], clients, 0)
    assert time.perf_counter() - start < 10


def test_dirichlet_errors(mnist: Domain) -> None:
    with pytest.raises(UserError, match=r"partition\.samples = 70000 in all, but mnist has 60000"):
        Dirichlet(samples=70000)([mnist], 5, 0)
    with pytest.raises(UserError, match=r"partition\.min_classes = 11, but mnist has 10"):
        Dirichlet(min_classes=11)([mnist], 5, 0)
    with pytest.raises(UserError, match="at least 10 samples each are more than the 2000"):
        DirichletMPFedCL()([mnist], 300, 0)


def test_mpfedcl_takes_the_first_samples_and_contiguous_test_slices(mnist: Domain) -> None:
    split = DirichletMPFedCL()([mnist], 5, 3)
    assert (np.sort(np.concatenate(split.train)) == np.arange(2000)).all()
    for i, rows in enumerate(split.test):
        assert (rows == np.arange(100 * i, 100 * (i + 1))).all()
    drawn = DirichletMPFedCL(order="random")([mnist], 5, 3)
    assert np.concatenate(drawn.train).max() > 2000
    assert disjoint(drawn.test)
    assert not (np.diff(drawn.test[0]) == 1).all()


def test_fedpr_draws_its_samples_and_tests_on_everything(mnist: Domain) -> None:
    split = DirichletFedPR()([mnist], 10, 3)
    assert np.concatenate(split.train).max() > 10_000
    assert all((rows == np.arange(10_000)).all() for rows in split.test)


# --- Test rules -------------------------------------------------------------------------------------------------------


@given(
    total=st.integers(0, 300),
    weights=st.lists(st.integers(0, 1000), min_size=1, max_size=40),
    seed=seeds,
)
@settings(max_examples=200, deadline=None)
def test_apportion(total: int, weights: list[int], seed: int) -> None:
    w = np.array(weights)
    shares = apportion(total, w, np.random.default_rng(seed))
    holders = np.count_nonzero(w)
    assert shares.sum() == (total if holders else 0)
    assert (shares >= 0).all()
    assert (shares[w == 0] == 0).all()
    if holders:
        exact = total * w / w.sum()
        assert (shares <= np.maximum(np.floor(exact) + 1, 1)).all()
        if holders <= total:
            assert (shares[w > 0] >= 1).all()
        if (exact[w > 0] >= 1).all():
            assert (np.abs(shares - exact) < 1).all()


@given(clients=st.integers(1, 20), seed=seeds)
@quick
def test_share_deals_the_test_set_as_the_training_set(clients: int, seed: int) -> None:
    data = even(5, train=200, test=100)
    split = Dirichlet(test="share")([data], clients, seed)
    counts, tests = split.counts([data]), dealt_tests(split, data)
    assert disjoint(split.test)
    assert (tests.sum(0) == 100).all()
    assert ((tests > 0) == (counts > 0)).all(), "at least one of each own class, none of the others"
    assert (np.abs(tests - counts / 2) <= 1 + 20 * (counts.min(0) < 4)).all()


@pytest.mark.parametrize("kind", [Dirichlet, Iid, Shards, Quantity])
def test_own_slice_and_all(kind: Any) -> None:
    data = even()
    own = kind(test="own")([data], 5, 1)
    for row, tests in zip(own.counts([data]), dealt_tests(own, data), strict=True):
        assert (tests == np.where(row > 0, 20, 0)).all()
    for size, each in ((0, 40), (7, 7)):
        cut = kind(test="slice", test_size=size)([data], 5, 1)
        assert [len(rows) for rows in cut.test] == [each] * 5
        assert disjoint(cut.test)
    whole = kind(test="all")([data], 5, 1)
    assert all((rows == np.arange(200)).all() for rows in whole.test)
    for other in (own, cut, whole):
        assert all((a == b).all() for a, b in zip(own.train, other.train, strict=True)), "same training data"


def test_slices_need_enough_test_samples() -> None:
    with pytest.raises(
        UserError, match=r"partition\.test_size = 50: 5 clients want 50 .* toy has 200\. .*test_size = 40"
    ):
        Iid(test="slice", test_size=50)([even()], 5, 0)
    with pytest.raises(UserError, match=r"30 clients want 1 test samples each.* Use fewer clients or partition.test"):
        Iid(test="slice")([even(2, train=50, test=5)], 30, 0)


def test_notes_tell_of_unused_settings_and_of_clients_without_test_samples() -> None:
    assert Iid(test_size=5)([even()], 5, 0).notes == (
        "partition.test_size = 5 has no effect with partition.test = 'share'.",
    )
    split = Iid()([domain((50, 50), (3, 3))], 20, 0)
    assert len(split.notes) == 1
    assert " of 20 clients have no test sample" in split.notes[0]


# --- Iid, shards ------------------------------------------------------------------------------------------------------


@given(size=st.integers(1, 60), clients=st.integers(1, 20), per_client=st.integers(1, 4), seed=seeds)
@quick
def test_iid_and_shards_cut_evenly(size: int, clients: int, per_client: int, seed: int) -> None:
    data = domain((size, size, size), (4, 4, 4))
    if clients <= 3 * size:
        sizes = [len(rows) for rows in Iid()([data], clients, seed).train]
        assert sum(sizes) == 3 * size
        assert max(sizes) - min(sizes) <= 1
    if clients * per_client <= 3 * size:
        split = Shards(per_client)([data], clients, seed)
        sizes = [len(rows) for rows in split.train]
        assert sum(sizes) == 3 * size
        assert max(sizes) - min(sizes) <= per_client
        if clients * per_client >= 3:  # then a shard is no larger than a class, and touches at most two
            assert np.count_nonzero(split.counts([data]), axis=1).max() <= 2 * per_client


def test_shards_of_whole_classes() -> None:
    counts = Shards(2)([even(10, train=60)], 5, 0).counts([even(10, train=60)])
    assert (np.sort(counts, axis=1)[:, -2:] == 60).all()
    with pytest.raises(UserError, match=r"partition\.per_client = 9: 100 clients want 900 shards, but toy has 600"):
        Shards(9)([even()], 100, 0)


# --- A few classes, other amounts -------------------------------------------------------------------------------------


@given(
    clients=st.integers(1, 30),
    classes=st.integers(2, 10),
    ways=st.integers(1, 10),
    alpha=st.sampled_from([0, 0.3]),
    seed=seeds,
)
@quick
def test_each_client_has_so_many_classes(clients: int, classes: int, ways: int, alpha: float, seed: int) -> None:
    data, ways = even(classes), min(ways, classes)
    split = FewClasses(ways, alpha)([data], clients, seed)
    valid(split, [data], clients)
    counts = split.counts([data])
    assert (np.count_nonzero(counts, axis=1) == ways).all()
    holders = np.count_nonzero(counts, axis=0)
    assert holders.max() - holders.min() <= 1
    assert (counts.sum(0) == np.where(holders, 60, 0)).all(), "nothing is left over of a class that somebody has"
    if not alpha:
        shares = [counts[counts[:, c] > 0, c] for c in range(classes) if holders[c]]
        assert all(part.max() - part.min() <= 1 for part in shares)


def test_classes_are_dealt_unevenly_by_alpha() -> None:
    data = even(10, train=600)
    spread = {}
    for alpha in (0.0, 100.0, 0.2):
        counts = FewClasses(5, alpha)([data], 20, 0).counts([data])
        spread[alpha] = float(np.std(counts[counts > 0]))
    assert spread[0.0] == 0
    assert 2 < spread[100.0] < 15 < 60 < spread[0.2]


def test_the_order_of_pfllib_gives_groups_the_same_classes() -> None:
    """The first clients with room take a class: 4 of 20 for each of ten classes, so four have classes 0 and 1."""
    data = even(10, train=8)
    split = FewClasses(2, order="file")([data], 20, 0)
    held = [tuple(np.flatnonzero(row)) for row in split.counts([data])]
    assert held == [(2 * (i // 4), 2 * (i // 4) + 1) for i in range(20)]
    first = np.flatnonzero(data.y_train == 0)
    assert [rows[data.y_train[rows] == 0].tolist() for rows in split.train[:4]] == first.reshape(4, 2).tolist()
    drawn = FewClasses(2)([data], 20, 0).counts([data])
    assert len({tuple(np.flatnonzero(row)) for row in drawn}) > 5


def test_classes_that_nobody_has_are_named() -> None:
    split = FewClasses(2)([even(5)], 2, 0)
    (note,) = split.notes
    missing = [c for c in range(5) if not split.counts([even(5)])[:, c].any()]
    assert note == f"partition.ways = 2: no client has the classes class{missing[0]}."
    with pytest.raises(UserError, match=r"partition\.ways = 6, but toy has 5 classes\. Use at most 5\."):
        FewClasses(6)([even(5)], 2, 0)


def test_amounts_differ_by_alpha_and_classes_do_not() -> None:
    data = even(10, train=600)
    sizes = {alpha: [len(rows) for rows in Quantity(alpha)([data], 20, 3).train] for alpha in (0.3, 1000.0)}
    assert all(sum(part) == 6000 and min(part) >= 1 for part in sizes.values())
    assert max(sizes[0.3]) > 5 * np.median(sizes[0.3])
    assert max(sizes[1000.0]) < 1.2 * min(sizes[1000.0])
    counts = Quantity(0.3)([data], 20, 3).counts([data])
    largest = counts[counts.sum(1).argmax()]
    assert largest.min() > 0.7 * largest.max()


# --- One domain per client --------------------------------------------------------------------------------------------


@given(clients=st.integers(3, 14), limit=st.integers(0, 6), seed=seeds, order=st.sampled_from(["random", "file"]))
@quick
def test_one_domain_each(clients: int, limit: int, seed: int, order: Any) -> None:
    domains = [even(4, train=40 + 10 * i, test=30, name=f"d{i}") for i in range(3)]
    split = OneDomain(limit, limit, order)(domains, clients, seed)
    valid(split, domains, clients)
    assert (split.domain == np.arange(clients) % 3).all()
    counts = split.counts(domains)
    for d in range(3):
        members = np.flatnonzero(split.domain == d)
        assert disjoint(tuple(split.test[i] for i in members))
        assert (np.ptp(counts[members], axis=0) <= 1).all()
        if limit:
            assert (counts[members] == limit).all()
        else:
            assert counts[members].sum() == len(domains[d].y_train)
    assert split.notes == ()


def test_one_domain_in_the_order_of_the_file() -> None:
    data = even(3)
    split = OneDomain(train_per_class=10, order="file")([data], 1, 0)
    first = np.sort(np.concatenate([np.flatnonzero(data.y_train == c)[:10] for c in range(3)]))
    assert (split.train[0] == first).all()


def test_one_domain_gives_what_there_is_and_says_so() -> None:
    domains = [even(3, train=50, name="large"), domain((8, 50, 50), (5, 5, 5), "dslr")]
    split = OneDomain(train_per_class=30)(domains, 2, 0)
    assert (split.counts(domains) == [[30, 30, 30], [8, 30, 30]]).all()
    assert len(split.notes) == 1
    assert "partition.train_per_class = 30: dslr has only 8 of class 'class0'" in split.notes[0]


def test_one_domain_errors() -> None:
    domains = [even(name=f"d{i}") for i in range(4)]
    with pytest.raises(UserError, match=r"clients = 3: .*4 domains\. Use at least 4"):
        OneDomain()(domains, 3, 0)
    with pytest.raises(UserError, match="0 domains"):
        OneDomain()([], 3, 0)
    with pytest.raises(UserError, match="would have no training sample"):
        OneDomain()([domain((2, 2), (2, 2))], 9, 0)


# --- Natural owners ---------------------------------------------------------------------------------------------------


def owned(shared: bool, seed: int = 0, name: str = "toy") -> Domain:
    """Twelve train writers, of which some write little; the test part has them too, or strangers."""
    rng = np.random.default_rng(seed)
    train = rng.permutation(np.repeat(np.arange(12), [5, 8, *[30 + i for i in range(10)]]))
    test = rng.integers(0, 12, 100) + (0 if shared else 500)
    sizes = (len(train) // 2, len(train) - len(train) // 2)
    return domain(sizes, (50, 50), name, {"writer": (train, test)})


@pytest.mark.parametrize("shared", [True, False])
@given(clients=st.integers(1, 10), seed=seeds, fraction=st.floats(0.01, 0.99))
@quick
def test_natural(shared: bool, clients: int, seed: int, fraction: float) -> None:
    data = owned(shared)
    split = Natural(test_fraction=fraction)([data], clients, seed)
    valid(split, [data], clients)
    train_ids, test_ids = data.ids["writer"]
    owners = []
    for rows, tests in zip(split.train, split.test, strict=True):
        (owner,) = np.unique(train_ids[rows])
        owners.append(owner)
        whole = np.count_nonzero(train_ids == owner)
        assert whole >= 20
        if shared:
            assert (tests == np.flatnonzero(test_ids == owner)).all()
            assert len(rows) == whole
        else:
            held = tests - len(test_ids)
            assert held.min() >= 0
            assert (train_ids[held] == owner).all()
            assert not np.intersect1d(held, rows).size
            assert len(held) + len(rows) == whole
            assert len(held) == np.clip(round(fraction * whole), 1, whole - 1)
    assert len(set(owners)) == clients
    assert split.hash == Natural(test_fraction=fraction)([data], clients, seed).hash


def test_natural_chooses_by_seed() -> None:
    chosen = {tuple(np.unique(np.concatenate(Natural()([owned(True)], 3, seed).train))) for seed in range(12)}
    assert len(chosen) > 6


def test_natural_over_several_domains_and_with_names() -> None:
    domains = [owned(True, 0, "a"), owned(False, 1, "b")]
    split = Natural("writer")(domains, 20, 0)
    valid(split, domains, 20)
    assert (np.bincount(split.domain) == 10).all()
    assert all((rows < 100).all() for rows in split.test[:10])
    assert all((rows >= 100).all() for rows in split.test[10:])
    words = np.array(["anna", "bo", "cecilia"])
    ids = {"writer": (np.repeat(words, 20), np.repeat(words[:2], [5, 15]))}
    split = Natural()([domain((30, 30), (10, 10), ids=ids)], 3, 0)
    assert [len(rows) for rows in split.test] == [5, 15, 4]


def test_natural_with_few_samples_of_each_class() -> None:
    data = owned(False)
    whole, few = (Natural(per_class=limit)([data], 10, 0) for limit in (0, 7))
    valid(few, [data], 10)
    for before, rows, tests, same in zip(whole.train, few.train, few.test, whole.test, strict=True):
        assert set(rows) <= set(before)
        have, got = (np.bincount(data.y_train[part], minlength=2) for part in (before, rows))
        assert (got == np.minimum(have, 7)).all()
        assert (tests == same).all()
    assert Natural(per_class=7)([data], 10, 1).hash != few.hash


def test_natural_tested_on_all_of_another_column() -> None:
    """Six people of two towns; other people of these towns are the tests."""
    person, town = np.repeat(np.arange(6), 20), np.repeat([3, 8], 60)
    ids = {"person": (person, np.full(20, 9)), "town": (town, np.tile([3, 8, 8, 5], 5))}
    data = domain((60, 60), (10, 10), ids=ids)
    split = Natural("person", test_key="town")([data], 6, 0)
    valid(split, [data], 6)
    assert [len(rows) for rows in split.train] == [20] * 6
    for rows, tests in zip(split.train, split.test, strict=True):
        (own,) = np.unique(town[rows])
        assert tests.tolist() == [row for row in range(20) if ids["town"][1][row] == own]
    lonely = domain((60, 60), (10, 10), ids=ids | {"town": (town, np.full(20, 3))})
    split = Natural("person", test_key="town")([lonely], 6, 0)
    assert [len(tests) for tests in split.test] == [20, 20, 20, 0, 0, 0]
    with pytest.raises(UserError, match=r"partition\.test_key = 'land': toy has no such .*\(it has: person, town\)"):
        Natural("person", test_key="land")([data], 6, 0)


def test_natural_refuses_samples_without_an_owner() -> None:
    some = np.arange(600) % 30 + 0.0
    words = np.array([f"w{k % 30}" for k in range(600)])

    def wrong(train: np.ndarray, test: np.ndarray) -> str:
        with pytest.raises(UserError) as error:
            Natural()([domain((300, 300), (100, 100), ids={"ward": (train, test)})], 3, 0)
        return str(error.value)

    holed, blank = some.copy(), words.copy()
    holed[[4, 5]], blank[7] = np.nan, " "
    assert "partition.key = 'ward': 3 of 800 samples of toy have no owner (NaN or empty text)" in wrong(
        holed, np.where(np.arange(200) == 3, np.nan, 1.0)
    )
    assert "1 of 800 samples of toy have no owner" in wrong(blank, words[:200])
    assert "are float64, those of test samples <U3. Save both" in wrong(some, words[:200])


def test_natural_errors() -> None:
    with pytest.raises(UserError, match=r"clients = 11: 10 owners have at least partition\.min_size = 20"):
        Natural()([owned(True)], 11, 0)
    with pytest.raises(
        UserError, match=r"partition\.key = 'hospital': toy has no such owner column \(it has: writer\)"
    ):
        Natural("hospital")([owned(True)], 3, 0)
    with pytest.raises(UserError, match=r"partition\.key = '': toy has 0 owner columns \(none\)"):
        Natural()([even()], 3, 0)
    pair = (np.zeros(600), np.zeros(200))
    with pytest.raises(UserError, match=r"toy has 2 owner columns \(series, writer\)\. Set partition\.key"):
        Natural()([domain((60,) * 10, (20,) * 10, ids={"writer": pair, "series": pair})], 1, 0)
    assert "no test sample" in Natural(test_fraction=0.0)([owned(False)], 3, 0).notes[0]


# --- Groups of classes ------------------------------------------------------------------------------------------------

NEWS = ("rec.autos", "sci.med", "rec.sport.hockey", "alt.atheism", "sci.space")


def test_groups_are_told_by_the_names_of_classes() -> None:
    data = replace(domain((5, 6, 7, 8, 9), (2, 3, 4, 5, 6)), class_names=NEWS)
    split = ClassGroups()([data], 2, 0)
    valid(split, [data], 2)
    assert split.counts([data]).tolist() == [[5, 0, 7, 0, 0], [0, 6, 0, 0, 9]]
    assert dealt_tests(split, data).tolist() == [[2, 0, 4, 0, 0], [0, 3, 0, 0, 6]]
    assert ClassGroups(min_classes=1)([data], 3, 0).counts([data])[2].tolist() == [0, 0, 0, 8, 0]
    assert len({ClassGroups()([data], 1, seed).hash for seed in range(8)}) == 2
    with pytest.raises(UserError, match=r"clients = 3: 2 groups .* '\.' in their names \(rec, sci\)\. Use at most 2"):
        ClassGroups()([data], 3, 0)
    with pytest.raises(UserError, match=r"clients = 1: 0 groups .*\(none\)"):
        ClassGroups(separator="/")([data], 1, 0)


# --- File -------------------------------------------------------------------------------------------------------------


def test_file_uses_a_split_again(tmp_path: Any) -> None:
    data = even()
    split = SMALL["dirichlet"]([data], 4, 0)
    split.save(tmp_path / "partition.npz")
    for path in (tmp_path, tmp_path / "partition.npz"):
        assert File(str(path))([data], 4, seed=9).hash == split.hash
    with pytest.raises(UserError, match="4 clients, but clients = 5"):
        File(str(tmp_path))([data], 5, 0)
    with pytest.raises(UserError, match="other data"):
        File(str(tmp_path))([even(5)], 4, 0)
    with pytest.raises(UserError, match="no split at"):
        File(str(tmp_path / "nothing"))([data], 4, 0)
    with pytest.raises(UserError, match=r"partition\.path = ''"):
        File()([data], 4, 0)


def test_large_federations_are_fast() -> None:
    data = domain((500,) * 200, (50,) * 200)
    start = time.perf_counter()
    for partition in (NWayKShot(shots=10), Dirichlet(), Iid(), Shards()):
        valid(partition([data], 1000, 0), [data], 1000)
    assert time.perf_counter() - start < 10
