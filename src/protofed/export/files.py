"""The files of an exported model, which somebody else may have made: checked, and never executed."""

import hashlib
import importlib.util
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from protofed.errors import UserError
from protofed.export.program import BROKEN, Program, Unknown

Outputs = list[np.ndarray]  # embedding (B, D), scores (B, C), and distances (B, C) where there are prototypes
Run = Callable[[np.ndarray], Outputs]
SUMS = "SHA256SUMS"  # of all other files; older exports have none
# In an ONNX file: a tensor that lies in another file. A number may have more bytes than it needs.
OUTSIDE = re.compile(rb"(\x0a|\x8a\x80*\x00)(\x08|\x88\x80*\x00)location")
AGAIN = "Export the model again."


def read_about(folder: Path, source: str | Path) -> dict[str, Any]:
    """about.json, with values of the right kinds."""
    path = folder / "about.json"
    if not Path(source).exists():
        raise UserError(f"there is no exported model {source}. Make one with protofed export.")
    if not path.is_file():
        raise UserError(f"{source} is not an exported model: there is no {path}. Make one with protofed export.")
    _verify(path)
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
        _check(found)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error}). {AGAIN}") from None
    return found


def _check(about: dict[str, Any]) -> None:
    """Raise ValueError, KeyError or TypeError if a value that is used is missing or of the wrong kind."""
    names, inputs, unknown = about["class_names"], about["input"], about["unknown"]
    shape = inputs["shape"]
    far = [] if unknown is None else [unknown["above"]]
    numbers = [*inputs["range"], about["temperature"]["head"], about["temperature"]["proto"], *far]
    words = [*names, about["method"], about["inference"], about["candidates"], inputs["dtype"], inputs["takes"]]
    whole = [*shape, *about["own_classes"]]
    if not names or not all(isinstance(word, str) for word in words):
        raise ValueError("a name is missing, or not text")
    if not all(type(one) in (int, float) and math.isfinite(one) for one in numbers) or len(inputs["range"]) != 2:
        raise ValueError("a number is missing, or not finite")
    if not all(type(one) is int and one >= 0 for one in whole) or any(c >= len(names) for c in about["own_classes"]):
        raise ValueError("a size or the number of a class is wrong")
    if about["outputs"] not in (["embedding", "scores"], ["embedding", "scores", "distances"]):
        raise ValueError(f"outputs are {str(about['outputs'])[:80]}")


def _verify(path: Path) -> None:
    """A UserError if a file is not what SHA256SUMS says."""
    sums = path.with_name(SUMS)
    if not sums.is_file():
        return
    lines = [line.split("  ", 1) for line in sums.read_text("utf-8", "replace").splitlines()]
    told = {line[1]: line[0] for line in lines if len(line) == 2}
    with open(path, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != told.get(path.name):
            raise UserError(
                f"{path} is damaged: it is not what {SUMS} says. Copy the folder again, or export it again."
            )


def model(path: Path, about: dict[str, Any]) -> Run:
    """The model in a .pt2 or .onnx file, from raw samples to outputs of the required shapes."""
    if path.suffix not in (".pt2", ".onnx") or not path.is_file():
        what = f"there is no {path}" if path.suffix == ".onnx" else f"{path} is not an exported model"
        raise UserError(f"{what}. Name the folder, its model.pt2 or its model.onnx.")
    _verify(path)
    inner = _session(path) if path.suffix == ".onnx" else _program(path)
    classes = len(about["class_names"])

    def run(x: np.ndarray) -> Outputs:
        try:
            made = inner(x)
        except Exception as error:  # a graph that somebody else made may raise anything in torch or ONNX Runtime
            raise UserError(f"{path} cannot be run ({_said(error)}). {AGAIN}") from None
        wide = [part.shape for part in made[1:]]
        if len(made) != len(about["outputs"]) or made[0].ndim != 2 or any(shape != (len(x), classes) for shape in wide):
            raise UserError(f"{path} does not give what about.json says. {AGAIN}")
        return made

    return run


def _program(path: Path) -> Run:
    try:
        program = Program(path)
    except Unknown as error:
        raise UserError(
            f"{path} asks for {error}, which is not among the tensor operations that predict runs. Use its model.onnx."
        ) from None
    except BROKEN as error:
        raise UserError(f"{path} cannot be read ({_said(error)}). {AGAIN}") from None
    return lambda x: [part.numpy() for part in program(torch.from_numpy(x))]


def _session(path: Path) -> Run:
    if importlib.util.find_spec("onnxruntime") is None:
        raise UserError(f"{path.name} needs onnxruntime: pip install 'protofed[export]', or name the folder.")
    import onnxruntime

    content = path.read_bytes()
    if OUTSIDE.search(content):
        raise UserError(f"{path} takes tensors from other files, which exports of protofed never do. {AGAIN}")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # it would write lines of its own to stderr
    try:
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's own errors have no common class
        raise UserError(f"{path} cannot be read ({type(error).__name__}). {AGAIN}") from None
    return lambda x: list(session.run(None, {"x": x}))


def _said(error: BaseException) -> str:
    first = next(iter(str(error).strip().splitlines()), "")[:160].rstrip(".")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
