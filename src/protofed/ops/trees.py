"""Arithmetic on trees of tensors."""

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from protofed.method import Each, Mean, Params, Tree


def total(means: Iterable[Tree]) -> Tree:
    """The sum of several Means, or of several trees of them."""
    return reduce(lambda left, right: map_nodes(add, left, right), means)


def under(params: Params, prefixes: str | Sequence[str], strip: bool = False) -> Params:
    """The entries whose name starts with a prefix (or one of several), if asked with the prefix taken off."""
    starts = (prefixes,) if isinstance(prefixes, str) else tuple(prefixes)
    chosen = {}
    for name, value in params.items():
        prefix = next((start for start in starts if name.startswith(start)), None)
        if prefix is not None:
            chosen[name.removeprefix(prefix) if strip else name] = value
    return chosen


def floating(tensors: Params) -> Params:
    """The entries that can be averaged: BatchNorm's batch counter, for example, cannot."""
    return {name: value for name, value in tensors.items() if value.is_floating_point()}


def squared_distance(left: Params, right: Params) -> Tensor:
    """The squared differences, summed over all shared names."""
    parts = [((left[name] - right[name]) ** 2).sum() for name in left if name in right]
    return torch.stack(parts).sum() if parts else torch.zeros(())


def all_finite(tree: Tree) -> Tensor:
    """Whether a tree is free of NaN and infinity, as a tensor."""
    leaves = [leaf for leaf in tree_leaves(tree) if leaf.is_floating_point()]
    return torch.stack([torch.isfinite(leaf).all() for leaf in leaves]).all()


def is_node(node: Any) -> bool:
    return isinstance(node, Mean | Each)


def map_nodes(fn: Callable[..., Any], *trees: Tree) -> Tree:
    """Apply fn to every Mean and Each (and to the tensors outside them)."""
    return tree_map(fn, *trees, is_leaf=is_node)


def alone(up: Tree) -> Tree:
    """One client's upload as that of a group of one: an Each gets an axis of clients."""
    return map_nodes(lambda node: Each(tree_map(lambda t: t[None], node.rows)) if isinstance(node, Each) else node, up)


def merge(left: Tree, right: Tree) -> Tree:
    """Merge two groups of clients: Means add, Eaches are concatenated."""

    def join(a: Mean | Each, b: Mean | Each) -> Mean | Each:
        if isinstance(a, Mean) and isinstance(b, Mean):
            return a + b
        return Each(tree_map(lambda s, t: torch.cat([s, t]), a.rows, b.rows))  # type: ignore[union-attr]

    return map_nodes(join, left, right)


def deal(down: Tree, index: int) -> Tree:
    """What the index-th client of the cohort gets: its own row of every Each, and everything else whole."""
    return map_nodes(
        lambda node: tree_map(lambda t: t[index], node.rows) if isinstance(node, Each) else node,
        down,
    )


def stack(trees: Sequence[Tree]) -> Tree:
    """The trees of several clients as one with an axis of clients."""
    form = tree_flatten(trees[0])[1]
    return tree_unflatten([torch.stack(leaves) for leaves in zip(*map(tree_leaves, trees), strict=True)], form)
