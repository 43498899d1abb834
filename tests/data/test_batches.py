"""Everyone's batches, against loops over hand-made data."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from protofed.data.augment import augment
from protofed.data.batches import CHUNK, Federation
from protofed.data.domain import Domain
from protofed.data.split import Split
from protofed.engines.reference import ReferenceEngine
from protofed.errors import UserError
from protofed.methods import METHODS
from protofed.models import MODELS
from protofed.ops import random
from protofed.ops.optim import Optimizer

CLASSES = 3
NAMES = tuple("abc")


def numbered(train: int = 40, test: int = 12, name: str = "numbered") -> Domain:
    """Sample i of the train part is (i, -i), sample i of the test part (1000 + i, ...): a sample tells its row."""

    def x(first: int, n: int) -> np.ndarray:
        ids = np.arange(first, first + n, dtype=np.float32)
        return np.stack([ids, -ids], 1)

    return Domain(name, x(0, train), np.arange(train) % CLASSES, x(1000, test), np.arange(test) % CLASSES, NAMES)


def pictures(n: int = 12, channels: int = 2, size: int = 6, seed: int = 0) -> Domain:
    g = np.random.default_rng(seed)

    def x(n: int) -> np.ndarray:
        return g.integers(0, 256, (n, channels, size, size), dtype=np.uint8)

    return Domain("pictures", x(n), np.arange(n) % CLASSES, x(5), np.arange(5) % CLASSES, NAMES)


def split_of(*train, test=None, domain=None) -> Split:
    test = test if test is not None else [[0]] * len(train)
    return Split(
        np.array(domain if domain is not None else [0] * len(train)),
        tuple(map(np.array, train)),
        tuple(map(np.array, test)),
    )


def federation(*train, batch_size: int = 4, seed: int = 0, normalize: str = "none", train_size: int = 40, **fields):
    return Federation(
        [numbered(train_size)], split_of(*train), seed=seed, batch_size=batch_size, normalize=normalize, **fields
    )


def order(fed: Federation, client: int, round: int = 0, epoch: int = 0) -> list[list[int]]:
    """The rows of every batch."""
    return [batch.x[:, 0].long().tolist() for batch in fed.epoch(client, round, epoch)]


MINE = [3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37]


# the order of batches


def test_every_sample_once_in_an_epoch_with_its_label() -> None:
    fed = federation(MINE, [0, 1, 2])
    for round, epoch in itertools.product(range(3), range(3)):
        rows = order(fed, 0, round, epoch)
        assert [len(batch) for batch in rows] == [4, 4, 3]
        assert sorted(itertools.chain(*rows)) == MINE
        for batch in fed.epoch(0, round, epoch):
            assert batch.y.tolist() == [row % CLASSES for row in batch.x[:, 0].long().tolist()]
            assert batch.x[:, 1].tolist() == (-batch.x[:, 0]).tolist()
            assert batch.mask.tolist() == [1.0] * len(batch.y)


def test_order_depends_on_seed_round_client_and_epoch() -> None:
    base = order(federation(MINE, MINE), 0)
    assert order(federation(MINE, MINE), 0) == base
    others = [
        order(federation(MINE, MINE, seed=1), 0),
        order(federation(MINE, MINE), 1),
        order(federation(MINE, MINE), 0, round=1),
        order(federation(MINE, MINE), 0, epoch=1),
        order(federation(MINE, MINE), 0, round=1, epoch=1),
    ]
    assert all(other != base for other in others)
    assert len({str(other) for other in others}) == len(others)


def test_order_depends_on_nothing_else() -> None:
    base = order(federation(MINE, [0, 1, 2]), 0)
    assert order(federation(MINE, [2]), 0) == base  # not on the others' samples
    assert order(federation(MINE, [0, 1], [2], [4]), 0) == base  # nor on their number
    assert order(federation(MINE, [5, 7]), 0) == base  # nor on sharing samples with them
    smaller = order(federation(MINE, batch_size=3), 0)
    assert list(itertools.chain(*smaller)) == list(itertools.chain(*base))  # nor on the batch size

    torch.manual_seed(1)
    np.random.seed(1)
    fed = federation(MINE, [0, 1, 2])
    before = torch.get_rng_state()
    order(fed, 1, 5, 5)
    list(fed.local(1, 3).batches)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    np.random.seed(2)
    assert order(fed, 0) == base


def test_order_is_the_same_for_every_method() -> None:
    seen: dict[str, list] = {}
    for name in ("local", "fedavg", "fedproto"):
        fed = federation(list(range(10)), list(range(10, 30)))
        asked = seen.setdefault(name, [])
        epoch = fed.epoch
        fed.epoch = lambda client, round, number, epoch=epoch, asked=asked: (  # type: ignore[method-assign]
            asked.append((client, [b.x[:, 0].tolist() for b in epoch(client, round, number)]))
            or epoch(client, round, number)
        )
        build = [("mlp_digits", MODELS["mlp_digits"])] * 2
        engine = ReferenceEngine(fed, build, Optimizer(lr=1e-6), seed=0, local_epochs=2, init="common")
        method = METHODS[name]()
        engine.train(method, method.init_server(engine.specs()[0]), [0, 1], 4)
    assert len(seen["local"]) == 4
    assert seen["local"] == seen["fedavg"] == seen["fedproto"]


def test_first_places_are_spread_evenly() -> None:
    """Over many rounds, each sample leads about equally often."""
    fed = federation(list(range(5)))
    first = [order(fed, 0, round)[0][0] for round in range(500)]
    assert all(60 < first.count(row) < 140 for row in range(5))


@given(st.integers(1, 40), st.integers(1, 12), st.booleans())
def test_batches_and_the_smallest_of_them(samples: int, batch_size: int, drop_last: bool) -> None:
    fed = federation(list(range(samples)), batch_size=batch_size, drop_last=drop_last)
    sizes = [len(batch) for batch in order(fed, 0)]
    expected, left = [], samples
    while left:
        expected.append(min(batch_size, left))
        left -= expected[-1]
    if drop_last and len(expected) > 1 and expected[-1] < batch_size:
        expected.pop()
    assert sizes == expected
    assert fed.smallest_batch(0) == min(expected)
    assert fed.widest == max(expected)
    assert fed.even == (len(set(expected)) == 1)


def test_drop_last_leaves_others_out_every_time() -> None:
    fed = federation(MINE, drop_last=True)
    left_out = set()
    for epoch in range(30):
        used = list(itertools.chain(*order(fed, 0, 0, epoch)))
        assert len(used) == len(set(used)) == 8
        left_out |= set(MINE) - set(used)
    assert left_out == set(MINE)


def test_a_client_smaller_than_a_batch_still_trains() -> None:
    for drop_last in (False, True):
        fed = federation([4, 9], [1], batch_size=8, drop_last=drop_last)
        assert [sorted(batch) for batch in order(fed, 0)] == [[4, 9]]
        assert order(fed, 1) == [[1]]
        assert (fed.smallest_batch(0), fed.smallest_batch(1)) == (2, 1)
        assert not fed.even


# what a client knows


def test_local_data_is_every_sample_once_in_fixed_order() -> None:
    rows = list(np.random.default_rng(0).permutation(CHUNK + 100))
    fed = federation(rows, [0], train_size=CHUNK + 100, drop_last=True, batch_size=7)
    data = fed.local(0, 3)
    assert [len(batch.y) for batch in data.batches] == [CHUNK, 100]
    assert torch.cat([b.x[:, 0] for b in data.batches]).long().tolist() == rows
    assert torch.cat([b.y for b in data.batches]).tolist() == [row % CLASSES for row in rows]
    assert all(bool((b.mask == 1).all()) for b in data.batches)
    assert data.seen == ()
    keys = [fed.local(client, round).key for client in (0, 1) for round in (0, 1)]
    assert len({tuple(key.tolist()) for key in keys}) == 4
    assert torch.equal(fed.local(0, 1).key, keys[1])


def test_counts() -> None:
    fed = federation([0, 3, 6, 1], [2, 5], [4])
    assert fed.counts.tolist() == [[3, 1, 0], [0, 0, 2], [0, 1, 0]]
    assert fed.local(0, 0).counts.tolist() == [3, 1, 0]
    assert (fed.clients, fed.classes) == (3, 3)


def test_train_keeps_the_order_of_the_split() -> None:
    fed = federation([9, 2, 30, 2], [0])
    assert fed.train(0).x[:, 0].tolist() == [9, 2, 30, 2]
    assert fed.train(0).y.tolist() == [0, 2, 0, 2]


# test samples


def test_test_rows_beyond_the_test_part_are_train_samples_held_back() -> None:
    domain = numbered(20, 6)
    split = split_of([0, 1], [2, 3], [4], test=[[5, 0], [6 + 19, 3, 6 + 7], [6 + 7, 6 + 0]])
    fed = Federation([domain], split, seed=0, batch_size=4, normalize="none")
    assert fed.test(0).x[:, 0].tolist() == [1005, 1000]
    assert fed.test(0).y.tolist() == [5 % 3, 0]
    assert fed.test(1).x[:, 0].tolist() == [19, 1003, 7]
    assert fed.test(1).y.tolist() == [19 % 3, 0, 7 % 3]
    assert fed.test(2).x[:, 0].tolist() == [7, 0]
    assert fed.global_test(0).x[:, 0].tolist() == [1000, 1001, 1002, 1003, 1004, 1005]
    assert fed.global_test(0).y.tolist() == [0, 1, 2, 0, 1, 2]


@given(st.data())
def test_test_samples_are_those_of_the_split(data) -> None:
    train, official = 15, data.draw(st.integers(0, 6))
    domain = numbered(train, official)
    rows = st.lists(st.integers(0, official + train - 1), max_size=8)
    test = data.draw(st.lists(rows, min_size=1, max_size=4))
    split = split_of(*[[i] for i in range(len(test))], test=[np.array(t, dtype=np.int64) for t in test])
    fed = Federation([domain], split, seed=0, batch_size=4, normalize="none")
    for client, mine in enumerate(test):
        expected = [1000 + row if row < official else row - official for row in mine]
        assert fed.test(client).x[:, 0].tolist() == expected
        assert fed.test(client).y.tolist() == [(n - 1000 if n >= 1000 else n) % CLASSES for n in expected]
    assert len(fed.global_test(0).y) == official


def test_a_client_without_test_samples() -> None:
    fed = Federation([numbered()], split_of([0, 1], test=[[]]), seed=0, batch_size=4)
    assert fed.test(0).x.shape == (0, 2)
    assert fed.test(0).y.tolist() == []


# normalisation


def naive_moments(x: np.ndarray) -> list[tuple[float, float]]:
    """Mean and population deviation of each channel, pixel by pixel."""
    result = []
    for channel in range(x.shape[1]):
        values = [float(v) for sample in x[:, channel] for v in np.asarray(sample).flatten()]
        mean = sum(values) / len(values)
        result.append((mean, math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))))
    return result


@pytest.mark.parametrize("normalize", ["auto", "half", "none"])
def test_pixels_are_normalised(normalize: str) -> None:
    domain = pictures()
    fed = Federation(
        [domain], split_of([0, 2, 4], [1], test=[[0, 1, 5 + 7], [2]]), seed=0, batch_size=4, normalize=normalize
    )
    moments = {
        "auto": naive_moments(domain.x_train / 255.0),  # of all train samples, whoever holds them, and of no others
        "half": [(0.5, 0.5)] * 2,
        "none": [(0.0, 1.0)] * 2,
    }[normalize]

    def expected(x: np.ndarray) -> Tensor:
        scaled = np.stack([(x[:, c] / 255.0 - m) / s for c, (m, s) in enumerate(moments)], 1)
        return torch.from_numpy(scaled).float()

    torch.testing.assert_close(fed.train(0).x, expected(domain.x_train[[0, 2, 4]]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fed.test(0).x[:2], expected(domain.x_test[:2]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fed.test(0).x[2:], expected(domain.x_train[[7]]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fed.global_test(0).x, expected(domain.x_test), rtol=1e-5, atol=1e-5)
    assert fed.train(0).x.dtype == torch.float32


def test_features_are_normalised_one_by_one_and_constant_ones_only_shifted() -> None:
    g = np.random.default_rng(1)
    x = np.stack([g.normal(5, 3, 30), g.normal(-100, 0.01, 30), np.full(30, 7.0)], 1).astype(np.float32)
    y = np.arange(30) % CLASSES
    domain = Domain("table", x, y, x[:4], y[:4], NAMES)
    fed = Federation([domain], split_of(list(range(30))), seed=0, batch_size=4, normalize="auto")
    got = fed.train(0).x.double().numpy()
    for feature, (mean, std) in enumerate(naive_moments(x)):
        expected = (x[:, feature].astype(np.float64) - mean) / (std if feature < 2 else 1)
        np.testing.assert_allclose(got[:, feature], expected, atol=2e-3)
    assert np.isfinite(got).all()


def test_float_pictures_are_not_divided_by_255() -> None:
    x = np.random.default_rng(0).random((6, 1, 4, 4)).astype(np.float32)
    domain = Domain("floats", x, np.arange(6) % 3, x[:2], np.arange(2), NAMES)
    fed = Federation([domain], split_of(list(range(6))), seed=0, batch_size=4, normalize="half")
    torch.testing.assert_close(fed.train(0).x, torch.from_numpy((x - 0.5) / 0.5))


@pytest.mark.parametrize("normalize", ["auto", "half", "none"])
@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.int16])
def test_tokens_stay_whole_numbers(normalize: str, dtype) -> None:
    x = np.arange(24, dtype=dtype).reshape(6, 4) * 1000
    domain = Domain("tokens", x, np.arange(6) % 3, x[:2] + 1, np.arange(2), NAMES)
    fed = Federation([domain], split_of([1, 3], test=[[0, 2 + 5]]), seed=0, batch_size=4, normalize=normalize)
    assert fed.train(0).x.dtype == torch.int64
    assert fed.train(0).x.tolist() == x[[1, 3]].tolist()
    assert fed.test(0).x.tolist() == [(x[0] + 1).tolist(), x[5].tolist()]
    assert next(iter(fed.epoch(0, 0, 0))).x.dtype == torch.int64


# several domains


def test_domains_of_different_shapes() -> None:
    one, two = pictures(9, channels=1, size=4, seed=1), pictures(12, channels=3, size=6, seed=2)
    split = split_of([0, 1, 2], [3, 4], [11, 0], test=[[0], [1, 5 + 2], [5 + 8]], domain=[0, 1, 1])
    fed = Federation([one, two], split, seed=0, batch_size=2, normalize="auto")
    assert [fed.domain(i) for i in range(3)] == [0, 1, 1]
    assert [fed.shape(i) for i in range(3)] == [(1, 4, 4), (3, 6, 6), (3, 6, 6)]
    assert fed.global_test(0).x.shape == (5, 1, 4, 4)
    assert fed.global_test(1).x.shape == (5, 3, 6, 6)
    assert [len(fed.test(i).y) for i in range(3)] == [1, 2, 1]
    assert fed.counts.tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 1]]
    for domain, client, rows in ((one, 0, [0, 1, 2]), (two, 2, [11, 0])):  # each by its own moments
        for channel, (mean, std) in enumerate(naive_moments(domain.x_train / 255.0)):
            expected = (domain.x_train[rows][:, channel] / 255.0 - mean) / std
            np.testing.assert_allclose(fed.train(client).x[:, channel].numpy(), expected, atol=1e-5)
    held = torch.from_numpy(two.x_train[[2]] / 255.0).float()
    assert torch.corrcoef(torch.stack([held[0, 0].flatten(), fed.test(1).x[1, 0].flatten()]))[0, 1] > 0.9999


def test_a_domain_that_nobody_holds() -> None:
    fed = Federation([numbered(), numbered(name="idle")], split_of([0, 1], domain=[0]), seed=0, batch_size=2)
    assert len(fed.global_test(1).y) == 12


# crops and flips


def windows(image: np.ndarray) -> list[np.ndarray]:
    """Every crop of an image (C, H, W) with four black pixels around it, the upper left one first."""
    channels, height, width = image.shape
    padded = np.zeros((channels, height + 8, width + 8), dtype=image.dtype)
    for c, y, x in itertools.product(range(channels), range(height), range(width)):
        padded[c, y + 4, x + 4] = image[c, y, x]
    return [padded[:, y : y + height, x : x + width] for y in range(9) for x in range(9)]


def which_window(got: Tensor, image: np.ndarray) -> list[int]:
    return [i for i, window in enumerate(windows(image)) if np.abs(got.numpy() - window).max() < 1e-4]


def test_every_crop_is_a_window_and_every_window_is_cropped() -> None:
    g = np.random.default_rng(0)
    images = g.random((1500, 1, 5, 6)).astype(np.float32) + 0.1
    got = augment(torch.from_numpy(images), ["crop"], random.key("crop"), torch.zeros(1, 1, 1))
    found = [which_window(a, b) for a, b in zip(got[:500], images, strict=False)]
    assert all(len(places) == 1 for places in found)
    places = [f[0] for f in found] + [which_window(a, b)[0] for a, b in zip(got[500:], images[500:], strict=True)]
    assert set(places) == set(range(81))
    expected = 1500 / 81
    statistic = sum((places.count(i) - expected) ** 2 / expected for i in range(81))
    assert abs(statistic - 80) < 5 * math.sqrt(160)


def test_flips_mirror_about_half() -> None:
    images = torch.rand(1000, 2, 3, 4)
    got = augment(images, ["flip"], random.key("flip"), torch.zeros(1, 1, 1))
    mirrored = 0
    for before, after in zip(images, got, strict=True):
        turned = torch.stack([before[:, :, 3 - i] for i in range(4)], -1)
        assert torch.equal(after, before) != torch.equal(after, turned)
        mirrored += int(torch.equal(after, turned))
    assert abs(mirrored - 500) < 5 * math.sqrt(250)


@pytest.mark.parametrize("kinds", [["crop"], ["flip"], ["crop", "flip"]])
def test_same_key_same_pictures(kinds: list[str]) -> None:
    images, black = torch.rand(20, 2, 5, 5), torch.full((2, 1, 1), -1.0)
    first = augment(images, kinds, random.key(1), black)
    assert first.shape == images.shape
    assert torch.equal(augment(images, kinds, random.key(1), black), first)
    assert not torch.equal(augment(images, kinds, random.key(2), black), first)
    assert torch.equal(augment(images, [], random.key(1), black), images)


def test_crop_and_flip_are_drawn_apart() -> None:
    """Whether an image is mirrored says nothing about where it was cut."""
    images = torch.arange(36.0).reshape(1, 1, 6, 6).expand(2000, -1, -1, -1) + 1
    cut = augment(images, ["crop"], random.key("apart"), torch.zeros(1, 1, 1))
    both = augment(images, ["crop", "flip"], random.key("apart"), torch.zeros(1, 1, 1))
    mirrored = (both != cut).flatten(1).any(1)
    assert torch.equal(both[mirrored], cut[mirrored].flip(-1))
    left = (cut == 0).all(2)[:, 0, 0]  # a black column on the left: cut on the left side
    share = [float(mirrored[left].double().mean()), float(mirrored[~left].double().mean())]
    assert abs(share[0] - share[1]) < 0.12


def test_batches_are_augmented_on_a_black_margin() -> None:
    """The margin is what a black pixel becomes, channel by channel, not 0."""
    domain = pictures(30)
    rows = list(range(0, 30, 2))
    fields = {"seed": 0, "batch_size": 4, "normalize": "auto"}
    fed = Federation([domain], split_of(rows, [1]), augmentations=["crop"], **fields)
    bare = Federation([domain], split_of(rows, [1]), **fields)
    moments = np.array(naive_moments(domain.x_train / 255.0))
    shifted = 0
    for one, other in zip(fed.epoch(0, 2, 1), bare.epoch(0, 2, 1), strict=True):
        assert torch.equal(one.y, other.y)  # the same samples in the same order
        for got, plain in zip(one.x, other.x, strict=True):
            pixels = plain.numpy() * moments[:, 1, None, None] + moments[:, 0, None, None]
            undone = got * torch.from_numpy(moments[:, 1, None, None]) + torch.from_numpy(moments[:, 0, None, None])
            places = which_window(undone, pixels)
            assert len(places) == 1
            shifted += places != [40]  # the window in the middle is the image itself
    assert shifted >= 10


def test_augmentation_depends_on_seed_round_client_and_epoch_alone() -> None:
    """Ten times the same picture: whatever the order, only the cuts can differ."""
    domain, rows = pictures(30), [3] * 10

    def drawn(client: int = 0, round: int = 0, epoch: int = 0, others=(11,), seed: int = 0) -> Tensor:
        split = split_of(rows, rows, list(others))
        fed = Federation([domain], split, seed=seed, batch_size=10, augmentations=["crop", "flip"])
        (batch,) = fed.epoch(client, round, epoch)
        return batch.x

    base = drawn()
    assert len(torch.unique(base, dim=0)) > 5  # each sample is cut for itself
    assert torch.equal(drawn(), base)
    assert torch.equal(drawn(others=(12, 13, 14)), base)
    for other in (drawn(client=1), drawn(round=1), drawn(epoch=1), drawn(seed=1)):
        assert not torch.equal(other, base)


def test_what_a_client_knows_is_not_augmented() -> None:
    domain = pictures(10)
    fed = Federation([domain], split_of([0, 1], test=[[0]]), seed=0, batch_size=2, augmentations=["crop", "flip"])
    bare = Federation([domain], split_of([0, 1], test=[[0]]), seed=0, batch_size=2)
    assert torch.equal(fed.local(0, 0).batches[0].x, bare.local(0, 0).batches[0].x)
    assert torch.equal(fed.test(0).x, bare.test(0).x)
    assert torch.equal(fed.global_test(0).x, bare.global_test(0).x)


def test_only_pictures_can_be_cropped() -> None:
    with pytest.raises(UserError, match=r"data.augment = .*images, but the samples have shape \(2,\)"):
        federation(MINE, augmentations=["crop"])
    with pytest.raises(UserError, match=r"samples have shape \(2,\)"):  # the shape that is no image, not the first
        Federation(
            [pictures(), numbered()], split_of([0], [1], domain=[0, 1]), seed=0, batch_size=2, augmentations=["flip"]
        )
