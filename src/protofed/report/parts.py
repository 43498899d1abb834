"""The files of a run beside its settings and rounds: each may be missing or damaged without harm to the rest."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from protofed.errors import UserError
from protofed.folder import RunFolder

CLIENT = {"client", "architecture", "train", "classes"}  # what a line of clients.jsonl says at least


class Remark(NamedTuple):
    """A folder, and why it or a part of it is not in the report."""

    folder: str
    reason: str


class Partition(NamedTuple):
    """Who has what, as far as a run's folder tells without its data."""

    hash: str
    fingerprint: str
    counts: np.ndarray | None
    """Training samples (clients, classes)."""


def part(folder: Path, name: str, reader: Any, remarks: list[Remark]) -> Any:
    """One file of a run; {} where it is not there, with a remark where it cannot be read."""
    path = folder / name
    if not path.is_file():
        return {}
    try:
        return reader(path)
    except Exception as error:  # json, zip, zlib and numpy each raise their own; the remark is one
        why = error if isinstance(error, UserError) else type(error).__name__
        remarks.append(Remark(str(folder), f"{name} cannot be read ({why}): what it tells is missing"))
        return {}


def table(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError("not a table")
    return content


def client_lines(path: Path) -> list[dict[str, Any]]:
    lines = RunFolder(path.parent).clients()
    if not all(line.keys() >= CLIENT and isinstance(line["classes"], list) for line in lines):
        raise ValueError("a line is no client")
    if not lines:
        raise UserError("it is empty")
    return lines


def classes(path: Path) -> dict[str, Any]:
    """Names of the classes and, of each where there are some, the one above it."""
    content = table(path)
    for names in (content.get("names"), content.get("superclasses")):
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise ValueError("not a list of names")
    return content


def _arrays(path: Path) -> dict[str, np.ndarray]:
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
    """Snapshots whose shapes fit each other; a KeyError or a ValueError where they do not."""
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
            raise ValueError(f"{name} has numbers that are no class")
    if not np.isfinite(views["z"]).any():
        raise ValueError("no embedding is a number")
    return views


def called(path: Path) -> dict[str, str]:
    """A sweep's names of its methods, by folder."""
    return {row["folder"]: row["labels"]["method"] for row in json.loads(path.read_text(encoding="utf-8"))}


def partition(path: Path) -> Partition:
    with np.load(path, allow_pickle=False) as stored:
        counts = stored.get("counts")
        if counts is not None and (counts.ndim != 2 or not counts.any()):
            raise ValueError("no counts of clients and classes")
        return Partition(str(stored["hash"]), str(stored["fingerprint"]), counts)
