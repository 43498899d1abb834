"""Optimisers as pairs of pure functions, so that they run under vmap."""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor

from protofed.errors import UserError
from protofed.method import Params


@dataclass(frozen=True)
class Optimizer:
    """How clients train locally; built again each round, as the papers' code does (no momentum is carried over)."""

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
    schedule: Literal["constant", "cosine", "step"] = "constant"
    """How the step size changes over the rounds, apart from `lr_decay`: not at all; along half a cosine from `lr`
    towards `floor` times `lr`; or times `drop` after every `every` rounds."""
    warmup: Annotated[int, Ge(0), Le(1_000_000)] = 0
    """Rounds over which the step size first rises in equal steps to `lr`; the schedule begins after them."""
    horizon: Annotated[int, Ge(0), Le(1_000_000)] = 0
    """cosine: the number of rounds in which it goes down, warm-up included; after them it stays where it is. 0: all
    rounds of the run."""
    floor: Annotated[float, Ge(0), Lt(1)] = 0.0
    """cosine: the step size at the end, as a share of `lr`."""
    every: Annotated[int, Ge(1), Le(1_000_000)] = 30
    """step: rounds from one drop to the next."""
    drop: Annotated[float, Gt(0), Lt(1)] = 0.1
    """step: what the step size is multiplied by."""
    clip: Annotated[float, Ge(0)] = 0.0
    """Largest norm of a gradient; 0 does not clip (FedNH's code clips at 10)."""

    def rate(self, round: int) -> float:
        """Step size in a round, counted from 0."""
        usual = self.lr * self.lr_decay**round
        if round < self.warmup:
            return usual * (round + 1) / self.warmup
        done = round - self.warmup
        if self.schedule == "cosine":
            length = max(1, self.horizon - self.warmup)  # of the run's rounds: see `over`
            share = (1 + math.cos(math.pi * min(done, length - 1) / length)) / 2
            return usual * (self.floor + (1 - self.floor) * share)
        if self.schedule == "step":
            return usual * self.drop ** (done // self.every)
        return usual

    def check_schedule(self) -> None:
        """Refuse keys that contradict each other."""
        if 0 < self.horizon <= self.warmup:
            raise UserError(
                f"optimizer.warmup = {self.warmup} leaves nothing of optimizer.horizon = {self.horizon} to go down in. "
                "Use a shorter warm-up, or a longer horizon."
            )
        usual = Optimizer()
        for key, schedule in (("horizon", "cosine"), ("floor", "cosine"), ("every", "step"), ("drop", "step")):
            if schedule != self.schedule and getattr(self, key) != getattr(usual, key):
                raise UserError(
                    f"optimizer.{key} = {getattr(self, key)} is for optimizer.schedule = {schedule!r}, and it is "
                    f"{self.schedule!r}. Set the schedule, or leave the key out."
                )

    def over(self, rounds: int) -> "Optimizer":
        """The same for a run of this many rounds: a cosine without a horizon takes all of them."""
        return self if self.horizon or self.schedule != "cosine" else replace(self, horizon=rounds)


class Moments(NamedTuple):
    """What an optimiser keeps between steps."""

    first: Params
    second: Params
    step: Tensor


def first_moments(optim: Optimizer, params: Params, plain: bool = False) -> Moments:
    zeros = {name: torch.zeros_like(p) for name, p in params.items()}
    adam = optim.name == "adam" and not plain
    momentum = adam or (optim.momentum > 0 and not plain)
    device = next(iter(params.values())).device if params else None
    return Moments(zeros if momentum else {}, zeros if adam else {}, torch.zeros((), device=device))


def update(
    optim: Optimizer,
    params: Params,
    grads: Params,
    state: Moments,
    lr: float | Tensor,
    plain: bool = False,
    clip: bool = True,
    pull: Params | None = None,
) -> tuple[Params, Moments]:
    """One step; `plain` leaves out momentum and weight decay, `pull` is a gradient that is added after clipping."""
    if optim.clip > 0 and clip:
        norm = torch.stack([(g * g).sum() for g in grads.values()]).sum().sqrt()
        scale = (optim.clip / (norm + 1e-6)).clamp(max=1)
        grads = {name: g * scale for name, g in grads.items()}
    if pull:
        grads = {name: g + pull[name] for name, g in grads.items()}
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
    clip: bool = True,
    pull: Params | None = None,
    listed: bool = True,
) -> None:
    """The same step of W lanes (W, ...) at once and in place, each at its own rate (W,); a lane at rate 0 stays.

    `listed`: use operations on lists of tensors, which are fewer; compilers need single tensors.
    """
    weights, slopes = list(params.values()), [grads[name] for name in params]
    mul_: Any = torch._foreach_mul_ if listed else _mul_each_
    add_: Any = torch._foreach_add_ if listed else _add_each_
    if optim.clip > 0 and clip:
        norm = torch.stack([(g * g).reshape(len(g), -1).sum(1) for g in slopes]).sum(0).sqrt()
        scale = (optim.clip / (norm + 1e-6)).clamp(max=1)
        slopes = [g * _wide(scale, g) for g in slopes]
    if pull:
        slopes = [g + pull[name] for name, g in zip(params, slopes, strict=True)]
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
    """One number per lane (W,), shaped to multiply (W, ...)."""
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
