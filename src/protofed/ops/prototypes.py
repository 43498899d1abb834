"""Class prototypes: means of embeddings, one row per class."""

from typing import Literal

import torch
from torch import Tensor

from protofed.method import Batch, Mean, Tree
from protofed.ops.distances import DISTANCES, Distance

ScoredBy = Literal["downloaded", "newest"]  # which prototypes a client is scored with: its own, or the server's


def no_prototypes(classes: int, dim: int) -> Mean:
    """Prototypes (C, D) before there are any: every class has weight 0."""
    return Mean(torch.zeros(classes, dim), torch.zeros(classes))


def class_sums(z: Tensor, batch: Batch, classes: int) -> Mean:
    """Embedding sums (C, D) and counts (C,); an absent class has weight 0."""
    onehot = (batch.y[:, None] == torch.arange(classes, device=z.device)).to(z.dtype) * batch.mask[:, None]
    return Mean(onehot.T @ z, onehot.sum(0))


def downloaded(prototypes: Mean) -> Tree:
    """What a client keeps of the prototypes (C, D) it received: the prototypes, and which classes had one."""
    return {"downloaded": prototypes.value, "known": prototypes.weight > 0}


def as_downloaded(memory: Tree, newest: Mean) -> Mean:
    """The prototypes that a client kept; for a class of which it downloaded none, the newest."""
    known = memory["known"] | (newest.weight > 0)
    rows = torch.where(memory["known"][:, None], memory["downloaded"], newest.value)
    return Mean(rows, known.to(rows.dtype))


def one_each(prototypes: Mean) -> Mean:
    """The same as (C, 1, D): one prototype per class; weight 1 where it exists."""
    return Mean(prototypes.value[:, None], (prototypes.weight > 0).to(prototypes.weight.dtype)[:, None])


def per_client(prototypes: Mean) -> Mean:
    """The same prototypes, each with weight 1 whatever its number of samples."""
    present = (prototypes.weight > 0).to(prototypes.weight.dtype)
    return Mean.of(prototypes.value, present)


def holders(prototypes: Mean) -> Mean:
    """How many clients have each class, once summed: a Mean without values, of which only the weights matter."""
    return per_client(prototypes)._replace(total=prototypes.total[:, :0])


def refresh(old: Mean, new: Mean, forget: bool = False) -> Mean:
    """Global prototypes after a round, known ones with weight 1. A class that no client had keeps its old one."""
    seen = (new.weight > 0).to(new.weight.dtype)
    if forget:
        return Mean(new.value, seen)
    return Mean(new.otherwise(old.value), torch.maximum(seen, old.weight))


def distance_to_own(z: Tensor, y: Tensor, prototypes: Mean, distance: Distance) -> Tensor:
    """Distance (B,) of each embedding to its own class's prototype; 0 if there is none."""
    return DISTANCES[distance](z, prototypes.value[y]) * (prototypes.weight > 0)[y]


def distance_of_means(z: Tensor, batch: Batch, prototypes: Mean, distance: Distance) -> Tensor:
    """Distance from each class's mean embedding in the batch to its prototype, summed over the classes."""
    own = class_sums(z, batch, len(prototypes.weight))
    both = (own.weight > 0) & (prototypes.weight > 0)
    return (DISTANCES[distance](own.value, prototypes.value) * both).sum()


def nearest(z: Tensor, prototypes: Mean) -> Tensor:
    """Scores (B, C): minus the mean squared distance to each prototype, -inf if there is none."""
    distance: Tensor = ((z[:, None] - prototypes.value) ** 2).mean(-1)
    return -distance.masked_fill(prototypes.weight == 0, torch.inf)


def distances(z: Tensor, prototypes: Mean) -> Tensor:
    """Euclidean distances (B, C) to the nearest of the prototypes (C, K, D) of each class; inf if there is none."""
    apart: Tensor = torch.linalg.vector_norm(z[:, None, None] - prototypes.value, dim=-1)
    return apart.masked_fill(prototypes.weight == 0, torch.inf).amin(-1)
