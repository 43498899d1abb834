"""Optimisers as pairs of pure functions, so that they run under vmap."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor

from protofed.method import Params


@dataclass(frozen=True)
class Optimizer:
    """How clients train locally; built anew each round, as the papers' code does (no momentum is carried over)."""

    name: Literal["sgd", "adam"] = "sgd"
    """Stochastic gradient descent or Adam."""
    lr: Annotated[float, Gt(0)] = 0.01
    """Step size in the first round."""
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Momentum of sgd."""
    weight_decay: Annotated[float, Ge(0)] = 0.0
    """Added to the gradient as weight_decay * weight."""
    lr_decay: Annotated[float, Gt(0), Le(1)] = 1.0
    """The step size is multiplied by this after every round."""
    clip: Annotated[float, Ge(0)] = 0.0
    """Largest norm of a gradient; 0 does not clip (FedNH's code clips at 10)."""

    def rate(self, round: int) -> float:
        """Step size in a round, counted from 0."""
        return self.lr * self.lr_decay**round


class Moments(NamedTuple):
    """What an optimiser remembers between steps."""

    first: Params
    second: Params
    step: Tensor


def init(optim: Optimizer, params: Params, plain: bool = False) -> Moments:
    zeros = {name: torch.zeros_like(p) for name, p in params.items()}
    adam = optim.name == "adam" and not plain
    momentum = adam or (optim.momentum > 0 and not plain)
    device = next(iter(params.values())).device if params else None
    return Moments(zeros if momentum else {}, zeros if adam else {}, torch.zeros((), device=device))


def update(
    optim: Optimizer, params: Params, grads: Params, state: Moments, lr: float | Tensor, plain: bool = False
) -> tuple[Params, Moments]:
    """One step; `plain` leaves out momentum and weight decay."""
    if optim.clip > 0:
        norm = torch.stack([(g * g).sum() for g in grads.values()]).sum().sqrt()
        scale = (optim.clip / (norm + 1e-6)).clamp(max=1)
        grads = {name: g * scale for name, g in grads.items()}
    if optim.weight_decay > 0 and not plain:
        grads = {name: g + optim.weight_decay * params[name] for name, g in grads.items()}
    if optim.name == "adam" and not plain:
        return _adam(params, grads, state, lr)
    if optim.momentum > 0 and not plain:
        grads = {name: optim.momentum * state.first[name] + g for name, g in grads.items()}
        state = state._replace(first=grads)
    return {name: p - lr * grads[name] for name, p in params.items()}, state


def update_(
    optim: Optimizer,
    params: Params,
    grads: Params,
    state: Moments,
    lr: Tensor,
    plain: bool = False,
    listed: bool = True,
) -> None:
    """The same step of W lanes (W, ...) at once and in place, each at its own rate (W,); a lane at rate 0 stays.

    `listed`: by operations on lists of tensors, which are fewer; compilers want them one by one.
    """
    weights, slopes = list(params.values()), [grads[name] for name in params]
    mul_: Any = torch._foreach_mul_ if listed else _mul_each_
    add_: Any = torch._foreach_add_ if listed else _add_each_
    if optim.clip > 0:
        norm = torch.stack([(g * g).reshape(len(g), -1).sum(1) for g in slopes]).sum(0).sqrt()
        scale = (optim.clip / (norm + 1e-6)).clamp(max=1)
        slopes = [g * _wide(scale, g) for g in slopes]
    if optim.weight_decay > 0 and not plain:
        slopes = [g.add(p, alpha=optim.weight_decay) for g, p in zip(slopes, weights, strict=True)]
    if optim.name == "adam" and not plain:
        first, second = list(state.first.values()), list(state.second.values())
        state.step.add_(1)
        mul_(first, 0.9)
        add_(first, slopes, alpha=0.1)
        mul_(second, 0.999)
        for v, g in zip(second, slopes, strict=True):
            v.addcmul_(g, g, value=0.001)
        first_scale, second_scale = 1 - 0.9**state.step, 1 - 0.999**state.step
        slopes = [
            (m / _wide(first_scale, m)) / ((v / _wide(second_scale, v)).sqrt() + 1e-8)
            for m, v in zip(first, second, strict=True)
        ]
    elif optim.momentum > 0 and not plain:
        first = list(state.first.values())
        mul_(first, optim.momentum)
        add_(first, slopes, alpha=1)
        slopes = first
    for weight, slope in zip(weights, slopes, strict=True):
        weight.addcmul_(slope, _wide(lr, weight), value=-1)


def _mul_each_(tensors: list[Tensor], factor: float) -> None:
    for tensor in tensors:
        tensor.mul_(factor)


def _add_each_(tensors: list[Tensor], others: list[Tensor], alpha: float) -> None:
    for tensor, other in zip(tensors, others, strict=True):
        tensor.add_(other, alpha=alpha)


def _wide(numbers: Tensor, like: Tensor) -> Tensor:
    """One number a lane (W,), shaped to multiply (W, ...)."""
    return numbers.reshape(-1, *[1] * (like.ndim - 1))


def _adam(params: Params, grads: Params, state: Moments, lr: float | Tensor) -> tuple[Params, Moments]:
    step = state.step + 1
    first = {name: 0.9 * state.first[name] + 0.1 * g for name, g in grads.items()}
    second = {name: 0.999 * state.second[name] + 0.001 * g * g for name, g in grads.items()}
    first_scale, second_scale = 1 - 0.9**step, 1 - 0.999**step
    moved = {
        name: p - lr * (first[name] / first_scale) / ((second[name] / second_scale).sqrt() + 1e-8)
        for name, p in params.items()
    }
    return moved, Moments(first, second, step)
