"""Class prototypes: means of embeddings, one row per class."""

import torch
from torch import Tensor

from protofed.method import Batch, Mean
from protofed.ops.distances import DISTANCES, Distance


def no_prototypes(classes: int, dim: int) -> Mean:
    """Prototypes (C, D) before there are any: every class has weight 0."""
    return Mean(torch.zeros(classes, dim), torch.zeros(classes))


def class_sums(z: Tensor, batch: Batch, classes: int) -> Mean:
    """Embedding sums (C, D) and counts (C,); a class that is absent has weight 0."""
    onehot = (batch.y[:, None] == torch.arange(classes, device=z.device)).to(z.dtype) * batch.mask[:, None]
    return Mean(onehot.T @ z, onehot.sum(0))


def one_each(prototypes: Mean) -> Mean:
    """The same (C, 1, D): one prototype of each class, of weight 1 where there is one."""
    return Mean(prototypes.value[:, None], (prototypes.weight > 0).to(prototypes.weight.dtype)[:, None])


def per_client(prototypes: Mean) -> Mean:
    """The same prototypes, each counting once, however many samples it was made of."""
    present = (prototypes.weight > 0).to(prototypes.weight.dtype)
    return Mean.of(prototypes.value, present)


def holders(prototypes: Mean) -> Mean:
    """How many clients have each class, once added up: a Mean of nothing, of which only the weights count."""
    return per_client(prototypes)._replace(total=prototypes.total[:, :0])


def refresh(old: Mean, new: Mean, absent: str = "keep") -> Mean:
    """Global prototypes after a round, known ones with weight 1: a class that nobody had keeps the old one, or none."""
    seen = (new.weight > 0).to(new.weight.dtype)
    if absent == "forget":
        return Mean(new.value, seen)
    return Mean(new.otherwise(old.value), torch.maximum(seen, old.weight))


def distance_to_own(z: Tensor, y: Tensor, prototypes: Mean, distance: Distance = "mse") -> Tensor:
    """Distance (B,) to the prototype of one's own class; 0 where there is none."""
    return DISTANCES[distance](z, prototypes.value[y]) * (prototypes.weight > 0)[y]


def distance_of_means(z: Tensor, batch: Batch, prototypes: Mean, distance: Distance = "mse") -> Tensor:
    """Sum over the classes of a batch of the distance of their mean embedding to the class's prototype."""
    own = class_sums(z, batch, len(prototypes.weight))
    both = (own.weight > 0) & (prototypes.weight > 0)
    return (DISTANCES[distance](own.value, prototypes.value) * both).sum()


def nearest(z: Tensor, prototypes: Mean) -> Tensor:
    """Scores (B, C): minus the mean squared distance to each prototype, -inf where there is none."""
    distance = ((z[:, None] - prototypes.value) ** 2).mean(-1)
    return -distance.masked_fill(prototypes.weight == 0, torch.inf)


def distances(z: Tensor, prototypes: Mean) -> Tensor:
    """Euclidean distances (B, C) to the nearest of the prototypes (C, K, D) of each class; inf where there is none."""
    apart = torch.linalg.vector_norm(z[:, None, None] - prototypes.value, dim=-1)
    return apart.masked_fill(prototypes.weight == 0, torch.inf).amin(-1)
