"""Random numbers that a module's own forward asks torch for, drawn from a key: the same alone or stacked with
others."""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from protofed.errors import UserError
from protofed.models.attention import open_attention
from protofed.models.layers import key_dropouts
from protofed.ops import random

APART = 1_000_003  # keys of calls are apart from those of layers
WHOLE = (functional.dropout1d, functional.dropout2d, functional.dropout3d)  # drop channels


class Keyed(TorchFunctionMode):
    """Inside this context, F.dropout, dropout of attention weights and `bernoulli_` (stochastic depth) draw from a key,
    call by call."""

    def __init__(self, key: Tensor) -> None:
        super().__init__()
        self.key, self.calls = key, 0
        self.drawn: dict[int, tuple[Tensor, Tensor]] = {}  # by id: a tensor that `bernoulli_` filled, and its values

    def _keeps(self, shape: torch.Size, p: float) -> Tensor:
        """A mask of these values, each dropped with probability p."""
        self.calls += 1
        return random.at_least(random.fold(self.key, APART + self.calls), shape.numel(), p).reshape(shape)

    def _drop(self, x: Tensor, p: float, shape: torch.Size) -> Tensor:
        kept = self._keeps(shape, p).to(x.dtype)
        scaled = kept / (1 - p) if p < 1 else torch.zeros_like(kept)
        return x * scaled.reshape(*shape, *[1] * (x.ndim - len(shape)))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.drawn:
            args, kwargs = tree_map(self._filled, (args, kwargs))
        if func is functional.dropout or func in WHOLE:
            x, p, training = _dropout(*args, **kwargs)
            return self._drop(x, p, x.shape[:2] if func in WHOLE else x.shape) if training and p > 0 else x
        if func is torch.Tensor.bernoulli_ and isinstance(args[1] if len(args) > 1 else kwargs.get("p", 0.5), float):
            share = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            return self._fill(args[0], self._keeps(args[0].shape, 1 - share).to(args[0].dtype))
        if func is functional.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        return func(*args, **kwargs)

    def _fill(self, target: Tensor, values: Tensor) -> Tensor:
        """Write values into a tensor. If all stacked clients share the tensor, it cannot hold each client's values;
        from here on, the values are used in its place."""
        if _stacked(values) and not _stacked(target):
            if target._is_view():  # the rest of it would stay as it was, and so would the part
                raise RuntimeError("bernoulli_ fills a part of a tensor that stacked clients share")
            self.drawn[id(target)] = target, values  # kept with its tensor, so that no other gets its id
            return values
        return target.copy_(values)

    def _filled(self, value: Any) -> Any:
        return self.drawn[id(value)][1] if id(value) in self.drawn else value

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if dropout_p == 0:
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa:
            raise UserError("attention with enable_gqa drops weights at random. Set its dropout to 0.")
        scores = query @ key.transpose(-2, -1) * (scale or 1 / math.sqrt(query.shape[-1]))
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        if attn_mask is not None:
            masked = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -torch.inf) if masked else scores + attn_mask
        weights = scores.softmax(-1)
        return self._drop(weights, dropout_p, weights.shape) @ value


def _stacked(x: Tensor) -> bool:
    """Whether each stacked client has its own values, also while gradients are computed."""
    while is_functorch_wrapped_tensor(x):
        if is_batchedtensor(x):
            return True
        x = get_unwrapped(x)
    return False


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> tuple[Tensor, float, bool]:
    return input, p, training


def draws(module: nn.Module, sample: Tensor, label: str) -> bool:
    """Whether a module's own forward draws random numbers in training; a UserError if they cannot be keyed."""
    trial = copy.deepcopy(module).train()
    for name, layer in trial.named_modules():
        if isinstance(layer, nn.RNNBase) and layer.dropout > 0:
            raise UserError(
                f"{label}: {name} is {type(layer).__name__} with dropout = {layer.dropout}, which cannot be seeded "
                "client by client. Use dropout=0 there, and nn.Dropout around it."
            )
    open_attention(trial)
    key_dropouts(trial)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        before = torch.get_rng_state()
        trial(sample)
        if torch.equal(before, torch.get_rng_state()):
            return False
        before = torch.get_rng_state()
        with Keyed(random.key(0)):
            trial(sample)
        if torch.equal(before, torch.get_rng_state()):
            return True
    raise UserError(
        f"{label} draws random numbers in its forward (such as torch.rand), which cannot be seeded client by client. "
        "Use dropout layers."
    )
