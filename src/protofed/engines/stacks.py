"""Trees of tensors with an axis of clients in front."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from protofed.method import Each, Tree
from protofed.ops.trees import map_nodes, stack


def pick_clients(down: Tree, places: Sequence[int]) -> Tree:
    """The part of a broadcast for these clients of the cohort."""
    return map_nodes(lambda n: Each(tree_map(lambda t: t[list(places)], n.rows)) if isinstance(n, Each) else n, down)


def deal_to(down: Tree, places: Sequence[int]) -> tuple[Tree, Tree]:
    """What these clients get, and the axis of clients in each leaf; None if no leaf has one.

    It is contiguous in memory, however the server made it: a compiled step needs the layout it first saw.
    """
    mine = map_nodes(lambda n: n.rows if isinstance(n, Each) else n, pick_clients(down, places))
    mine = tree_map(torch.Tensor.contiguous, mine)
    dims = map_nodes(lambda n: tree_map(lambda t: 0 if isinstance(n, Each) else None, n), down)
    dims = map_nodes(lambda n: n.rows if isinstance(n, Each) else n, dims)
    return mine, dims if any(isinstance(node, Each) for node in _nodes(down)) else None


def _nodes(tree: Tree) -> list[Any]:
    found: list[Any] = []
    map_nodes(found.append, tree)
    return found


def _axes(tree: Tree, dims: Tree) -> list[int | None]:
    """The axis of clients of every leaf, if it has one."""
    if dims is None or isinstance(dims, int):
        return [dims] * len(tree_leaves(tree))
    return tree_flatten(dims, is_leaf=lambda d: d is None)[0]


def along(index: Tensor, tree: Tree, dims: Tree = 0) -> Tree:
    """The rows of these clients, from every leaf with an axis of clients."""
    leaves, form = tree_flatten(tree)
    rows = [t if d is None else t.index_select(0, index) for t, d in zip(leaves, _axes(tree, dims), strict=True)]
    return tree_unflatten(rows, form)


def put_rows(tree: Tree, index: Tensor, rows: Tree, dims: Tree = 0) -> None:
    """Write the rows of these clients (or a number), in place, into every leaf with an axis of clients."""
    leaves, axes = tree_leaves(tree), _axes(tree, dims)
    given = [rows] * len(leaves) if isinstance(rows, int) else tree_leaves(rows)
    for leaf, new, axis in zip(leaves, given, axes, strict=True):
        if axis is None:
            continue
        if isinstance(new, int):
            leaf.index_fill_(0, index, new)
        else:
            leaf.index_copy_(0, index, new)


def join_groups(parts: Sequence[Tree]) -> Tree:
    """Concatenate groups of clients."""
    return parts[0] if len(parts) == 1 else tree_map(lambda *leaves: torch.cat(leaves), *parts)


def rows_of(tree: Tree, copy: bool) -> list[Tree]:
    """Every client's tree, as a view or with its own memory."""
    leaves = tree_leaves(tree)
    columns: dict[int, Sequence[Tensor]] = {}
    if not copy:
        columns = {id(leaf): leaf.unbind(0) for leaf in leaves}
    elif not leaves[0].is_cuda:
        columns = {id(leaf): [row.clone() for row in leaf.unbind(0)] for leaf in leaves}
    else:  # one piece of memory per client, for one copy instead of many
        for dtype in {leaf.dtype for leaf in leaves}:
            alike = [leaf for leaf in leaves if leaf.dtype == dtype]
            flat = torch.cat([leaf.reshape(len(leaf), -1) for leaf in alike], 1)
            rows = [torch.split(row.clone(), [leaf[0].numel() for leaf in alike]) for row in flat.unbind(0)]
            for leaf, parts in zip(alike, zip(*rows, strict=True), strict=True):
                columns[id(leaf)] = [part.view(leaf.shape[1:]) for part in parts]
    return _dealt(tree, columns, len(leaves[0]))


def _dealt(tree: Tree, columns: dict[int, Sequence[Tensor]], many: int) -> list[Tree]:
    """A tree of columns, split into one tree per row."""
    if isinstance(tree, Tensor):
        return list(columns[id(tree)])
    parts = [_dealt(part, columns, many) for part in (tree.values() if isinstance(tree, dict) else tree)]
    rows = zip(*parts, strict=True) if parts else [()] * many
    if isinstance(tree, dict):
        return [dict(zip(tree, row, strict=True)) for row in rows]
    return [type(tree)(*row) if hasattr(tree, "_fields") else type(tree)(row) for row in rows]


def one_by_one(function: Callable[..., Tree], in_dims: Sequence[Tree]) -> Callable[..., Tree]:
    """What vmap does, one client after another: this is faster if one client keeps a device busy."""

    def run(*inputs: Tree) -> Tree:
        flat = [tree_flatten(part) for part in inputs]
        axes = [_axes(part, dims) for part, dims in zip(inputs, in_dims, strict=True)]
        pairs = [pair for (leaves, _), dims in zip(flat, axes, strict=True) for pair in zip(leaves, dims, strict=True)]
        many = next(len(leaf) for leaf, axis in pairs if axis == 0)

        def row(number: int) -> list[Tree]:
            return [
                tree_unflatten([t if d is None else t[number] for t, d in zip(leaves, dims, strict=True)], form)
                for (leaves, form), dims in zip(flat, axes, strict=True)
            ]

        return stack([function(*row(number)) for number in range(many)])

    return run


def finite_rows(tree: Tree, many: int) -> Tensor:
    """Which of M clients are free of NaN and infinity (M,), judged by sums."""
    leaves = [leaf.reshape(many, -1) for leaf in tree_leaves(tree) if leaf.is_floating_point()]
    if not leaves[0].is_cuda and torch.isfinite(sum(leaf.sum() for leaf in leaves)):  # quick check: all is well
        return torch.ones(many, dtype=torch.bool)
    return torch.stack([torch.isfinite(leaf.sum(1, dtype=torch.float64)) for leaf in leaves]).all(0)


def cloned(tree: Tree) -> Tree:
    """A copy with its own memory, to be written to."""
    return tree_map(lambda t: t.clone(memory_format=torch.contiguous_format), tree)
