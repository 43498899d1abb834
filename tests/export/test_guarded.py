"""Operations that torch does not check by itself: a graph that somebody made must not write beyond a tensor."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from protofed.export.guarded import check_arguments
from protofed.export.program import _call

ATEN = torch.ops.aten
WIDE, ONE = torch.zeros(2, 9), torch.zeros(1)
NORM = {"input": WIDE, "weight": None, "bias": None, "running_mean": torch.zeros(9), "running_var": torch.ones(9)}
HALF = torch.zeros(3, 5, dtype=torch.complex64)
BACK = {"self": HALF, "dim": [1], "normalization": 0, "last_dim_size": 8}
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (ATEN.native_batch_norm.default, NORM | {"running_mean": ONE, "training": True}, "running_mean has shape"),
    (ATEN.native_batch_norm.default, NORM | {"running_var": ONE, "training": True}, "running_var has shape"),
    (ATEN._native_batch_norm_legit_no_training.default, NORM | {"weight": ONE}, "weight has shape"),
    (ATEN._native_batch_norm_legit_no_training.default, NORM | {"bias": torch.zeros(3, 3)}, "bias has shape"),
    (ATEN._fft_c2c.default, {"self": HALF, "dim": [2], "normalization": 0, "forward": True}, "has no axes"),
    (ATEN._fft_c2c.default, {"self": HALF, "dim": [-1], "normalization": 0, "forward": True}, "has no axes"),
    (ATEN._fft_c2c.default, {"self": HALF, "dim": [0, 0], "normalization": 0, "forward": True}, "has no axes"),
    (ATEN._fft_c2c.default, {"self": HALF, "dim": [], "normalization": 0, "forward": True}, "has no axes"),
    (ATEN._fft_r2c.default, {"self": WIDE, "dim": [1], "normalization": 9, "onesided": True}, "has no axes"),
    (ATEN._fft_r2c.default, {"self": WIDE[:0], "dim": [1], "normalization": 0, "onesided": True}, "of nothing"),
    (ATEN._fft_c2r.default, BACK | {"last_dim_size": 10}, "are not half of"),
    (ATEN._fft_c2r.default, BACK | {"last_dim_size": 2**40}, "are not half of"),
    (ATEN._fft_c2r.default, BACK | {"dim": [5]}, "has no axes"),
    (ATEN.lstm.data, {"data": WIDE, "batch_sizes": torch.tensor([10**9])}, "packed"),
    (ATEN.gru.data, {"data": WIDE, "batch_sizes": torch.tensor([10**9])}, "packed"),
    (ATEN.arange.default, {"end": 3, "dtype": -1}, "dtype = -1 is not a dtype"),
    (ATEN._to_copy.default, {"self": WIDE, "layout": 9}, "layout = 9 is not a layout"),
    (ATEN.clone.default, {"self": WIDE, "memory_format": 99}, "memory_format = 99 is not a memory_format"),
]


@pytest.mark.parametrize("operation, given, why", REFUSED)
def test_arguments_that_torch_does_not_check_are_refused(operation: Any, given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_arguments(operation, given)


def test_a_graphs_arguments_are_checked_before_they_are_used() -> None:
    """With a running mean that is too short, torch writes where it has nothing to write: this process would end."""
    inputs = [{"name": "input", "arg": {"as_tensor": {"name": "x"}}}]
    inputs += [{"name": key, "arg": {"as_tensor": {"name": "one"}}} for key in ("running_mean", "running_var")]
    inputs += [{"name": key, "arg": {"as_none": True}} for key in ("weight", "bias")]
    inputs += [{"name": "training", "arg": {"as_bool": True}}]
    inputs += [{"name": key, "arg": {"as_float": 0.1}} for key in ("momentum", "eps")]
    with pytest.raises(ValueError, match="has shape"):
        _call(ATEN.native_batch_norm.default, inputs, {"x": torch.zeros(2, 4_000_000), "one": ONE})


class Checked(TorchDispatchMode):
    """Checks what torch itself calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        names = (argument.name for argument in func._schema.arguments)
        check_arguments(func, dict(zip(names, args, strict=False)) | kwargs)
        self.names.add(func._schema.name.removeprefix("aten::"))
        return func(*args, **kwargs)


def test_what_torch_calls_itself_is_let_through() -> None:
    x, model = torch.randn(4, 3, 6, 5), torch.nn.BatchNorm2d(3).eval()
    with torch.no_grad(), Checked() as checked:
        for size in (None, 4, 7):
            torch.fft.irfft(torch.fft.rfft(x, size, norm="ortho"), size)
        torch.fft.irfft2(torch.fft.rfft2(x))
        torch.fft.ifftn(torch.fft.fftn(x, dim=(1, 3)), norm="forward")
        ATEN._native_batch_norm_legit_no_training.default(
            x, model.weight, model.bias, model.running_mean, model.running_var, 0.1, 1e-5
        )
        torch.nn.functional.batch_norm(x.flatten(1), None, None, training=True)
        x.to(torch.float64, memory_format=torch.channels_last)
    assert {"_fft_r2c", "_fft_c2r", "_fft_c2c", "_native_batch_norm_legit_no_training"} <= checked.names
