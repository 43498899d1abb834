"""k-means, DBSCAN and the pool of prototypes against loops over samples, clients, classes and clusters."""

import itertools
import math

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from torch import Tensor

from protofed.method import Mean
from protofed.ops import random
from protofed.ops.clustering import dbscan, kmeans
from protofed.ops.pool import class_means, contrast, nearest_of_pool, no_pool, pad
from protofed.ops.prototypes import no_prototypes

Row = list[float]
CLASSES, DIM, STEPS = 4, 3, 20
KEY = random.key("clustering")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def squared(a: Row, b: Row) -> float:
    return sum((x - y) ** 2 for x, y in zip(a, b, strict=True))


def middle(rows: list[Row]) -> Row:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def of_class(z: Tensor, y: Tensor, mask: Tensor, number: int) -> list[Row]:
    return [row for row, c, m in zip(z.tolist(), y.tolist(), mask.tolist(), strict=True) if c == number and m]


def centres_of(found: Mean, number: int) -> list[Row]:
    """The centres of a class that are there; what is not there holds zeros."""
    assert set(found.weight.flatten().tolist()) <= {0.0, 1.0}
    assert not bool(found.total[found.weight == 0].any())
    pairs = zip(found.total[number].tolist(), found.weight[number].tolist(), strict=True)
    return [row for row, there in pairs if there]


def close(left: list[Row], right: list[Row], tolerance: float = 1e-9) -> None:
    np.testing.assert_allclose(np.array(left), np.array(right), atol=tolerance)


def close_unordered(left: list[Row], right: list[Row], tolerance: float = 1e-9) -> None:
    close(sorted(left), sorted(right), tolerance)


def samples(n: int = 40, seed: int = 0, classes: int = CLASSES - 1) -> tuple[Tensor, Tensor, Tensor]:
    """Samples of all classes but the last, all of them real."""
    y = torch.from_numpy(np.random.default_rng(seed).integers(0, classes, n))
    return normal(n, DIM, seed=seed), y, torch.ones(n, dtype=torch.float64)


def found(z: Tensor, y: Tensor, mask: Tensor, k: int, steps: int = STEPS, key: Tensor = KEY) -> Mean:
    return kmeans(z, y, mask, CLASSES, k, key, steps)


# k-means


def lloyd(rows: list[Row], centres: list[Row], steps: int) -> list[Row]:
    centres = [list(centre) for centre in centres]
    for _ in range(steps):
        members: list[list[Row]] = [[] for _ in centres]
        for row in rows:
            distances = [squared(row, centre) for centre in centres]
            members[distances.index(min(distances))].append(row)
        centres = [middle(mine) if mine else old for mine, old in zip(members, centres, strict=True)]
    return centres


def inertia(rows: list[Row], centres: list[Row]) -> float:
    return sum(min(squared(row, centre) for centre in centres) for row in rows)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("steps", [1, 2, 20])
def test_kmeans_is_lloyds_loop(k: int, steps: int) -> None:
    data = samples()
    start, end = found(*data, k, 0), found(*data, k, steps)
    assert end.total.shape == (CLASSES, k, DIM)
    for c in range(CLASSES):
        rows, first = of_class(*data, c), centres_of(start, c)
        assert len(first) == min(k, len(rows))
        assert all(centre in rows for centre in first)  # started from samples of the class,
        assert len({tuple(centre) for centre in first}) == len(first)  # none of them twice
        close(centres_of(end, c), lloyd(rows, first, steps))


def test_a_class_sees_its_own_samples_only() -> None:
    z, y, mask = samples()
    moved = torch.where((y == 1)[:, None], z, z * 100 - 7)
    before, after = found(z, y, mask, 3), found(moved, y, mask, 3)
    assert torch.equal(before.total[1], after.total[1])
    assert not torch.allclose(before.total[0], after.total[0])


@pytest.mark.parametrize("held", [1, 2, 3])
def test_fewer_samples_than_clusters_are_their_own_centres(held: int) -> None:
    z, y = normal(held + 1, DIM), torch.tensor([2] * held + [0])
    got = found(z, y, torch.ones(held + 1, dtype=torch.float64), 4)
    assert got.weight[2].tolist() == [1.0] * held + [0.0] * (4 - held)
    close_unordered(centres_of(got, 2), z[:held].tolist())
    close(centres_of(got, 0), z[held:].tolist())
    assert got.weight[1].sum() == got.weight[3].sum() == 0


