"""A training step captured once as a CUDA graph and replayed: launching it costs one call instead of hundreds."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from protofed.method import Tree

WARM = 3  # runs before capturing, in which libraries choose their kernels


def signature(tree: Tree) -> Any:
    """What a captured step depends on: the tree's form, its shapes and its types."""
    leaves, form = tree_flatten(tree)
    return str(form), tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)


class Replay:
    """step(carried, *now, *fixed) -> carried, with memory of its own for all of them."""

    def __init__(self, step: Callable[..., Tree], inputs: Sequence[Tree]) -> None:
        carried, *rest = inputs
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            full = step(carried, *rest)  # what is carried may grow by what the first step reports
            self.carried = tree_map(lambda t: torch.zeros_like(t, memory_format=torch.contiguous_format), full)
            self.rest = tree_map(lambda t: t.clone(memory_format=torch.contiguous_format), rest)
            for _ in range(WARM):
                step(self.carried, *self.rest)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            after = step(self.carried, *self.rest)
            for kept, new in zip(tree_leaves(self.carried), tree_leaves(after), strict=True):
                kept.copy_(new)

    def __call__(self, carried: Tree, steps: Sequence[tuple[Tree, ...]], fixed: Sequence[Tree]) -> Tree:
        """All steps from `carried`; what it has no place for yet starts at 0."""
        for name in carried._fields:
            mine, given = tree_leaves(getattr(self.carried, name)), tree_leaves(getattr(carried, name))
            if given:
                torch._foreach_copy_(mine, given)
            elif mine:
                torch._foreach_zero_(mine)
        now = len(steps[0])
        _copy(self.rest[now:], list(fixed))
        here = tree_leaves(self.rest[:now])
        for step in steps:
            torch._foreach_copy_(here, tree_leaves(step))
            self.graph.replay()
        leaves, form = tree_flatten(self.carried)
        return tree_unflatten([leaf.clone() for leaf in leaves], form)


def _copy(into: Tree, given: Tree) -> None:
    mine, theirs = tree_leaves(into), tree_leaves(given)
    if mine:
        torch._foreach_copy_(mine, theirs)
