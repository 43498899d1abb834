"""Labels of any kind: strings, whole numbers, booleans, and other distinguishable values (dates, enum members, tuples);
all clients share one numbering of the classes."""

import enum
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from protofed.errors import UserError


def read_labels(y: Any, where: str) -> list[Any]:
    """One plain value for each sample."""
    if isinstance(y, torch.Tensor):
        y = y.detach().cpu().numpy()
    elif hasattr(y, "to_numpy"):  # a pandas Series
        y = y.to_numpy()
    if isinstance(y, np.ndarray):
        if y.ndim == 2 and y.shape[1] == 1:
            y = y[:, 0]
        if y.ndim != 1:
            raise UserError(
                f"{where}: labels have shape {y.shape}. Give one label for each sample; of one-hot rows, y.argmax(1)."
            )
        values = y.tolist()
    elif isinstance(y, Iterable) and not isinstance(y, str | bytes):
        values = list(y)
    else:
        raise UserError(f"{where}: labels are {type(y).__name__}. Give a list or array with one for each sample.")
    return [_value(value, f"{where}: the label at index {index}") for index, value in enumerate(values)]


def _value(value: Any, where: str) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        if getattr(value, "size", None) not in (1, ()) and (not isinstance(value, torch.Tensor) or value.numel() != 1):
            raise UserError(f"{where} is {tuple(value.shape)} numbers. Give one label for each sample.")
        value = value.item()
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool | int):
        return value
    if isinstance(value, str) and not isinstance(value, enum.Enum):
        return str(value)
    if value is not None and not isinstance(value, float | complex) and _hashable(value) and value == value:
        return value
    what = "NaN" if isinstance(value, float) and value != value else repr(value)
    raise UserError(f"{where} is {what}. Labels are classes: strings, whole numbers, booleans, tuples, dates.")


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:  # a tuple of lists
        return False
    return isinstance(value, Hashable)


def _kind(value: Any) -> str:
    """The kind of a label, in words: one list cannot mix classes of different kinds."""
    plain = {str: "text", bool: "booleans", int: "numbers"}
    return plain.get(type(value), type(value).__name__)


def known_classes(found: Mapping[str, Sequence[Any]], labels: Sequence[Any] | None) -> list[Any]:
    """The classes in order: as given, otherwise all that occur, sorted."""
    if labels is not None:
        classes = read_labels(labels, "labels")
        if len(set(classes)) < len(classes):
            raise UserError("labels names a class twice. Name each once.")
        return classes
    kinds: dict[str, tuple[str, Any]] = {}
    for name, some in found.items():
        for value in some:
            kinds.setdefault(_kind(value), (name, value))
    if len(kinds) > 1:
        (kind, (one, value)), (another, (other, second)) = sorted(kinds.items(), reverse=True)[:2]
        raise UserError(
            f"labels are {kind} with {one} ({value!r}) but {another} with {other} ({second!r}). "
            "Use one kind everywhere."
        )
    values = {value for values in found.values() for value in values}
    if len(values) < 2:
        raise UserError(
            f"there is only one class ({next(iter(values), None)!r}) in all data. Classifying needs two: give more "
            "data, or name all classes with labels=[...]."
        )
    try:
        return sorted(values)
    except TypeError:  # values without an order, such as enum members
        return sorted(values, key=str)


def class_names_of(classes: Sequence[Any]) -> tuple[str, ...]:
    """The classes' names in reports."""
    return tuple(str(value) for value in classes)


def numbered(y: Sequence[Any], classes: Sequence[Any], where: str) -> np.ndarray:
    """The number of each label's class."""
    place = {value: number for number, value in enumerate(classes)}
    odd = next((index for index, value in enumerate(y) if value not in place), None)
    if odd is not None:
        shown = ", ".join(map(repr, classes[:6])) + (", ..." if len(classes) > 6 else "")
        raise UserError(f"{where}: the label at index {odd} is {y[odd]!r}, which is not among the classes [{shown}].")
    return np.array([place[value] for value in y], np.int64)
