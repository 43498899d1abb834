"""Sums of embeddings that add: counts, class sums and second moments, and the Gaussians that they stand for.

Embeddings are rounded to multiples of `GRID`, so products are multiples of 2**-32, and a double holds their sums
exactly as long as they are below 2**21. The same samples therefore give the same sums to the bit, however they are
split and in whatever order they are added, and subtracting a client's sums leaves exactly those of the others.
"""

from typing import Literal

import torch
from torch import Tensor

from protofed.method import Batch, Mean, Tree
from protofed.ops import random

GRID = 2.0**-16  # embeddings are rounded to multiples of this
ROUNDING = 1e-6  # of the largest eigenvalue: what is farther below zero is noise
Second = Literal["none", "shared", "diagonal", "full"]  # of second moments: one for all classes, or one for each


def on_grid(z: Tensor) -> Tensor:
    """Embeddings as doubles that are multiples of `GRID`."""
    return (z.double() / GRID).round() * GRID


def upper_triangle(square: Tensor) -> Tensor:
    """The upper triangle (..., D (D + 1) / 2) of symmetric matrices (..., D, D), row by row."""
    rows, columns = torch.triu_indices(square.shape[-1], square.shape[-1], device=square.device)
    return square[..., rows, columns]


def symmetric(triangle: Tensor, dim: int) -> Tensor:
    """Symmetric matrices (..., D, D) from their upper triangles."""
    rows, columns = torch.triu_indices(dim, dim, device=triangle.device)
    square = triangle.new_zeros(*triangle.shape[:-1], dim, dim)
    square[..., rows, columns] = triangle
    square[..., columns, rows] = triangle
    return square


def no_sums(classes: int, dim: int, second: Second) -> dict[str, Mean]:
    """What `embedding_sums` returns for no samples."""
    none = torch.zeros(0, dim), torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    return embedding_sums(none[0], Batch(*none), classes, second)


def embedding_sums(z: Tensor, batch: Batch, classes: int, second: Second) -> dict[str, Mean]:
    """Class sums (C, D) with counts (C,), and second moments: of all samples together (T,) with their number, or of
    each class (C, D) or (C, T), where T = D (D + 1) / 2 is a triangle."""
    z = on_grid(z)
    own = ((batch.y[:, None] == torch.arange(classes, device=z.device)) * batch.mask[:, None]).double()
    counts = own.sum(0)
    sums = {"means": Mean(own.T @ z, counts)}
    if second == "shared":
        sums["second"] = Mean(upper_triangle((z * batch.mask[:, None]).T @ z), counts.sum())
    elif second == "diagonal":
        sums["second"] = Mean(own.T @ z**2, counts)
    elif second == "full":
        squares = torch.stack([upper_triangle((z * own[:, [c]]).T @ z) for c in range(classes)])
        sums["second"] = Mean(squares, counts)
    return sums


def scatter(sums: Tree, within: bool) -> tuple[Tensor, Tensor]:
    """The covariance (D, D) that all samples share, about their class's mean or about the mean of all, and the degrees
    of freedom that it is divided by."""
    means, second = sums["means"], sums["second"]
    square = symmetric(second.total, means.total.shape[1])
    if within:
        square = square - means.total.T @ means.value
        freedom = means.weight.sum() - (means.weight > 0).sum()
    else:
        whole = means.total.sum(0)
        square = square - torch.outer(whole, whole) / second.weight.clamp(min=1)
        freedom = second.weight - 1
    return _symmetric(square) / freedom.clamp(min=1), freedom.clamp(min=0)


def class_scatters(sums: Tree) -> tuple[Tensor, Tensor]:
    """The covariance of each class (C, D, D), or its diagonal (C, D), and the degrees of freedom (C,)."""
    means, second = sums["means"], sums["second"]
    freedom = (means.weight - 1).clamp(min=0)
    if second.total.shape == means.total.shape:
        spread = (second.total - means.total * means.value).clamp(min=0)
        return spread / freedom.clamp(min=1)[:, None], freedom
    square = symmetric(second.total, means.total.shape[1])
    square = square - means.total[:, :, None] * means.value[:, None, :]
    return _symmetric(square) / freedom.clamp(min=1)[:, None, None], freedom


