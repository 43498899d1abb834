"""Arguments that torch does not check: with them an operation would read or write memory outside of its tensors.

torch's own functions check them before they call these operations; a graph that somebody made calls them directly.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

KINDS = {"ScalarType": torch.dtype, "Layout": torch.layout, "MemoryFormat": torch.memory_format}
NORMALIZATIONS = (0, 1, 2)  # of a Fourier transform: none, by the root of n, by n


def check_arguments(operation: torch._ops.OpOverload, given: Mapping[str, Any]) -> None:
    """A ValueError where an operation must not be called with these arguments, which are given by name."""
    for argument in operation._schema.arguments:
        kind = next((kind for name, kind in KINDS.items() if name in str(argument.real_type)), None)
        value = given.get(argument.name)
        if kind is not None and value is not None and not isinstance(value, kind):  # a number would be taken for one
            raise ValueError(f"{argument.name} = {str(value)[:40]} is not a {kind.__name__}")
    check = CHECKS.get(operation._schema.name.removeprefix("aten::"))
    if check is not None:
        check(given)


def _check_batch_norm(given: Mapping[str, Any]) -> None:
    x = given["input"]
    channels = x.shape[1] if x.ndim > 1 else 0
    for key in ("weight", "bias", "running_mean", "running_var"):
        if given.get(key) is not None and given[key].shape != (channels,):
            raise ValueError(f"{key} has shape {tuple(given[key].shape)}, and there are {channels} channels")


def _check_fft(given: Mapping[str, Any]) -> None:
    x, axes = given["self"], given["dim"]
    whole = all(type(axis) is int and 0 <= axis < x.ndim for axis in axes)
    if not axes or not whole or len(set(axes)) < len(axes) or given["normalization"] not in NORMALIZATIONS:
        raise ValueError(f"a Fourier transform of {x.ndim} axes has no axes {str(axes)[:40]}")
    if not x.numel():
        raise ValueError("a Fourier transform of nothing")


def _check_fft_to_real(given: Mapping[str, Any]) -> None:
    _check_fft(given)
    size, made = given["self"].shape[given["dim"][-1]], given["last_dim_size"]
    if type(made) is not int or made < 1 or made // 2 + 1 != size:
        raise ValueError(f"{size} numbers are not half of a spectrum of {str(made)[:40]}")


def _check_input(given: Mapping[str, Any]) -> None:
    if not isinstance(given.get("input"), Tensor):
        raise ValueError("of packed sequences, whose sizes nobody checks")


CHECKS: dict[str, Callable[[Mapping[str, Any]], None]] = {
    "_native_batch_norm_legit_no_training": _check_batch_norm,
    "native_batch_norm": _check_batch_norm,
    "_fft_c2c": _check_fft,
    "_fft_r2c": _check_fft,
    "_fft_c2r": _check_fft_to_real,
    "lstm": _check_input,
    "gru": _check_input,
}
