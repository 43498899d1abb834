"""How large an upload may be: a figure for each of its parts, and a bound that follows from the members' own figures.

A part is either a `Mean` with a count for each row (prototypes), the parameters or the buffers of a model, or what a
method sends besides, such as a covariance. The figure of prototypes is the length of the longest row, total / count.
The figure of a model is its distance from the one that was broadcast to the client (its own length, if nothing of that
form was broadcast). The figure of anything else is its length.

Unless the operator sets it, the bound of a part is `factor` times the usual figure. The usual figure is the median over
the clients. Each client counts once, with its figure of this round or, if it does not take part, of the last round that
it was merged in. If there are fewer than three, the server's own guess stands in for the missing ones: for prototypes
the longest row that a fresh model makes of random samples, for a model a fifth of the length of what was broadcast. One
client alone is bounded by a hundred times that. A model that moved no farther than the guess is always within bounds.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from protofed.engines.wire import signature
from protofed.method import Each, Mean, Tree
from protofed.ops.trees import is_node
from protofed.remote.settings import Bounds

VOTES = 3  # figures that a median needs
ALONE = 100  # times wider is the bound of a client that nobody can be compared with
STEP = 0.2  # of its length: how far a model may move in any case; honest ones moved 0.02 to 0.4 of it in a round


class PartSize(NamedTuple):
    """How large a part of an upload is."""

    kind: str  # "prototype" or "change"
    size: float
    guess: float  # what the server itself would expect


class UploadVerdict(NamedTuple):
    """What becomes of an upload: the part that is largest in relation to its bound, and whether that is too much."""

    part: str
    size: float
    bound: float
    times: float  # the usual figure
    beyond: dict[str, float]  # the bounds of all parts that are beyond theirs

    @property
    def share(self) -> float:
        """Of the bound: above 1 it is too large."""
        return self.size / self.bound if self.bound else 0.0

    @property
    def words(self) -> str:
        part = f"its {self.part}" if self.part else "its upload"
        return (
            f"{part} measures {self.size:.4g}, where {self.bound:.4g} is the bound ({self.times:.3g} times the usual)"
        )


def part_sizes(up: Tree, down: Tree, form: Tree, path: str = "") -> dict[str, PartSize]:
    """The figures of an upload's parts, by their paths."""
    found: dict[str, PartSize] = {}
    for where, node, like in _parts(up, form, path):
        if isinstance(node, Mean) and node.weight.ndim:
            if any(leaf.numel() for leaf in tree_leaves(node.total)):
                found[where] = PartSize("prototype", float(_rows(node).amax()), float(_rows(like).amax()))
            continue
        value = _whole(node)
        if value is None:
            continue
        usual = {name: part for name, part, _ in _pieces(_inside(like), None)}
        for name, part, known in _pieces(value, _broadcast(value, down)):
            size = _length(part, known)
            guess = _length(usual[name], None) if known is None else STEP * _length(known, None)
            found[_join(where, name)] = PartSize("change", size, guess)
    return found


def clip_upload(up: Tree, down: Tree, limits: Mapping[str, float], path: str = "") -> Tree:
    """The upload with every part that is beyond its limit brought back to it, in the same direction."""
    if isinstance(up, Mean) and up.weight.ndim:
        limit = limits.get(path)
        if limit is None:
            return up
        shrink = (limit / _rows(up).clamp(min=max(limit, 1e-300))).to(up.weight.dtype)
        return Mean(tree_map(lambda leaf: leaf * _like(shrink, leaf), up.total), up.weight)
    if isinstance(up, Mean):
        value = up.value
        clipped = _clipped(value, down, limits, path)
        return up if clipped is value else Mean.of(clipped, up.weight)
    if isinstance(up, Each):
        inside = any(is_node(node) for node in _nodes(up.rows))
        return Each(clip_upload(up.rows, down, limits, path) if inside else _clipped(up.rows, down, limits, path))
    if isinstance(up, dict):
        return {key: clip_upload(part, down, limits, _join(path, key)) for key, part in up.items()}
    if isinstance(up, list | tuple):
        return type(up)(clip_upload(part, down, limits, _join(path, str(i))) for i, part in enumerate(up))
    return up


def judge(
    bounds: Bounds, here: Mapping[int, dict[str, PartSize]], before: Mapping[int, Mapping[str, float]]
) -> dict[int, UploadVerdict]:
    """What to think of each upload of a round; `before` has earlier figures of clients that were merged."""
    usual: dict[str, tuple[float, float]] = {}  # by part: the figure, and the factor on it
    for part in {part for found in here.values() for part in found}:
        votes = {number: old[part] for number, old in before.items() if part in old}
        votes |= {number: found[part].size for number, found in here.items() if part in found}
        guess = _middle([found[part].guess for found in here.values() if part in found])
        many = len(votes)
        middle = _middle([*votes.values(), *[guess] * (VOTES - many)])
        usual[part] = middle, bounds.factor * (ALONE if many == 1 else 1)
    return {number: _verdict(bounds, found, usual) for number, found in here.items() if found}


