"""Trees of tensors as bytes: one safetensors file with names, types and shapes, and nothing pickled.

The same form is a message, and a file of a checkpoint. Rows of weight 0 in a Mean (classes a client does not hold) are
not sent; a checkpoint keeps them, so that it gives back the same bits.
"""

import json
from collections.abc import Callable
from functools import lru_cache, reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from protofed.method import Client, Each, Mean, Tree
from protofed.ops.trees import map_nodes

KEPT = 4096  # forms of messages whose size is remembered
KINDS = {"params": "weights", "buffers": "buffers"}  # words in a tensor's path, and what a person calls it
PROTOTYPES = ("", "prototypes", "pool", "means")  # where methods keep them: first words of a path
BESIDE = "counts and header"  # weights of Means, row numbers, single numbers, names and shapes
_costs: dict[Any, "Size"] = {}


class Size(NamedTuple):
    """What a message costs."""

    bytes: int  # as serialised
    params: int  # numbers of models and prototypes, as the papers count: no counts, indices or buffers
    kinds: dict[str, int] = {}  # the bytes by what they are: prototypes, weights, ... (never mutated)

    def __add__(self, other: "Size") -> "Size":  # type: ignore[override]
        kinds = {kind: self.kinds.get(kind, 0) + other.kinds.get(kind, 0) for kind in self.kinds | other.kinds}
        return Size(self.bytes + other.bytes, self.params + other.params, kinds)

    def times(self, many: int) -> "Size":
        return Size(self.bytes * many, self.params * many, {kind: n * many for kind, n in self.kinds.items()})


def signature(tree: Tree) -> Any:
    """A tree's form, its shapes and its types."""
    leaves, form = tree_flatten(tree)
    return str(form), tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)


def encode(tree: Tree, whole: bool = False) -> bytes:
    """A tree of tensors as bytes; `whole` keeps rows of weight 0."""
    tensors: dict[str, Tensor] = {}
    shape = _flatten(tree, "", tensors, whole)
    own: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        flat = tensor.detach().cpu().contiguous()
        storage = flat.untyped_storage().data_ptr()
        own[name] = flat.clone() if storage in storages else flat  # safetensors wants no two to share memory
        storages.add(storage)
    return save(own, metadata={"tree": json.dumps(shape, separators=(",", ":"))})


def decode(message: bytes) -> Tree:
    """The tree that was encoded; ValueError where the bytes are no such thing."""
    try:
        length = int.from_bytes(message[:8], "little")
        header = json.loads(message[8 : 8 + length])
        shape = json.loads(header["__metadata__"]["tree"])
        return _unflatten(shape, "", load(message))
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise ValueError(f"not a tree of tensors: {error}") from error


def measure(tree: Tree) -> Size:
    """What encoding this would cost; the bytes are counted on zeros of the same shapes, once for each form."""
    tensors: dict[str, Tensor] = {}
    shape = _flatten(tree, "", tensors)
    if not tensors:
        return Size(0, 0)  # nothing is sent
    form = tuple((name, tuple(t.shape), t.dtype) for name, t in tensors.items())
    return _measure(json.dumps(shape, separators=(",", ":")), form)


def measure_up(up: Tree, many: int) -> Size:
    """What encoding the uploads of M clients would cost, all of whose tensors are stacked."""
    here = map_nodes(_weights_here, up)
    return _sum_rows(lambda row: map_nodes(lambda node: _light(node, row), here), _kinds(here, many))


def measure_down(down: Tree, many: int) -> Size:
    """What encoding a broadcast to M clients would cost, of which each gets its row of every Each and all the rest."""
    here = map_nodes(_weights_here, down)

    def mine(row: int) -> Tree:
        return map_nodes(lambda n: _light(n.rows, row) if isinstance(n, Each) else _light(n, None), here)

    dealt: list[Any] = []
    map_nodes(lambda node: dealt.append(node.rows) if isinstance(node, Each) else None, here)
    if dealt:
        return _sum_rows(mine, _kinds(dealt, many))
    return measure(mine(0)).times(many)


def _kinds(tree: Tree, many: int) -> dict[bytes, list[int]]:
    """Rows of a tree that cost the same: those in which the same weights are 0."""
    present: list[np.ndarray] = []

    def look(node: Any) -> None:
        if isinstance(node, Each):
            map_nodes(look, node.rows)
        elif isinstance(node, Mean):
            present.append((node.weight > 0).reshape(many, -1).numpy())

    map_nodes(look, tree)
    kinds: dict[bytes, list[int]] = {}
    for row in range(many):
        kinds.setdefault(b"/".join(part[row].tobytes() for part in present), []).append(row)
    return kinds


def _sum_rows(of: Callable[[int], Tree], kinds: dict[bytes, list[int]]) -> Size:
    """What all rows cost, of which one of each kind is measured."""
    form = signature(of(0)) if kinds else ""
    each = []
    for kind, rows in kinds.items():
        if (form, kind) not in _costs:
            _costs[form, kind] = measure(of(rows[0]))
        each.append(_costs[form, kind].times(len(rows)))
    while len(_costs) > KEPT:
        del _costs[next(iter(_costs))]
    return reduce(Size.__add__, each, Size(0, 0))


def _weights_here(node: Any) -> Any:
    """The same with its weights on the host, in one transfer each."""
    if isinstance(node, Each):
        return Each(_weights_here(node.rows))
    return Mean(node.total, node.weight.cpu()) if isinstance(node, Mean) else node


