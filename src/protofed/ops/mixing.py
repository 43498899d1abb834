"""A client's own Gaussian statistics mixed with those of all clients: personal linear discriminants."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.method import Batch, Tree
from protofed.ops import random
from protofed.ops.heads import FLOOR, discriminant_head, linear_scores, log_prior
from protofed.ops.statistics import embedding_sums, enough_shrinkage, scatter, shrunk, subtracted


class Fold(NamedTuple):
    """A part of a client's samples, with its sums."""

    z: Tensor
    y: Tensor
    sums: Tree


def halves(z: Tensor, y: Tensor, mask: Tensor, classes: int, key: Tensor) -> list[Fold]:
    """A client's samples in two random halves of every class."""
    second = random.ranks(random.fold(key, -2), y, mask > 0) % 2
    folds = []
    for number in range(2):
        rows = (second == number) & (mask > 0)
        part = Batch(z[rows], y[rows], mask[rows])
        folds.append(Fold(part.x, part.y, embedding_sums(part.x, part, classes, "shared")))
    return folds


def mixed_head(everyone: Tree, own: Tree, beta: float, within: bool, shrinkage: float) -> dict[str, Tensor]:
    """Linear discriminants from means and covariance of which the share `beta` is the client's own, with its own prior.
    For a class that the client lacks, the mean is that of all clients."""
    mine, theirs = own["means"], everyone["means"]
    share = beta * ((mine.weight > 0) & (theirs.weight > 0)).double() + ((mine.weight > 0) & (theirs.weight == 0))
    means = share[:, None] * mine.value + (1 - share[:, None]) * theirs.value
    (small, few), (large, many) = scatter(own, within), scatter(everyone, within)
    taken = enough_shrinkage(large, many, shrinkage), enough_shrinkage(small, few, shrinkage)
    covariance = (1 - beta) * shrunk(large, taken[0]) + beta * shrunk(small, taken[1])
    held = (mine.weight > 0) | (theirs.weight > 0)
    return discriminant_head(means, covariance, log_prior(mine.weight, "counts", FLOOR), held)


def best_mixture(
    everyone: Tree, own: Tree, folds: Sequence[Fold], betas: Sequence[float], within: bool, shrinkage: float
) -> float:
    """The share under which each half of a client's samples is most likely, given all other samples of all clients."""
    found: list[float] = []
    for beta in betas:
        worth = 0.0
        for fold in folds:
            if not len(fold.y):
                continue
            rest = subtracted(everyone, fold.sums)
            head = mixed_head(rest, subtracted(own, fold.sums), beta, within, shrinkage)
            scores = linear_scores(head, fold.z.float())
            known = head["held"][fold.y]  # the only samples of a class teach nothing about it
            worth -= float(F.cross_entropy(scores[known], fold.y[known], reduction="sum")) if bool(known.any()) else 0.0
        found.append(worth)
    return betas[int(torch.tensor(found).argmax())]
