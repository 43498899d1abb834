"""Keyed randomness: the same key gives the same numbers, everywhere, and other keys give other numbers."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from protofed.ops import random

WORDS = st.integers(0, 2**32 - 1)
PARTS = st.lists(st.integers(0, 2**63) | st.text(max_size=8), min_size=1, max_size=5)


def many(n: int, *parts: int | str) -> Tensor:
    """Keys (n, 2)."""
    return torch.stack([random.key(*parts, i) for i in range(n)])


def chi_square(counts: list[int]) -> float:
    expected = sum(counts) / len(counts)
    return sum((c - expected) ** 2 / expected for c in counts)


def too_far(statistic: float, degrees: int) -> bool:
    """Five deviations from what chance gives, on either side: too uneven, or too even."""
    return abs(statistic - degrees) > 5 * math.sqrt(2 * degrees)


# the same numbers


def test_the_numbers_of_a_key_never_change() -> None:
    """Pinned: a run that is resumed with another version must draw on."""
    key = random.key(7, "dropout", 3, 11)
    assert key.tolist() == [3699052961, 1280983014]
    assert random.bits(key, 4).tolist() == [2836698411, 3273769282, 3228656199, 2069354052]
    assert random.fold(key, 5).tolist() == [1685405041, 2515192327]
    assert random.permutation(key, 6).tolist() == [4, 3, 5, 0, 2, 1]


def test_same_key_same_numbers() -> None:
    for draw in (random.bits, random.uniform, random.normal, random.permutation):
        first, second = draw(random.key(1, "a"), 50), draw(random.key(1, "a"), 50)
        assert torch.equal(first, second)
        assert not torch.equal(first, draw(random.key(2, "a"), 50))


@pytest.mark.parametrize("draw", [random.bits, random.uniform, random.normal, random.permutation])
def test_batched_keys_draw_what_single_ones_draw(draw) -> None:
    keys = many(12, "batched")
    together = draw(keys, 17)
    assert together.shape == (12, 17)
    for i in range(12):
        assert torch.equal(together[i], draw(keys[i], 17))
    grid = draw(keys.reshape(3, 4, 2), 17)
    assert torch.equal(grid.reshape(12, 17), together)


@pytest.mark.parametrize("draw", [random.bits, random.uniform, random.normal, random.permutation])
def test_vmapped_keys_draw_what_single_ones_draw(draw) -> None:
    keys = many(5, "vmapped")
    together = torch.func.vmap(lambda key: draw(random.fold(key, 3), 9))(keys)
    for i in range(5):
        assert torch.equal(together[i], draw(random.fold(keys[i], 3), 9))


def test_folding_many_numbers_is_folding_each() -> None:
    key = random.key("fold")
    folded = random.fold(key, torch.arange(20)[:, None])
    assert folded.shape == (20, 2)
    for i in range(20):
        assert torch.equal(folded[i], random.fold(key, i))
        assert torch.equal(folded[i], random.fold(key, torch.tensor(i)))


def test_torch_generator_is_neither_used_nor_moved() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = random.normal(random.fold(random.key("x"), 1), 9)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(random.normal(random.fold(random.key("x"), 1), 9), first)


# 32-bit words


@given(WORDS, WORDS, st.integers(0, 2**31))
def test_words_stay_words(low: int, high: int, number: int) -> None:
    key = torch.tensor([low, high])
    for words in (random.bits(key, 33), random.fold(key, number), random.fold(random.fold(key, number), number)):
        assert words.dtype == torch.int64
        assert int(words.min()) >= 0
        assert int(words.max()) <= 2**32 - 1


@pytest.mark.parametrize("word", [0, 1, 2**31 - 1, 2**31, 2**32 - 1])
def test_extreme_keys_are_as_good_as_others(word: int) -> None:
    key = torch.tensor([word, 2**32 - 1 - word])
    words = random.bits(key, 100_000)
    assert 0 <= int(words.min()) < 2**20
    assert 2**32 - 2**20 < int(words.max()) <= 2**32 - 1
    assert len(torch.unique(words)) == 100_000  # the mixing loses nothing


def test_every_bit_is_set_half_the_time() -> None:
    words = random.bits(random.key("bits"), 40_000)
    for bit in range(32):
        share = float(((words >> bit) & 1).double().mean())
        assert abs(share - 0.5) < 5 * 0.5 / math.sqrt(40_000), bit


# distributions


def test_uniform_moments_and_bins() -> None:
    n = 200_000
    u = random.uniform(random.key("uniform"), n).double()
    assert 0 <= float(u.min()) < float(u.max()) < 1
    assert abs(float(u.mean()) - 1 / 2) < 5 * math.sqrt(1 / 12 / n)
    assert abs(float((u**2).mean()) - 1 / 3) < 5 * math.sqrt(4 / 45 / n)
    counts = torch.bincount((u * 100).long(), minlength=100).tolist()
    assert len(counts) == 100
    assert not too_far(chi_square(counts), 99)


def test_uniform_neighbours_are_independent() -> None:
    u = random.uniform(random.key("pairs"), 100_000)
    for left, right in ((u[:-1], u[1:]), (u[:50_000], u[50_000:])):
        cells = (left * 10).long() * 10 + (right * 10).long()
        counts = torch.bincount(cells, minlength=100).tolist()
        assert not too_far(chi_square(counts), 99)


def test_first_numbers_of_many_keys_are_uniform() -> None:
    """Clients draw little from many keys: the n-th number must be as good over keys as along one."""
    for keys in (many(5_000, "across"), random.fold(random.key("across"), torch.arange(5_000)[:, None])):
        drawn = random.uniform(keys, 3)
        for column in range(3):
            counts = torch.bincount((drawn[:, column] * 20).long(), minlength=20).tolist()
            assert not too_far(chi_square(counts), 19)


def test_normal_moments_and_tails() -> None:
    n = 1_000_000
    x = random.normal(random.key("normal"), n).double()
    assert bool(torch.isfinite(x).all())
    assert abs(float(x.mean())) < 5 / math.sqrt(n)
    assert abs(float((x**2).mean()) - 1) < 5 * math.sqrt(2 / n)
    assert abs(float((x**3).mean())) < 5 * math.sqrt(15 / n)
    assert abs(float((x**4).mean()) - 3) < 5 * math.sqrt(96 / n)
    edges = [-math.inf, -2, -1, -0.5, 0, 0.5, 1, 2, math.inf]
    statistic = 0.0
    for low, high in itertools.pairwise(edges):
        expected = n * (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))) / 2
        count = int(((x >= low) & (x < high)).sum())
        statistic += (count - expected) ** 2 / expected
    assert not too_far(statistic, 7)


@given(WORDS, WORDS, st.integers(0, 300))
def test_permutations_are_permutations(low: int, high: int, n: int) -> None:
    order = random.permutation(torch.tensor([low, high]), n)
    assert sorted(order.tolist()) == list(range(n))


@pytest.mark.parametrize("keys", ["named", "folded"])
def test_all_orders_of_three_are_equally_likely(keys: str) -> None:
    n = 6_000
    drawn = many(n, "order") if keys == "named" else random.fold(random.key("order"), torch.arange(n)[:, None])
    orders = [tuple(order) for order in random.permutation(drawn, 3).tolist()]
    counts = [orders.count(order) for order in itertools.permutations(range(3))]
    assert sum(counts) == n
    assert not too_far(chi_square(counts), 5)


def test_every_place_is_equally_likely_for_every_element() -> None:
    orders = random.permutation(random.fold(random.key("places"), torch.arange(4_000)[:, None]), 8)
    for element in range(8):
        places = (orders == element).long().argmax(1)
        assert not too_far(chi_square(torch.bincount(places, minlength=8).tolist()), 7)


# different streams


def test_fold_gives_no_stream_twice() -> None:
    key = random.key("streams")
    keys = random.fold(key, torch.arange(10_000)[:, None])
    assert len(torch.unique(keys, dim=0)) == 10_000
    streams = random.bits(keys, 4)
    assert len(torch.unique(streams, dim=0)) == 10_000
    assert not bool((streams == random.bits(key, 4)).all(1).any())  # nor the parent's own


def test_fold_of_fold_gives_no_stream_twice() -> None:
    key, numbers = random.key("nested"), torch.arange(100)[:, None]
    once = random.fold(key, numbers)
    twice = torch.cat([random.fold(parent, numbers) for parent in once])
    every = torch.cat([once, twice])
    assert len(torch.unique(every, dim=0)) == 10_100
    assert len(torch.unique(random.bits(every, 3), dim=0)) == 10_100


def test_the_order_of_folds_counts() -> None:
    key = random.key("folds")
    assert not torch.equal(random.fold(random.fold(key, 1), 2), random.fold(random.fold(key, 2), 1))
    assert not torch.equal(random.fold(random.fold(key, 1), 2), random.fold(key, 3))


@pytest.mark.parametrize("word", [0, 5, 2**32 - 1])
def test_streams_of_neighbouring_keys_are_unrelated(word: int) -> None:
    """Neighbouring words and neighbouring numbers, where weak mixing would show."""
    key = torch.tensor([word, word ^ 1])
    n = 20_000
    others = [torch.tensor([word ^ 1, word]), torch.tensor([word ^ 1, word ^ 1]), torch.tensor([word, word])]
    others += [random.fold(key, 0), random.fold(key, 1)]
    mine = random.uniform(key, n).double() - 0.5
    for other in others:
        theirs = random.uniform(other, n).double() - 0.5
        assert abs(float((mine * theirs).mean()) * 12) < 5 / math.sqrt(n)
        assert int((random.bits(key, n) == random.bits(other, n)).sum()) <= 2


@given(PARTS, PARTS)
def test_key_depends_on_every_part(left: list, right: list) -> None:
    assert torch.equal(random.key(*left), random.key(*right)) == (left == right)
    assert (random.seed(*left) == random.seed(*right)) == (left == right)


def test_key_depends_on_order_kind_and_borders_of_its_parts() -> None:
    occasions: list[tuple[int | str, ...]] = [
        *[(1, 2), (2, 1), (12,), (1, "2"), ("1", 2), ("1", "2"), ("12",), ("1, 2",), ("1', '2",)],
        *[(1, 2, 0), (0, 1, 2), ("a", "bc"), ("ab", "c"), ("abc",), ()],
    ]
    for left, right in itertools.combinations(occasions, 2):
        assert not torch.equal(random.key(*left), random.key(*right)), (left, right)


def test_keys_are_two_words_and_seeds_fit_every_library() -> None:
    for i in range(200):
        key, seed = random.key("seed", i), random.seed("seed", i)
        assert key.shape == (2,)
        assert key.dtype == torch.int64
        assert 0 <= int(key.min()) <= int(key.max()) <= 2**32 - 1
        assert 0 <= seed < 2**63
    assert len({random.seed("seed", i) for i in range(1000)}) == 1000


@pytest.mark.parametrize("p", [0.0, 0.1, 0.25, 1 / 3, 0.5, 0.999])
def test_at_least_is_uniform_compared(p: float) -> None:
    keys = torch.stack([random.key(0, i) for i in range(20)])
    assert torch.equal(random.at_least(keys, 500, p), random.uniform(keys, 500) >= p)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (10, 1), (100, 25), (1_000, 100), (70_000, 7), (300_000, 100)])
def test_the_first_of_a_permutation_are_found_without_the_rest(n: int, k: int) -> None:
    for number in range(3):
        key = random.key("first", number)
        assert random.first_drawn(key, n, k).tolist() == random.permutation(key, n)[:k].tolist()


def test_the_first_of_a_permutation_are_right_where_draws_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equal draws the lower number comes first, and too few small ones are no reason to return fewer."""
    monkeypatch.setattr(random, "_mix", lambda word: word & 0xF)
    monkeypatch.setattr(random, "mix_words", lambda word: word & 0xF)
    key = torch.tensor([3, 5])
    assert random.first_drawn(key, 1_000, 100).tolist() == random.permutation(key, 1_000)[:100].tolist()
    monkeypatch.setattr(random, "_mix", lambda word: word * 0 + 2**32 - 1)
    monkeypatch.setattr(random, "mix_words", lambda word: np.full_like(word, random.WORD))
    assert random.first_drawn(key, 50, 3).tolist() == [0, 1, 2]
