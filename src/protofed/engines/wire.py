"""Trees of tensors as bytes: one safetensors file with names, types and shapes, and nothing pickled.

Messages and checkpoint files have the same format. Rows of weight 0 in a Mean (classes a client does not hold) are
not sent; a checkpoint keeps them, so it restores the same bits.
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

KEPT = 4096  # forms of messages whose size is cached
KINDS = {"params": "weights", "buffers": "buffers"}  # words in a tensor's path, and their names for people
PROTOTYPES = ("", "prototypes", "pool", "means")  # the first words of the paths where methods keep them
BESIDE = "counts and header"  # weights of Means, row numbers, single numbers, names and shapes
_costs: dict[Any, "Size"] = {}


class Size(NamedTuple):
    """The size of a message."""

    bytes: int  # as serialised
    params: int  # numbers of models and prototypes, as the papers count: no counts, indices or buffers
    kinds: dict[str, int] = {}  # bytes by content: prototypes, weights, ... (never mutated)

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
        own[name] = flat.clone() if storage in storages else flat  # safetensors refuses tensors that share memory
        storages.add(storage)
    return save(own, metadata={"tree": json.dumps(shape, separators=(",", ":"))})


def decode(message: bytes) -> Tree:
    """The tree that was encoded; ValueError if the bytes are not one encoded tree and nothing else."""
    try:
        shape, tensors = described(message), load(message)
        tree = _unflatten(shape, "", tensors)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise ValueError(f"not a tree of tensors: {error}") from error
    if tensors:
        raise ValueError(f"not a tree of tensors: {next(iter(tensors))[:80]!r} is not part of it")
    return tree


def header(message: bytes) -> dict[str, Any]:
    """A message's header: the name, type and shape of each tensor, and `__metadata__`; nothing else is read."""
    found: dict[str, Any] = strict_json(message[8 : 8 + header_bytes(message)])
    return found


def header_bytes(message: bytes) -> int:
    """The header's length, as the message states it."""
    return int.from_bytes(message[:8], "little")


def described(message: bytes) -> Any:
    """A message's own description of its tree, as JSON."""
    about = header(message)["__metadata__"]
    if list(about) != ["tree"]:
        raise ValueError("it says more than its tree")
    return strict_json(about["tree"])


def strict_json(text: str | bytes) -> Any:
    """JSON without duplicate keys: readers differ in which value they use."""
    try:
        return json.loads(text, object_pairs_hook=_no_pair_twice)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _no_pair_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is given twice")
    return found


def encoded_size(tree: Tree) -> Size:
    """The size of this tree if encoded; the bytes are counted on zeros of the same shapes, once per form."""
    tensors: dict[str, Tensor] = {}
    shape = _flatten(tree, "", tensors)
    if not tensors:
        return Size(0, 0)  # nothing is sent
    form = tuple((name, tuple(t.shape), t.dtype) for name, t in tensors.items())
    return _measure(json.dumps(shape, separators=(",", ":")), form)


def measure_up(up: Tree, many: int) -> Size:
    """The size of M clients' uploads if encoded, given with all tensors stacked."""
    here = map_nodes(_weights_here, up)
    return _sum_rows(lambda row: map_nodes(lambda node: _light(node, row), here), _kinds(here, many))


def measure_down(down: Tree, many: int) -> Size:
    """The size of a broadcast to M clients if encoded: each gets its row of every Each and everything else."""
    here = map_nodes(_weights_here, down)

    def mine(row: int) -> Tree:
        return map_nodes(lambda n: _light(n.rows, row) if isinstance(n, Each) else _light(n, None), here)

    dealt: list[Any] = []
    map_nodes(lambda node: dealt.append(node.rows) if isinstance(node, Each) else None, here)
    if not dealt:
        return encoded_size(mine(0)).times(many)
    for_all: list[bytes] = []
    map_nodes(lambda n: for_all.append((n.weight > 0).numpy().tobytes()) if isinstance(n, Mean) else None, here)
    kinds = {b"/".join([*for_all, kind]): rows for kind, rows in _kinds(dealt, many).items()}
    return _sum_rows(mine, kinds)


