"""Trees, flattened and compared."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import MappingKey, keystr, tree_flatten_with_path, tree_leaves, tree_map

from protofed.method import Each, Mean, Tree
from protofed.ops.trees import is_node


class Leaves(dict[str, Any]):
    """A flattened tree: its leaves by their places."""


def leaves(tree: Tree) -> Leaves:
    if isinstance(tree, Leaves):
        return tree
    return Leaves({keystr(path): leaf for path, leaf in tree_flatten_with_path(tree)[0]})


def floats(tree: Tree) -> Leaves:
    return Leaves({at: x for at, x in leaves(tree).items() if isinstance(x, Tensor) and x.is_floating_point()})


def names_on(path: Sequence[Any]) -> set[str]:
    return {str(key.key) for key in path if isinstance(key, MappingKey)}


def keys(tree: Tree) -> set[str]:
    """Every key of every dict that leads to a leaf."""
    return {name for path, _ in tree_flatten_with_path(tree)[0] for name in names_on(path)}


def under_names(tree: Tree, wanted: set[str]) -> Leaves:
    """The leaves that lie under one of these names."""
    return Leaves({keystr(path): leaf for path, leaf in tree_flatten_with_path(tree)[0] if names_on(path) & wanted})


def means(tree: Tree) -> list[Mean]:
    """All Means, those in an Each too."""
    nodes = tree_leaves(tree, is_leaf=is_node)
    inner = [mean for node in nodes if isinstance(node, Each) for mean in means(node.rows)]
    return [node for node in nodes if isinstance(node, Mean)] + inner


def copied(tree: Tree) -> Tree:
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, tree)


def difference(left: Tree, right: Tree, tolerance: float = 0.0) -> str:
    """Where two trees first differ, in words; empty if they do not."""
    mine, other = leaves(left), leaves(right)
    for place in mine.keys() ^ other.keys():
        return f"{place} is in one of both only"
    for place, a in mine.items():
        b = other[place]
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            if type(a) is not type(b) or a != b:
                return f"{place} is {a!r}, not {b!r}"
        elif a.shape != b.shape or a.dtype != b.dtype:
            return f"{place} is {a.dtype} {tuple(a.shape)}, not {b.dtype} {tuple(b.shape)}"
        else:
            close = torch.isclose(a.double(), b.double(), rtol=tolerance, atol=tolerance / 10, equal_nan=True)
            if not bool(close.all()):
                at = tuple((~close).nonzero()[0].tolist())
                return f"{place}{list(at) if at else ''} is {a[at].item():.6g}, not {b[at].item():.6g}"
    return ""


def readable_numbers(tree: Tree) -> Tensor:
    """Every number the server can read: the tensors of an upload, and the means they stand for."""
    found = [*floats(tree).values(), *(leaf for mean in means(tree) for leaf in floats(mean.value).values())]
    return torch.cat([leaf.flatten().double() for leaf in found] or [torch.zeros(0).double()])


def leaked(private: Tensor, seen: Tensor) -> bool:
    """Whether all numbers of a private tensor are among those seen, to float precision; zeros prove nothing."""
    mine = private.flatten().double()
    mine = mine[mine != 0]
    if len(mine) < 2 or not len(seen):
        return False
    seen = seen.sort().values
    place = torch.searchsorted(seen, mine).clamp(max=len(seen) - 1)
    nearest = torch.minimum((seen[place] - mine).abs(), (seen[(place - 1).clamp(min=0)] - mine).abs())
    return bool((nearest <= 2e-7 * mine.abs()).all())
