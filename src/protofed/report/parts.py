"""The files of a run apart from its settings and rounds: each may be missing or damaged without harm to the rest."""

import json
import math
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from protofed.errors import UserError
from protofed.runs import listing
from protofed.runs.folder import RunFolder

ACCURACIES = ("accuracy_mean", "global_accuracy", "loss")  # a round that has none of these was not written by us
CLIENT = {"client", "architecture", "train", "classes"}  # what a line of clients.jsonl says at least
Content = TypeVar("Content")
LARGEST = 2**29  # bytes of a file's arrays, unpacked; a run's own are a hundred times smaller


class Remark(NamedTuple):
    """A folder, and why it or a part of it is left out of a table or report."""

    folder: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.folder}: {self.reason}"


class Partition(NamedTuple):
    """The partition, as far as a run's folder tells without its data."""

    hash: str
    fingerprint: str
    counts: np.ndarray | None
    """Training samples (clients, classes)."""


def part(folder: Path, name: str, reader: Callable[[Path], Content], remarks: list[Remark]) -> Content | None:
    """One file of a run; None if it does not exist, or, with a remark, if it cannot be read."""
    path = folder / name
    if not path.is_file():
        return None
    try:
        return reader(path)
    except Exception as error:  # json, zip, zlib and numpy each raise their own; the remark is one
        why = error if isinstance(error, UserError) else type(error).__name__
        remarks.append(Remark(folder, f"{name} cannot be read ({why}): what it tells is missing"))
        return None


