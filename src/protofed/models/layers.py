"""Layers whose randomness, or whose padding, is an argument."""

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


class MaskedBatchNorm(nn.Module):
    """BatchNorm whose statistics are those of the real samples of a batch; which they are is handed in as a buffer."""

    mask: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor

    def __init__(self, norm: nn.modules.batchnorm._BatchNorm) -> None:
        super().__init__()
        self.eps, self.momentum = norm.eps, norm.momentum
        self.weight, self.bias = norm.weight, norm.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(norm, name))
        self.register_buffer("mask", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        wide = [1, -1, *[1] * (x.ndim - 2)]  # one number per channel
        real = self.mask.reshape(-1, *[1] * (x.ndim - 1))
        rest = [0, *range(2, x.ndim)]
        n = (self.mask.sum() * x[0, 0].numel()).clamp(min=1)
        mean = (x * real).sum(rest) / n
        var = ((x - mean.reshape(wide)) ** 2 * real).sum(rest) / n
        if self.running_mean is not None and self.running_var is not None:
            self.num_batches_tracked.add_(1)
            share = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
            unbiased = var.detach() * n / (n - 1).clamp(min=1)
            self.running_mean.copy_((1 - share) * self.running_mean + share * mean.detach())
            self.running_var.copy_((1 - share) * self.running_var + share * unbiased)
        x = (x - mean.reshape(wide)) * torch.rsqrt(var + self.eps).reshape(wide)
        return x if self.weight is None else x * self.weight.reshape(wide) + self.bias.reshape(wide)


def mask_norms(module: nn.Module, every: bool) -> list[str]:
    """Replace every BatchNorm below a module by a masked one, in place, or only those that torch.func cannot take
    (a cumulative mean reads its counter on the host); returns their names."""
    names = []
    for name, child in list(module.named_modules(remove_duplicate=False)):
        if isinstance(child, nn.modules.batchnorm._BatchNorm) and (every or child.momentum is None):
            parent, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(parent), leaf, MaskedBatchNorm(child))
            names.append(name)
    return names


def key_dropouts(module: nn.Module) -> list[str]:
    """Replace every dropout below a module by a keyed one, in place; returns their names."""
    names = []
    for name, child in list(module.named_modules(remove_duplicate=False)):
        if isinstance(child, nn.AlphaDropout | nn.FeatureAlphaDropout):
            raise UserError(
                f"{name} is {type(child).__name__}, which cannot be seeded client by client. Use nn.Dropout."
            )
        if isinstance(child, nn.MultiheadAttention) and child.dropout > 0:
            raise UserError(
                f"{name} drops attention weights at random (dropout = {child.dropout}), which cannot be seeded client "
                f"by client. Set {name}.dropout = 0.0; dropout layers around it are fine."
            )
        if isinstance(child, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d):
            parent, _, leaf = name.rpartition(".")
            keyed = KeyedDropout(child.p, whole_channels=not isinstance(child, nn.Dropout))
            setattr(module.get_submodule(parent), leaf, keyed)
            names.append(name)
    return names
