"""What is in a message: tensors by groups that a person can name, and what the server can tell from them."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from protofed.engines.wire import Size
from protofed.method import Client, Each, Mean, Tree

KINDS = {"params": "parameters", "buffers": "buffers"}


class Leaf(NamedTuple):
    """One tensor of a message."""

    path: tuple[str, ...]  # ("model", "params", "body.conv1.weight")
    each: bool
    tensor: Tensor  # its shape and type alone, unless it is a weight
    rows: tuple[int, int] | None = None  # of a Mean with a weight per row: how many are sent, of how many
    weight: bool = False  # it is a Mean's weight


class Message(NamedTuple):
    """What one client sends or gets."""

    leaves: list[Leaf]
    size: Size


def leaves(
    tree: Tree, path: tuple[str, ...] = (), each: bool = False, rows: tuple[int, int] | None = None
) -> Iterator[Leaf]:
    """Every tensor of a message, and the weights of its Means."""
    if isinstance(tree, Tensor):
        yield Leaf(path, each, tree.to("meta"), rows)
    elif isinstance(tree, Mean):
        present = (int((tree.weight > 0).sum()), tree.weight.numel()) if tree.weight.ndim else None
        yield from leaves(tree.total, path, each, present)
        yield Leaf(path, each, tree.weight, present, weight=True)
    elif isinstance(tree, Each):
        yield from leaves(tree.rows, path, True, rows)
    else:
        tree = tree._asdict() if isinstance(tree, Client) else tree
        parts = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, part in parts:
            yield from leaves(part, (*path, str(key)), each, rows)


class Place(NamedTuple):
    """Where a tensor belongs when a person counts."""

    name: str
    kind: str  # parameters, buffers or rows
    part: str  # of parameters and buffers: "body"
    each: bool


def _place(leaf: Leaf) -> Place:
    for mark, kind in KINDS.items():
        if mark in leaf.path[:-1]:
            at = leaf.path.index(mark)
            return Place("/".join(leaf.path[:at]) or "model", kind, leaf.path[at + 1].split(".")[0], leaf.each)
    name, kind = ("prototypes", "rows") if leaf.rows else ("model", "numbers")
    return Place("/".join(leaf.path) or name, kind, "", leaf.each)


def _sent(leaf: Leaf) -> int:
    """Rows of weight 0 stay at home."""
    return leaf.tensor.numel() if leaf.rows is None else leaf.tensor.numel() // leaf.rows[1] * leaf.rows[0]


def summary(messages: Sequence[Message], kept: set[str], shared: str, own: str) -> dict[str, Any]:
    """The messages of a cohort by groups that a person can name, and their sizes as serialised."""
    groups: dict[Place, list[list[Leaf]]] = {}
    for number, message in enumerate(messages):
        for leaf in message.leaves:
            if not leaf.weight:
                groups.setdefault(_place(leaf), [[] for _ in messages])[number].append(leaf)
    missing = kept - names_in(messages)
    listed = [_group(place, by_client, missing, own if place.each else shared) for place, by_client in groups.items()]
    raw = [sum(_sent(x) * x.tensor.element_size() for x in m.leaves if not x.weight) for m in messages]
    return {
        "clients": len(messages),
        "groups": listed,
        "numbers": _spread([message.size.params for message in messages]),
        "bytes": _spread([message.size.bytes for message in messages]),
        "bytes_beside": _spread([m.size.bytes - tensors for m, tensors in zip(messages, raw, strict=True)]),
    }


def _group(place: Place, by_client: Sequence[Sequence[Leaf]], missing: set[str], seen: str) -> dict[str, Any]:
    one = max(by_client, key=len)
    rows = [leaves[0].rows[0] for leaves in by_client if leaves and leaves[0].rows]
    return {
        "name": place.name,
        "kind": place.kind,
        "parts": cover([leaf.path[-1] for leaf in one], missing) if place.part else [],
        "tensors": len(one),
        "shape": list(one[0].tensor.shape) if len(one) == 1 else None,
        "dtype": str(one[0].tensor.dtype).removeprefix("torch."),
        "dtype_bytes": one[0].tensor.element_size(),
        "rows": {**_spread(rows), "of": one[0].rows[1]} if one[0].rows else None,
        "numbers": _spread([sum(map(_sent, leaves)) for leaves in by_client]),
        "bytes": _spread([sum(_sent(leaf) * leaf.tensor.element_size() for leaf in leaves) for leaves in by_client]),
        "seen": seen,
    }


def _spread(values: Sequence[int]) -> dict[str, float]:
    """Over the clients of a round, and the whole round."""
    return {"min": min(values), "mean": sum(values) / len(values), "max": max(values), "round": sum(values)}


def cover(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """The shortest prefixes that cover these names and none of the others."""
    found: dict[str, None] = {}
    for name in names:
        words = name.split(".")
        starts = (".".join(words[:depth]) + "." for depth in range(1, len(words)))
        free = (f"{start}*" for start in starts if not any(other.startswith(start) for other in others))
        found[next(free, name)] = None
    return list(found)


def names_in(messages: Iterable[Message]) -> set[str]:
    return {leaf.path[-1] for message in messages for leaf in message.leaves if leaf.path}


def learns(up: Sequence[Message]) -> Iterator[str]:
    """What the server can tell from the uploads, in words."""
    leaves = [leaf for message in up for leaf in message.leaves]
    if not leaves:
        yield "nothing: no message goes up"
    for each in (False, True):
        mine = [leaf for leaf in leaves if leaf.each == each]
        if names := dict.fromkeys(_place(leaf).name for leaf in mine if not leaf.weight and leaf.tensor.numel()):
            several = f"only summed over the {len(up)} clients of a round" if len(up) > 1 else "of a round's one client"
            whose = "of every single client" if each else several
            yield f"{whose}: {', '.join(names)}"
        for path in dict.fromkeys(leaf.path for leaf in mine if leaf.weight):
            told = _told([leaf for leaf in mine if leaf.weight and leaf.path == path])
            if told:
                yield f"{'of every single client' if each else 'of these clients together'}: {told}"
        if mine and each:
            yield "what it has of a single client it may pass on to others: see what goes down"
        elif mine:
            yield "until they are summed, messages can be read where they arrive: where nobody may, sum on the way"


def _told(weights: Sequence[Leaf]) -> str:
    """What the weights of a Mean tell, if anything."""
    one = weights[0]
    counts = any(bool(((w.tensor != 0) & (w.tensor != 1)).any()) for w in weights)  # else clients count all alike
    if one.rows is None:
        return f"the number of training samples (the count beside {_place(one).name})" if counts else ""
    rows = f"(rows of {_place(one).name})"
    if one.each:
        return f"which classes it holds{', and how many samples of each' if counts else ''} {rows}"
    return f"how many {'samples there are of each class' if counts else 'hold each class'} {rows}"
