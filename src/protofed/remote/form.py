"""The tree in a message must have the form that this side expects, before any of it is made."""

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from protofed.engines.wire import decode, described, header, header_bytes
from protofed.method import Client, Each, Mean, Tree
from protofed.remote.protocol import Refused

ENTRY = 400  # bytes that a tensor's entry in a header takes at most, besides its name


def read_tree(body: bytes, form: Tree, most: int = 1) -> Tree:
    """The tree in a message, which must have this form; `most` rows may be where the form has one of several axes."""
    if not body and not tree_leaves(form):
        return form
    _check_size(body, form, most)  # before any of it is read
    try:
        shape = described(body)
        _check_memory(header(body), form, most)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refused(f"not a tree of tensors ({type(error).__name__})") from None
    _check_shape(shape, form, "", most)  # before anything is made as large as it says
    try:
        tree = decode(body)
    except ValueError as error:
        raise Refused(str(error)) from None
    for path, want, got in _pairs(form, tree, ""):
        if not _fits(list(got.shape), list(want.shape), most) or want.dtype != got.dtype:
            raise Refused(f"{path} is {_words(got)}, where {_words(want)} is expected")
        if got.is_floating_point() and not bool(torch.isfinite(got).all()):
            raise Refused(f"{path} holds NaN or infinite numbers")
        if path.endswith("running_var") and bool((got < 0).any()):  # whose root would be NaN for everybody
            raise Refused(f"{path} is negative, which no variance is")
    return tree


def _check_size(body: bytes, form: Tree, most: int) -> None:
    """Refused where a message, or its header, is longer than one of this form can be."""
    pairs = list(_pairs(form, form, ""))
    room = 4096 + sum(2 * (4 * len(path) + ENTRY) for path, _, _ in pairs)  # twice: row numbers are tensors too
    data = sum((tensor.element_size() + 4) * tensor.numel() for _, tensor, _ in pairs) * max(1, most)
    if header_bytes(body) > room or len(body) > 8 + room + data:
        raise Refused(f"it is {len(body):,} bytes with a header of {header_bytes(body):,}, which is more than its form")


def _check_memory(entries: dict[str, Any], form: Tree, most: int) -> None:
    """Refused where a tensor, although it may hold nothing, has rows that are larger than any of this form."""
    largest = max(1, most) * max(1, *(tensor.numel() for _, tensor, _ in _pairs(form, form, "")))
    for name, about in entries.items():
        if name != "__metadata__" and prod(max(1, size) for size in about["shape"]) > largest:
            raise Refused(f"{name[:80]} has shape {str(about['shape'])[:40]}, which is more than its form")


def _check_shape(shape: Any, form: Tree, path: str, most: int) -> None:
    """A message's own words about its form; Refused where they are not this form's."""
    where = path or "the message"
    if isinstance(form, Tensor):
        if shape is not None:
            raise Refused(f"{where} is not a tensor")
        return
    if not isinstance(shape, dict) or len(shape) != 1:
        raise Refused(f"{where} is not a {type(form).__name__.lower()}")
    ((kind, inner),) = shape.items()
    if kind != type(form).__name__.lower():
        raise Refused(f"{where} is a {str(kind)[:20]}, where a {type(form).__name__.lower()} is expected")
    if isinstance(form, Mean):
        rows = inner.get("rows") if isinstance(inner, dict) else None
        sizes = list(form.weight.shape)
        if not isinstance(inner, dict) or not set(inner) <= {"rows", "total"} or "total" not in inner:
            raise Refused(f"{where} is not a mean")
        if rows is not None and not _fits(rows, sizes, most):
            raise Refused(f"{where} has {str(rows)[:40]} rows, where {sizes} are expected")
        _check_shape(inner["total"], form.total, path, most)
    elif isinstance(form, Each):
        _check_shape(inner, form.rows, path, most)
    elif isinstance(form, Client):
        _check_shape(inner, form._asdict(), path, most)
    elif isinstance(form, dict):
        if not isinstance(inner, dict) or list(inner) != list(form):
            missing = sorted(set(form) ^ set(inner if isinstance(inner, dict) else {}))
            raise Refused(f"{where} has other parts than expected: {', '.join(missing)[:80] or 'in another order'}")
        for key, part in form.items():
            _check_shape(inner[key], part, f"{path}/{key}" if path else key, most)
    else:
        if not isinstance(inner, list) or len(inner) != len(form):
            raise Refused(f"{where} does not have {len(form)} parts")
        for i, part in enumerate(form):
            _check_shape(inner[i], part, f"{path}/{i}", most)


def _fits(got: Any, want: list[int], most: int) -> bool:
    """Whether sizes are as expected; a pool, whose form has one client's rows, may have those of so many, and so may
    the clusters (classes, clusters, ...) of a class, whose form has one."""
    if not isinstance(got, list) or any(type(n) is not int for n in got) or len(got) != len(want):
        return False
    several = [axis for axis, least in ((0, 3), (1, 2)) if len(want) >= least and want[axis] == 1]
    return got == want or any(1 <= got[axis] <= most and [*got[:axis], 1, *got[axis + 1 :]] == want for axis in several)


def _pairs(form: Tree, tree: Tree, path: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Every tensor of two trees of one shape, with its path."""
    if isinstance(form, Tensor):
        yield path or "the tensor", form, tree
    elif isinstance(form, Mean):
        yield from _pairs(form.total, tree.total, path)
        yield f"{path or 'the mean'} (counts)", form.weight, tree.weight
    elif isinstance(form, Each):
        yield from _pairs(form.rows, tree.rows, path)
    else:
        form, tree = (part._asdict() if isinstance(part, Client) else part for part in (form, tree))
        for key in form if isinstance(form, dict) else range(len(form)):
            yield from _pairs(form[key], tree[key], f"{path}/{key}" if path else str(key))


def _words(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
