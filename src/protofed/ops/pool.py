"""MP-FedCL's pool: several prototypes per class from each client, (S, C, K, D) with weights (S, C, K)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.method import Mean
from protofed.ops.prototypes import refresh

UNKNOWN = -1e9  # the logit of a class without any prototype


def no_pool(classes: int, clusters: int, dim: int) -> Mean:
    """The empty pool: one client that has sent nothing."""
    return Mean(torch.zeros(1, classes, clusters, dim), torch.zeros(1, classes, clusters))


def class_means(pool: Mean, old: Mean) -> Mean:
    """Eq. 9: the mean (C, D) of all prototypes of a class; a class that no client had keeps its old mean."""
    return refresh(old, Mean(pool.total.sum((0, 2)), pool.weight.sum((0, 2))))


def pad(pool: Mean, means: Mean, whole: bool) -> Mean:
    """Eq. 10: fill a client's missing prototypes with the class mean; weight 1 for what a loss averages over.

    `whole`: a client with fewer than K prototypes of a class gets the mean in all K places, as in the paper. Otherwise
    the mean only fills the gaps, and only real prototypes count, or one mean for a class without any.
    """
    there = pool.weight > 0
    keep = there.all(2, keepdim=True) if whole else there
    filled = torch.where(keep[..., None], pool.total, means.value[:, None])
    counts = torch.ones_like(there) if whole else there
    counts = counts | ((torch.arange(there.shape[2], device=there.device) == 0) & ~there.any(2, keepdim=True))
    heard = there.flatten(1).any(1)[:, None, None, None]  # a client that sent nothing is left out, not padded
    return Mean(filled, (counts & heard[..., 0] & (means.weight > 0)[:, None]).to(pool.weight.dtype))


def contrast(v: Tensor, y: Tensor, pool: Mean, means: Mean, temperature: float) -> Tensor:
    """Eq. 11, per sample (B,): cross-entropy over classes of v . u / t, averaged over clients and prototypes.

    P(y) is the sample's own class; the text's "labels distinct from y" would push embeddings to the wrong classes.
    """
    logits = torch.einsum("bd,sckd->bskc", v, pool.total) / temperature
    logits = logits.masked_fill(means.weight == 0, UNKNOWN)
    own = y[:, None, None, None].expand(*logits.shape[:3], 1)
    loss = -F.log_softmax(logits, -1).gather(-1, own)[..., 0]  # (B, S, K)
    used = pool.weight.movedim(1, 0)[y]
    return (loss * used).sum((1, 2)) / used.sum((1, 2)).clamp(min=1)


def by_class(pool: Mean, means: Mean) -> Mean:
    """All prototypes of each class (C, S * K + 1, D); the last is the mean if the pool has none of a known class."""
    spare = (means.weight > 0) & (pool.weight.sum((0, 2)) == 0)
    rows = torch.cat([pool.total.movedim(1, 0).flatten(1, 2), means.value[:, None]], 1)
    there = torch.cat([pool.weight.movedim(1, 0).flatten(1) > 0, spare[:, None]], 1)
    return Mean(rows, there.to(rows.dtype))


def nearest_of_pool(z: Tensor, pool: Mean, means: Mean) -> Tensor:
    """Eq. 13, scores (B, C): minus the distance to the nearest prototype of each class, -inf where there is none.

    A known class that no client of the last round had is represented by its mean.
    """
    rows, weight = by_class(pool, means)  # (C, S * K + 1, D)
    products = torch.einsum("bd,cnd->bcn", z, rows)
    squared: Tensor = (z**2).sum(-1)[:, None, None] + (rows**2).sum(-1) - 2 * products
    return -squared.masked_fill(weight == 0, torch.inf).amin(-1).clamp(min=0).sqrt()
