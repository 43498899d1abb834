"""The papers' distances for pulling embeddings (B, D) towards prototypes (B, D): one number per row.

Where a paper gives only a name, the docstring states the formula used here.
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

NEAR = 1e-5  # a distance below this (times the prototype's length if above 1) is rounding error: its gradient is 0
FINER = {torch.float64: torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps}  # doubles round less

Distance = Literal["mse", "l1", "l2", "squared_l2", "relu_l2", "cosine", "cross_entropy", "earth_mover"]


def mse(z: Tensor, p: Tensor) -> Tensor:
    """Mean over the D coordinates of the squared differences: what FedProto's code minimises."""
    return ((z - p) ** 2).mean(-1)


def l1(z: Tensor, p: Tensor) -> Tensor:
    """Sum of the absolute differences; a difference of 0 up to rounding (`NEAR`) has no gradient."""
    return _settled((z - p).abs(), p).sum(-1)


def l2(z: Tensor, p: Tensor) -> Tensor:
    """Length of the difference; at 0 up to rounding (`NEAR`), it has no gradient."""
    return _settled(torch.linalg.vector_norm(z - p, dim=-1), p)


def squared_l2(z: Tensor, p: Tensor) -> Tensor:
    """Sum of the squared differences, which is D times the mse."""
    return ((z - p) ** 2).sum(-1)


def relu_l2(z: Tensor, p: Tensor) -> Tensor:
    """Length of max(z - p, 0): only the coordinates in which the embedding exceeds the prototype are pulled."""
    return _settled(torch.linalg.vector_norm(F.relu(z - p), dim=-1), p)


def cosine(z: Tensor, p: Tensor) -> Tensor:
    """1 - cos(z, p), from 0 to 2; an embedding shorter than `NEAR` has no direction and gets no gradient."""
    apart = 1 - F.cosine_similarity(z, p, dim=-1)
    return torch.where(torch.linalg.vector_norm(z, dim=-1) > _near(z), apart, apart.detach())


def softmax_cross_entropy(z: Tensor, p: Tensor) -> Tensor:
    """Cross-entropy of softmax(z) against softmax(p), both over the D coordinates."""
    return -(F.softmax(p, -1) * F.log_softmax(z, -1)).sum(-1)


def earth_mover(z: Tensor, p: Tensor) -> Tensor:
    """Work to turn softmax(z) into softmax(p), neighbouring coordinates being at distance 1.

    On a line this is the sum of the absolute differences of the two cumulative sums, which has a gradient.
    """
    return _settled((F.softmax(z, -1) - F.softmax(p, -1)).cumsum(-1).abs()).sum(-1)


def _settled(distance: Tensor, p: Tensor | None = None) -> Tensor:
    """The same values, without gradients where a distance is only rounding error.

    If a prototype was computed from these same samples, their distance is 0 up to rounding. There, a length or an
    absolute value has slope 1 in a random direction, which would differ between engines.
    """
    near: float | Tensor = _near(distance)
    if p is not None:
        near = near * torch.linalg.vector_norm(p, dim=-1, keepdim=distance.ndim == p.ndim).clamp(min=1)
    return torch.where(distance > near, distance, distance.detach())


def _near(numbers: Tensor) -> float:
    """`NEAR` for this tensor's type."""
    return NEAR * FINER.get(numbers.dtype, 1.0)


DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": mse,
    "l1": l1,
    "l2": l2,
    "squared_l2": squared_l2,
    "relu_l2": relu_l2,
    "cosine": cosine,
    "cross_entropy": softmax_cross_entropy,
    "earth_mover": earth_mover,
}
