"""Finished runs, with the labels by which a table tells them apart; whatever is not one is named, and left out."""

import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from protofed.environment import changed_code
from protofed.errors import UserError
from protofed.experiment import Experiment
from protofed.folder import RunFolder
from protofed.report.runs import flat, that_counts

ASIDE = ("device", "engine.", "record.", "evaluate.own", "evaluate.gm")  # keys that make no other experiment of it
LISTING = "cells.json"  # in the folder of a sweep: which run is which cell
FAILED = ".failed.txt"  # behind the name of a cell that failed: its reason
NEEDED = ("method", "seed", "rounds", "partition", "accuracy_mean")  # keys without which a summary is not one
HALF = "half written: it has no experiment.toml"
TRACES = ("summary.json", "rounds.jsonl", "checkpoints", "partition.npz")  # of a run without its experiment.toml


class LeftOut(NamedTuple):
    """A folder that is in no table, and why."""

    folder: Path
    reason: str

    def __str__(self) -> str:
        return f"left out: {self.folder}: {self.reason}"


class Run:
    """A finished run and its labels: experiment, method, seed, and whatever else tells it from others."""

    def __init__(self, folder: Path, summary: Mapping[str, Any], labels: Mapping[str, str] | None = None) -> None:
        self.folder, self.summary = folder, dict(summary)
        self.labels = dict(labels) if labels is not None else {"method": str(summary["method"])}

    @property
    def seed(self) -> int:
        return int(self.summary["seed"])

    @cached_property
    def rounds(self) -> list[dict[str, Any]]:
        return RunFolder(self.folder).rounds()

    @cached_property
    def experiment(self) -> dict[str, Any]:
        """Every key with its value, as the run's folder says: not all may be known here."""
        return RunFolder(self.folder).experiment_dict()

    @cached_property
    def environment(self) -> dict[str, Any]:
        return RunFolder(self.folder).environment()

    def changed_code(self) -> list[str]:
        """Import paths of methods and models whose file is not what it was."""
        if not self.environment.get("own"):
            return []
        try:
            return changed_code(RunFolder(self.folder), Experiment.from_dict(self.experiment))
        except UserError:  # of another version, or the file is gone
            return []

    @property
    def version(self) -> str:
        """The protofed that made it."""
        return str(self.environment.get("protofed", "?"))

    @cached_property
    def data(self) -> tuple[str, str]:
        """Who had what: the hash of the partition, and the fingerprint of the data where it was kept."""
        try:
            with np.load(self.folder / "partition.npz", allow_pickle=False) as stored:
                return str(self.summary["partition"]), str(stored["fingerprint"])
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return str(self.summary["partition"]), ""


class Collected(NamedTuple):
    """The runs of a table, and what is not among them."""

    runs: list[Run]
    left_out: list[LeftOut]


def collect(
    source: str | Path | Iterable[str | Path], *, everything: bool = False, any_version: bool = False
) -> Collected:
    """The finished runs in a folder, or in several: of a sweep its cells, elsewhere all there are.

    `everything` takes runs that lie in a sweep's folder without being of it, `any_version` those of other versions.
    """
    left_out: list[LeftOut] = []
    named: list[tuple[Path, dict[str, str] | None]] = []
    for folder in [source] if isinstance(source, str | Path) else source:
        if not Path(folder).is_dir():
            raise UserError(f"there is no folder {str(folder)!r}. Name the folder of a sweep, of a run, or of several.")
        named += _candidates(Path(folder), everything, left_out)
    return read(named, left_out, any_version)


def read(
    named: Iterable[tuple[Path, Mapping[str, str] | None]], left_out: Sequence[LeftOut] = (), any_version: bool = False
) -> Collected:
    """The finished runs in these folders, with the labels that a sweep gave them."""
    found = [_read(path, labels) for path, labels in named]
    runs = [run for run in found if isinstance(run, Run)]
    left_out = [*left_out, *(out for out in found if isinstance(out, LeftOut))]
    if not any_version:
        runs = _one_version(runs, left_out)
    _label(runs)
    return Collected(runs, left_out)


