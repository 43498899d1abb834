"""Unit vectors far apart from each other: initial class prototypes."""

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.errors import UserError


def orthogonal(classes: int, dim: int, seed: int) -> Tensor:
    """Orthonormal rows (C, D)."""
    if classes > dim:
        raise UserError(
            f"method.start = 'orthogonal' needs an embedding at least as wide as there are classes, but {classes} "
            f"classes meet width {dim}. Use method.start = 'separated'."
        )
    rows = torch.empty(classes, dim)
    return torch.nn.init.orthogonal_(rows, generator=torch.Generator().manual_seed(seed))


def simplex(classes: int, dim: int, seed: int) -> Tensor:
    """Unit rows (C, D) with pairwise cosine -1 / (C - 1), which is optimal for C <= D + 1."""
    corners = torch.eye(classes, dtype=torch.float64) - 1 / classes  # a regular simplex in C - 1 dimensions
    basis = torch.linalg.svd(corners).Vh[: max(classes - 1, 1)]
    flat = F.normalize(corners @ basis.T) if classes > 1 else torch.ones(1, 1, dtype=torch.float64)
    turn = torch.linalg.qr(_normal(dim, dim, seed)).Q[: flat.shape[1]]  # any rotation is as good; the seed picks one
    return F.normalize(flat @ turn).float()


@lru_cache(maxsize=32)
def separated(classes: int, dim: int, seed: int) -> Tensor:
    """Unit rows (C, D) with the largest possible smallest distance: problem (1) of FedNH.

    Up to D + 1 classes this is the regular simplex, in the plane the regular polygon, up to 2 D classes the axes and
    their opposites. Beyond that there is no formula: the smallest distance is maximised from several starts, through a
    soft minimum that becomes harder step by step.
    """
    if classes <= dim + 1:
        return simplex(classes, dim, seed)
    if dim == 2:
        angle = torch.arange(classes, dtype=torch.float64) * (2 * math.pi / classes)
        return torch.stack([angle.cos(), angle.sin()], 1).float()
    if classes <= 2 * dim:
        axes = torch.linalg.qr(_normal(dim, dim, seed)).Q
        return torch.cat([axes, -axes])[:classes].float()
    starts = [_spread_out(_normal(classes, dim, seed + number)) for number in range(3)]
    return max(starts, key=smallest_distance).float()


def smallest_distance(rows: Tensor) -> float:
    return float(torch.pdist(rows).min())


def _normal(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed % 2**63)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)


def _spread_out(start: Tensor) -> Tensor:
    best = rows = F.normalize(start)
    pairs = torch.tril_indices(len(start), len(start), -1)
    for hardness in (4.0, 16.0, 64.0, 256.0, 1024.0):
        point = rows.clone().requires_grad_()
        optimizer = torch.optim.Adam([point], lr=0.3 / hardness**0.5)
        for _ in range(200):
            optimizer.zero_grad()
            unit = F.normalize(point)
            cosine = (unit @ unit.T)[pairs[0], pairs[1]]
            torch.autograd.backward(torch.logsumexp(hardness * cosine, 0) / hardness)
            optimizer.step()
        rows = F.normalize(point.detach())
        best = max(best, rows, key=smallest_distance)
    return best