def _kinds(tree: Tree, many: int) -> dict[bytes, list[int]]:
    """Rows of a tree that have the same size: those in which the same weights are 0."""
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
    """The size of all rows, of which one of each kind is measured."""
    form = signature(of(0)) if kinds else ""
    each = []
    for kind, rows in kinds.items():
        if (form, kind) not in _costs:
            _costs[form, kind] = encoded_size(of(rows[0]))
        each.append(_costs[form, kind].times(len(rows)))
    while len(_costs) > KEPT:
        del _costs[next(iter(_costs))]
    return reduce(Size.__add__, each, Size(0, 0))


def _weights_here(node: Any) -> Any:
    """The same tree with its weights on the host, in one transfer each."""
    if isinstance(node, Each):
        return Each(_weights_here(node.rows))
    return Mean(node.total, node.weight.cpu()) if isinstance(node, Mean) else node


def _light(node: Any, row: int | None) -> Any:
    """One row (or all) as shapes without memory: only the weights keep their numbers."""
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
    """A tensor's name for people, from its path; the method's own word if there is no better one."""
    words = name.split("/")
    found = next((kind for word, kind in KINDS.items() if word in words), None)
    if "#" in name or (found is None and (tensor.ndim == 0 or not tensor.is_floating_point())):
        return BESIDE
    first = words[1] if len(words) > 1 else ""
    return found or ("prototypes" if first in PROTOTYPES else first)


def _flatten(tree: Tree, path: str, tensors: dict[str, Tensor], whole: bool = False) -> Any:
    """Collect the tensors by name; returns the tree's shape, as JSON."""
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
    """Escape a key, so that no two places in a tree share a name."""
    return key.replace("~", "~0").replace("/", "~1").replace("#", "~2")


def _flatten_mean(mean: Mean, path: str, tensors: dict[str, Tensor], whole: bool) -> Any:
    """A Mean with a weight per row keeps only rows of positive weight, and their indices."""
    present = mean.weight > 0
    if whole or mean.weight.ndim == 0 or bool(present.all()):
        tensors[f"{path}#n"] = mean.weight
        return {"total": _flatten(mean.total, path, tensors, whole)}
    tensors[f"{path}#i"] = present.flatten().nonzero().flatten().to(_index_type(mean.weight.numel()))
    tensors[f"{path}#n"] = mean.weight[present]
    total = tree_map(lambda leaf: leaf[present], mean.total)
    return {"rows": list(mean.weight.shape), "total": _flatten(total, path, tensors)}


def _index_type(rows: int) -> torch.dtype:
    """The smallest integer type that can index this many rows."""
    return torch.uint8 if rows <= 256 else torch.int16 if rows <= 32768 else torch.int32


def _unflatten(shape: Any, path: str, tensors: dict[str, Tensor]) -> Tree:
    """The tree of this shape; its tensors are removed from the dict, so leftovers can be detected."""
    if shape is None:
        return tensors.pop(path)
    ((kind, inner),) = shape.items()
    if kind == "mean" and "rows" in inner:
        rows, weight = _unflatten(inner["total"], path, tensors), tensors.pop(f"{path}#n")
        index, whole_shape = tensors.pop(f"{path}#i"), torch.Size(inner["rows"])
        if index.ndim != 1 or index.dtype != _index_type(whole_shape.numel()):
            raise ValueError("row numbers are of another type")
        index = index.long()
        if len(index) and (index[0] < 0 or bool((index.diff() <= 0).any())):
            raise ValueError("row numbers must rise")

        def put(rows: Tensor) -> Tensor:
            if rows.ndim == 0 or len(rows) != len(index):  # otherwise torch would broadcast them
                raise ValueError("there are not as many rows as row numbers")
            whole = torch.zeros(whole_shape.numel(), *rows.shape[1:], dtype=rows.dtype)
            whole[index] = rows
            return whole.reshape(*whole_shape, *rows.shape[1:])

        return Mean(tree_map(put, rows), put(weight))
    if kind == "mean":
        return Mean(_unflatten(inner["total"], path, tensors), tensors.pop(f"{path}#n"))
    if kind == "each":
        return Each(_unflatten(inner, path, tensors))
    if kind == "client":
        return Client(**_unflatten(inner, path, tensors))
    if kind == "dict":
        return {key: _unflatten(part, f"{path}/{_escape(key)}", tensors) for key, part in inner.items()}
    if kind not in ("list", "tuple"):
        raise ValueError(f"{kind!r} is not part of a tree")
    parts = [_unflatten(part, f"{path}/{i}", tensors) for i, part in enumerate(inner)]
    return parts if kind == "list" else tuple(parts)
