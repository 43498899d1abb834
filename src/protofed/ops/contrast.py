"""Contrast of embeddings with prototypes: InfoNCE by cosine."""

import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.method import Mean

LEAST = 1e-3  # a cosine below this counts as this much before it is raised to a power: there the slope has no bound


def contrast_with(z: Tensor, y: Tensor, prototypes: Mean, temperature: float, power: float | None = None) -> Tensor:
    """InfoNCE (B,) by cosine: all prototypes (C, K, D) of the own class against those of all classes.

    0 for a class without any. `power`: the cosines are raised to it, and those that are not positive count as 0.
    """
    cosines = torch.einsum("bd,ckd->bck", F.normalize(z), F.normalize(prototypes.total, dim=-1))
    if power is not None:
        cosines = cosines.clamp(min=LEAST) ** power
    heat = (cosines / temperature).masked_fill(prototypes.weight == 0, -1e9)
    own = heat[torch.arange(len(y), device=z.device), y]
    known = (prototypes.weight.sum(1) > 0)[y]
    return (heat.flatten(1).logsumexp(1) - own.logsumexp(1)) * known


def centres(prototypes: Mean) -> Mean:
    """The mean (C, D) of each class's prototypes (C, K, D); weight 1 where there is one."""
    many = prototypes.weight.sum(1)
    rows = prototypes.total.sum(1) / many.clamp(min=1)[:, None]
    return Mean(rows, (many > 0).to(rows.dtype))