def test_one_cluster_is_the_mean() -> None:
    data = samples()
    for c, row in enumerate(found(*data, 1, 1).total[:, 0].tolist()):
        rows = of_class(*data, c)
        close([row], [middle(rows) if rows else [0.0] * DIM])


def test_identical_samples_are_one_place() -> None:
    z = normal(1, DIM).repeat(7, 1)
    got = found(z, torch.full((7,), 1), torch.ones(7, dtype=torch.float64), 3)
    assert got.weight[1].tolist() == [1, 1, 1]  # three centres, though they are alike: none is lost
    close(got.total[1].tolist(), z[:3].tolist())


def test_a_single_class() -> None:
    z, _, mask = samples()
    y = torch.full((40,), 3)
    got = found(z, y, mask, 2)
    assert got.weight.sum(1).tolist() == [0, 0, 0, 2]
    close(centres_of(got, 3), lloyd(z.tolist(), centres_of(found(z, y, mask, 2, 0), 3), STEPS))


def test_no_samples_no_centres() -> None:
    z, y, mask = samples()
    got = found(z, y, torch.zeros_like(mask), 2)
    assert not bool(got.total.any())
    assert not bool(got.weight.any())


def padded(z: Tensor, y: Tensor, mask: Tensor, places: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """The same samples with padding put before these places: far away, and of any class."""
    parts = [list(z), list(y), list(mask)]
    for count, place in enumerate(sorted(places, reverse=True)):
        for part, what in zip(
            parts, (torch.full((DIM,), 1e3 + count), torch.tensor(count % CLASSES), 0.0), strict=True
        ):
            part.insert(place, torch.as_tensor(what, dtype=part[0].dtype))
    stacked = [torch.stack(part) for part in parts]
    return stacked[0], stacked[1], stacked[2]


@pytest.mark.parametrize(
    "places", [[0] * 3, [17, 17, 20], [40] * 5, [0, 1, 9, 30, 40]], ids=["before", "between", "after", "everywhere"]
)
@pytest.mark.parametrize("k", [1, 3])
def test_padding_changes_nothing(places: list[int], k: int) -> None:
    data = samples()
    more = padded(*data, places)
    assert len(more[1]) == 40 + len(places)
    for steps in (0, STEPS):
        plain, wide = found(*data, k, steps), found(*more, k, steps)
        torch.testing.assert_close(wide, plain, atol=1e-12, rtol=0)


def test_the_key_decides_the_start() -> None:
    data = samples()
    assert torch.equal(found(*data, 3).total, found(*data, 3).total)
    starts = {tuple(found(*data, 3, 0, random.key("start", i)).total[0].flatten().tolist()) for i in range(20)}
    assert len(starts) > 15
    chosen = {row for start in starts for row in (start[:DIM], start[DIM : 2 * DIM], start[2 * DIM :])}
    assert chosen == {tuple(row) for row in of_class(*data, 0)}  # every sample gets its turn


def test_every_sample_is_as_likely_to_start() -> None:
    """Three of six samples, in 600 draws: each is met about 300 times (deviation 12)."""
    z, y = torch.arange(6.0, dtype=torch.float64)[:, None], torch.zeros(6, dtype=torch.int64)
    counts = [0] * 6
    for i in range(600):
        for (value,) in found(z, y, torch.ones(6, dtype=torch.float64), 3, 0, random.key(i)).total[0].tolist():
            counts[int(value)] += 1
    assert sum(counts) == 1800
    assert all(abs(count - 300) < 60 for count in counts)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_stacked_clients_are_the_same_as_one_by_one(k: int) -> None:
    ragged = [samples(40), samples(25, seed=1), samples(3, seed=2), padded(*samples(8, seed=3), [0, 4])]
    wide = [padded(*data, [len(data[1])] * (40 - len(data[1]))) for data in ragged]
    keys = torch.stack([random.key("client", i) for i in range(4)])
    z, y, mask = (torch.stack([data[i] for data in wide]) for i in range(3))
    stacked = torch.vmap(lambda z, y, mask, key: found(z, y, mask, k, key=key))(z, y, mask, keys)
    for i, data in enumerate(ragged):
        one = found(*data, k, key=keys[i])
        torch.testing.assert_close(Mean(stacked.total[i], stacked.weight[i]), one, atol=1e-12, rtol=0)


@pytest.mark.parametrize("seed", range(5))
def test_inertia_never_rises(seed: int) -> None:
    data = samples(60, seed)
    for c in range(CLASSES - 1):
        rows = of_class(*data, c)
        course = [inertia(rows, centres_of(found(*data, 3, steps), c)) for steps in range(12)]
        assert all(later <= earlier + 1e-9 for earlier, later in itertools.pairwise(course))
        assert course[-1] < course[0]


@pytest.mark.parametrize("seed", range(3))
def test_separate_blobs_are_found_as_by_sklearn(seed: int) -> None:
    """With two far groups any start leads to them; sklearn from the same start agrees with any number of groups."""
    z = normal(30, DIM, seed=seed) * 0.1
    z[:12] += 5
    y, mask = torch.zeros(30, dtype=torch.int64), torch.ones(30, dtype=torch.float64)
    key = random.key(seed)
    got = centres_of(found(z, y, mask, 2, key=key), 0)
    theirs = KMeans(2, n_init=1, random_state=seed).fit(z.numpy())
    assert inertia(z.tolist(), got) == pytest.approx(theirs.inertia_, rel=1e-6)
    close_unordered(got, theirs.cluster_centers_.tolist(), 1e-6)
    start = found(z, y, mask, 4, 0, key).total[0].numpy()
    same = KMeans(4, init=start, n_init=1, algorithm="lloyd", tol=0).fit(z.numpy())
    assert inertia(z.tolist(), centres_of(found(z, y, mask, 4, 50, key), 0)) == pytest.approx(same.inertia_, rel=1e-6)


# DBSCAN


def naive_dbscan(rows: list[Row], eps: float, enough: int) -> list[list[int]]:
    """Core points within eps of each other are one cluster, with all near them that are in none; largest first."""
    near = [[j for j, other in enumerate(rows) if squared(row, other) <= eps**2] for row in rows]
    core = {i for i, mine in enumerate(near) if len(mine) >= enough}
    clusters: list[set[int]] = []
    left, free = set(core), set(range(len(rows)))
    while left:
        cluster: set[int] = set()
        ahead = [min(left)]
        while ahead:
            point = ahead.pop()
            if point in left:
                left.discard(point)
                ahead += near[point]
                cluster |= set(near[point]) & free
        clusters.append(cluster)
        free -= cluster
    return [sorted(cluster) for cluster in sorted(clusters, key=len, reverse=True)]


def naive_radius(rows: list[Row], enough: int) -> float:
    """The 0.9 quantile of the distances to the enough-th nearest sample, which counts the sample itself."""
    reach = sorted(math.sqrt(sorted(squared(row, other) for other in rows)[enough - 1]) for row in rows)
    place = 0.9 * (len(reach) - 1)
    low = int(place)
    return reach[low] + (place - low) * (reach[min(low + 1, len(reach) - 1)] - reach[low])


def blobs(sizes: tuple[int, ...], noise: int = 0, seed: int = 0) -> Tensor:
    """Tight groups at 0, 10, 20, ... on the first axis, and far lonely points."""
    groups = [normal(n, DIM, seed=seed + i) * 0.2 + torch.tensor([10.0 * i, 0, 0]) for i, n in enumerate(sizes)]
    lonely = torch.tensor([[1000.0 * (i + 1), -500.0, 0.0] for i in range(noise)], dtype=torch.float64)
    return torch.cat([*groups, lonely.reshape(noise, DIM)])


def scanned(z: Tensor, most: int = 4, eps: float = 1.5, enough: int = 4, number: int = 2) -> list[Row]:
    """The centres found for one class among samples of another and padding."""
    other, pads = normal(3, DIM, seed=9) + 300, torch.full((2, DIM), 10.0, dtype=torch.float64)
    y = torch.tensor([number] * len(z) + [0] * 3 + [number, 1])
    mask = torch.tensor([1.0] * (len(z) + 3) + [0, 0], dtype=torch.float64)
    order = random.permutation(KEY, len(y))  # nothing depends on the order
    got = dbscan(torch.cat([z, other, pads])[order], y[order], mask[order], CLASSES, most, eps, enough)
    assert got.total.shape == (CLASSES, most, DIM)
    assert got.weight.sum(1)[1] == got.weight.sum(1)[3] == 0
    assert got.weight[0].tolist() == [1] + [0] * (most - 1)  # three samples, fewer than enough: their mean
    close(centres_of(got, 0), [middle(other.tolist())])
    return centres_of(got, number)


def test_blobs_are_found_largest_first() -> None:
    z = blobs((6, 9, 5))
    expected = [middle(z[6:15].tolist()), middle(z[:6].tolist()), middle(z[15:].tolist())]
    close(scanned(z), expected)


def test_noise_is_in_no_centre() -> None:
    z = blobs((6, 9), noise=3)
    close(scanned(z), [middle(z[6:15].tolist()), middle(z[:6].tolist())])


def test_all_noise_is_the_mean_of_all() -> None:
    z = blobs((), noise=6)
    close(scanned(z), [middle(z.tolist())])


@pytest.mark.parametrize("held", [1, 2, 3])
def test_fewer_than_enough_samples_are_their_mean(held: int) -> None:
    z = blobs((held,))
    for eps in (1.5, 0.0):
        close(scanned(z, eps=eps), [middle(z.tolist())])


def test_more_clusters_than_are_sent_leaves_the_largest() -> None:
    z = blobs((5, 8, 4, 7))
    close(scanned(z, most=2), [middle(z[5:13].tolist()), middle(z[17:].tolist())])


@pytest.mark.parametrize("eps", [1.5, 0.0])
@pytest.mark.parametrize("dim", [3, 64])
def test_identical_samples_are_one_cluster(eps: float, dim: int) -> None:
    z = normal(1, dim).repeat(12, 1)
    got = dbscan(z, torch.ones(12, dtype=torch.int64), torch.ones(12, dtype=torch.float64), 2, 3, eps, 5)
    assert got.weight.tolist() == [[0, 0, 0], [1, 0, 0]]
    close(got.total[1, :1].tolist(), z[:1].tolist())


def test_a_pool_of_one_prototype_a_class_by_hand() -> None:
    v, y = torch.tensor([[1.0, 0.0]]), torch.tensor([0])
    pool = Mean(torch.eye(2)[None, :, None], torch.ones(1, 2, 1))
    means = Mean(torch.eye(2), torch.ones(2))
    for temperature in (1.0, 0.5):
        expected = math.log(1 + math.exp(-1 / temperature))
        assert contrast(v, y, pool, means, temperature).tolist() == pytest.approx([expected])


def test_a_gap_before_a_prototype_does_not_count() -> None:
    """Of two places of a class the second alone is filled: the mean stands in the first, but only the second counts."""
    weight = torch.tensor([[[0.0, 1.0]]])
    pool, means = Mean(torch.tensor([[[[0.0], [3.0]]]]), weight), Mean(torch.tensor([[2.0]]), torch.ones(1))
    got = pad(pool, means, whole=False)
    assert got.total.flatten().tolist() == [2.0, 3.0]
    assert torch.equal(got.weight, weight)
    assert pad(pool, means, whole=True).total.flatten().tolist() == [2.0, 2.0]


def test_a_radius_of_its_own_is_0_where_nearly_all_samples_are_alike() -> None:
    z = torch.zeros(13, DIM, dtype=torch.float64)
    z[12, 0] = 0.5
    got = dbscan(z, torch.zeros(13, dtype=torch.int64), torch.ones(13, dtype=torch.float64), 1, 3, 0.0, 5)
    close(centres_of(got, 0), [[0.0] * DIM])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("radius", [0.8, 1.2, 0.0])
def test_dbscan_is_the_textbooks(seed: int, radius: float) -> None:
    """Random clouds, with noise and points at the border; eps = 0 finds its own radius."""
    z, enough = normal(25, 2, seed=seed), 4
    rows = z.tolist()
    groups = naive_dbscan(rows, (radius or naive_radius(rows, enough)) * (1 + 1e-9), enough)
    got = dbscan(z, torch.zeros(25, dtype=torch.int64), torch.ones(25, dtype=torch.float64), 1, 9, radius, enough)
    expected = [middle([rows[i] for i in group]) for group in groups] or [middle(rows)]
    close_unordered(centres_of(got, 0), expected)


def test_no_samples_no_clusters() -> None:
    z, y, mask = samples()
    got = dbscan(z, y, torch.zeros_like(mask), CLASSES, 3, 1.0, 2)
    assert not bool(got.total.any())
    assert not bool(got.weight.any())


# The pool: as many prototypes by client and class as there are. Of classes 0 and 1 somebody has fewer than K, class 2
# is known from an earlier round only, nobody ever had class 3, and one client has sent nothing.

Pool = list[dict[int, list[Row]]]
K = 2
POOL: Pool = [
    {0: [[1.0, 0.2, 0.0], [0.4, 0.9, -0.3]], 1: [[-0.5, 1.0, 0.7]]},
    {0: [[0.8, -0.1, 0.5]], 4: [[0.1, 0.1, 1.0], [-1.0, 0.3, 0.2]]},
    {},  # has sent nothing
]
OLD = {1: [9.0, 9.0, 9.0], 2: [0.3, -0.7, 0.6]}
V = normal(7, DIM, seed=4)
Y = [0, 1, 2, 3, 4, 0, 4]


def pool_of(pool: Pool, k: int = K) -> Mean:
    total, weight = torch.zeros(len(pool), 5, k, DIM).double(), torch.zeros(len(pool), 5, k).double()
    for s, client in enumerate(pool):
        for c, rows in client.items():
            for i, row in enumerate(rows):
                total[s, c, i], weight[s, c, i] = torch.tensor(row, dtype=torch.float64), 1
    return Mean(total, weight)


def known_of(known: dict[int, Row]) -> Mean:
    total, weight = torch.zeros(5, DIM).double(), torch.zeros(5).double()
    for c, row in known.items():
        total[c], weight[c] = torch.tensor(row, dtype=torch.float64), 1
    return Mean(total, weight)


def naive_means(pool: Pool, old: dict[int, Row]) -> dict[int, Row]:
    means = dict(old)
    for c in range(5):
        rows = [row for client in pool for row in client.get(c, [])]
        if rows:
            means[c] = middle(rows)
    return means


MEANS = naive_means(POOL, OLD)


def naive_pad(pool: Pool, means: dict[int, Row], k: int, whole: bool) -> list[dict[int, list[Row]]]:
    """Eq. 10: of every client that was heard, and every class that is known, the prototypes that count."""
    filled: list[dict[int, list[Row]]] = []
    for client in pool:
        if not client:
            filled.append({})
            continue
        mine: dict[int, list[Row]] = {}
        for c, mean in means.items():
            rows = client.get(c, [])
            if whole:
                mine[c] = rows if len(rows) == k else [mean] * k
            else:
                mine[c] = rows or [mean]
        filled.append(mine)
    return filled


def naive_contrast(v: Row, label: int, filled: list[dict[int, list[Row]]], means: dict[int, Row], t: float) -> float:
    """Eq. 11 with P(y) = {y}: a class without a k-th prototype stands with its mean."""
    losses = []
    for client in filled:
        for k, own in enumerate(client.get(label, [])):
            others = [rows[k] if k < len(rows) else means[c] for c, rows in client.items()]
            logits = [sum(a * b for a, b in zip(v, u, strict=True)) / t for u in others]
            mine = sum(a * b for a, b in zip(v, own, strict=True)) / t
            losses.append(math.log(sum(math.exp(logit) for logit in logits)) - mine)
    return sum(losses) / len(losses) if losses else 0.0


def naive_nearest(z: Row, c: int, pool: Pool, means: dict[int, Row]) -> float:
    rows = [row for client in pool for row in client.get(c, [])]
    if not rows and c in means:
        rows = [means[c]]
    return -min(math.sqrt(squared(z, row)) for row in rows) if rows else -math.inf


def test_class_means_keep_what_nobody_had() -> None:
    got = class_means(pool_of(POOL), known_of(OLD))
    assert got.weight.tolist() == [1, 1, 1, 0, 1]
    for c in range(5):
        close([got.value[c].tolist()], [MEANS.get(c, [0.0] * DIM)])
    assert MEANS[1] == POOL[0][1][0]  # new ones replace the old,
    assert MEANS[2] == OLD[2]  # or not


@pytest.mark.parametrize("whole", [True, False])
def test_pad_by_hand(whole: bool) -> None:
    got = pad(pool_of(POOL), known_of(MEANS), whole)
    expected = naive_pad(POOL, MEANS, K, whole)
    for s, c in itertools.product(range(3), range(5)):
        rows = expected[s].get(c, [])
        assert got.weight[s, c].tolist() == [1.0] * len(rows) + [0.0] * (K - len(rows)), (s, c)
        if rows:
            close(got.total[s, c, : len(rows)].tolist(), rows)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("t", [0.5, 1.0])
def test_contrast_by_hand(whole: bool, t: float) -> None:
    means, filled = known_of(MEANS), naive_pad(POOL, MEANS, K, whole)
    got = contrast(V, torch.tensor(Y), pad(pool_of(POOL), means, whole), means, t)
    expected = [naive_contrast(v, c, filled, MEANS, t) for v, c in zip(V.tolist(), Y, strict=True)]
    assert expected[3] == 0  # of a class that nobody ever had
    assert all(value > 0 for i, value in enumerate(expected) if i != 3)
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-12)


