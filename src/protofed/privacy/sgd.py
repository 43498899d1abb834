"""The arithmetic of a training step with noise (DP-SGD, Abadi et al., CCS 2016).

A step adds up the gradients of the samples in its batch, none of them longer than a clip, and adds Gaussian noise. One
sample changes the sum by no more than the clip. What the sum is divided by is no secret: the experiment's batch_size.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from protofed.method import Params
from protofed.ops import random
from protofed.privacy.noise import seeded

DRAWS = 2**24  # numbers that a sample's place in a batch is drawn from


def drawn_rate(rate: float) -> float:
    """How likely a sample is in a batch when its place is drawn."""
    return math.ceil(rate * DRAWS) / DRAWS


def steps_in_epoch(rate: float) -> int:
    """Steps in which every sample takes part once on average: the same for all clients, whatever their samples."""
    return max(1, round(1 / rate))


def clipped_sum(grads: Params, clip: float) -> Tensor:
    """The sum (P,) in double precision of the gradients of samples (N, ...), none longer than the clip; one that is not
    finite counts as zero."""
    rows = torch.cat([grad.reshape(len(grad), -1).to(torch.float64) for grad in grads.values()], 1)
    rows = torch.where(torch.isfinite(rows).all(1, keepdim=True), rows, 0.0)
    length = torch.linalg.vector_norm(rows, dim=1)
    scale = torch.where(length > clip, clip / length.clamp(min=1e-300), 1.0)
    return scale @ rows


def with_noise(total: Tensor, spread: float, key: Tensor) -> Tensor:
    """A sum (P,) with Gaussian noise of this standard deviation, which follows from the key."""
    return total + spread * seeded(random.fold(key, -1), len(total)).to(total.device)


def as_params(vector: Tensor, like: Params) -> Params:
    """A vector (P,) as parameters of these shapes and types."""
    sizes: Sequence[int] = [p.numel() for p in like.values()]
    parts = torch.split(vector, list(sizes))
    return {name: part.reshape(p.shape).to(p) for (name, p), part in zip(like.items(), parts, strict=True)}
