"""A client's model as files that need no protofed: torch.export, ONNX, plain tensors, prototypes and class names."""

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch.utils._pytree import tree_map

from protofed.atomic import write_synced
from protofed.errors import UserError, asked_in_python, option
from protofed.export.calibrate import calibrate
from protofed.export.files import SUMS
from protofed.export.graph import Network, Subject
from protofed.export.program import Program, Unknown
from protofed.method import Params
from protofed.methods.ditto import OWN
from protofed.version import VERSION

HOW = Path(__file__).with_name("README.txt")  # how to use the files, which goes with them
TENSORS = ("client", "judge", "down", "prototypes", "own", "known", "test", "state")


def export(subject: Subject, out: Path, *, onnx: bool = True, quantile: float = 0.95) -> dict[str, Any]:
    """Write a new folder, whole or not at all; returns what its about.json says."""
    check_out(out, onnx)
    here: dict[str, Any] = {name: getattr(subject, name) for name in TENSORS if getattr(subject, name) is not None}
    subject = subject._replace(**tree_map(torch.Tensor.cpu, here))
    network = Network(subject).eval()
    scratch = out.with_name(f".{out.name}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        about = _write(subject, network, scratch, onnx, quantile)
        if out.is_dir():
            out.rmdir()
        scratch.rename(out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return about


def check_out(out: Path, onnx: bool) -> None:
    """Refuse what can be refused before any work is done."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{option('out', out)} already exists. Name a new folder: nothing is overwritten.")
    above = next(path for path in out.absolute().parents if path.exists())
    if not above.is_dir():
        raise UserError(f"{option('out', out)} lies under {above}, which is a file. Name another folder.")
    if not os.access(above, os.W_OK | os.X_OK):
        raise UserError(f"{option('out', out)}: {above} cannot be written to. Name another folder.")
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if onnx and missing:
        without = "onnx=False" if asked_in_python() else "--no-onnx"
        raise UserError(
            f"model.onnx needs {' and '.join(missing)}: pip install 'protofed[export]', or leave it out with {without}."
        )


def _write(subject: Subject, network: Network, folder: Path, onnx: bool, quantile: float) -> dict[str, Any]:
    kind = torch.int64 if subject.inputs["whole"] else torch.float32
    example = torch.zeros(2, *subject.inputs["shape"], dtype=kind)
    outputs = ["embedding", "scores", "distances"][: 2 if subject.prototypes is None else 3]
    try:
        batch = torch.export.Dim("batch", min=1)
        program = torch.export.export(network, (example,), dynamic_shapes={"x": {0: batch}})
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"{subject.about['architecture']} cannot be traced by torch.export ({reason}). "
            "Avoid Python branches on values in its forward()."
        ) from None
    _write_program(program, folder / "model.pt2")
    if onnx:
        _write_onnx(program, outputs, folder / "model.onnx")
    own, beside = _tensors(subject)
    write_synced(folder / "model.safetensors", save(own))
    if beside:
        write_synced(folder / "beside.safetensors", save(beside))
    if subject.prototypes is not None:
        rows = {"prototypes": subject.prototypes.value.contiguous(), "held": subject.prototypes.weight.contiguous()}
        write_synced(folder / "prototypes.safetensors", save(rows))
    scaling = "none: whole numbers" if subject.inputs["whole"] else "inside the graph: (x / unit - mean) / std"
    about = {
        "protofed": VERSION,
        **subject.about,
        "input": {**subject.inputs, "takes": str(kind).removeprefix("torch."), "scaling": scaling},
        "outputs": outputs,
        "class_names": list(subject.class_names),
        "own_classes": subject.own.nonzero()[:, 0].tolist(),
        "inference": subject.method.inference if subject.prototypes is not None else "head",
        "candidates": subject.method.candidates,
        **calibrate(subject, network, quantile),
        "state": sorted(own),
    }
    write_synced(folder / "about.json", (json.dumps(about, indent=2, allow_nan=False) + "\n").encode())
    write_synced(folder / "README.txt", HOW.read_bytes())
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(folder.iterdir())]
    write_synced(folder / SUMS, "".join(sums).encode())
    return about


def _write_program(program: torch.export.ExportedProgram, path: Path) -> None:
    """The graph as `predict` can read it: made of tensor operations that it knows, if possible."""
    _save_program(program, path)
    try:
        Program(path)
    except Unknown:
        _save_program(program.run_decompositions(), path)


def _save_program(program: torch.export.ExportedProgram, path: Path) -> None:
    """Save without the example, which torch would pickle."""
    example, program._example_inputs = program._example_inputs, None
    try:
        torch.export.save(program, path)
    finally:
        program._example_inputs = example


def _write_onnx(program: torch.export.ExportedProgram, outputs: list[str], path: Path) -> None:
    """Export quietly: the exporter mentions every package that it can do without."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            made = torch.onnx.export(program, dynamo=True, input_names=["x"], output_names=outputs, verbose=False)
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
    assert made is not None
    for node in made.model.graph:  # a value inside may have an output's name: torch calls that of nn.Embedding so
        for value in node.outputs:
            if value.name in outputs and not value.is_graph_output():
                value.name = f"{value.name}_inside"
    made.save(path, external_data=False)


def _tensors(subject: Subject) -> tuple[Params, Params]:
    """The module's own tensors as in its state_dict, and whatever else the client keeps."""
    everything = {**subject.client.params, **subject.client.buffers}
    names = subject.model.eval_module.state_dict().keys()
    prefix = OWN if any(name.startswith(OWN) for name in everything) else ""
    own = {name: everything[prefix + name].contiguous() for name in names if prefix + name in everything}
    taken = {prefix + name for name in own}
    rest = {name: value.contiguous() for name, value in everything.items() if name not in taken}
    return ({k: v.clone() for k, v in subject.state.items()} if subject.state else own), rest
