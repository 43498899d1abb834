"""Layers whose randomness, or whose padding, is an argument."""

from typing import Any

import torch
from torch import Tensor, nn

from protofed.errors import UserError
from protofed.ops import random


class KeyedDropout(nn.Module):
    """Dropout that draws what it keeps from a key, handed in as a buffer at every call, or takes what was drawn."""

    key: Tensor
    kept: Tensor

    def __init__(self, p: float, whole_channels: bool) -> None:
        super().__init__()
        self.p, self.whole_channels = p, whole_channels
        self.register_buffer("key", torch.zeros(2, dtype=torch.int64), persistent=False)
        self.register_buffer("kept", torch.zeros(0, dtype=torch.bool), persistent=False)

    def draw(self, key: Tensor, shape: torch.Size) -> Tensor:
        """What is kept (..., *shape) with keys (..., 2)."""
        return random.uniform(key, shape.numel()).reshape(*key.shape[:-1], *shape) >= self.p

    def shape(self, x: Tensor) -> torch.Size:
        """Of what is drawn for an input."""
        return x.shape[:2] if self.whole_channels else x.shape

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        shape = self.shape(x)
        kept = self.kept if self.kept.shape == shape else self.draw(self.key, shape)
        scale = kept.to(x.dtype) / (1 - self.p) if self.p < 1 else torch.zeros_like(kept, dtype=x.dtype)
        return x * scale.reshape(*shape, *[1] * (x.ndim - len(shape)))


class _LargestOfFour(torch.autograd.Function):
    """The largest in every square of 2x2; its gradient goes to the first of equals, row by row, as in max-pooling."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        height, width = x.shape[-2] // 2 * 2, x.shape[-1] // 2 * 2
        rows = torch.maximum(x[..., :height, 0:width:2], x[..., :height, 1:width:2])
        return torch.maximum(rows[..., 0::2, :], rows[..., 1::2, :]), rows

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        largest, rows = output
        ctx.mark_non_differentiable(rows)
        ctx.save_for_backward(inputs[0], rows, largest)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> Tensor:
        x, rows, largest = ctx.saved_tensors
        height, width = rows.shape[-2], rows.shape[-1] * 2
        above = grad * (rows[..., 0::2, :] == largest)
        by_row = torch.stack((above, grad - above), -2).flatten(-3, -2)
        left = by_row * (x[..., :height, 0:width:2] == rows)
        whole = torch.stack((left, by_row - left), -1).flatten(-2)
        below, beside = x.shape[-2] - height, x.shape[-1] - width
        return nn.functional.pad(whole, (0, beside, 0, below)) if below or beside else whole


class Pool2x2(nn.Module):
    """nn.MaxPool2d(2) in whole tensors: on a CPU its forward pass is faster under vmap, and a compiler can fuse it."""

    def forward(self, x: Tensor) -> Tensor:
        pooled: Tensor = _LargestOfFour.apply(x)[0]
        return pooled


def plain_pools(module: nn.Module) -> None:
    """Replace every max-pooling of 2x2 squares below a module, in place."""
    for name, child in list(module.named_modules(remove_duplicate=False)):
        if isinstance(child, nn.MaxPool2d):
            plain = [_pair(child.kernel_size), _pair(child.stride), _pair(child.padding), _pair(child.dilation)]
            if plain == [(2, 2), (2, 2), (0, 0), (1, 1)] and not child.ceil_mode and not child.return_indices:
                parent, _, leaf = name.rpartition(".")
                setattr(module.get_submodule(parent), leaf, Pool2x2())


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)


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
