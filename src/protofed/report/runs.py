"""Run folders, found and read; what cannot be read is named with the reason, and the rest is used."""

import contextlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from protofed.errors import UserError
from protofed.experiment import Experiment
from protofed.folder import RunFolder
from protofed.version import VERSION

NO_RUN = ("checkpoints", "__pycache__")  # folders in which no run is looked for
LISTING = "cells.json"  # beside the runs of a sweep: what it calls each
ACCURACIES = ("accuracy_mean", "global_accuracy", "loss")  # a round that has none of these was not written by us


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


@dataclass(frozen=True, eq=False)
class Run:
    """One run as its folder tells it, finished or not."""

    folder: Path
    name: str
    """The method, or what a sweep calls it."""
    settings: dict[str, Any]
    """Every key of the experiment with its value, flat: "method.lam"."""
    rounds: list[dict[str, Any]]
    summary: dict[str, Any] | None
    """None while the run is not finished."""
    clients: list[dict[str, Any]]
    environment: dict[str, Any]
    partition: Partition
    class_names: list[str]
    superclasses: list[str] | None
    confusion: dict[str, np.ndarray]
    views: dict[str, np.ndarray]

    @property
    def seed(self) -> int:
        return int(self.settings["seed"])

    def column(self, key: str) -> tuple[list[int], list[float]]:
        """The rounds in which a number was taken, and the number."""
        known = [(line["round"], line[key]) for line in self.rounds if line.get(key) is not None]
        return [round for round, _ in known], [value for _, value in known]

    def number(self, key: str) -> float | None:
        """From the summary, or as it stood in the last round that has it."""
        if self.summary is not None:
            return self.summary.get(key)
        values = self.column(key)[1]
        return values[-1] if values else None


class Gathered(NamedTuple):
    """What was found under the folders that were named."""

    runs: list[Run]
    left_out: list[Remark]
    """Folders that are not in the report."""
    remarks: list[Remark]
    """Parts of runs that are not."""


def gather(paths: Iterable[str | Path]) -> Gathered:
    """Read all runs in these folders, or below them."""
    found = Gathered([], [], [])
    folders = _folders(paths, found.left_out)
    made_by = _versions(folders)
    kept = that_counts(made_by.values())
    for folder in folders:
        remarks: list[Remark] = []
        if made_by.get(folder, kept) != kept:
            found.left_out.append(Remark(str(folder), f"made by protofed {made_by[folder]}, not {kept}"))
            continue
        try:
            run = read(folder, remarks)
        except UserError as error:
            found.left_out.append(Remark(str(folder), str(error)))
            continue
        twin = next((other for other in found.runs if other.settings == run.settings), None)
        if twin is not None:
            found.left_out.append(Remark(str(folder), f"has the settings and the seed of {twin.folder}, which is in"))
            continue
        if any(other.views and but_seed(other) == but_seed(run) for other in found.runs):
            run = replace(run, views={})  # one seed's are drawn; of many runs they would fill the memory
        found.runs.append(run)
        found.remarks.extend(remarks)
    return found


def that_counts(versions: Iterable[str]) -> str:
    """Numbers of different versions are not mixed: this one's count, or where there are none those of most runs."""
    many = Counter(versions)
    return VERSION if VERSION in many or not many else many.most_common(1)[0][0]


def _versions(folders: Iterable[Path]) -> dict[Path, str]:
    """The protofed that each run was made with, where it says so."""
    found = {}
    for folder in folders:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # `read` names what is damaged
            found[folder] = str(json.loads((folder / "environment.json").read_text(encoding="utf-8"))["protofed"])
    return found


def but_seed(run: Run) -> dict[str, Any]:
    """The settings that runs of one group share."""
    return {key: value for key, value in run.settings.items() if key != "seed"}


def _folders(paths: Iterable[str | Path], left_out: list[Remark]) -> list[Path]:
    folders: dict[Path, Path] = {}
    for path in map(Path, paths):
        here = sorted(_below(path)) if path.is_dir() else []
        if not here:
            left_out.append(Remark(str(path), "holds no run" if path.is_dir() else "there is no such folder"))
        for folder in here:
            folders.setdefault(folder.resolve(), folder)
    return list(folders.values())


def _below(path: Path) -> list[Path]:
    """The folder itself where it is a run, else all runs below it."""
    if any((path / name).exists() for name in ("experiment.toml", "rounds.jsonl")):
        return [path]
    return [
        run for p in path.iterdir() if p.is_dir() and p.name[0] != "." and p.name not in NO_RUN for run in _below(p)
    ]


def read(folder: Path, remarks: list[Remark]) -> Run:
    """A run; a UserError says why it is none, `remarks` what of it cannot be used."""
    source = RunFolder(folder)
    settings = _settings(source)
    rounds = source.rounds()
    if not rounds:
        raise UserError("no round is finished yet")
    if not all(isinstance(line.get("round"), int) and any(key in line for key in ACCURACIES) for line in rounds):
        raise UserError("rounds.jsonl has lines that are no rounds: it was written by another version")
    names = _part(folder, "classes.json", _json, remarks)
    partition = _part(folder, "partition.npz", _partition, remarks) or Partition("", "", None)
    known = names.get("names") or range(partition.counts.shape[1] if partition.counts is not None else 0)
    return Run(
        folder=folder,
        name=_part(folder.parent, LISTING, _called, remarks).get(folder.name, str(settings["method.name"])),
        settings=settings,
        rounds=rounds,
        summary=source.summary() if source.finished else None,
        clients=_part(folder, "clients.jsonl", _lines, remarks) or [],
        environment=_part(folder, "environment.json", _json, remarks) or {},
        partition=partition,
        class_names=[str(name) for name in known],
        superclasses=names.get("superclasses"),
        confusion=_part(folder, "confusion.npz", _confusion, remarks) or {},
        views=_part(folder, "views.npz", _views, remarks) or {},
    )


def _settings(source: RunFolder) -> dict[str, Any]:
    if not source.file("experiment.toml").is_file():
        raise UserError("experiment.toml is missing: the folder is half written")
    try:
        return flat(Experiment.from_dict(source.experiment_dict()).to_dict())
    except UserError as error:
        what = str(error).partition(". ")[0]  # the remedy is for who writes one
        raise UserError(f"experiment.toml is of another version or method: {what}") from None


def _part(folder: Path, name: str, reader: Any, remarks: list[Remark]) -> Any:
    """One file of a run; {} where it is not there, with a remark where it cannot be read."""
    path = folder / name
    if not path.is_file():
        return {}
    try:
        return reader(path)
    except Exception as error:  # json, zip, zlib and numpy each raise their own; the remark is one
        remarks.append(Remark(str(folder), f"{name} cannot be read ({type(error).__name__}): what it tells is missing"))
        return {}


def _json(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError("not a table")
    return content


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as stored:
        return dict(stored)


def _confusion(path: Path) -> dict[str, np.ndarray]:
    tables = _arrays(path)
    if not all(table.ndim == 2 and table.shape[0] == table.shape[1] for table in tables.values()):
        raise ValueError("not square")
    return tables


def _views(path: Path) -> dict[str, np.ndarray]:
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
    return views


def _called(path: Path) -> dict[str, str]:
    """A sweep's names of its methods, by folder."""
    return {row["folder"]: row["labels"]["method"] for row in json.loads(path.read_text(encoding="utf-8"))}


def _partition(path: Path) -> Partition:
    with np.load(path, allow_pickle=False) as stored:
        counts = stored.get("counts")
        return Partition(str(stored["hash"]), str(stored["fingerprint"]), counts)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dots in the keys."""
    result: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result
