"""An exported graph (model.pt2) read as data: nothing in it is unpickled, evaluated or imported.

`torch.export.load` unpickles sample inputs and weights, evaluates expressions of shapes, and calls whatever function of
torch a node names. Here a node names one of the tensor operations below, and a tensor is its bytes.
"""

import json
import operator
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protofed.export.guarded import check_arguments

# Operations of torch.ops.aten that compute tensors from tensors and numbers, and do nothing else.
ATEN_NAMES = """
    __and__ __iand__ __ilshift__ __ior__ __irshift__ __ixor__ __lshift__ __or__ __rshift__ __xor__
    _adaptive_avg_pool2d _adaptive_avg_pool3d _assert_scalar _assert_tensor_metadata _cdist_forward _fft_c2c _fft_c2r
    _fft_r2c _log_softmax _native_batch_norm_legit_no_training _pdist_forward _softmax _to_copy _unsafe_view
    _upsample_bicubic2d_aa _upsample_bilinear2d_aa
    abs absolute acos acosh adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
    adaptive_max_pool2d adaptive_max_pool3d add addbmm addcdiv addcmul addmm addmv alias all alpha_dropout amax amin
    aminmax any arange arccos arcsin arctan argmax argmin argsort as_strided asin asinh atan atan2 atanh avg_pool1d
    avg_pool2d avg_pool3d baddbmm batch_norm bilinear bitwise_and bitwise_left_shift bitwise_not bitwise_or
    bitwise_right_shift bitwise_xor bmm broadcast_to bucketize cartesian_prod cat cdist ceil celu channel_shuffle chunk
    clamp clamp_max clamp_min clip clone col2im concat concatenate constant_pad_nd contiguous conv1d conv2d conv3d
    conv_transpose1d conv_transpose2d conv_transpose3d convolution copy cos cosh cosine_similarity count_nonzero
    cummax cummin cumprod cumsum detach diag diag_embed diagonal diff dist div divide dot dropout einsum elu embedding
    eq erf erfc exp exp2 expand expand_as expm1 feature_dropout fill flatten flip fliplr flipud floor floor_divide fmax
    fmin fmod frac full full_like gather ge gelu glu greater greater_equal grid_sampler grid_sampler_2d
    grid_sampler_3d group_norm gru gt hann_window hardshrink hardsigmoid hardswish hardtanh heaviside hstack hypot
    im2col index index_add index_copy index_fill index_put index_select inner instance_norm isclose isfinite isinf isnan
    isneginf isposinf kron kthvalue layer_norm le leaky_relu lerp less less_equal lift_fresh_copy linalg_cross
    linalg_inv linalg_matrix_norm linalg_norm linalg_vector_norm linear linspace log log10 log1p log2 log_sigmoid
    log_softmax logaddexp logcumsumexp logical_and logical_not logical_or logical_xor logit logsumexp lstm lt
    masked_fill masked_scatter masked_select matmul max max_pool1d max_pool2d max_pool2d_with_indices max_pool3d
    max_pool3d_with_indices maximum mean median meshgrid min minimum mish mm mode moveaxis movedim mul multiply mv
    nan_to_num nanmean nansum narrow native_batch_norm native_dropout native_group_norm native_layer_norm ne neg
    negative new_full new_ones new_zeros nonzero norm not_equal numpy_T one_hot ones ones_like outer pad
    pairwise_distance permute pixel_shuffle pixel_unshuffle polar positive pow prelu prod quantile rad2deg real
    reciprocal reflection_pad1d reflection_pad2d reflection_pad3d relu relu6 remainder renorm repeat
    repeat_interleave replication_pad1d replication_pad2d replication_pad3d reshape reshape_as rms_norm roll rot90 round
    rsqrt rsub scalar_tensor scaled_dot_product_attention scatter scatter_add scatter_reduce searchsorted select
    select_scatter selu sgn sigmoid sign silu sin sinc sinh slice slice_scatter softmax softplus softshrink sort split
    split_with_sizes sqrt square squeeze stack std std_mean sub subtract sum swapaxes swapdims sym_constrain_range
    sym_constrain_range_for_size sym_numel sym_size sym_stride t take take_along_dim tan tanh tensor_split threshold
    tile to topk transpose tril tril_indices triu triu_indices true_divide trunc type_as unbind unflatten unfold
    unsqueeze upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d
    upsample_nearest3d upsample_trilinear3d var var_mean vdot view view_as vstack where xlogy zeros zeros_like
"""
ATEN = frozenset(ATEN_NAMES.split())
ARITHMETIC = "add sub mul floordiv truediv mod neg eq ne lt le gt ge and_ or_"
NUMBERS: dict[str, Callable[..., Any]] = {
    f"_operator.{name}": getattr(operator, name) for name in ARITHMETIC.split()
} | {
    "torch.sym_max": max,
    "torch.sym_min": min,
    "math.ceil": lambda x: -int(-x // 1),
    "math.floor": lambda x: int(x // 1),
}
NAME = re.compile(r"torch\.ops\.aten\.(\w+)\.(\w+)")
TYPES = {
    1: torch.uint8, 2: torch.int8, 3: torch.int16, 4: torch.int32, 5: torch.int64, 6: torch.float16, 7: torch.float32,
    8: torch.float64, 9: torch.complex32, 10: torch.complex64, 11: torch.complex128, 12: torch.bool, 13: torch.bfloat16,
}  # fmt: skip
FORMATS = {
    1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d, 4: torch.preserve_format,
}  # fmt: skip
STRIDED = 7  # torch's usual layout
LARGEST = 256 * 2**20  # bytes of the graph's description
BROKEN = (
    *(zipfile.BadZipFile, OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError),
    *(RuntimeError, NotImplementedError, MemoryError, RecursionError, OverflowError, AssertionError),
)


class Unknown(Exception):
    """A graph asks for an operation that is not in the tables above."""


def _layout(number: int) -> torch.layout:
    if number != STRIDED:
        raise Unknown("an argument as_layout")
    return torch.strided


def _same(what: Any) -> Any:
    return what


# What a constant is in Python, by the kind that the file names.
CONSTANTS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("as_int", "as_bool", "as_string", "as_ints", "as_bools", "as_int_lists"), _same),
    "as_none": lambda what: None,
    "as_float": float,
    "as_floats": lambda what: [float(one) for one in what],
    "as_complex": lambda what: complex(what["real"], what["imag"]),
    "as_scalar_type": TYPES.__getitem__,
    "as_memory_format": FORMATS.__getitem__,
    "as_device": lambda what: torch.device("cpu"),
    "as_layout": _layout,
}


