"""What comes from the other side is believed only where it has the form, the range and the size that it must have."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from protofed.data.domain import Domain
from protofed.engines.wire import decode
from protofed.experiment import Experiment
from protofed.federation.build import one_client
from protofed.federation.protocol import Refused
from protofed.method import Client, Each, Mean, Spec, Tree
from protofed.metrics import Correct, Tally
from protofed.ops.trees import deal
from protofed.sections import ModelChoice

SLACK = 1 + 1e-5  # what rounding may add to a count


def upload_form(experiment: Experiment, server: Spec, number: int, choice: ModelChoice, shape: tuple[int, ...]) -> Tree:
    """An upload of this client as the method makes it of two made-up samples of each class: for its form alone."""
    y = np.arange(server.classes).repeat(2)
    x = np.random.default_rng(0).random((len(y), *shape), np.float32)
    domain = Domain("form", x, y, x[:0], y[:0], tuple(map(str, range(server.classes))))
    quick = replace(experiment, local_epochs=1, batch_size=len(y))
    engine = one_client(quick, number, domain, choice)
    down = experiment.method.broadcast(experiment.method.init_server(server), torch.tensor([number]))
    return engine.update(experiment.method, number, deal(down, 0), 0).up


def read_tree(body: bytes, form: Tree, most: int = 1) -> Tree:
    """The tree in a message, which must have this form; `most` rows may be where the form has one of several axes."""
    if not body and not tree_leaves(form):
        return form
    try:
        length = int.from_bytes(body[:8], "little")
        shape = json.loads(json.loads(body[8 : 8 + length])["__metadata__"]["tree"])
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
    return tree


def _check_shape(shape: Any, form: Tree, path: str, most: int) -> None:
    """A message's own words about its form; Refused where they are not this form's."""
    where = path or "the message"
    if isinstance(form, Tensor):
        if shape is not None:
            raise Refused(f"{where} is no tensor")
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
            raise Refused(f"{where} has not {len(form)} parts")
        for i, part in enumerate(form):
            _check_shape(inner[i], part, f"{path}/{i}", most)


def _fits(got: Any, want: list[int], most: int) -> bool:
    """Whether sizes are as expected; a pool, whose form has one client's rows, may have those of so many."""
    if not isinstance(got, list) or any(type(n) is not int for n in got) or len(got) != len(want):
        return False
    return got == want or (len(want) >= 3 and want[0] == 1 and 1 <= got[0] <= most and got[1:] == want[1:])


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


def check_counts(up: Tree, samples: int, path: str = "", each: bool = False) -> None:
    """Nothing is counted less than not at all, or more often than there are samples."""
    if isinstance(up, Tensor):
        if each and up.ndim == 0:  # a single number of one client is a count
            _check_count(up, samples, path)
    elif isinstance(up, Mean):
        _check_count(up.weight, samples, path)
    elif isinstance(up, Each):
        check_counts(up.rows, samples, path, True)
    else:
        for key, part in up.items() if isinstance(up, dict) else enumerate(up):
            check_counts(part, samples, f"{path}/{key}" if path else str(key), each)


def _check_count(count: Tensor, samples: int, path: str) -> None:
    if bool((count < 0).any()):
        raise Refused(f"{path or 'the mean'} has a negative count ({float(count.min()):g})")
    if bool((count > max(1, samples) * SLACK).any()):
        raise Refused(f"{path or 'the mean'} counts {float(count.max()):g}, but there are {samples} samples")


def loss_of(head: dict[str, Any], samples: int, epochs: int) -> Mean:
    """The loss that a client tells: a sum, and over how many samples of all its steps."""
    told = head.get("loss")
    if not isinstance(told, list) or len(told) != 2 or not all(type(n) in (int, float) for n in told):
        raise Refused("it tells no loss")
    if not all(math.isfinite(n) for n in told):
        raise Refused("its loss is not a number")
    if not 0 <= told[1] <= max(1, samples) * epochs * SLACK:
        raise Refused(f"its loss is over {told[1]:g} samples, but there are {samples}")
    return Mean(torch.tensor(float(told[0])), torch.tensor(float(told[1])))


def tally_form(kinds: list[str], classes: int, confusion: str) -> Tree:
    """What a client answers where it is tested: for each kind of score, right answers and samples of each class."""
    none = torch.zeros(classes, dtype=torch.float64)
    square = {"said": torch.zeros(classes, classes, dtype=torch.float64)}
    return {kind: {"right": none, "samples": none} | (square if kind == confusion else {}) for kind in kinds}


def read_tallies(body: bytes, form: Tree) -> dict[str, Tally]:
    """The counts of a client's tests by what was asked; none may be negative, or larger than what it is a part of."""
    found: dict[str, Tally] = {}
    for asked, tally in read_tree(body, form).items():
        found[asked] = {}
        for kind, counts in tally.items():
            right, samples, said = counts["right"], counts["samples"], counts.get("said", ())
            parts = (right, samples, said) if isinstance(said, Tensor) else (right, samples)
            if any(bool(((part < 0) | (part != part.round())).any()) for part in parts):
                raise Refused(f"{asked}, {kind}: a count is negative or not whole")
            if bool((right > samples).any()) or (isinstance(said, Tensor) and bool((said.sum(1) > samples).any())):
                raise Refused(f"{asked}, {kind}: more answers than samples")
            found[asked][kind] = Correct(right, samples, said)
    return found
