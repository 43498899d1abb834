"""One client's round. Every engine trains by these functions and by no other."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.func import grad
from torch.utils._pytree import tree_map

from protofed.errors import UserError
from protofed.method import Batch, Client, LocalData, Mean, Method, Params, Phase, Tree
from protofed.models.functional import FunctionalModel
from protofed.ops import optim, random
from protofed.ops.trees import total, under


class Update(NamedTuple):
    """What comes of one client's round."""

    up: Tree
    client: Client
    loss: Mean  # over all samples of all its steps


class Step(NamedTuple):
    """What comes of one training step."""

    client: Client
    moments: optim.Moments
    loss: Tensor
    seen: Tree


class Slopes(NamedTuple):
    """What one batch says to one client."""

    grads: Params
    loss: Tensor
    seen: Tree
    buffers: Params


def slopes(
    method: Method,
    model: FunctionalModel,
    phase: Phase,
    client: Client,
    batch: Batch,
    down: Tree,
    key: Tensor,
    drawn: Params | None = None,
    stacked: bool = False,
) -> Slopes:
    """Loss and gradients of one client on one batch; `drawn` is what dropouts keep, where that was drawn before.

    By torch.func where clients are stacked, and by plain autograd, which is faster, where one is alone.
    """
    loss_of = phase.loss or method.loss

    def objective(trained: Params) -> tuple[Tensor, tuple[Tensor, Tree, Params]]:
        training = model.training(client.buffers, key, batch.mask, drawn)
        loss = loss_of(training, client._replace(params=client.params | trained), batch, down)
        value, seen = loss if isinstance(loss, tuple) else (loss, ())
        return value, (value, seen, training.buffers)

    trained = under(client.params, phase.trains)
    if stacked:
        grads, (value, seen, buffers) = grad(objective, has_aux=True)(trained)
        return Slopes(grads, value, seen, buffers)
    leaves = {name: value.detach().requires_grad_() for name, value in trained.items()}
    with torch.enable_grad():
        value, aux = objective(leaves)
    value, seen, buffers = tree_map(torch.Tensor.detach, aux)
    if not aux[0].requires_grad:  # a loss in which none of what is trained occurs
        return Slopes({name: torch.zeros_like(p) for name, p in trained.items()}, value, seen, buffers)
    found = torch.autograd.grad(aux[0], list(leaves.values()), materialize_grads=True)
    return Slopes(dict(zip(leaves, found, strict=True)), value, seen, buffers)


def train_step(
    method: Method,
    model: FunctionalModel,
    optimizer: optim.Optimizer,
    phase: Phase,
    client: Client,
    moments: optim.Moments,
    batch: Batch,
    down: Tree,
    key: Tensor,
    lr: float | Tensor,
    stacked: bool = False,
) -> Step:
    """One step of one client on one batch."""
    grads, value, seen, buffers = slopes(method, model, phase, client, batch, down, key, stacked=stacked)
    trained, moments = optim.update(optimizer, under(client.params, phase.trains), grads, moments, lr, phase.plain)
    return Step(client._replace(params=client.params | trained, buffers=buffers), moments, value, seen)


def refuse_empty(method: Method, phase: Phase) -> NoReturn:
    raise UserError(f"a phase of {type(method).__name__} trains {phase.trains}, which this model does not have.")


def train(
    method: Method,
    model: FunctionalModel,
    optimizer: optim.Optimizer,
    phases: Iterable[Phase],
    client: Client,
    epoch_batches: Callable[[int], Iterable[Batch]],
    down: Tree,
    key: Tensor,
    lr: float,
    local_epochs: int,
    rounding: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> tuple[Client, Mean, Tree]:
    """All phases of local training: the trained client, the mean loss, and what was seen in the last epoch.

    Every phase meets the same batches in the same order, as in the papers' code.
    """
    key = random.fold(key, -1)  # apart from whatever the method draws with the same key
    losses: list[Tensor] = []
    sizes: list[Tensor] = []
    seen: list[Tree] = []
    for phase in phases:
        trained = under(client.params, phase.trains)
        if not trained:
            refuse_empty(method, phase)
        moments = optim.init(optimizer, trained, phase.plain)
        rate = lr if phase.lr is None else phase.lr
        steps = 0
        for epoch in range(phase.passes(local_epochs)):
            seen = []
            for batch in epoch_batches(epoch):
                at = random.fold(key, steps)
                with rounding():
                    step = train_step(method, model, optimizer, phase, client, moments, batch, down, at, rate)
                client, moments = step.client, step.moments
                losses.append(step.loss)
                sizes.append(batch.mask.sum())
                seen.append(step.seen)
                steps += 1
    if not losses:
        return client, Mean(torch.zeros((), device=key.device), torch.zeros((), device=key.device)), ()
    weights = torch.stack(sizes)
    return client, Mean((torch.stack(losses) * weights).sum(), weights.sum()), total(seen) if seen else ()


def local_update(
    method: Method,
    model: FunctionalModel,
    optimizer: optim.Optimizer,
    client: Client,
    data: LocalData,
    epoch_batches: Callable[[int], Iterable[Batch]],
    down: Tree,
    lr: float,
    local_epochs: int,
    rounding: Callable[[], AbstractContextManager[Any]] = nullcontext,
    timed: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> Update:
    """One client's whole round: receive, train, upload; `timed` is told which of the last two is done."""
    client = method.receive(model, client, data, down)
    with timed("train"):
        client, loss, seen = train(
            method, model, optimizer, method.phases(), client, epoch_batches, down, data.key, lr, local_epochs, rounding
        )
    with timed("upload"):
        up, client = method.upload(model, client, data._replace(seen=seen), down)
    return Update(up, client, loss)
