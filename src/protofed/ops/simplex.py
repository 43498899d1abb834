"""The best mixture of several things: a quadratic problem over weights that are not negative and sum to 1."""

import torch
from torch import Tensor


def onto_simplex(points: Tensor) -> Tensor:
    """The nearest points (..., K) whose entries are not negative and sum to 1; an entry of -inf becomes 0."""
    ordered = points.sort(-1, descending=True).values
    count = torch.arange(1, points.shape[-1] + 1, device=points.device)
    excess = (ordered.masked_fill(~torch.isfinite(ordered), 0).cumsum(-1) - 1) / count
    used = ((ordered > excess) & torch.isfinite(ordered)).sum(-1, keepdim=True).clamp(min=1)
    return (points - excess.gather(-1, used - 1)).clamp(min=0)


def best_mixtures(quadratic: Tensor, allowed: Tensor, steps: int = 500) -> Tensor:
    """For symmetric matrices (N, K, K), the weights a (N, K) that minimise a'Qa, by accelerated projected gradients.

    `allowed` (K,) says which entries may be above 0; if none may, all weights are 0.
    """
    allowed = allowed.expand(quadratic.shape[:-1])
    largest = torch.linalg.matrix_norm(quadratic, ord=2).clamp(min=1e-12)[:, None]
    first = allowed.to(quadratic.dtype) / allowed.sum(-1, keepdim=True).clamp(min=1)
    best, ahead, pace = first, first, 1.0
    for _ in range(steps):
        slope = (quadratic @ ahead[..., None])[..., 0]
        new = onto_simplex((ahead - slope / largest).masked_fill(~allowed, -torch.inf))
        quicker = (1 + (1 + 4 * pace**2) ** 0.5) / 2
        ahead, best, pace = new + (pace - 1) / quicker * (new - best), new, quicker
    return best
