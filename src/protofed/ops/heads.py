"""Classifiers in closed form, computed from sums of embeddings (`ops/statistics.py`).

A linear head is {"weight": (C, D), "bias": (C,), "held": (C,)}. A class that nobody holds has zeros, is not held, and
gets the score -inf.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.method import Tree
from protofed.ops.statistics import (
    class_scatters,
    enough_shrinkage,
    is_definite,
    scatter,
    shrunk,
    solved,
    symmetric,
    without_negative,
)

FLOOR = 1e-4  # the least share of a class in a client's own prior, as in pFedFDA
Prior = Literal["counts", "uniform"]  # how likely a class is before its sample is seen


def log_prior(counts: Tensor, prior: Prior, floor: float = 0.0) -> Tensor:
    """Log of each class's probability (C,); 0 for a class that is not held."""
    share = counts / counts.sum().clamp(min=1) if prior == "counts" else torch.ones_like(counts)
    return torch.where(share + floor > 0, (share + floor).clamp(min=1e-300).log(), torch.zeros_like(share))


def as_head(weight: Tensor, bias: Tensor, held: Tensor) -> dict[str, Tensor]:
    """A linear head in float32, with zeros for classes that are not held."""
    return {
        "weight": (weight * held[:, None]).float(),
        "bias": torch.where(held, bias, torch.zeros_like(bias)).float(),
        "held": held,
    }


def linear_scores(head: Tree, z: Tensor) -> Tensor:
    """Scores (B, C) of embeddings (B, D)."""
    return F.linear(z, head["weight"], head["bias"]).masked_fill(~head["held"], -torch.inf)


def nearest_mean_head(sums: Tree) -> dict[str, Tensor]:
    """-|z - mean|^2 / 2, but for |z|^2, which all classes share."""
    means = sums["means"]
    return as_head(means.value, -(means.value**2).sum(1) / 2, means.weight > 0)


def cosine_head(sums: Tree) -> dict[str, Tensor]:
    """cos(z, mean), times |z|, which all classes share."""
    means = sums["means"]
    return as_head(F.normalize(means.value), torch.zeros_like(means.weight), means.weight > 0)


def discriminant_head(means: Tensor, covariance: Tensor, prior: Tensor, held: Tensor) -> dict[str, Tensor]:
    """Linear discriminants: S^-1 mean, and a bias -mean' S^-1 mean / 2 + log prior."""
    weight = solved(covariance, means.T).T
    return as_head(weight, prior - (weight * means).sum(1) / 2, held)


def lda_head(sums: Tree, within: bool, shrinkage: float, prior: Prior) -> dict[str, Tensor]:
    """Linear discriminant analysis, with the shrinkage that was taken."""
    means, (covariance, freedom) = sums["means"], scatter(sums, within)
    taken = enough_shrinkage(covariance, freedom, shrinkage)
    if not is_definite(shrunk(covariance, taken)):
        covariance = without_negative(covariance)
        taken = enough_shrinkage(covariance, freedom, shrinkage)
    head = discriminant_head(means.value, shrunk(covariance, taken), log_prior(means.weight, prior), means.weight > 0)
    return head | {"shrinkage": taken.float()}


def ridge_head(sums: Tree, gamma: float, bias: bool) -> dict[str, Tensor]:
    """Ridge regression on one-hot labels: (B + gamma I)^-1 A; a bias is the weight of a feature that is always 1."""
    means, second = sums["means"], sums["second"]
    square = symmetric(second.total, means.total.shape[1])
    right = means.total.T
    if bias:
        whole = means.total.sum(0)
        square = torch.cat([torch.cat([square, whole[:, None]], 1), torch.cat([whole, second.weight[None]])[None]])
        right = torch.cat([right, means.weight[None]])
    found = solved(square + gamma * torch.eye(len(square), dtype=square.dtype, device=square.device), right).T
    dim = means.total.shape[1]
    return as_head(found[:, :dim], found[:, dim] if bias else torch.zeros_like(means.weight), means.weight > 0)


def qda_head(sums: Tree, shrinkage: float, prior: Prior) -> dict[str, Tensor]:
    """A Gaussian for each class: {"mean": (C, D), "whiten": (C, D, D) or (C, D), "bias": (C,), "held": (C,)}.

    A class with a single sample has the covariance of all classes together.
    """
    means, (own, freedom) = sums["means"], class_scatters(sums)
    held, full = means.weight > 0, own.ndim == 3
    rest = (slice(None), None, None) if full else (slice(None), None)
    pooled = (own * freedom[rest]).sum(0) / freedom.sum().clamp(min=1)
    one = (freedom < 1)[rest]
    own, freedom = torch.where(one, pooled, own), torch.where(freedom < 1, freedom.sum(), freedom)
    square = own if full else torch.diag_embed(own)
    whole, taken = _invertible(square, freedom, shrinkage, full)
    if not is_definite(whole):
        whole, taken = _invertible(without_negative(square), freedom, shrinkage, full)
    factor = torch.linalg.cholesky(whole)
    eye = torch.eye(square.shape[-1], dtype=square.dtype, device=square.device)
    whiten = torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False)
    logs = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    keep = held.double()
    return {
        "mean": means.value.float(),
        "whiten": ((whiten if full else whiten.diagonal(dim1=-2, dim2=-1)) * keep[rest]).float(),
        "bias": torch.where(held, log_prior(means.weight, prior) - logs, torch.zeros_like(logs)).float(),
        "held": held,
        "shrinkage": torch.where(held, taken, torch.zeros_like(taken)).float(),
    }


def _invertible(square: Tensor, freedom: Tensor, shrinkage: float, full: bool) -> tuple[Tensor, Tensor]:
    """Covariances (C, D, D) moved towards balls, and by how much."""
    taken = enough_shrinkage(square, freedom, shrinkage) if full else torch.full_like(freedom, shrinkage)
    ball = square.diagonal(dim1=-2, dim2=-1).mean(-1)
    eye = torch.eye(square.shape[-1], dtype=square.dtype, device=square.device)
    least = (1e-6 * ball + 1e-12)[:, None, None] * eye  # also where all samples of a class are alike
    return shrunk(square, taken) + least, taken


def qda_scores(head: Tree, z: Tensor) -> Tensor:
    """Log likelihood of each class (B, C), but for a constant that all classes share."""
    full = head["whiten"].ndim == 3
    columns = []
    for mean, whiten, bias in zip(head["mean"], head["whiten"], head["bias"], strict=True):
        white = (z - mean) @ whiten.T if full else (z - mean) * whiten
        columns.append(bias - (white**2).sum(1) / 2)
    return torch.stack(columns, 1).masked_fill(~head["held"], -torch.inf)
