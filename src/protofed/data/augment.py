"""Random crops and flips of a batch of images, from a key alone."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.ops import random

PADDING = 4


class Moves(NamedTuple):
    """The change to each image (...,): how far it is cropped from the top and the left, and whether it is mirrored."""

    down: Tensor
    right: Tensor
    mirrored: Tensor


def moves(key: Tensor, n: int | Tensor, most: int) -> Moves:
    """Moves for `most` images, of which n are real, from a key (2,); or (M, most) from keys (M, 2) and n (M, 1)."""
    place = torch.arange(most, device=key.device)
    offsets = (random.uniform(random.fold(key, 0), 2 * most) * (2 * PADDING + 1)).long()
    right = (place + n).clamp(max=2 * most - 1).expand(*key.shape[:-1], most)
    mirrored = random.uniform(random.fold(key, 1), most) < 0.5
    return Moves(offsets[..., :most], offsets.gather(-1, right), mirrored)


def apply(x: Tensor, kinds: Sequence[str], to: Moves, black: Tensor) -> Tensor:
    """Move images (N, C, H, W), each in its own way; `black` (C, 1, 1) or (N, C, 1, 1) fills the margin."""
    if "crop" in kinds:
        n, _, height, width = x.shape
        padded = F.pad(x - black, (PADDING,) * 4) + black
        rows = to.down[:, None] + torch.arange(height, device=x.device)
        columns = to.right[:, None] + torch.arange(width, device=x.device)
        sample = torch.arange(n, device=x.device)[:, None, None]
        x = padded.movedim(1, -1)[sample, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)
    if "flip" in kinds:
        x = torch.where(to.mirrored[:, None, None, None], x.flip(-1), x)
    return x


def augment(x: Tensor, kinds: Sequence[str], key: Tensor, black: Tensor) -> Tensor:
    """Apply the requested changes to a client's images, in order."""
    return apply(x, kinds, moves(key, len(x), len(x)), black)
