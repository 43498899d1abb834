"""One training step of many lanes: as it is, as a list of operations, compiled, or captured on a GPU and replayed."""

import atexit
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from protofed import local
from protofed.engines.resources import cache_folder
from protofed.engines.stacked.data import StackedData
from protofed.method import Batch, Client, Method, Params, Phase, Tree
from protofed.models.functional import FunctionalModel
from protofed.ops import optim
from protofed.ops.trees import under

Step = Callable[..., Tree]


class Carried(NamedTuple):
    """The state that one training step of W lanes hands to the next."""

    client: Client
    moments: optim.Moments
    loss: Tensor  # (W,) sums over samples
    samples: Tensor  # (W,)
    seen: Tree  # sums over the last epoch


class Now(NamedTuple):
    """The inputs of a single step of W lanes."""

    batch: Tree  # (W, B, ...)
    key: Tensor  # (W, 2)
    drawn: Params  # dropout masks, if they were drawn in advance
    busy: Tensor  # (W,) whether there is a step to take
    last: Tensor  # (W,) whether it belongs to the client's last epoch


def now_of(samples: StackedData, feed: Tree, fixed: Tree) -> Now:
    """The lanes' inputs at one time, from their feed at that time."""
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
    """step(carried, now, down, rate): one step in place; returns what the losses reported in it."""

    def one(client: Client, batch: Batch, down: Tree, key: Tensor, drawn: Params) -> local.Slopes:
        return local.slopes(method, model, phase, client, batch, down, key, drawn, stacked=True)

    def step(carried: Carried, now: Now, down: Tree, rate: Tensor) -> Tree:
        client, busy = carried.client, now.busy
        with rounding():
            mapped = vmap(one, in_dims=(0, 0, dims, 0, 0))
            grads, loss, seen, buffers, pull = mapped(client, now.batch, down, now.key, now.drawn)
        trained = under(client.params, phase.trains)
        rates = torch.where(busy, rate, 0)
        optim.update_(
            optimizer, trained, grads, carried.moments, rates, phase.plain, phase.clip, pull, listed=not compiled
        )
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
    """A step as a list of operations, without the machinery that traced them; compiled if requested."""

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
        """The same, with everything that stays in place between steps looked up once."""
        before, after = tree_leaves(carried), tree_leaves(rest)

        @torch.no_grad()
        def step(now: Tree) -> None:
            self.run(*before, *tree_leaves(now), *after)

        return step


def trace_flat(work: Callable[..., list[Tensor]], leaves: Sequence[Tensor]) -> torch.fx.GraphModule:
    """The operations of `work` on tensors of these shapes, without those whose results are unused."""
    with tracing(TracingContext(FakeTensorMode())):  # one for all shapes that are noted: one for each doubles the time
        traced = make_fx(work)(*[t.clone() for t in leaves])
    traced.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or _writes(node))
    traced.recompile()
    return traced


def compile_flat(work: Callable[..., list[Tensor]], leaves: Sequence[Tensor]) -> Callable[..., Any]:
    """The same, compiled; on a CPU it is called from C++, which releases Python's lock for the whole call.

    The compiler keeps its work on disk, by operations, shapes and versions, so another process need not do it again.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # this takes a second to import
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    traced = trace_flat(work, leaves)
    for node in traced.graph.nodes:
        node.meta.clear()  # notes from tracing disturb the compiler
    options: dict[str, Any] = {"cpp_wrapper": not leaves[0].is_cuda}
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", default_cache_dir()) == default_cache_dir():  # not the user's choice
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(_compiled_code())

    def compiled() -> Callable[..., Any]:
        shapes = FakeTensorMode(shape_env=ShapeEnv())  # without which nothing is kept
        with tracing(TracingContext(shapes)):
            inputs: list[Any] = [shapes.from_tensor(leaf, static_shapes=True) for leaf in leaves]
            made: Callable[..., Any] = torch._inductor.compile(traced, inputs, options=options)
        return made

    try:
        return compiled()
    except Exception:
        if not _compiled_code().is_dir():
            raise
        shutil.rmtree(_compiled_code(), ignore_errors=True)  # what is kept may be damaged
        return compiled()


@functools.cache
def _compiled_code() -> Path:
    """A folder that nobody but this user can write to: what is in it is executed."""
    folder = cache_folder() / "compiled"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_uid == os.getuid() and not found.st_mode & 0o022 and os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass  # no home to write to
    passing = Path(tempfile.mkdtemp(prefix="protofed-compiled-"))
    atexit.register(shutil.rmtree, passing, ignore_errors=True)
    return passing


def _writes(node: torch.fx.Node) -> bool:
    """Whether an operation changes one of its inputs."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