def _symmetric(square: Tensor) -> Tensor:
    """A matrix made exactly symmetric: rounding may differ on the two sides of the diagonal."""
    return (square + square.mT) / 2


def shrunk(covariance: Tensor, by: float | Tensor) -> Tensor:
    """(1 - by) S + by tr(S)/D I: between the covariance and a ball of the same size."""
    dim = covariance.shape[-1]
    ball = covariance.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    by = torch.as_tensor(by, dtype=covariance.dtype, device=covariance.device)[..., None, None]
    return (1 - by) * covariance + by * ball * torch.eye(dim, dtype=covariance.dtype, device=covariance.device)


def without_negative(square: Tensor) -> Tensor:
    """The nearest symmetric matrices (..., D, D) without eigenvalues below zero, which noise in the sums causes.
    Matrices that only rounding has moved stay as they are."""
    values, vectors = torch.linalg.eigh(square)
    noisy = values.amin(-1) < -ROUNDING * values.abs().amax(-1)
    near = (vectors * values.clamp(min=0)[..., None, :]) @ vectors.mT
    return torch.where(noisy[..., None, None], near, square)


def is_definite(square: Tensor) -> bool:
    """Whether all matrices (..., D, D) have a Cholesky factor."""
    return not bool(torch.linalg.cholesky_ex(square).info.any())


def usual_shrinkage(covariance: Tensor, freedom: Tensor) -> Tensor:
    """The shrinkage that suits a Gaussian with this many degrees of freedom: the oracle-approximating one (Chen et al.,
    2010), which needs only the covariance (..., D, D)."""
    dim = covariance.shape[-1]
    mean = covariance.diagonal(dim1=-2, dim2=-1).mean(-1) ** 2
    square = (covariance**2).mean((-2, -1))
    apart = (freedom + 1) * (square - mean / dim)
    return torch.where(apart > 0, ((square + mean) / apart.clamp(min=1e-300)).clamp(max=1), torch.ones_like(apart))


def enough_shrinkage(covariance: Tensor, freedom: Tensor, asked: float) -> Tensor:
    """The requested shrinkage; with fewer degrees of freedom than dimensions, at least the usual one."""
    usual = usual_shrinkage(covariance, freedom)
    wanted = torch.full_like(usual, asked)
    return torch.where(freedom < covariance.shape[-1], torch.maximum(usual, wanted), wanted)


def solved(square: Tensor, right: Tensor) -> Tensor:
    """S^-1 right for a symmetric S (D, D); by the pseudo-inverse where S is singular."""
    factor, failed = torch.linalg.cholesky_ex(square)
    if int(failed) == 0 and _well_conditioned(factor):
        return torch.cholesky_solve(right, factor)
    inverse: Tensor = torch.linalg.pinv(square, hermitian=True, rtol=square.shape[-1] * torch.finfo(square.dtype).eps)
    return inverse @ right


def _well_conditioned(factor: Tensor) -> bool:
    """Whether no pivot is rounding error."""
    pivots = factor.diagonal()
    return bool(pivots.min() > pivots.max() * (factor.shape[-1] * torch.finfo(factor.dtype).eps) ** 0.5)


def subtracted(sums: Tree, part: Tree) -> dict[str, Mean]:
    """The sums without a part of their samples: what a client takes with it when it leaves."""
    return {name: Mean(sums[name].total - part[name].total, sums[name].weight - part[name].weight) for name in sums}


def drawn_embeddings(sums: Tree, held: Tensor, many: int, key: Tensor) -> Tensor:
    """Embeddings (M, many, D) in float32, drawn from the Gaussian of each of the M classes that are held."""
    covariance, _ = class_scatters(sums)
    values, vectors = torch.linalg.eigh(covariance[held])
    spread = vectors * values.clamp(min=0).sqrt()[:, None]
    means, dim = sums["means"].value[held], covariance.shape[-1]
    noise = random.normal(key, len(means) * many * dim).to(means.dtype).reshape(len(means), many, dim)
    drawn: Tensor = means[:, None] + noise @ spread.mT
    return drawn.float()
