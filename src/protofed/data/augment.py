"""Random crops and flips of a batch of images, from a key alone."""

import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.ops import random

PADDING = 4


def crop(x: Tensor, key: Tensor, black: Tensor) -> Tensor:
    """Shift every image (N, C, H, W) by up to four pixels in each direction; `black` (C, 1, 1) fills the margin."""
    n, _, height, width = x.shape
    padded = F.pad(x - black, (PADDING,) * 4) + black
    offsets = (random.uniform(key, 2 * n) * (2 * PADDING + 1)).long()
    rows = offsets[:n, None] + torch.arange(height, device=x.device)
    columns = offsets[n:, None] + torch.arange(width, device=x.device)
    sample = torch.arange(n, device=x.device)[:, None, None]
    return padded.movedim(1, -1)[sample, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)


def flip(x: Tensor, key: Tensor) -> Tensor:
    """Mirror every other image (N, C, H, W), at random."""
    mirrored = random.uniform(key, len(x)) < 0.5
    return torch.where(mirrored[:, None, None, None], x.flip(-1), x)


def augment(x: Tensor, kinds: list[str], key: Tensor, black: Tensor) -> Tensor:
    """The asked-for changes, in order."""
    if "crop" in kinds:
        x = crop(x, random.fold(key, 0), black)
    if "flip" in kinds:
        x = flip(x, random.fold(key, 1))
    return x