def _verdict(bounds: Bounds, found: dict[str, PartSize], usual: dict[str, tuple[float, float]]) -> UploadVerdict:
    told: list[UploadVerdict] = []
    beyond: dict[str, float] = {}
    for part, (kind, size, guess) in found.items():
        middle, factor = usual[part]
        own = bounds.prototype if kind == "prototype" else bounds.change
        bound = own or max(middle * factor, guess if kind == "change" else 0.0) or guess * factor
        if size > bound:
            beyond[part] = bound
        likely = middle or guess
        told.append(UploadVerdict(part, size, bound, size / likely if likely else 0.0, {}))
    return max(told, key=lambda one: (one.part in beyond, one.share))._replace(beyond=beyond)


def _middle(figures: Sequence[float]) -> float:
    """The median; of two in the middle the larger."""
    return sorted(figures)[len(figures) // 2]


def _parts(up: Tree, form: Tree, path: str) -> Iterator[tuple[str, Tree, Tree]]:
    """Every Mean of an upload and every tree of tensors that is seen singly, with its path and its form."""
    if isinstance(up, Mean):
        yield path, up, form
    elif isinstance(up, Each):
        if any(is_node(node) for node in _nodes(up.rows)):
            yield from _parts(up.rows, form.rows, path)
        else:
            yield path, up, form
    elif isinstance(up, dict | list | tuple):
        for key in up if isinstance(up, dict) else range(len(up)):
            yield from _parts(up[key], form[key], _join(path, str(key)))


def _nodes(tree: Tree) -> list[Any]:
    return tree_leaves(tree, is_leaf=is_node)


def _whole(node: Mean | Each) -> Tree | None:
    """The model in a part; None where it weighs nothing, or is a single number."""
    if isinstance(node, Mean):
        return _inside(node) if bool(node.weight > 0) else None
    return None if isinstance(node.rows, Tensor) and node.rows.ndim == 0 else node.rows


def _inside(node: Mean | Each) -> Tree:
    return node.value if isinstance(node, Mean) else node.rows


def _pieces(value: Tree, known: Tree | None) -> Iterator[tuple[str, Tree, Tree | None]]:
    """Parameters and buffers apart, where a model has both."""
    if isinstance(value, dict) and value and all(isinstance(part, dict) for part in value.values()):
        for name, part in value.items():
            if tree_leaves(part):
                yield name, part, None if known is None else known[name]
    elif tree_leaves(value):
        yield "", value, None  # statistics: they are new every time, and lie anywhere around those of before


def _broadcast(value: Tree, down: Tree) -> Tree | None:
    """The first part of a broadcast that has the names and shapes of this."""
    wanted = signature(value)
    for node in _within(down):
        if signature(node) == wanted:
            return node
    return None


def _within(tree: Tree) -> Iterator[Tree]:
    yield tree
    inner = tree.total if isinstance(tree, Mean) else tree.rows if isinstance(tree, Each) else tree
    if isinstance(inner, dict | list | tuple) and not (isinstance(inner, dict) and not _nested(inner)):
        for part in inner.values() if isinstance(inner, dict) else inner:
            yield from _within(part)


def _nested(table: dict[str, Any]) -> bool:
    return any(not isinstance(part, Tensor) for part in table.values())


def _clipped(value: Tree, down: Tree, limits: Mapping[str, float], path: str) -> Tree:
    known, made, changed = _broadcast(value, down), {}, False
    for name, part, before in _pieces(value, known):
        limit, size = limits.get(_join(path, name)), _length(part, before)
        made[name] = part
        if limit is not None and size > limit:
            made[name], changed = _towards(before, part, limit / size), True
    if not changed:
        return value
    return made[""] if "" in made else value | made


def _towards(before: Tree | None, after: Tree, share: float) -> Tree:
    if before is None:
        return tree_map(lambda leaf: (leaf.double() * share).to(leaf.dtype), after)
    return tree_map(lambda a, b: (a.double() + (b.double() - a.double()) * share).to(b.dtype), before, after)


def _length(tree: Tree, origin: Tree | None) -> float:
    """Of all numbers of a tree together, as a vector, from its origin."""
    leaves = [leaf for leaf in tree_leaves(tree) if leaf.is_floating_point()]
    if origin is not None:
        starts = [leaf for leaf in tree_leaves(origin) if leaf.is_floating_point()]
        leaves = [leaf.double() - start.double() for leaf, start in zip(leaves, starts, strict=True)]
    norms = [torch.linalg.vector_norm(leaf, dtype=torch.float64) for leaf in leaves]
    return float(torch.stack(norms).norm()) if norms else 0.0


def _rows(mean: Mean) -> Tensor:
    """The length of every row's mean; 0 where nothing was counted."""
    parts = [
        torch.linalg.vector_norm(leaf.reshape(*mean.weight.shape, -1), dim=-1, dtype=torch.float64)
        for leaf in tree_leaves(mean.total)
        if leaf.numel()
    ]
    length = torch.stack(parts).norm(dim=0) / mean.weight.double().clamp(min=1e-300)
    return torch.where(mean.weight > 0, length, torch.zeros_like(length))


def _like(weight: Tensor, leaf: Tensor) -> Tensor:
    return weight.reshape((*weight.shape, *[1] * (leaf.ndim - weight.ndim)))


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path and name else path or name