class Archive:
    """The members of a .pt2 file, which is a zip file with uncompressed members."""

    def __init__(self, path: Path) -> None:
        self.zip = zipfile.ZipFile(path)
        members = self.zip.infolist()
        names = [member.filename for member in members]
        self.root = names[0].partition("/")[0] if names else ""
        if len(set(names)) < len(names) or any(name.partition("/")[0] != self.root for name in names):
            raise ValueError("its members have no names of their own")
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise ValueError("its members are compressed")
        if sum(member.file_size for member in members) > path.stat().st_size:
            raise ValueError("its members are larger than the file")
        self.names = {name.partition("/")[2] for name in names}

    def read(self, name: str) -> bytes:
        return self.zip.read(f"{self.root}/{name}")

    def table(self, name: str) -> dict[str, Any]:
        content = self.read(name)
        if len(content) > LARGEST:
            raise ValueError(f"{name} has {len(content)} bytes")
        found = json.loads(content)
        if not isinstance(found, dict):
            raise ValueError(f"{name} is not a table")
        return found


class Program:
    """A graph that is ready to be run."""

    def __init__(self, path: Path) -> None:
        """One of BROKEN where the file is damaged; Unknown where it asks for what is not done here."""
        archive = Archive(path)
        with archive.zip:
            if "byteorder" in archive.names and archive.read("byteorder") != b"little":
                raise ValueError("its bytes are in another order")
            whole = archive.table("models/model.json")["graph_module"]
            tensors = _tensors(archive, "weights", "weight_") | _tensors(archive, "constants", "tensor_")
        self.graph, signature = whole["graph"], whole["signature"]
        self.values: dict[str, Any] = {}
        self.takes: list[str] = []
        for kind, spec in map(_single, signature["input_specs"]):
            if kind == "user_input":
                self.takes.append(_argument_name(spec["arg"]))
            else:
                self.values[spec["arg"]["name"]] = tensors[spec[f"{kind}_name"]]
        made = [
            (_single(spec)[0], out) for spec, out in zip(signature["output_specs"], self.graph["outputs"], strict=True)
        ]
        self.gives = [_argument_name(out) for kind, out in made if kind == "user_output"]
        self.steps = [(_operation(node["target"]), node) for node in self.graph["nodes"]]

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        values = self.values | dict(zip(self.takes, inputs, strict=True))
        with torch.no_grad():
            for operation, node in self.steps:
                _put(node["outputs"], _call(operation, node["inputs"], values), values)
        return [values[name] for name in self.gives]