def test_contrast_says_nothing_before_there_is_a_pool() -> None:
    pool, means = no_pool(5, K, DIM), no_prototypes(5, DIM)
    for whole in (True, False):
        v = V.float().requires_grad_()
        value = contrast(v, torch.tensor(Y), pad(pool, means, whole), means, 0.07)
        assert value.tolist() == [0] * 7
        assert not bool(torch.autograd.grad(value.sum(), v)[0].any())


def test_an_unheard_client_is_as_none() -> None:
    means = known_of(MEANS)
    for whole in (True, False):
        with_it, without = (
            contrast(V, torch.tensor(Y), pad(pool_of(pool), means, whole), means, 0.3) for pool in (POOL, POOL[:2])
        )
        torch.testing.assert_close(with_it, without, atol=1e-12, rtol=0)


def test_nearest_of_pool_by_hand() -> None:
    got = nearest_of_pool(V, pool_of(POOL), known_of(MEANS))
    for i, c in itertools.product(range(7), range(5)):
        assert float(got[i, c]) == pytest.approx(naive_nearest(V[i].tolist(), c, POOL, MEANS), abs=1e-9)
    assert bool((got[:, 3] == -math.inf).all())
    at = torch.tensor([POOL[1][4][1]], dtype=torch.float64)
    assert int(nearest_of_pool(at, pool_of(POOL), known_of(MEANS)).argmax()) == 4  # a prototype is its own nearest


