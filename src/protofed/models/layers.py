"""Layers whose randomness is an argument."""

import torch
from torch import Tensor, nn

from protofed.errors import UserError
from protofed.ops import random


class KeyedDropout(nn.Module):
    """Dropout that draws its mask from a key, which is handed in as a buffer at every call."""

    key: Tensor

    def __init__(self, p: float, whole_channels: bool) -> None:
        super().__init__()
        self.p, self.whole_channels = p, whole_channels
        self.register_buffer("key", torch.zeros(2, dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        shape = x.shape[:2] if self.whole_channels else x.shape
        kept = random.uniform(self.key, shape.numel()).reshape(shape) >= self.p
        scale = kept.to(x.dtype) / (1 - self.p) if self.p < 1 else torch.zeros_like(kept, dtype=x.dtype)
        return x * scale.reshape(*shape, *[1] * (x.ndim - len(shape)))


def key_dropouts(module: nn.Module) -> list[str]:
    """Replace every dropout below a module by a keyed one, in place; returns their names."""
    names = []
    for name, child in list(module.named_modules(remove_duplicate=False)):
        if isinstance(child, nn.AlphaDropout | nn.FeatureAlphaDropout):
            raise UserError(
                f"{name} is {type(child).__name__}, which cannot be seeded client by client. Use nn.Dropout."
            )
        if isinstance(child, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d):
            parent, _, leaf = name.rpartition(".")
            keyed = KeyedDropout(child.p, whole_channels=not isinstance(child, nn.Dropout))
            setattr(module.get_submodule(parent), leaf, keyed)
            names.append(name)
    return names