def _light(node: Any, row: int | None) -> Any:
    """A row of it (or all) in shapes without memory: of its numbers only the weights are looked at."""
    if isinstance(node, Each):
        return Each(_light(node.rows, row))
    if isinstance(node, Mean):
        return Mean(_light(node.total, row), node.weight if row is None else node.weight[row])
    return tree_map(lambda t: torch.zeros((), dtype=t.dtype).expand(t.shape if row is None else t.shape[1:]), node)


@lru_cache(maxsize=4096)
def _measure(shape: str, form: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]) -> Size:
    zeros = {name: torch.zeros(size, dtype=dtype) for name, size, dtype in form}
    counted = (
        zeros[name].numel()
        for name, _, dtype in form
        if dtype.is_floating_point and "#" not in name and "buffers" not in name.split("/")
    )
    size = len(save(zeros, metadata={"tree": shape}))
    kinds: dict[str, int] = {}
    for name, tensor in zeros.items():
        if tensor.numel():
            kind = _kind(name, tensor)
            kinds[kind] = kinds.get(kind, 0) + tensor.numel() * tensor.element_size()
    return Size(size, sum(counted), kinds | {BESIDE: kinds.get(BESIDE, 0) + size - sum(kinds.values())})


def _kind(name: str, tensor: Tensor) -> str:
    """What a person calls a tensor of a message: by its path, the method's own word where there is no better one."""
    words = name.split("/")
    found = next((kind for word, kind in KINDS.items() if word in words), None)
    if "#" in name or (found is None and (tensor.ndim == 0 or not tensor.is_floating_point())):
        return BESIDE
    first = words[1] if len(words) > 1 else ""
    return found or ("prototypes" if first in PROTOTYPES else first)


def _flatten(tree: Tree, path: str, tensors: dict[str, Tensor], whole: bool = False) -> Any:
    """Collect the tensors by name; what remains is the tree's shape, as JSON."""
    if isinstance(tree, Tensor):
        tensors[path] = tree
        return None
    if isinstance(tree, Mean):
        return {"mean": _flatten_mean(tree, path, tensors, whole)}
    if isinstance(tree, Each):
        return {"each": _flatten(tree.rows, path, tensors, whole)}
    if isinstance(tree, Client):
        return {"client": _flatten(tree._asdict(), path, tensors, whole)}
    if isinstance(tree, dict):
        if any(not isinstance(key, str) for key in tree):
            raise TypeError(f"keys of a tree that travels are strings; {path} has {list(tree)}")
        return {"dict": {key: _flatten(part, f"{path}/{_escape(key)}", tensors, whole) for key, part in tree.items()}}
    if type(tree) in (list, tuple):
        kind = "list" if isinstance(tree, list) else "tuple"
        return {kind: [_flatten(part, f"{path}/{i}", tensors, whole) for i, part in enumerate(tree)]}
    raise TypeError(f"only tensors travel, in dicts, lists, tuples, Mean, Each and Client; {path} is {type(tree)}")


def _escape(key: str) -> str:
    """So that no two places in a tree have one name."""
    return key.replace("~", "~0").replace("/", "~1").replace("#", "~2")


def _flatten_mean(mean: Mean, path: str, tensors: dict[str, Tensor], whole: bool) -> Any:
    """A Mean with a weight per row keeps the rows that have any, and their numbers."""
    present = mean.weight > 0
    if whole or mean.weight.ndim == 0 or bool(present.all()):
        tensors[f"{path}#n"] = mean.weight
        return {"total": _flatten(mean.total, path, tensors, whole)}
    count = mean.weight.numel()
    smallest = torch.uint8 if count <= 256 else torch.int16 if count <= 32768 else torch.int32
    tensors[f"{path}#i"] = present.flatten().nonzero().flatten().to(smallest)
    tensors[f"{path}#n"] = mean.weight[present]
    total = tree_map(lambda leaf: leaf[present], mean.total)
    return {"rows": list(mean.weight.shape), "total": _flatten(total, path, tensors)}


def _unflatten(shape: Any, path: str, tensors: dict[str, Tensor]) -> Tree:
    if shape is None:
        return tensors[path]
    ((kind, inner),) = shape.items()
    if kind == "mean" and "rows" in inner:
        rows, weight = _unflatten(inner["total"], path, tensors), tensors[f"{path}#n"]
        index, whole_shape = tensors[f"{path}#i"].long(), torch.Size(inner["rows"])
        if len(index) and (index[0] < 0 or bool((index.diff() <= 0).any())):
            raise ValueError("row numbers must rise")

        def put(rows: Tensor) -> Tensor:
            whole = torch.zeros(whole_shape.numel(), *rows.shape[1:], dtype=rows.dtype)
            whole[index] = rows
            return whole.reshape(*whole_shape, *rows.shape[1:])

        return Mean(tree_map(put, rows), put(weight))
    if kind == "mean":
        return Mean(_unflatten(inner["total"], path, tensors), tensors[f"{path}#n"])
    if kind == "each":
        return Each(_unflatten(inner, path, tensors))
    if kind == "client":
        return Client(**_unflatten(inner, path, tensors))
    if kind == "dict":
        return {key: _unflatten(part, f"{path}/{_escape(key)}", tensors) for key, part in inner.items()}
    if kind not in ("list", "tuple"):
        raise ValueError(f"{kind!r} is no part of a tree")
    parts = [_unflatten(part, f"{path}/{i}", tensors) for i, part in enumerate(inner)]
    return parts if kind == "list" else tuple(parts)
