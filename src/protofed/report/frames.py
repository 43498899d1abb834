"""Runs as data frames for your own analyses: one row for each run, each of its rounds and each of its clients."""

import warnings
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from protofed.errors import UserError
from protofed.report.gather import collect
from protofed.report.parts import Remark
from protofed.report.runs import Run
from protofed.runs.folder import RunFolder

KNOWN = ("experiment", "method", "seed")  # labels that every run has


class Loaded(NamedTuple):
    """Three tables with the same label columns first, and the folders that are in none of them."""

    runs: Any
    """A row for each run: its labels, its folder, and the numbers of summary.json."""
    rounds: Any
    """A row for each run and round: labels, and the numbers of rounds.jsonl."""
    clients: Any
    """A row for each run and client after the last round: labels, and the numbers of clients.jsonl."""
    left_out: list[Remark]
    """Folders without a finished run, and why."""

    def __repr__(self) -> str:
        sizes = f"{len(self.runs)} runs, {len(self.rounds)} rounds, {len(self.clients)} clients"
        return f"<Loaded: {sizes}; {len(self.left_out)} folders left out>"


def load(
    runs: str | Path | Iterable[str | Path],
    *,
    pandas: bool = True,
    everything: bool = False,
    any_version: bool = False,
) -> Loaded:
    """The finished runs in a folder, or in several, as data frames `runs`, `rounds` and `clients`.

    runs: the folder of a sweep, of a run, or of many, or a list of such folders
    pandas: False gives lists of dicts, which need no pandas
    everything: runs too that lie in a sweep's folder and are not among its cells
    any_version: runs of different versions of protofed

    Every row begins with the run's labels, as a table tells runs apart: experiment, method (as the sweep calls it),
    seed, and each parameter that differs, by its key, such as optimizer.lr. Nested numbers have dots in their names
    (bytes_up_by.weights). Where a number is called like a label, it is named after its row (run.method, round.clients).
    """
    if pandas:
        _check_pandas()
    found = collect(runs, everything=everything, any_version=any_version)
    if not found.runs:
        reasons = "; ".join(f"{out.folder}: {out.reason}" for out in found.left_out[:3])
        raise UserError(f"there is no finished run to load. {reasons or 'Name a folder that holds runs.'}")
    if found.left_out:
        first, more = found.left_out[0], len(found.left_out) - 1
        warnings.warn(
            f"left out{f', with {more} more' if more else ''}: {first.folder}: {first.reason}. See .left_out.",
            stacklevel=3,
        )
    keys = {key: None for run in found.runs for key in (*KNOWN, *run.labels)}
    of_runs: list[dict[str, Any]] = []
    of_rounds: list[dict[str, Any]] = []
    of_clients: list[dict[str, Any]] = []
    for run in found.runs:
        labels = {key: _value(run, key) for key in keys}
        of_runs.append(labels | {"folder": str(run.folder)} | _flat(_unlabelled(run.final), keys, "run"))
        of_rounds.extend(labels | _flat(line, keys, "round") for line in run.rounds)
        of_clients.extend(labels | _flat(line, keys, "client") for line in RunFolder(run.folder).clients())
    if not pandas:
        return Loaded(of_runs, of_rounds, of_clients, found.left_out)
    from pandas import DataFrame

    return Loaded(DataFrame(of_runs), DataFrame(of_rounds), DataFrame(of_clients), found.left_out)


def _check_pandas() -> None:
    if find_spec("pandas") is None:
        raise UserError("data frames need pandas: pip install pandas. Or load(..., pandas=False) gives lists of dicts.")


def _value(run: Run, key: str) -> Any:
    """A label; if it is a key of the experiment, the key's value, so that a step size is a number."""
    if key == "seed":
        return run.seed
    told = run.labels.get(key)
    value = run.settings.get(key, told)
    plain = isinstance(value, bool | int | float | str) and key not in KNOWN
    return value if told is not None and plain else told


def _unlabelled(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in summary.items() if key != "labels"}


def _flat(line: Mapping[str, Any], labels: Iterable[str], what: str, prefix: str = "") -> dict[str, Any]:
    """Nested numbers as one row; a number with the name of a label gets a longer name."""
    row: dict[str, Any] = {}
    for key, value in line.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            row |= _flat(value, labels, what, f"{name}.")
        else:
            row[f"{what}.{name}" if name in labels else name] = value
    return row
