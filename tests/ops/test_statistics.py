"""Sums of embeddings and the Gaussians that they stand for, number by number."""

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from protofed.method import Batch, Mean
from protofed.ops import random
from protofed.ops.statistics import (
    Second,
    class_scatters,
    drawn_embeddings,
    embedding_sums,
    enough_shrinkage,
    is_definite,
    no_sums,
    on_grid,
    scatter,
    shrunk,
    solved,
    subtracted,
    symmetric,
    upper_triangle,
    usual_shrinkage,
    without_negative,
)

CLASSES, DIM = 5, 3
Y = torch.tensor([0, 1, 1, 3, 3, 3, 3])  # of class 0 there is one, and nobody has 2 and 4
X = torch.tensor([[1, 2, 0], [3, 1, 1], [5, 4, 1], [0, 0, 2], [1, 7, 3], [2, 2, 2], [8, 1, 0]], dtype=torch.float64)


def sums_of(x: Tensor, y: Tensor, second: Second) -> dict[str, Mean]:
    """With a sample of padding in front."""
    padded = Batch(
        torch.cat([torch.full_like(X[:1, : x.shape[1]], 9), x]),
        torch.cat([torch.zeros(1, dtype=y.dtype), y]),
        torch.cat([torch.zeros(1), torch.ones(len(y))]),
    )
    return embedding_sums(padded.x, padded, CLASSES, second)


