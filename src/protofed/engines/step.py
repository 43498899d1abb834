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
from protofed.method import Client, Method, Params, Phase, Tree
from protofed.models.functional import FunctionalModel
from protofed.ops import optim

WARM = 3  # runs before capturing, in which libraries choose their kernels

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
    last: Tensor  # (W,) whether it belongs to the client's last epoch


def lanes_step(
    method: Method,
    phase: Phase,
    model: FunctionalModel,
    optimizer: optim.Optimizer,
    dims: Tree,
    every: bool,
    rounding: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Step:
    """step(carried, now, down, rate) -> carried; `every` says that all lanes have a step to take at all times."""

    def one(carried: Carried, now: Now, down: Tree, rate: Tensor) -> Carried:
        client, moments, loss, samples, seen = carried
        batch, key, drawn, last = now
        made = local.train_step(method, model, optimizer, phase, client, moments, batch, down, key, rate, drawn)
        size = batch.mask.sum()
        active = size > 0
        now_seen = tree_map(lambda t: torch.where(active & last, t, torch.zeros_like(t)), made.seen)
        seen = now_seen if seen == () else tree_map(torch.add, seen, now_seen)
        if every:
            return Carried(made.client, made.moments, loss + made.loss * size, samples + size, seen)
        client, moments = tree_map(  # a lane without a step to take stays as it is
            lambda new, old: torch.where(active, new, old), (made.client, made.moments), (client, moments)
        )
        return Carried(client, moments, loss + torch.where(active, made.loss, 0) * size, samples + size, seen)

    def step(carried: Carried, now: Now, down: Tree, rate: Tensor) -> Carried:
        with rounding():
            made: Carried = vmap(one, in_dims=(0, 0, dims, None))(carried, now, down, rate)
        return made

    return step


def signature(tree: Tree) -> Any:
    """What a traced or captured step depends on: the tree's form, its shapes and its types."""
    leaves, form = tree_flatten(tree)
    return str(form), tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)


class Traced:
    """A step as a list of operations, without the machinery that found them; compiled if asked for."""

    def __init__(self, step: Step, inputs: Sequence[Tree], compiled: bool) -> None:
        leaves, form = tree_flatten(tuple(inputs))
        found: list[Any] = []

        def flat(*leaves: Tensor) -> list[Tensor]:
            made, made_form = tree_flatten(step(*tree_unflatten(list(leaves), form)))
            found.append(made_form)
            return made

        traced = make_fx(flat)(*leaves)
        traced.graph.eliminate_dead_code()
        traced.recompile()
        self.form, self.run = found[0], traced
        if compiled:
            for node in traced.graph.nodes:
                node.meta.clear()  # what tracing noted there is in the compiler's way
            self.run = torch._inductor.compile(traced, leaves)

    @torch.no_grad()
    def __call__(self, *inputs: Tree) -> Tree:
        return tree_unflatten(self.run(*tree_leaves(inputs)), self.form)


class Replay:
    """A step on a GPU captured once and replayed: launching it costs one call instead of hundreds.

    It has memory of its own for all it takes: step(carried, feed, time, *fixed) -> carried, of which `time` counts up.
    """

    def __init__(self, step: Step, carried: Tree, feed: Tree, fixed: Sequence[Tree]) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        own = lambda tree: tree_map(lambda t: t.clone(memory_format=torch.contiguous_format), tree)  # noqa: E731
        with torch.cuda.stream(stream):
            self.carried, self.feed, self.fixed = own(carried), own(feed), own(list(fixed))
            self.time = torch.zeros(1, dtype=torch.int64, device=tree_leaves(feed)[0].device)
            for _ in range(WARM):
                step(self.carried, self.feed, self.time, *self.fixed)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            after = step(self.carried, self.feed, self.time, *self.fixed)
            for kept, new in zip(tree_leaves(self.carried), tree_leaves(after), strict=True):
                kept.copy_(new)
            self.time += 1

    def begin(self, carried: Tree, feed: Tree, fixed: Sequence[Tree]) -> None:
        """From time 0 on, with these."""
        self.time.zero_()
        torch._foreach_copy_(tree_leaves(self.carried), tree_leaves(carried))
        for mine, given in zip(tree_leaves(self.feed), tree_leaves(feed), strict=True):
            mine[: len(given)].copy_(given)
        kept = tree_leaves(self.fixed)
        if kept:
            torch._foreach_copy_(kept, tree_leaves(list(fixed)))

    def __call__(self) -> None:
        self.graph.replay()