def _tensors(archive: Archive, what: str, prefix: str) -> dict[str, Tensor]:
    """The weights or constants by name: from their bytes or, in an older file, from what torch reads as tensors
    only."""
    older = f"data/{what}/model.pt"
    if older in archive.names:  # as torch 2.8 writes them
        content = archive.read(older)
        try:
            found = torch.load(BytesIO(content), map_location="cpu", weights_only=True) if content else {}
        except Exception as error:  # of several kinds, with many lines of advice
            raise ValueError(f"{older} holds more than tensors") from error
        return {str(name): tensor.detach() for name, tensor in found.items() if isinstance(tensor, Tensor)}
    config = archive.table(f"data/{what}/model_{what}_config.json")["config"]
    return {name: _tensor(archive, f"data/{what}/", about, prefix) for name, about in config.items()}


def _tensor(archive: Archive, folder: str, about: Mapping[str, Any], prefix: str) -> Tensor:
    if about["use_pickle"] or not about["path_name"].startswith(prefix):
        raise ValueError(f"{folder}{about['path_name']} is pickled, and nothing is unpickled")
    meta = about["tensor_meta"]
    size, stride = ([int(one["as_int"]) for one in meta[key]] for key in ("sizes", "strides"))
    content, kind = archive.read(folder + about["path_name"]), TYPES[meta["dtype"]]
    if not content:
        if prod(size):
            raise ValueError(f"{folder}{about['path_name']} is empty")
        return torch.zeros(size, dtype=kind)
    flat = torch.frombuffer(bytearray(content), dtype=kind)
    return flat.as_strided(size, stride, int(meta["storage_offset"]["as_int"]))


def _operation(target: str) -> Any:
    """What a node does: one of ATEN or NUMBERS, or a choice from a list."""
    if target in NUMBERS or target == "_operator.getitem":
        return NUMBERS.get(target, "getitem")
    named = NAME.fullmatch(target)
    if named is None or (named[1] not in ATEN and named[1].removesuffix("_") not in ATEN):
        raise Unknown(target[:80])
    operation = getattr(getattr(torch.ops.aten, named[1]), named[2])
    if not isinstance(operation, torch._ops.OpOverload):
        raise Unknown(target[:80])
    return operation


def _call(operation: Any, inputs: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> Any:
    given = [(one["name"], _value(one["arg"], values)) for one in inputs]
    if not isinstance(operation, torch._ops.OpOverload):
        return _number(operation, [value for _, value in given])
    asked = dict(given)
    check_arguments(operation, asked)
    positional: list[Any] = []
    for argument in operation._schema.arguments:
        if argument.kwarg_only or argument.name not in asked:
            break
        positional.append(asked.pop(argument.name))
    return operation(*positional, **asked)


def _number(operation: Any, given: Sequence[Any]) -> Any:
    """Arithmetic on sizes, or an entry of a list."""
    if operation == "getitem":
        whole, place = given
        if not isinstance(whole, list | tuple) or type(place) is not int:
            raise ValueError("only an entry of a list can be taken")
        return whole[place]
    if any(type(one) not in (int, float, bool) or abs(one) >= 2**63 for one in given):
        raise ValueError("only numbers are computed with")
    return operation(*given)


def _put(outputs: Sequence[Mapping[str, Any]], made: Any, values: dict[str, Any]) -> None:
    """Store a node's results under their names."""
    several = made if isinstance(made, list | tuple) and len(outputs) > 1 else [made]
    if not outputs:
        return
    for output, one in zip(outputs, several, strict=True):
        kind, what = _single(output)
        if kind == "as_tensors":
            values |= {entry["name"]: part for entry, part in zip(what, one, strict=True)}
        elif kind != "as_none":
            values[_argument_name(output)] = one


def _value(argument: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    """An argument of a node: a constant, or the result of an earlier node."""
    kind, what = _single(argument)
    if kind in CONSTANTS:
        return CONSTANTS[kind](what)
    if kind in ("as_optional_tensor", "as_sym_int", "as_sym_float", "as_sym_bool"):
        return _value(what, values)
    if kind in ("as_optional_tensors", "as_sym_ints", "as_sym_floats", "as_sym_bools"):
        return [_value(one, values) for one in what]
    if kind == "as_name":
        return values[what]
    if kind == "as_tensor":
        return values[what["name"]]
    if kind in ("as_tensors", "as_nested_tensors"):
        return [_named(one, values) for one in what]
    raise Unknown(f"an argument {kind[:40]}")


def _named(tensors: Any, values: Mapping[str, Any]) -> Any:
    """The tensor of a name, or those of a list of names."""
    return [values[one["name"]] for one in tensors] if isinstance(tensors, list) else values[tensors["name"]]


def _argument_name(argument: Mapping[str, Any]) -> str:
    kind, what = _single(argument)
    if kind in ("as_sym_int", "as_sym_float", "as_sym_bool", "as_optional_tensor"):
        return _argument_name(what)
    return str(what if kind == "as_name" else what["name"])


def _single(union: Mapping[str, Any]) -> tuple[str, Any]:
    """The only entry of a table with one entry."""
    ((kind, what),) = union.items()
    return kind, what
