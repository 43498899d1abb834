"""A pretrained encoder that is small and comes without a package: random filters of fixed weights."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from protofed.models import MODELS
from protofed.models.mlp import Shape
from protofed.models.pretrained import AdapterKind, BodyKind, Pretrained, Width

NAME = "small_encoder"


class Filters(nn.Module):
    """Images (B, 1, H, W) from 0 to 1 -> 12 numbers."""

    calls = 0  # samples embedded in this process

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 12, 3)
        generator = torch.Generator().manual_seed(1)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        Filters.calls += len(x)
        return torch.relu(self.conv(2 * x - 1)).amax((2, 3))


class SmallEncoder(Pretrained):
    """As EfficientNetLite0, but small."""

    embedding = 12

    def __init__(
        self, shape: Shape, classes: int, *, body: BodyKind = "frozen", adapter: AdapterKind = "none", width: Width = 8
    ) -> None:
        super().__init__(Filters(), classes, body, adapter, width)

    @classmethod
    def unfit_data(cls, x: np.ndarray, shape: Shape, **fields: Any) -> str:
        return "it takes images of one channel" if len(shape) != 3 or shape[0] != 1 else ""


def known(monkeypatch: Any) -> None:
    """In this test it is one of protofed's."""
    monkeypatch.setitem(MODELS.places, NAME, f"{__name__}:SmallEncoder")
