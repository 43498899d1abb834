"""The forms in which one client's data may be given, and the errors for forms that are nearly right."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from protofed.errors import UserError

INPUTS = ("x", "image", "img", "pixel_values", "input_ids", "input", "inputs", "features", "data", "audio")
LABELS = ("y", "label", "labels", "target", "targets", "class")


def is_arrays(source: tuple[Any, ...]) -> bool:
    """Whether a tuple is one client's (x, y), not several clients."""
    return bool(source) and isinstance(source[0], np.ndarray | torch.Tensor)


def inputs_and_labels(source: Mapping[str, Any], where: str) -> tuple[Any, Any]:
    """The inputs and labels of a dict, such as {"x": ..., "y": ...}."""
    names = [next((name for name in some if name in source), None) for some in (INPUTS, LABELS)]
    if None in names:
        raise UserError(
            f"{where} is a dict with the keys {', '.join(map(str, source)) or '(none)'}. Give (x, y), or "
            '{"train": (x, y), "test": (x, y)}.'
        )
    x, y = (source[str(name)] for name in names)
    return x, y


def refuse_half(source: Any, where: str) -> None:
    """A UserError for inputs without labels, and for tuples of arrays that are too short or too long."""
    if isinstance(source, np.ndarray | torch.Tensor):
        raise UserError(f"{where} is an array of shape {tuple(source.shape)} without labels. Give (x, y).")
    if hasattr(source, "to_numpy"):  # a pandas frame, or one of its columns
        raise UserError(
            f"{where} is a {type(source).__name__} without labels. Give (x, y), such as "
            '(frame.drop(columns="label"), frame["label"]).'
        )
    if isinstance(source, tuple) and is_arrays(source):
        raise UserError(f"{where} is a tuple of {len(source)}. Give (x, y), or (x, y, x_test, y_test).")


def frame_as_numbers(x: Any, where: str) -> Any:
    """A pandas frame as numbers; the error names a column that has none."""
    if not hasattr(x, "dtypes") or not hasattr(x, "columns"):
        return x
    for name, kind in zip(x.columns, x.dtypes, strict=True):
        if kind.kind not in "biuf":
            raise UserError(
                f"{where}: column {name!r} holds {kind}, not numbers. Encode it, for example with pandas.get_dummies, "
                "or drop it."
            )
    whole = all(kind.kind in "iu" for kind in x.dtypes)
    return x.to_numpy(np.int64 if whole else np.float64)  # without a type, mixed columns would become objects
