"""Less noise on the dimensions that tell classes apart, and more on the others, for the same price (VPDR, CVPR 2026).

Of each release, a client first chooses its dimensions, by how they vary between classes and within them, and then
releases class sums in two groups of dimensions. Each group has its own clip and its own noise.

- The choice. A score is between 0 and `worth_limit`, so one sample changes no score by more than that. Each gets
  Laplace noise of `scale`, and the largest k are taken. With a scale of 2 k limit / epsilon the choice costs epsilon:
  whatever the noise of the others, one sample moves each of the k by at most 2 limits against the best of the others.
- The noise. Of d dimensions, a group of d_g has sqrt(d_g / d) of the clip and w_g of the price, where the w add up to
  1 and w_g is the other group's share of the dimensions (the paper's kappa, as we read it). Its noise is then
  sqrt(d_g / d / w_g) times what all dimensions would have: less for the chosen ones as long as they are the fewer.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from protofed.errors import UserError
from protofed.privacy import Privacy


class Groups(NamedTuple):
    """How the dimensions of an embedding are split: the chosen ones first, the others second."""

    sizes: tuple[int, int]

    @property
    def clips(self) -> tuple[float, float]:
        """Of each group, over the clip of all dimensions."""
        return math.sqrt(self.sizes[0] / sum(self.sizes)), math.sqrt(self.sizes[1] / sum(self.sizes))

    @property
    def prices(self) -> tuple[float, float]:
        """Of each group, as a share of the whole: what it adds to 1 / noise squared."""
        return self.sizes[1] / sum(self.sizes), self.sizes[0] / sum(self.sizes)

    @property
    def noises(self) -> tuple[float, float]:
        """The standard deviation in each group, over that without groups."""
        chosen, others = (clip / math.sqrt(price) for clip, price in zip(self.clips, self.prices, strict=True))
        return chosen, others


def groups_of(privacy: Privacy, dimensions: int) -> Groups:
    """The groups for embeddings of so many dimensions; a UserError if nothing would be gained."""
    many = round(privacy.worth * dimensions)
    if not 1 <= many <= dimensions / 2:
        raise UserError(
            f"privacy.worth = {privacy.worth:g} of {dimensions} dimensions is {many}, and the dimensions that are "
            "worth most get less noise only if they are at least one and at most half. Use another share, or leave it "
            "out."
        )
    found = Groups((many, dimensions - many))
    spent = sum((clip / noise) ** 2 for clip, noise in zip(found.clips, found.noises, strict=True))
    if spent > 1 + 1e-9:
        raise AssertionError(f"two groups spend {spent} of what one would")
    return found


def scale_of_choice(privacy: Privacy, many: int, epsilon: float) -> float:
    """The scale of the Laplace noise with which choosing so many dimensions costs epsilon."""
    return 2 * many * privacy.worth_limit / epsilon


class Statistics(NamedTuple):
    """Of embeddings: what says how they vary between classes and within them."""

    counts: Tensor  # samples of each class (C,)
    total: Tensor  # sums by class (C, D)
    squares: Tensor  # sums of squares (D,)

    def __add__(self, other: "Statistics") -> "Statistics":  # type: ignore[override]  # of a tuple it would append
        return Statistics(self.counts + other.counts, self.total + other.total, self.squares + other.squares)


def worths(of: Statistics, limit: float) -> Tensor:
    """How well each dimension tells classes apart (D,): the variance between classes over the variance within them, cut
    at the limit."""
    counts, total, squares = of
    means = total / counts.clamp(min=1)[:, None]
    mean = total.sum(0) / counts.sum().clamp(min=1)
    between = (counts[:, None] * (means - mean).square()).sum(0)
    within = (squares - (counts[:, None] * means.square()).sum(0)).clamp(min=0)
    there = between > 1e-12 * squares  # the rest is rounding
    ratio = torch.where(there, between / within.clamp(min=1e-300), 0.0)
    return ratio.clamp(max=limit)


def largest(scores: Tensor, many: int) -> Tensor:
    """Which (D,) are the largest so many."""
    chosen = torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
    return chosen.index_fill(0, scores.topk(many).indices, True)