def json_table(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError("not a table")
    return content


def client_lines(path: Path) -> list[dict[str, Any]]:
    lines = RunFolder(path.parent).clients()
    if not all(line.keys() >= CLIENT and isinstance(line["classes"], list) for line in lines):
        raise ValueError("a line is not a client")
    if not lines:
        raise UserError("it is empty")
    return lines


def classes(path: Path) -> dict[str, Any]:
    """Names of the classes and of each class's superclass, if there are some."""
    content = json_table(path)
    for names in (content.get("names"), content.get("superclasses")):
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise ValueError("not a list of names")
    return content


def _arrays(path: Path) -> dict[str, np.ndarray]:
    with zipfile.ZipFile(path) as archive:
        size = sum(member.file_size for member in archive.infolist())
    if size > LARGEST:
        raise UserError(f"unpacked it has {size:,} bytes")
    with np.load(path, allow_pickle=False) as stored:
        return dict(stored)


def confusion(path: Path) -> dict[str, np.ndarray]:
    tables = _arrays(path)
    if not all(table.ndim == 2 and table.shape[0] == table.shape[1] for table in tables.values()):
        raise ValueError("not square")
    if not all(table.dtype.kind in "iuf" for table in tables.values()):
        raise ValueError("not numbers")
    return tables


def views(path: Path) -> dict[str, np.ndarray]:
    """Snapshots whose shapes match; raises KeyError or ValueError if they do not."""
    views = _arrays(path)
    rounds, samples, width = views["z"].shape
    globals_, clients = len(views["global_class"]), len(views["local_clients"])
    classes = views["local_held"].shape[2]
    expected = {
        "rounds": (rounds,),
        "labels": (samples,),
        "client": (samples,),
        "global_prototypes": (rounds, globals_, width),
        "global_held": (rounds, globals_),
        "local_prototypes": (rounds, clients, classes, width),
        "local_held": (rounds, clients, classes),
    }
    for name, shape in expected.items():
        if views[name].shape != shape:
            raise ValueError(f"{name} is {views[name].shape}, not {shape}")
    kinds = {"rounds": "iu", "labels": "iu", "client": "iu", "global_class": "iu", "local_clients": "iu", "z": "f"}
    kinds |= {"global_held": "b", "local_held": "b", "global_prototypes": "f", "local_prototypes": "f"}
    for name, allowed in kinds.items():
        if views[name].dtype.kind not in allowed:
            raise ValueError(f"{name} is of type {views[name].dtype}")
    for name in ("labels", "global_class"):
        if views[name].size and not 0 <= views[name].min() <= views[name].max() < classes:
            raise ValueError(f"{name} has numbers that are not classes")
    if not np.isfinite(views["z"]).any():
        raise ValueError("no embedding is a number")
    return views


LEAKS = ("psnr", "ssim", "correlation", "error")


def leaks(path: Path) -> dict[str, Any]:
    """The results of an attack on a run's uploads; raises ValueError, KeyError or TypeError if the file is not as it
    was written."""
    content = json_table(path)
    for line in [*content["reconstruction"], *content["membership"]]:
        _numbers([line["samples"]], missing=False)
        if line["samples"] <= 0 or type(line["size"]) not in (int, type(None)):
            raise ValueError("a line has no number of samples")
    for line in content["reconstruction"]:
        for attack in ("guess", "likely", "smooth"):
            _numbers(line[attack][key] for key in (*LEAKS, *(f"other_{key}" for key in LEAKS)))
            _numbers([line[attack]["correlation"]], missing=False)
    for line in content["membership"]:
        for attack in ("distance", "likelihood"):
            _numbers(line[attack][key] for key in ("tpr_at_0.01", "tpr_at_0.001"))
            _numbers([line[attack]["auc"]], missing=False)
    if content["epsilon"] is not None:
        for part in ("one_release", "all_releases"):
            _numbers(content["epsilon"][part][key] for key in ("claimed", "lower_bound"))
    words = [content["view"], content["holdings"]["classes"], content["holdings"]["counts"]]
    if not all(isinstance(word, str) for word in words):
        raise ValueError("what the server sees is not a word")
    if not all(type(content["model"][key]) is bool for key in ("sent", "public")):
        raise ValueError("whether models are sent is not said")
    return content


def _numbers(values: Iterable[Any], missing: bool = True) -> None:
    for value in values:
        if not (missing and value is None) and (type(value) not in (int, float) or not math.isfinite(value)):
            raise ValueError(f"{str(value)[:40]!r} is not a number")


def called(folder: Path, remarks: list[Remark]) -> dict[str, str]:
    """A sweep's names of its methods, by the folders of its runs."""

    def names(path: Path) -> dict[str, str]:
        return {name: each["method"] for name, each in listing.read_cells(folder)}

    return part(folder, listing.LISTING, names, remarks) or {}


def read_partition(path: Path) -> Partition:
    stored = _arrays(path)
    counts = stored.get("counts")
    if counts is not None and (counts.ndim != 2 or not counts.any()):
        raise ValueError("no counts of clients and classes")
    return Partition(str(stored["hash"]), str(stored["fingerprint"]), counts)


def fingerprint(path: Path) -> str:
    """The fingerprint of the data in a partition.npz; empty if it was not kept or cannot be read."""
    try:
        return str(_arrays(path)["fingerprint"])
    except Exception:  # zip, zlib and numpy each raise their own, and a MemoryError where a size is a lie
        return ""


def is_round(line: dict[str, Any]) -> bool:
    """Whether this is a round's line: its numbers are numbers."""
    if type(line.get("round")) is not int or not any(key in line for key in ACCURACIES):
        return False
    tables = [line[key] for key in ("parts", "bytes_up_by", "bytes_down_by", "theory") if line.get(key) is not None]
    if not all(isinstance(table, dict) for table in tables):
        return False
    numbers = [line[key] for key in ACCURACIES if line.get(key) is not None] + list((line.get("parts") or {}).values())
    return all(isinstance(number, int | float) for number in numbers)


def only_finite(lines: list[dict[str, Any]], folder: Path, name: str, remarks: list[Remark]) -> list[dict[str, Any]]:
    """Lines without numbers that are not finite, and a remark if there were any."""
    found = [_finite(line) for line in lines]
    if found != lines:
        remarks.append(Remark(folder, f"{name} has NaN or Infinity: these numbers are left out"))
    return found


def _finite(table: dict[str, Any]) -> dict[str, Any]:
    """The value without numbers that are not finite."""
    return {
        key: _finite(value) if isinstance(value, dict) else value
        for key, value in table.items()
        if not isinstance(value, float) or math.isfinite(value)
    }
