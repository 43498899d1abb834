"""Layers whose randomness, or whose padding, is an argument."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.grad import conv2d_input

from protofed.errors import UserError
from protofed.models.attention import Attention
from protofed.ops import random

Pair = tuple[int, int]
LONG = 8192  # terms of a sum
SMALL = 1e8  # products of one client below which libraries run stacked convolutions slowly in any precision


class KeyedDropout(nn.Module):
    """Dropout whose mask comes from a key, given as a buffer with every call, or was drawn in advance."""

    key: Tensor
    kept: Tensor

    def __init__(self, p: float, whole_channels: bool) -> None:
        super().__init__()
        self.p, self.whole_channels = p, whole_channels
        self.register_buffer("key", torch.zeros(2, dtype=torch.int64), persistent=False)
        self.register_buffer("kept", torch.zeros(0, dtype=torch.bool), persistent=False)

    def draw(self, key: Tensor, shape: torch.Size) -> Tensor:
        """What is kept (..., *shape) with keys (..., 2)."""
        return random.at_least(key, shape.numel(), self.p).reshape(*key.shape[:-1], *shape)

    def shape(self, x: Tensor) -> torch.Size:
        """The shape of the mask for an input."""
        return x.shape[:2] if self.whole_channels else x.shape

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        shape = self.shape(x)
        kept = self.kept if self.kept.shape == shape else self.draw(self.key, shape)
        scale = kept.to(x.dtype) / (1 - self.p) if self.p < 1 else torch.zeros_like(kept, dtype=x.dtype)
        return x * scale.reshape(*shape, *[1] * (x.ndim - len(shape)))


class Pool2x2(nn.Module):
    """nn.MaxPool2d(2) in whole tensors: faster under vmap on a CPU, and a compiler can fuse it. The values are the
    same. If several values are the largest, they share the gradient; in torch the first one gets all of it.

    Values are the same; of exactly equal largest ones each gets a share of the gradient, not the first one all of it.
    """

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2] // 2 * 2, x.shape[-1] // 2 * 2
        rows = torch.maximum(x[..., 0:height:2, :width], x[..., 1:height:2, :width])
        return torch.maximum(rows[..., 0::2], rows[..., 1::2])


class Mean2d(nn.Module):
    """nn.AdaptiveAvgPool2d(1) in operations that vmap knows; the same to the last digit."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((-2, -1), keepdim=True)


class _Conv(torch.autograd.Function):
    """A convolution of images (B, C, H, W) as a product with what each output looks at (C * k * k, B * outputs)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> tuple[Tensor, Tensor]:
        columns, sides = _columns(x, weight, stride, padding)
        return (weight.flatten(1) @ columns).reshape(len(weight), len(x), *sides).transpose(0, 1).contiguous(), columns

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Pair, Pair], output: tuple[Tensor, Tensor]) -> None:
        x, weight, *ctx.how = inputs
        ctx.size = x.shape[2:]
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(weight, output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        (weight, columns), (stride, padding) = ctx.saved_tensors, ctx.how
        many, outputs = len(grad), grad.shape[2] * grad.shape[3]
        flat = grad.transpose(0, 1).flatten(1)
        if many * outputs > LONG:  # image by image, because one long sum of products keeps few processors busy
            images = columns.reshape(len(columns), many, outputs).permute(1, 2, 0)
            to_weight = (grad.flatten(2) @ images).sum(0)
        else:
            to_weight = flat @ columns.T
        to_x = None
        if ctx.needs_input_grad[0]:
            back = (weight.flatten(1).T @ flat).reshape(len(columns), many, outputs).transpose(0, 1)
            to_x = nn.functional.fold(back, ctx.size, weight.shape[2:], padding=padding, stride=stride)
        return to_x, to_weight.reshape(weight.shape), None, None


class _WideConv(torch.autograd.Function):
    """A convolution by the library, except for the gradient of its weights, which is a product: what libraries choose
    for stacked clients in bf16 can take longer than everything else together."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
        return nn.functional.conv2d(x, weight, None, stride, padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Pair, Pair], output: Tensor) -> None:
        x, weight, *ctx.how = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        (x, weight), how = ctx.saved_tensors, ctx.how
        to_weight = grad.transpose(0, 1).flatten(1) @ _columns(x, weight, *how)[0].T
        to_x = conv2d_input(x.shape, weight, grad, *how) if ctx.needs_input_grad[0] else None
        return to_x, to_weight.reshape(weight.shape), None, None


