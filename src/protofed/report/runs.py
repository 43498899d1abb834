"""Run folders, found and read; what cannot be read is named with the reason, and the rest is used."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from protofed.errors import UserError
from protofed.experiment import Experiment
from protofed.folder import RunFolder
from protofed.report import parts
from protofed.report.parts import Partition, Remark
from protofed.version import VERSION

NO_RUN = ("checkpoints", "__pycache__")  # folders in which no run is looked for
LISTING = "cells.json"  # beside the runs of a sweep: what it calls each
NO_FOLDER, HOLDS_NONE, NOT_BEGUN = "there is no such folder", "holds no run", "no round is finished yet"
ACCURACIES = ("accuracy_mean", "global_accuracy", "loss")  # a round that has none of these was not written by us


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
        twin = next((other for other in found.runs if other.settings == run.settings and _one_data(other, run)), None)
        if twin is not None and _far(run) > _far(twin):  # a run that was killed, and begun anew
            found.runs.remove(twin)
            found.left_out.append(Remark(str(twin.folder), f"has the settings and the seed of {folder}, which is in"))
        elif twin is not None:
            found.left_out.append(Remark(str(folder), f"has the settings and the seed of {twin.folder}, which is in"))
            continue
        if any(other.views and alike(other, run) for other in found.runs):
            run = replace(run, views={})  # one seed's are drawn; of many runs they would fill the memory
        found.runs.append(run)
        found.remarks.extend(remarks)
    return found


def _one_data(run: Run, other: Run) -> bool:
    """Whether two runs had one data set, as far as that is known."""
    return len({run.partition.fingerprint, other.partition.fingerprint} - {""}) < 2


def _far(run: Run) -> tuple[bool, int]:
    """A finished run counts more than one that is not, and that more than one of fewer rounds."""
    return run.summary is not None, len(run.rounds)


def that_counts(versions: Iterable[str]) -> str:
    """Numbers of different versions are not mixed: this one's count, or where there are none those of most runs."""
    many = Counter(versions)
    return VERSION if VERSION in many or not many else many.most_common(1)[0][0]


def _versions(folders: Iterable[Path]) -> dict[Path, str]:
    """The protofed that each run was made with, where it says so."""
    made = {folder: RunFolder(folder).environment() for folder in folders}  # `read` names what is damaged
    return {folder: str(about["protofed"]) for folder, about in made.items() if "protofed" in about}


def but_seed(run: Run) -> dict[str, Any]:
    """The settings that runs of one group share."""
    return {key: value for key, value in run.settings.items() if key != "seed"}


def alike(run: Run, other: Run) -> bool:
    """Whether they differ by their seed alone."""
    return but_seed(run) == but_seed(other) and _one_data(run, other)


def _folders(paths: Iterable[str | Path], left_out: list[Remark]) -> list[Path]:
    folders: dict[Path, Path] = {}
    for path in map(Path, paths):
        here = sorted(_below(path)) if path.is_dir() else []
        if not here:
            why = HOLDS_NONE if path.is_dir() else "is a file, not a folder" if path.exists() else NO_FOLDER
            left_out.append(Remark(str(path), why))
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
    summary = source.summary() if source.finished else None  # first: the rounds of a finished run are all there
    rounds = source.rounds()
    if not rounds:
        raise UserError(NOT_BEGUN if summary is None else "rounds.jsonl is empty, although the run is finished")
    if not all(map(_is_round, rounds)):
        raise UserError("rounds.jsonl has lines that are no rounds: it was written by another version")
    rounds = _all_finite(rounds, folder, "rounds.jsonl", remarks)
    clients = parts.part(folder, "clients.jsonl", parts.client_lines, remarks) or []
    clients = _all_finite(clients, folder, "clients.jsonl", remarks)
    if summary is not None:
        _agree(settings, summary)
        if rounds[-1]["round"] < settings["rounds"]:
            far = f"{rounds[-1]['round']} of {settings['rounds']}"
            remarks.append(Remark(str(folder), f"rounds.jsonl ends at round {far}, although the run is finished"))
        if not source.file("clients.jsonl").is_file():
            remarks.append(Remark(str(folder), "clients.jsonl is missing, although the run is finished"))
        elif clients and len(clients) < summary.get("clients", 0):
            far = f"{len(clients)} of {summary['clients']}"
            remarks.append(Remark(str(folder), f"clients.jsonl has {far} clients: it was cut, and is left out"))
            clients = []
    names = parts.part(folder, "classes.json", parts.classes, remarks)
    partition = parts.part(folder, "partition.npz", parts.partition, remarks) or Partition("", "", None)
    if not partition.hash and summary is not None:
        partition = partition._replace(hash=str(summary.get("partition") or ""))
    classes = partition.counts.shape[1] if partition.counts is not None else 0
    known = names.get("names") or range(classes)
    if classes and len(known) != classes:
        remarks.append(Remark(str(folder), f"classes.json has {len(known)} names for {classes} classes"))
        known = range(classes)
    return Run(
        folder=folder,
        name=parts.part(folder.parent, LISTING, parts.called, remarks).get(folder.name, str(settings["method.name"])),
        settings=settings,
        rounds=rounds,
        summary=summary,
        clients=clients,
        environment=parts.part(folder, "environment.json", parts.table, remarks) or {},
        partition=partition,
        class_names=[str(name) for name in known],
        superclasses=names.get("superclasses"),
        confusion=parts.part(folder, "confusion.npz", parts.confusion, remarks) or {},
        views=parts.part(folder, "views.npz", parts.views, remarks) or {},
    )


def _is_round(line: dict[str, Any]) -> bool:
    """Whether it is a round's line: its numbers are numbers."""
    if type(line.get("round")) is not int or not any(key in line for key in ACCURACIES):
        return False
    tables = [line[key] for key in ("parts", "bytes_up_by", "bytes_down_by", "theory") if line.get(key) is not None]
    if not all(isinstance(table, dict) for table in tables):
        return False
    numbers = [line[key] for key in ACCURACIES if line.get(key) is not None] + list((line.get("parts") or {}).values())
    return all(isinstance(number, int | float) for number in numbers)


def _all_finite(lines: list[dict[str, Any]], folder: Path, name: str, remarks: list[Remark]) -> list[dict[str, Any]]:
    """Lines without numbers that are not finite, and a remark where there were some."""
    found = [_finite(line) for line in lines]
    if found != lines:
        remarks.append(Remark(str(folder), f"{name} has NaN or Infinity: these numbers are left out"))
    return found


def _finite(table: dict[str, Any]) -> dict[str, Any]:
    """Without numbers that are not finite."""
    return {
        key: _finite(value) if isinstance(value, dict) else value
        for key, value in table.items()
        if not isinstance(value, float) or math.isfinite(value)
    }


def _agree(settings: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
    """A UserError where a summary is of another run than the settings beside it."""
    for name, key in {"method": "method.name", "seed": "seed", "rounds": "rounds"}.items():
        if name in summary and summary[name] != settings[key]:
            what = f"{name} is {settings[key]!r} in the one and {summary[name]!r} in the other"
            raise UserError(f"its experiment.toml and summary.json are of different runs: {what}")


def _settings(source: RunFolder) -> dict[str, Any]:
    if not source.file("experiment.toml").is_file():
        raise UserError("experiment.toml is missing: the folder is half written")
    try:
        return flat(Experiment.from_dict(source.experiment_dict()).to_dict())
    except UserError as error:
        what = str(error).partition(". ")[0]  # the remedy is for who writes one
        raise UserError(f"experiment.toml is of another version or method: {what}") from None


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dots in the keys."""
    result: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result
