"""Prototypes whose weights are any numbers: only the means, and which classes have one, make a difference."""

import math

import pytest
import torch
from torch import Tensor

from protofed.method import Batch, Mean
from protofed.ops.prototypes import (
    as_downloaded,
    distance_of_means,
    distance_to_own,
    distances,
    downloaded,
    holders,
    nearest,
    no_prototypes,
    one_each,
    per_client,
    refresh,
)

ROWS = torch.tensor([[9.0, 9.0], [1.0, -2.0], [0.5, 4.0], [-3.0, 0.0]])
WEIGHT = torch.tensor([0.0, 1.0, 3.0, 0.5])  # nobody has class 0
PLAIN = Mean(ROWS * (WEIGHT > 0)[:, None], (WEIGHT > 0).float())
SUMS = Mean.of(PLAIN.total, WEIGHT)
Z = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 1.0], [3.0, 3.0], [50.0, -50.0]])
Y = torch.tensor([0, 1, 2, 3, 2])
BATCH = Batch(Z, Y, torch.tensor([1.0, 1, 1, 1, 0]))


def same(left: Mean, right: Mean) -> None:
    torch.testing.assert_close((left.value, left.weight), (right.value, right.weight))


def length(*differences: float) -> float:
    return math.sqrt(sum(d**2 for d in differences))


def test_weights_say_no_more_than_which_classes_there_are() -> None:
    assert downloaded(SUMS)["known"].tolist() == [False, True, True, True]
    torch.testing.assert_close(downloaded(SUMS)["downloaded"], PLAIN.total)
    some = downloaded(Mean(ROWS + 1, torch.tensor([0.0, 0.0, 1.0, 0.0])))
    got = as_downloaded(some, SUMS)
    torch.testing.assert_close(got.value, torch.stack([0 * ROWS[0], ROWS[1], ROWS[2] + 1, ROWS[3]]))
    assert got.weight.tolist() == [0, 1, 1, 1]
    same(per_client(SUMS), PLAIN)
    torch.testing.assert_close(per_client(SUMS).total, PLAIN.total)
    torch.testing.assert_close(one_each(SUMS), Mean(PLAIN.total[:, None], PLAIN.weight[:, None]))
    assert holders(SUMS).weight.tolist() == [0, 1, 1, 1]
    assert holders(SUMS).total.shape == (4, 0), "nothing but the numbers is sent"
    torch.testing.assert_close(nearest(Z, SUMS), nearest(Z, PLAIN))
    assert nearest(Z, SUMS)[0].tolist() == pytest.approx([-math.inf, -2.0, -8.125, -8.0])


@pytest.mark.parametrize("forget", [False, True])
def test_a_round_replaces_what_somebody_holds(forget: bool) -> None:
    old = Mean(torch.full((4, 2), 7.0), torch.ones(4))
    new = refresh(old, SUMS, forget)
    assert new.weight.tolist() == [0.0 if forget else 1.0, 1, 1, 1]
    kept = torch.zeros(2) if forget else torch.full((2,), 7.0)
    torch.testing.assert_close(new.total, torch.cat([kept[None], ROWS[1:]]))
    same(refresh(no_prototypes(4, 2), SUMS), PLAIN)


def test_distances_to_prototypes() -> None:
    expected = [0.0, length(1, 4), length(1.5, 3), length(6, 3)]
    torch.testing.assert_close(distance_to_own(Z, Y, SUMS, "l2")[:4], torch.tensor(expected))
    assert float(distance_of_means(Z, BATCH, SUMS, "l2")) == pytest.approx(sum(expected))  # one sample of each class
    twice = Batch(torch.cat([Z, Z + 2]), torch.cat([Y, Y]), torch.cat([BATCH.mask, BATCH.mask]))
    middle = [length(0, 5), length(0.5, 2), length(7, 4)]  # of the means, which are z + 1
    assert float(distance_of_means(twice.x, twice, SUMS, "l2")) == pytest.approx(sum(middle))


def test_the_nearest_of_several_prototypes_of_a_class() -> None:
    rows = torch.tensor([[[3.0, 4.0], [0.0, 1.0]], [[6.0, 8.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]])
    weight = torch.tensor([[1.0, 2.0], [0.5, 0.0], [0.0, 0.0]])
    z: Tensor = torch.tensor([[0.0, 0.0], [3.0, 3.0]])
    got = distances(z, Mean.of(rows, weight))
    assert got[0].tolist() == pytest.approx([1.0, 10.0, math.inf])
    assert got[1].tolist() == pytest.approx([1.0, length(3, 5), math.inf])