def _columns(x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> tuple[Tensor, torch.Size]:
    """What each output looks at (C * k * k, B * outputs), and the outputs' height and width."""
    (high, wide), (down, right), (above, beside) = weight.shape[2:], stride, padding
    x = nn.functional.pad(x, (beside, beside, above, above)) if above or beside else x
    windows = x.unfold(2, high, down).unfold(3, wide, right)  # (B, C, h, w, k, k)
    return windows.permute(1, 4, 5, 0, 2, 3).flatten(3).flatten(0, 2), windows.shape[2:4]


_conv: Callable[[Tensor, Tensor, Pair, Pair], tuple[Tensor, Tensor]] = _Conv.apply
_wide_conv: Callable[[Tensor, Tensor, Pair, Pair], Tensor] = _WideConv.apply


class MatrixConv(nn.Module):
    """nn.Conv2d by matrix products: on a GPU libraries run the convolutions of stacked clients one by one."""

    def __init__(self, conv: nn.Conv2d, always: bool) -> None:
        """always: also where each client has much to do."""
        super().__init__()
        self.weight, self.bias = conv.weight, conv.bias
        self.how = _pair(conv.stride), _pair(conv.padding)
        self.limit = math.inf if always else SMALL

    def forward(self, x: Tensor) -> Tensor:
        (stride, padding), kernel = self.how, self.weight.shape[2:]
        sides = [(n + 2 * p - k) // s + 1 for n, p, k, s in zip(x.shape[2:], padding, kernel, stride, strict=True)]
        if len(x) * math.prod(sides) * self.weight.numel() < self.limit:
            out = _conv(x, self.weight, stride, padding)[0]
        elif not x.is_meta and torch.is_autocast_enabled(x.device.type):  # it does not see into a function of our own
            kind = torch.get_autocast_dtype(x.device.type)
            out = _wide_conv(x.to(kind), self.weight.to(kind), stride, padding)
        else:
            return nn.functional.conv2d(x, self.weight, self.bias, stride, padding)
        return out if self.bias is None else out + self.bias.to(out.dtype)[:, None, None]


def matrix_convs(module: nn.Module, rounded: bool) -> None:
    """Replace, in place, the convolutions of a module that a matrix product may do faster for stacked clients: in full
    precision (not rounded to tf32 or bf16) nearly all with few input channels, otherwise the small ones."""

    def product(child: nn.Module) -> nn.Module | None:
        if type(child) is not nn.Conv2d or child.groups > 1 or child.padding_mode != "zeros":
            return None
        if isinstance(child.padding, str) or _pair(child.dilation) != (1, 1):
            return None
        fan_in = child.weight[0].numel()
        always = child.in_channels < 16 or (not rounded and (fan_in <= 1000 or max(_pair(child.kernel_size)) < 5))
        return MatrixConv(child, always)

    _exchange(module, product)


def plain_pools(module: nn.Module) -> None:
    """Replace every max-pooling of 2x2 squares below a module, in place."""

    def plain(child: nn.Module) -> nn.Module | None:
        if not isinstance(child, nn.MaxPool2d) or child.ceil_mode or child.return_indices:
            return None
        sizes = [_pair(child.kernel_size), _pair(child.stride), _pair(child.padding), _pair(child.dilation)]
        return Pool2x2() if sizes == [(2, 2), (2, 2), (0, 0), (1, 1)] else None

    _exchange(module, plain)


def plain_means(module: nn.Module) -> None:
    """Replace every mean over whole images below a module, in place."""

    def mean(child: nn.Module) -> nn.Module | None:
        whole = isinstance(child, nn.AdaptiveAvgPool2d) and _pair(child.output_size) == (1, 1)
        return Mean2d() if whole else None

    _exchange(module, mean)


def _exchange(module: nn.Module, other: Callable[[nn.Module], nn.Module | None]) -> list[str]:
    """Replace each layer of a module by what `other` returns for it; None keeps the layer. Returns the names of those
    replaced."""
    names = []
    for name, child in list(module.named_modules(remove_duplicate=False)):
        if (new := other(child)) is not None:
            parent, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(parent), leaf, new)
            names.append(name)
    return names


def _pair(size: Any) -> Pair:
    return (size, size) if isinstance(size, int) else tuple(size)


class MaskedBatchNorm(nn.Module):
    """BatchNorm with the statistics of a batch's real samples only; a buffer says which they are."""

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
        x = x - mean.reshape(wide)
        var = (x**2 * real).sum(rest) / n
        if self.running_mean is not None and self.running_var is not None:
            self.num_batches_tracked.add_(1)
            share = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
            unbiased = var.detach() * n / (n - 1).clamp(min=1)
            self.running_mean.copy_((1 - share) * self.running_mean + share * mean.detach())
            self.running_var.copy_((1 - share) * self.running_var + share * unbiased)
        scale = torch.rsqrt(var + self.eps)
        if self.weight is None:
            return x * scale.reshape(wide)
        return x * (scale * self.weight).reshape(wide) + self.bias.reshape(wide)


def mask_norms(module: nn.Module, every: bool) -> list[str]:
    """Replace every BatchNorm below a module by a masked one, in place, or only those that torch.func cannot take
    (a cumulative mean reads its counter on the host); returns their names."""

    def masked(child: nn.Module) -> nn.Module | None:
        if isinstance(child, nn.modules.batchnorm._BatchNorm) and (every or child.momentum is None):
            return MaskedBatchNorm(child)
        return None

    return _exchange(module, masked)


def key_dropouts(module: nn.Module) -> list[str]:
    """Replace every dropout below a module by a keyed one, in place; returns their names."""
    for name, child in module.named_modules(remove_duplicate=False):
        if isinstance(child, nn.AlphaDropout | nn.FeatureAlphaDropout):
            raise UserError(
                f"{name} is {type(child).__name__}, which cannot be seeded client by client. Use nn.Dropout."
            )
        if isinstance(child, nn.MultiheadAttention) and not isinstance(child, Attention) and child.dropout > 0:
            raise UserError(
                f"{name} drops attention weights at random (dropout = {child.dropout}), which cannot be seeded client "
                f"by client. Set {name}.dropout = 0.0; dropout layers around it are fine."
            )

    def keyed(child: nn.Module) -> nn.Module | None:
        if isinstance(child, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d):
            return KeyedDropout(child.p, whole_channels=not isinstance(child, nn.Dropout))
        return None

    return _exchange(module, keyed)