def test_nothing_is_near_an_empty_pool() -> None:
    assert bool((nearest_of_pool(V.float(), no_pool(5, K, DIM), no_prototypes(5, DIM)) == -math.inf).all())


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_random_pools(whole: bool, seed: int) -> None:
    """Any number of prototypes from any client, the whole way from the round before to loss and scores."""
    g = np.random.default_rng(seed)
    k = int(g.integers(1, 4))
    pool: Pool = [
        {c: g.normal(size=(int(n), DIM)).tolist() for c in range(5) if (n := g.integers(0, k + 1))} for _ in range(4)
    ]
    old = {int(c): g.normal(size=DIM).tolist() for c in g.choice(5, 2, replace=False)}
    means = naive_means(pool, old)
    got_means = class_means(pool_of(pool, k), known_of(old))
    filled = naive_pad(pool, means, k, whole)
    got = contrast(V, torch.tensor(Y), pad(pool_of(pool, k), got_means, whole), got_means, 0.7)
    expected = [naive_contrast(v, c, filled, means, 0.7) for v, c in zip(V.tolist(), Y, strict=True)]
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-12)
    scores = nearest_of_pool(V, pool_of(pool, k), got_means)
    for i, c in itertools.product(range(7), range(5)):
        assert float(scores[i, c]) == pytest.approx(naive_nearest(V[i].tolist(), c, pool, means), abs=1e-7)