def _candidates(
    folder: Path, everything: bool, left_out: list[LeftOut]
) -> Iterator[tuple[Path, dict[str, str] | None]]:
    """Folders that should be runs, with their labels where a sweep says them."""
    if RunFolder(folder).exists:
        yield folder, None
        return
    if not (folder / LISTING).is_file():
        inner = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")]
        if any((folder / name).exists() for name in TRACES):
            left_out.append(LeftOut(folder, HALF))
            return
        for path in inner:
            yield from _candidates(path, everything, left_out)
        return
    try:
        rows = json.loads((folder / LISTING).read_text())
        listing = [(str(row["folder"]), row["labels"] | {"method": str(row["labels"]["method"])}) for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / LISTING} is damaged ({error}). Run the sweep again: it writes it anew.") from None
    yield from ((folder / name, labels) for name, labels in listing)
    known = {name for name, _ in listing}
    for path in sorted(path for path in folder.iterdir() if RunFolder(path).exists and path.name not in known):
        if everything:
            yield path, None
        else:
            left_out.append(LeftOut(path, "not a cell of sweep.toml (--all takes it)"))


def _read(path: Path, labels: Mapping[str, str] | None) -> Run | LeftOut:
    folder = RunFolder(path)
    try:
        failed = path.with_name(f"{path.name}{FAILED}")
        why = next(iter(failed.read_text(encoding="utf-8").splitlines()), "") if failed.is_file() else ""
        if not folder.exists and any((path / name).exists() for name in TRACES):
            return LeftOut(path, HALF)
        if not folder.exists:
            return LeftOut(path, f"failed: {why}" if why else "not run yet")
        if not folder.finished:
            done = f"{len(folder.rounds())} of {folder.experiment_dict().get('rounds', '?')} rounds"
            return LeftOut(path, f"failed after {done}: {why}" if why else f"unfinished: {done}")
        summary = folder.summary()
        lacking = [key for key in NEEDED if key not in summary]
        if lacking:
            return LeftOut(path, f"of another version: its summary.json has no {', '.join(lacking)}")
        if type(summary["seed"]) is not int:
            return LeftOut(path, f"its summary.json is damaged: seed is {summary['seed']!r}")
        run = Run(path, summary, labels)
        method = run.experiment.get("method")
        if (method.get("name") if isinstance(method, dict) else method) != summary["method"]:
            return LeftOut(path, "its experiment.toml and summary.json are of different methods")
        if not all(type(line.get("round")) is int for line in run.rounds):
            return LeftOut(path, "its rounds.jsonl is damaged: a line is no round")
        last = run.rounds[-1]["round"] if run.rounds else 0
        if last != summary["rounds"]:
            return LeftOut(path, f"its rounds.jsonl ends at round {last} of {summary['rounds']}")
    except (UserError, OSError, UnicodeDecodeError) as error:
        return LeftOut(path, str(error))
    return run


def _one_version(runs: Sequence[Run], left_out: list[LeftOut]) -> list[Run]:
    """Those of the version that counts."""
    kept = that_counts(run.version for run in runs)
    for run in runs:
        if run.version != kept:
            left_out.append(LeftOut(run.folder, f"made by protofed {run.version}, not {kept} (--any-version takes it)"))
    return [run for run in runs if run.version == kept]


def unlike(run: Run, other: Run) -> list[str]:
    """In which keys, known to both, two runs differ that should differ in their seed alone."""
    ours, theirs = _flat(run.experiment), _flat(other.experiment)
    same = [key for key in ours if key in theirs and not key.startswith(ASIDE)]
    return [f"{key} {theirs[key]!r} -> {ours[key]!r}" for key in same if ours[key] != theirs[key]]


def _label(runs: Sequence[Run]) -> None:
    """Labels of runs that belong to no sweep: the method, and every key in which runs differ."""
    if all("experiment" in run.labels for run in runs):
        return
    plain = [_flat(run.experiment) for run in runs]
    values: dict[tuple[str, str], set[str]] = {}
    for run, keys in zip(runs, plain, strict=True):
        for key, value in keys.items():
            values.setdefault(_scope(run, key), set()).add(str(value))
    for run, keys in zip(runs, plain, strict=True):
        if "experiment" in run.labels:
            continue
        differ = {key: str(value) for key, value in keys.items() if len(values[_scope(run, key)]) > 1}
        run.labels = {"experiment": "", "method": str(run.summary["method"]), "seed": str(run.seed), **differ}


def _scope(run: Run, key: str) -> tuple[str, str]:
    """A key of [method] is compared within one method, every other among all."""
    return (str(run.summary["method"]) if key.startswith("method.") else "", key)


def _flat(table: Mapping[str, Any]) -> dict[str, Any]:
    """Every key but those by which runs are told apart anyway; several models have the keys that one has."""
    if isinstance(models := table.get("model"), list):
        several = {str(i): dict(model) if isinstance(model, dict) else {} for i, model in enumerate(models)}
        names = [str(model.pop("name", "?")) for model in several.values()]
        table = {**table, "model": {"name": "+".join(names), **several}}
    return {key: value for key, value in flat(table).items() if key not in ("seed", "method.name")}
