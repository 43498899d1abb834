"""One client's round.

The reference engine, the clients of a federation and clients that join later all train with `local_update` and `train`.
The stacked engine uses the phases (`planned`), and the loss and gradients of each step (`slopes`), from here. It has
its own version of two parts, for many clients at once: the loop over steps, since a lane moves from one client to the
next in the middle of it, and the optimiser's step (`optim.update_`), which changes weights in place. `optim.update`
under vmap would do the same with different rounding, and takes 2.5 to 9 times as long. tests/test_local.py and
tests/engines/test_engines_agree.py check that both give the same results.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from protofed.errors import UserError
from protofed.method import Batch, Client, LocalData, Mean, Method, Params, Phase, Tree
from protofed.models.functional import FunctionalModel
from protofed.ops import optim, random
from protofed.ops.trees import total, under

Rate = TypeVar("Rate", float, float | Tensor)  # stacked clients may have one each (M,)


class Update(NamedTuple):
    """The result of one client's round."""

    up: Tree
    client: Client
    loss: Mean  # over all samples of all its steps


class Step(NamedTuple):
    """The result of one training step."""

    client: Client
    moments: optim.Moments
    loss: Tensor
    seen: Tree


class Slopes(NamedTuple):
    """Loss and gradients of one client on one batch."""

    grads: Params
    loss: Tensor
    seen: Tree
    buffers: Params
    pull: Params  # a gradient that is not clipped


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
    """Loss and gradients of one client on one batch; `drawn` has the dropout masks if they were drawn in advance.

    Uses torch.func for stacked clients, and plain autograd, which is faster, for a single one.
    """
    loss_of = phase.loss or method.loss

    def objective(trained: Params) -> tuple[Tensor, tuple[Tensor, Tree, Params]]:
        training = model.training(client.buffers, key, batch.mask, drawn)
        loss = loss_of(training, client._replace(params=client.params | trained), batch, down)
        value, seen = loss if isinstance(loss, tuple) else (loss, ())
        return value, (value, seen, training.buffers)

    trained = under(client.params, phase.trains)
    pull = phase.pull(client, down) if phase.pull else {}
    if stacked:
        from protofed.ops.derivatives import recorded  # a client of a federation trains alone, and never loads this

        with recorded(trained) as (inputs, _, gradient):
            grads, (value, seen, buffers) = gradient(*objective(inputs))
        return Slopes(grads, value, seen, buffers, pull)
    leaves = {name: value.detach().requires_grad_() for name, value in trained.items()}
    with torch.enable_grad():
        value, aux = objective(leaves)
    value, seen, buffers = tree_map(torch.Tensor.detach, aux)
    if not aux[0].requires_grad:  # a loss that does not depend on any trained parameter
        return Slopes({name: torch.zeros_like(p) for name, p in trained.items()}, value, seen, buffers, pull)
    found = torch.autograd.grad(aux[0], list(leaves.values()), materialize_grads=True)
    return Slopes(dict(zip(leaves, found, strict=True)), value, seen, buffers, pull)


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
    grads, value, seen, buffers, pull = slopes(method, model, phase, client, batch, down, key, stacked=stacked)
    trained, moments = optim.update(
        optimizer, under(client.params, phase.trains), grads, moments, lr, phase.plain, phase.clip, pull
    )
    return Step(client._replace(params=client.params | trained, buffers=buffers), moments, value, seen)


def planned(
    method: Method, phases: Iterable[Phase], params: Params, lr: Rate, local_epochs: int
) -> list[tuple[Phase, int, Rate]]:
    """The phases of a round, each with its number of epochs and its step size."""
    found = [(phase, phase.passes(local_epochs), lr if phase.lr is None else phase.lr) for phase in phases]
    for phase, _, _ in found:
        if not under(params, phase.trains):
            raise UserError(
                f"a phase of {type(method).__name__} trains {phase.trains}, which this model does not have."
            )
    return found


def steps_in_time(pace: float, epochs: int, each: int) -> int:
    """The steps of a phase, `each` in an epoch, that a client takes: this share of them, at least one of any."""
    return epochs * each if pace >= 1 else min(epochs * each, max(1, int(pace * epochs * each + 1e-9)))


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
    pace: float = 1.0,
    each: int = 0,
    one_step: Callable[..., Step] = train_step,
) -> tuple[Client, Mean, Tree]:
    """Run all phases of local training. Returns the trained client, the mean loss, and what the last epoch reported.
    `one_step` is called in place of `train_step`.

    Every phase sees the same batches in the same order, as in the papers' code. With a `pace` below 1 a client takes
    that share of each phase's steps, of which an epoch has `each`; its last epoch is then its last `each` steps.
    """
    key = random.fold(key, -1)  # independent of what the method draws with the same key
    losses: list[Tensor] = []
    sizes: list[Tensor] = []
    seen: list[Tree] = []
    for phase, epochs, rate in planned(method, phases, client.params, lr, local_epochs):
        moments = optim.first_moments(optimizer, under(client.params, phase.trains), phase.plain)
        steps, most = 0, steps_in_time(pace, epochs, each)
        before: list[Tree] = []
        for epoch in range(epochs):
            before, seen = seen if epoch else [], []
            for batch in epoch_batches(epoch):
                if pace < 1 and steps == most:
                    break
                at = random.fold(key, steps)
                with rounding():
                    step = one_step(method, model, optimizer, phase, client, moments, batch, down, at, rate)
                client, moments = step.client, step.moments
                losses.append(step.loss)
                sizes.append(batch.mask.sum())
                seen.append(step.seen)
                steps += 1
            if pace < 1 and steps == most:
                seen = [*before, *seen][-each:]
                break
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
    pace: float = 1.0,
    each: int = 0,
) -> Update:
    """One client's whole round: receive, train, upload. Calls `timed` after training and after the upload. `pace` and
    `each` are those of `train`."""
    client = method.receive(model, client, data, down)
    phases = method.phases()
    with timed("train"):
        client, loss, seen = train(
            method,
            model,
            optimizer,
            phases,
            client,
            epoch_batches,
            down,
            data.key,
            lr,
            local_epochs,
            rounding,
            pace,
            each,
        )
    with timed("upload"):
        up, client = method.upload(model, client, data._replace(seen=seen), down)
    return Update(up, client, loss)