def close(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, torch.as_tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_embeddings_are_rounded_to_multiples_of_a_65536th() -> None:
    z = torch.tensor([0.3, 0.7, -1.6, 4.0]) / 65536
    close(on_grid(z) * 65536, [0.0, 1.0, -2.0, 4.0])
    found = embedding_sums(z[:, None], Batch(z[:, None], torch.zeros(4, dtype=torch.int64), torch.ones(4)), 1, "none")
    close(found["means"].total * 65536, [[3.0]])


def test_sums_by_hand() -> None:
    x, y = torch.tensor([[1.0, 2], [3, 4], [5, 6]]), torch.tensor([0, 2, 2])
    for second in get_args(Second):
        means = sums_of(x, y, second)["means"]
        close(means.total, [[1, 2], [0, 0], [8, 10], [0, 0], [0, 0]])
        close(means.weight, [1, 0, 2, 0, 0])
    assert sums_of(x, y, "none").keys() == {"means"}
    shared = sums_of(x, y, "shared")["second"]
    close(shared.total, [1 + 9 + 25, 2 + 12 + 30, 4 + 16 + 36])
    close(shared.weight, 3)
    diagonal = sums_of(x, y, "diagonal")["second"]
    close(diagonal.total, [[1, 4], [0, 0], [34, 52], [0, 0], [0, 0]])
    close(diagonal.weight, [1, 0, 2, 0, 0])
    full = sums_of(x, y, "full")["second"]
    close(full.total, [[1, 2, 4], [0, 0, 0], [34, 42, 52], [0, 0, 0], [0, 0, 0]])
    close(full.weight, [1, 0, 2, 0, 0])


@pytest.mark.parametrize("second", get_args(Second))
def test_no_samples_have_sums_of_zero_in_the_same_shapes(second: Second) -> None:
    none, some = no_sums(CLASSES, DIM, second), sums_of(X, Y, second)
    assert none.keys() == some.keys()
    for name, (total, weight) in none.items():
        assert (total.shape, weight.shape) == (some[name].total.shape, some[name].weight.shape)
        assert not bool(total.any() | weight.any())


def test_triangles_are_row_by_row() -> None:
    square = torch.tensor([[1.0, 2, 3], [2, 4, 5], [3, 5, 6]])
    assert upper_triangle(square).tolist() == [1, 2, 3, 4, 5, 6]
    assert torch.equal(symmetric(upper_triangle(square), 3), square)
    two = torch.stack([square, 7 * square])
    assert torch.equal(symmetric(upper_triangle(two), 3), two)


def covariance(x: Tensor) -> Tensor:
    return torch.cov(x.T) if len(x) > 1 else torch.zeros(DIM, DIM, dtype=torch.float64)


def test_the_covariance_that_all_samples_share() -> None:
    whole, freedom = scatter(sums_of(X, Y, "shared"), within=False)
    close(whole, covariance(X))
    assert float(freedom) == 6
    within, freedom = scatter(sums_of(X, Y, "shared"), within=True)
    close(within, (1 * covariance(X[1:3]) + 3 * covariance(X[3:])) / 4)
    assert float(freedom) == 7 - 3, "of seven samples, three classes' means are taken"
    assert torch.equal(within, within.mT)


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("many", [0, 1, 2])
def test_the_covariance_of_hardly_any_samples(many: int, within: bool) -> None:
    """Two samples of one class have one degree of freedom; fewer have none, and a covariance of 0."""
    rows = slice(1, 1 + many)
    found, freedom = scatter(sums_of(X[rows], Y[rows], "shared"), within)
    close(found, covariance(X[rows]))
    assert float(freedom) == max(many - 1, 0)


def test_the_covariance_of_each_class() -> None:
    wanted = [covariance(X[c == Y]) for c in range(CLASSES)]
    full, freedom = class_scatters(sums_of(X, Y, "full"))
    close(full, torch.stack(wanted))
    assert torch.equal(full, full.mT)
    assert freedom.tolist() == [0, 1, 0, 3, 0]
    diagonal, freedom = class_scatters(sums_of(X, Y, "diagonal"))
    close(diagonal, torch.stack([square.diagonal() for square in wanted]))
    assert freedom.tolist() == [0, 1, 0, 3, 0]


def test_no_variance_is_negative() -> None:
    """Noise may make a second moment smaller than the square of the mean."""
    sums = {"means": Mean(torch.tensor([[6.0, 6.0]]), torch.tensor([3.0]))}
    found, _ = class_scatters(sums | {"second": Mean(torch.tensor([[11.0, 13.0]]), torch.tensor([3.0]))})
    assert found.tolist() == [[0, 0.5]]


def test_shrinking_keeps_the_size() -> None:
    square = torch.tensor([[1.0, 2, 0], [2, 5, 0], [0, 0, 3]], dtype=torch.float64)  # whose mean variance is 3
    quarter = torch.tensor([[1.5, 1.5, 0], [1.5, 4.5, 0], [0, 0, 3]], dtype=torch.float64)
    close(shrunk(square, 0.25), quarter)
    several = torch.stack([square, 10 * square])
    close(shrunk(several, torch.tensor([0.0, 0.25])), torch.stack([square, 10 * quarter]))
    close(shrunk(several, 0.25), torch.stack([quarter, 10 * quarter]))


def test_eigenvalues_below_zero_are_taken_out_unless_they_are_rounding() -> None:
    """Rounding is up to a millionth of the largest eigenvalue."""
    turned = torch.tensor([[1.0, 2], [2, 1]], dtype=torch.float64)  # eigenvalues 3 and -1
    close(without_negative(turned), [[1.5, 1.5], [1.5, 1.5]])
    rounded, noisy = (torch.diag(torch.tensor([2.0, low], dtype=torch.float64)) for low in (-1e-6, -3e-6))
    assert torch.equal(without_negative(rounded), rounded)
    close(without_negative(noisy), [[2, 0], [0, 0]])
    below = -torch.eye(2, dtype=torch.float64)
    found = without_negative(torch.stack([turned, rounded, noisy, below]))
    close(found, torch.stack([without_negative(square) for square in (turned, rounded, noisy, below)]))
    close(found[3], torch.zeros(2, 2))


def test_which_matrices_are_definite() -> None:
    good, bad = torch.eye(2), torch.tensor([[1.0, 2], [2, 1]])
    assert is_definite(good)
    assert not is_definite(bad)
    assert is_definite(torch.stack([good, good, good]))
    assert not is_definite(torch.stack([good, bad, good]))


def test_the_usual_shrinkage_by_hand() -> None:
    """Of variances 1 and 3, the mean of all squares is 5/2 and the squared mean variance 4: 6.5 / ((n + 1) / 2)."""
    square = torch.diag(torch.tensor([1.0, 3.0], dtype=torch.float64))
    for factor in (1.0, 0.1, 10.0):
        close(usual_shrinkage(factor * square, torch.tensor(25.0)), 0.5)
    several = torch.stack([square, 0.1 * square, torch.eye(2, dtype=torch.float64), 0 * square])
    close(usual_shrinkage(several, torch.tensor([51.0, 5.0, 100.0, 100.0])), [0.25, 1, 1, 1])


def test_shrinkage_is_chosen_where_there_are_fewer_degrees_of_freedom_than_dimensions() -> None:
    square = torch.diag(torch.tensor([1.0, 3.0], dtype=torch.float64))
    found = enough_shrinkage(torch.stack([square] * 3), torch.tensor([1.0, 2.0, 3.0]), 0.1)
    close(found, [1, 0.1, 0.1])
    long = torch.zeros(40, 40, dtype=torch.float64)
    long[0, 0] = 1
    usual = usual_shrinkage(long, torch.tensor(30.0))
    assert 0.06 < float(usual) < 0.07
    close(enough_shrinkage(long, torch.tensor(30.0), 0.01), usual)
    close(enough_shrinkage(long, torch.tensor(30.0), 0.1), 0.1)


def test_equations_are_solved_by_cholesky_and_by_the_least_solution_where_there_is_no_other() -> None:
    a = torch.randn(9, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    square, right = a.T @ a, a[:2].T.contiguous()
    close(square @ solved(square, right), right)
    assert torch.equal(solved(square, right), torch.cholesky_solve(right, torch.linalg.cholesky(square)))
    flat = torch.ones(2, 2, dtype=torch.float64)
    close(solved(flat, torch.tensor([[2.0], [2.0]], dtype=torch.float64)), [[1], [1]])
    tiny = torch.diag(torch.tensor([4.0, 1e-20], dtype=torch.float64))  # has a factor, but of rounding errors
    close(solved(tiny, torch.ones(2, 1, dtype=torch.float64)), [[0.25], [0]])
    small = torch.diag(torch.tensor([4.0, 1e-12], dtype=torch.float64))
    torch.testing.assert_close(solved(small, torch.ones(2, 1).double())[1, 0], torch.tensor(1e12).double())


def test_a_part_can_be_taken_out() -> None:
    sums, part = sums_of(X, Y, "shared"), sums_of(X[:3], Y[:3], "shared")
    rest = subtracted(sums, part)
    for name, mean in sums_of(X[3:], Y[3:], "shared").items():
        assert torch.equal(rest[name].total, mean.total)
        assert torch.equal(rest[name].weight, mean.weight)


def test_embeddings_are_drawn_from_the_gaussian_of_each_class_that_is_held() -> None:
    sums = sums_of(X, Y, "full")
    drawn = drawn_embeddings(sums, sums["means"].weight > 0, 40_000, random.key("drawn"))
    assert drawn.shape == (3, 40_000, DIM)
    assert drawn.dtype == torch.float32
    for place, rows in enumerate((slice(0, 1), slice(1, 3), slice(3, 7))):
        torch.testing.assert_close(drawn[place].mean(0).double(), X[rows].mean(0), rtol=0, atol=0.06)
        torch.testing.assert_close(torch.cov(drawn[place].T).double(), covariance(X[rows]), rtol=0.03, atol=0.1)
    assert float(drawn[0].std(0).max()) < 1e-3, "a class of one sample has no spread"


def test_embeddings_can_be_drawn_where_noise_has_spoilt_the_sums() -> None:
    means = Mean(torch.zeros(1, 2, dtype=torch.float64), torch.full((1,), 3.0, dtype=torch.float64))
    second = Mean(torch.tensor([[2.0, 4, 2]], dtype=torch.float64), means.weight)  # a covariance of [[1, 2], [2, 1]]
    drawn = drawn_embeddings({"means": means, "second": second}, means.weight > 0, 10_000, random.key("spoilt"))
    torch.testing.assert_close(torch.cov(drawn[0].T), torch.full((2, 2), 1.5), rtol=0.1, atol=0)
