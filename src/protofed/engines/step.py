"""One training step of many lanes: as it is, as a list of operations, compiled, or captured on a GPU and replayed."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from protofed import local
from protofed.data.stacked import StackedData
from protofed.method import Batch, Client, Method, Params, Phase, Tree
from protofed.models.functional import FunctionalModel
from protofed.ops import optim
from protofed.ops.trees import under

Step = Callable[..., Tree]


class Carried(NamedTuple):
    """What one training step of W lanes hands to the next."""

    client: Client
    moments: optim.Moments
    loss: Tensor  # (W,) sums over samples
    samples: Tensor  # (W,)
    seen: Tree  # sums over the last epoch


class Now(NamedTuple):
    """What a step of W lanes gets of its own."""

    batch: Tree  # (W, B, ...)
    key: Tensor  # (W, 2)
    drawn: Params  # what dropouts keep, where that was drawn before
    busy: Tensor  # (W,) whether there is a step to take
    last: Tensor  # (W,) whether it belongs to the client's last epoch


def now_of(samples: StackedData, feed: Tree, fixed: Tree) -> Now:
    """What the lanes get at a time, from their feed at that time."""
    plan, keys, drawn, busy, last = feed
    return Now(samples.batch(plan, fixed[0]), keys, drawn, busy, last)


def lanes_step(
    method: Method,
    phase: Phase,
    model: FunctionalModel,
    optimizer: optim.Optimizer,
    dims: Tree,
    rounding: Callable[[], AbstractContextManager[Any]] = nullcontext,
    compiled: bool = False,
) -> Step:
    """step(carried, now, down, rate): one step in place; returns what was seen in it."""

    def one(client: Client, batch: Batch, down: Tree, key: Tensor, drawn: Params) -> local.Slopes:
        return local.slopes(method, model, phase, client, batch, down, key, drawn, stacked=True)

    def step(carried: Carried, now: Now, down: Tree, rate: Tensor) -> Tree:
        client, busy = carried.client, now.busy
        with rounding():
            mapped = vmap(one, in_dims=(0, 0, dims, 0, 0))
            grads, loss, seen, buffers = mapped(client, now.batch, down, now.key, now.drawn)
        trained = under(client.params, phase.trains)
        rates = torch.where(busy, rate, 0)
        optim.update_(optimizer, trained, grads, carried.moments, rates, phase.plain, listed=not compiled)
        for name, old in client.buffers.items():
            old.copy_(torch.where(busy.reshape(-1, *[1] * (old.ndim - 1)), buffers[name], old))
        size = torch.where(busy, now.batch.mask.sum(1), 0)
        carried.loss.add_(torch.where(busy, loss * size, 0))
        carried.samples.add_(size)
        counted = tree_map(lambda t: torch.where((busy & now.last).reshape(-1, *[1] * (t.ndim - 1)), t, 0), seen)
        for total, new in zip(tree_leaves(carried.seen), tree_leaves(counted), strict=False):
            total.add_(new)
        return counted

    return step


class Traced:
    """A step as a list of operations, without the machinery that found them; compiled if asked for."""

    def __init__(self, step: Step, inputs: Sequence[Tree], compiled: bool) -> None:
        leaves, form = tree_flatten(tuple(inputs))

        def flat(*leaves: Tensor) -> list[Tensor]:
            step(*tree_unflatten(list(leaves), form))
            return []

        self.run = compile_flat(flat, leaves) if compiled else trace_flat(flat, leaves)

    @torch.no_grad()
    def __call__(self, *inputs: Tree) -> None:
        self.run(*tree_leaves(inputs))

    def bind(self, carried: Tree, *rest: Tree) -> Callable[[Tree], None]:
        """The same with all that stays in its place from step to step looked up once."""
        before, after = tree_leaves(carried), tree_leaves(rest)

        @torch.no_grad()
        def step(now: Tree) -> None:
            self.run(*before, *tree_leaves(now), *after)

        return step


def trace_flat(work: Callable[..., list[Tensor]], leaves: Sequence[Tensor]) -> torch.fx.GraphModule:
    """The operations of work on tensors of these shapes, without those from which nothing comes."""
    traced = make_fx(work)(*[t.clone() for t in leaves])
    traced.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or _writes(node))
    traced.recompile()
    return traced


def compile_flat(work: Callable[..., list[Tensor]], leaves: Sequence[Tensor]) -> Callable[..., Any]:
    """The same compiled; on a CPU called from C++, which lets go of Python's lock for the whole of it."""
    traced = trace_flat(work, leaves)
    for node in traced.graph.nodes:
        node.meta.clear()  # what tracing noted there is in the compiler's way
    return torch._inductor.compile(traced, list(leaves), options={"cpp_wrapper": not leaves[0].is_cuda})


def _writes(node: torch.fx.Node) -> bool:
    """Whether an operation changes one of its inputs."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
