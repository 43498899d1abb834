"""Every distance that the papers name for pulling embeddings (B, D) towards prototypes (B, D): one number a row.

Where the papers give only a name, the form taken here is the one that is written below it.
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Distance = Literal["mse", "l1", "l2", "squared_l2", "relu_l2", "cosine", "cross_entropy", "earth_mover"]


def mse(z: Tensor, p: Tensor) -> Tensor:
    """Mean over the D coordinates of the squared differences: what FedProto's code minimises."""
    return ((z - p) ** 2).mean(-1)


def l1(z: Tensor, p: Tensor) -> Tensor:
    """Sum of the absolute differences."""
    return (z - p).abs().sum(-1)


def l2(z: Tensor, p: Tensor) -> Tensor:
    """Length of the difference; its gradient at 0 is 0."""
    return torch.linalg.vector_norm(z - p, dim=-1)


def squared_l2(z: Tensor, p: Tensor) -> Tensor:
    """Sum of the squared differences, which is D times the mse."""
    return ((z - p) ** 2).sum(-1)


def relu_l2(z: Tensor, p: Tensor) -> Tensor:
    """Length of max(z - p, 0): only the coordinates in which the embedding exceeds the prototype are pulled."""
    return torch.linalg.vector_norm(F.relu(z - p), dim=-1)


def cosine(z: Tensor, p: Tensor) -> Tensor:
    """1 - cos(z, p), from 0 to 2."""
    return 1 - F.cosine_similarity(z, p, dim=-1)


def cross_entropy(z: Tensor, p: Tensor) -> Tensor:
    """Cross-entropy of softmax(z) against softmax(p), both over the D coordinates."""
    return -(F.softmax(p, -1) * F.log_softmax(z, -1)).sum(-1)


def earth_mover(z: Tensor, p: Tensor) -> Tensor:
    """Work to turn softmax(z) into softmax(p), neighbouring coordinates being at distance 1.

    On a line that is the sum of the absolute differences of the two cumulative sums, which has a gradient.
    """
    return (F.softmax(z, -1) - F.softmax(p, -1)).cumsum(-1).abs().sum(-1)


DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": mse,
    "l1": l1,
    "l2": l2,
    "squared_l2": squared_l2,
    "relu_l2": relu_l2,
    "cosine": cosine,
    "cross_entropy": cross_entropy,
    "earth_mover": earth_mover,
}
