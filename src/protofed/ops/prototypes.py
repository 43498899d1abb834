"""Class prototypes: means of embeddings, one row per class."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.method import Batch, Mean
from protofed.ops.trees import total


def no_prototypes(classes: int, dim: int) -> Mean:
    """Prototypes (C, D) before there are any: every class has weight 0."""
    return Mean(torch.zeros(classes, dim), torch.zeros(classes))


def class_sums(z: Tensor, batch: Batch, classes: int) -> Mean:
    """Embedding sums (C, D) and counts (C,); a class that is absent has weight 0."""
    onehot = F.one_hot(batch.y, classes).to(z.dtype) * batch.mask[:, None]
    return Mean(onehot.T @ z, onehot.sum(0))


def class_means(parts: Iterable[Mean]) -> Mean:
    """Local prototypes (C, D) from the sums of some batches, weighted by counts (C,)."""
    return total(parts)


def per_client(prototypes: Mean) -> Mean:
    """The same prototypes, each counting once, however many samples it was made of."""
    present = (prototypes.weight > 0).to(prototypes.weight.dtype)
    return Mean.of(prototypes.value, present)


def distance_to_own(z: Tensor, y: Tensor, prototypes: Mean) -> Tensor:
    """Mean squared distance (B,) to the prototype of one's own class; 0 where there is none."""
    return ((z - prototypes.value[y]) ** 2).mean(1) * (prototypes.weight > 0)[y]


def nearest(z: Tensor, prototypes: Mean) -> Tensor:
    """Scores (B, C): minus the mean squared distance to each prototype, -inf where there is none."""
    distance = ((z[:, None] - prototypes.value) ** 2).mean(-1)
    return -distance.masked_fill(prototypes.weight == 0, torch.inf)
