"""Turns arrays that were read into checked data sets."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from protofed.data.domain import Domain
from protofed.data.readers.files import Found, Pair
from protofed.errors import UserError

if TYPE_CHECKING:
    from protofed.data import Data

GREY = np.array([0.299, 0.587, 0.114], np.float32)  # ITU-R 601, Pillow's conversion of colour to grey


def as_domain(name: str, where: str, found: Found, data: "Data", rng: np.random.Generator) -> Domain:
    """The checked data set: images (N, C, H, W), labels 0 .. K-1, and a test part."""
    pairs = {"train": found.train, "test": found.test}
    xs, ys = [], []
    for part, pair in pairs.items():
        if pair is None:
            continue
        y = _labels(pair[1], f"{where} ({part})")
        if not len(pair[0]) or len(pair[0]) != len(y):
            raise UserError(
                f"{where}: the {part} part has {len(pair[0])} samples and {len(y)} labels. There must be one label per "
                "sample, and at least one sample."
            )
        xs.append(_samples(np.asarray(pair[0]), f"{where} ({part})", data))
        ys.append(y)
    if xs[0].shape[1:] != xs[-1].shape[1:]:
        raise UserError(
            f"{where}: training samples have shape {xs[0].shape[1:]}, test samples {xs[-1].shape[1:]}. "
            "For images, set data.size and data.channels; else save both alike."
        )
    ys, class_names = _number(ys, found.class_names, where)
    ids = found.ids
    if len(xs) == 1:
        train, test = hold_back(ys[0], data.test_fraction, rng)
        if not len(test):
            raise UserError(
                f"{where} has no class with two samples, so no test part can be held back. Give x_test, y_test."
            )
        xs, ys = [xs[0][train], xs[0][test]], [ys[0][train], ys[0][test]]
        ids = {column: (owners[train], owners[test]) for column, (owners, _) in ids.items()}
    kept = {column: (first, second) for column, (first, second) in ids.items() if second is not None}
    return Domain(name, xs[0], ys[0], xs[1], ys[1], class_names, kept)


def join_parts(parts: Sequence[tuple[str, Found]]) -> Found:
    """One data set from its files, with the rows of one file after those of the other; each file comes with its
    path."""
    first, one = parts[0]
    for where, other in parts[1:]:
        for what, mine in _form(one).items():
            if mine != (theirs := _form(other)[what]):
                raise UserError(
                    f"data.more: {where} and {first} are not parts of one data set: {what} are {theirs} and {mine}. "
                    "Name files with the same arrays."
                )
    founds = [found for _, found in parts]
    test = [found.test for found in founds if found.test is not None]
    ids = {name: [found.ids[name] for found in founds] for name in one.ids}
    return Found(
        _behind_each_other([found.train for found in founds]),
        _behind_each_other(test) if test else None,
        one.class_names,
        {name: _behind_each_other(columns) for name, columns in ids.items()},
    )


def _form(found: Found) -> dict[str, str]:
    """What the parts of a data set have in common, in words."""
    pairs = {"training": found.train, "test": found.test}
    return {
        f"{part} samples": f"{pair[0].dtype} of shape {pair[0].shape[1:]}, labels of shape {pair[1].shape[1:]}"
        if pair
        else "none"
        for part, pair in pairs.items()
    } | {
        "classes": ", ".join(found.class_names) or "numbers",
        "owner columns": ", ".join(sorted(found.ids)) or "none",
    }


def _behind_each_other(pairs: Sequence[tuple[np.ndarray, Any]]) -> tuple[np.ndarray, Any]:
    """Pairs of arrays as one pair; the second is None in all of them or in none."""
    firsts, seconds = zip(*pairs, strict=True)
    return np.concatenate(firsts), None if seconds[0] is None else np.concatenate(seconds)


def _labels(y: np.ndarray, where: str) -> np.ndarray:
    y = np.asarray(y)
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1 or y.dtype.kind not in "biu":
        raise UserError(
            f"{where}: labels must be one whole number (or text) per sample, got {y.dtype} of shape {y.shape}. "
            "Save them as an array (N,) of one kind."
        )
    return y.astype(np.int64)


def _number(ys: list[np.ndarray], names: tuple[str, ...], where: str) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """Labels as 0 .. K-1 and the names of the classes."""
    values = np.unique(np.concatenate(ys))
    if len(set(names)) < len(names):
        raise UserError(f"{where}: class_names repeats a name. Give each class a name of its own.")
    # Labels within range index the names from 0, so a class without samples keeps its place.
    if names and values[0] >= 0 and values[-1] < len(names):
        return ys, names
    if names and len(names) != len(values):
        raise UserError(
            f"{where}: there are {len(names)} class names, but labels from {values[0]} to {values[-1]} ({len(values)} "
            "different). Give one name per class."
        )
    return [np.searchsorted(values, y) for y in ys], names or tuple(str(value) for value in values)


def _samples(x: np.ndarray, where: str, data: "Data") -> np.ndarray:
    """uint8 images as uint8 (N, C, H, W), rows of whole numbers as int64, all else as float32."""
    if x.ndim < 2 or not x[0].size or x.dtype.kind not in "biuf":
        raise UserError(
            f"{where}: samples must be numbers of shape (N, features), (N, H, W) or (N, H, W, C), all of one size, got "
            f"{x.dtype} of shape {x.shape}. Save them so."
        )
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[3] in (1, 3):
        x = x.transpose(0, 3, 1, 2)
    if x.dtype.kind in "iu" and x.dtype != np.uint8 and x.ndim == 2:
        x = x.astype(np.int64)  # perhaps tokens: the model will tell
    elif x.dtype != np.uint8 or x.ndim != 4:
        with np.errstate(over="ignore"):  # too big for float32 becomes inf, which is reported below
            x = x.astype(np.float32)
        if not (np.isfinite(x) if x.ndim > 2 else ~np.isinf(x)).all():  # NaN in a table is a missing value
            raise UserError(f"{where}: samples hold NaN or infinite values. Remove or replace those before saving.")
    if (data.size or data.channels) and (x.ndim != 4 or x.shape[1] not in (1, 3)):
        raise UserError(
            f"{where}: data.size and data.channels are for images, but samples have shape {x.shape[1:]}. "
            "Leave both at 0."
        )
    if data.channels == 3 and x.shape[1] == 1:
        x = np.repeat(x, 3, axis=1)
    elif data.channels == 1 and x.shape[1] == 3:
        grey = np.einsum("nchw,c->nhw", x, GREY)[:, None]
        x = np.rint(grey).astype(np.uint8) if x.dtype == np.uint8 else grey
    return _resize(np.ascontiguousarray(x), data.size) if data.size else np.ascontiguousarray(x)


def _resize(x: np.ndarray, size: int) -> np.ndarray:
    if x.shape[2:] == (size, size):
        return x
    out = np.empty((*x.shape[:2], size, size), x.dtype)
    for start in range(0, len(x), 1024):  # in pieces: the whole set may not fit in memory as float32
        piece = torch.from_numpy(x[start : start + 1024].astype(np.float32))
        piece = torch.nn.functional.interpolate(piece, (size, size), mode="bilinear", antialias=True)
        out[start : start + 1024] = (piece.round().clamp(0, 255) if x.dtype == np.uint8 else piece).numpy()
    return out


def hold_back(y: np.ndarray, fraction: float, rng: np.random.Generator) -> Pair:
    """Indices of the train and of the test samples, class by class; a class of one sample stays in train."""
    held = []
    for label in np.unique(y):
        members = rng.permutation(np.flatnonzero(y == label))
        if len(members) > 1:
            held.append(members[: min(max(1, round(len(members) * fraction)), len(members) - 1)])
    test = np.sort(np.concatenate(held)) if held else np.array([], np.int64)
    return np.setdiff1d(np.arange(len(y)), test), test


def same_classes(domains: list[Domain]) -> list[Domain]:
    """Domains with the same order of classes: matched by name, or by number if one side has only numbers."""

    def numbered(domain: Domain) -> bool:
        return domain.class_names == tuple(str(k) for k in range(domain.classes))

    first = next((domain for domain in domains if not numbered(domain)), domains[0])
    aligned = []
    for domain in domains:
        if set(domain.class_names) == set(first.class_names):
            order = np.array([first.class_names.index(name) for name in domain.class_names])
            domain = replace(domain, y_train=order[domain.y_train], y_test=order[domain.y_test])
        elif domain.classes != first.classes or not numbered(domain):
            raise UserError(
                f"Domains must have the same classes, but {first.name} has {first.classes} ({_some(first)}) and "
                f"{domain.name} has {domain.classes} ({_some(domain)}). "
                "Use sources of one task, or give them equal class_names."
            )
        aligned.append(replace(domain, class_names=first.class_names))
    return aligned


def _some(domain: Domain) -> str:
    return ", ".join(domain.class_names[:4]) + (", ..." if domain.classes > 4 else "")
