"""From an entry to its runs, with the data that is available."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from protofed.config.experiment import Experiment
from protofed.config.files import read_tables as read_experiment
from protofed.data.readers.kinds import kind_of
from protofed.data.sources import BUILT_IN, available, data_root
from protofed.errors import UserError
from protofed.papers.reproduce.entry import PaperEntry
from protofed.sweep import Cell, Sweep
from protofed.sweep.plan import key_of, method_of, method_takes

QUICK = "quick version"
WHOLE = ("model", "partition")  # naming another one makes fields of the old one meaningless


class EntryPlan(NamedTuple):
    """The runs of an entry, and how they differ from what the entry asks for."""

    entry: PaperEntry
    quick: bool
    cells: list[Cell]
    left_out: list[str]  # what cannot be run here, in words
    instead: str  # other data that stands in; empty if none does

    @property
    def label(self) -> str:
        """A remark for every number of this plan; empty for the whole entry."""
        parts = [f"{QUICK}: smaller and fewer runs, not the paper's setting"] if self.quick else []
        return "; ".join([*parts, *([self.instead] if self.instead else [])])


def data_of(entry: PaperEntry, data_dir: Path | None) -> str:
    """The data sets of the whole entry, in words, with those that are missing and their replacements; empty if none
    is."""
    found = _found(data_dir)
    pairs = [_domains(name, found) for name in entry.experiments]
    wanted = dict.fromkeys(domain for all_, _ in pairs for domain in all_)
    there = {domain for _, some in pairs for domain in some}
    said = ", ".join(name if name in there else f"{name} (not found)" for name in wanted)
    if wanted and not there and entry.stand_in and _domains(entry.experiments[0], found, entry.stand_in.changes)[1]:
        said += f"; stand-in: {entry.stand_in.says}"
    return said


def _found(data_dir: Path | None) -> set[str]:
    return {row["name"] for row in available(data_dir) if row["kind"] != "ids"}


def plan_entry(entry: PaperEntry, quick: bool, data_dir: Path | None) -> EntryPlan:
    """The runs that can be made. Those that lack data are left out and listed; a UserError if none remains."""
    found = _found(data_dir)
    shape = _smaller(entry) if quick else dict(entry.sweep)
    experiments = shape.pop("experiment", [])
    experiments = [experiments] if isinstance(experiments, str) else experiments
    cells: list[Cell] = []
    left_out: list[str] = []
    for name in experiments:
        wanted, there = _domains(name, found)
        if not there:
            left_out.append(f"{name}: {', '.join(wanted)} not found")
            continue
        changes = list(entry.quick.changes) if quick else []
        if len(there) < len(wanted):
            missing = [domain for domain in wanted if domain not in there]
            left_out.append(f"{name}: without {', '.join(missing)}, which was not found")
            changes += [f"data.name={there}", f"clients={len(there)}"]
        cells += _cells(name, shape, changes, {})
    if cells or not experiments:
        return EntryPlan(entry, quick, cells, left_out, "")
    if entry.stand_in and _domains(experiments[0], found, entry.stand_in.changes)[1]:
        changes = [*entry.stand_in.changes, *(entry.quick.changes if quick else [])]
        cells = [cell for name in experiments for cell in _cells(name, shape, changes, entry.stand_in.methods)]
        return EntryPlan(entry, quick, cells, [], entry.stand_in.says)
    if quick and entry.quick.digits:
        digits = entry.quick.digits
        shape["parameters"] = shape.get("parameters", {}) | digits.parameters
        changes = [*entry.quick.changes, *digits.changes]
        cells = [cell for name in experiments[:1] for cell in _cells(name, shape, changes, digits.methods)]
        return EntryPlan(entry, quick, cells, [], "on the built-in 8x8 digits, because the data set is not there")
    root = data_root(data_dir)
    names = ", ".join(dict.fromkeys(domain for name in experiments for domain in _domains(name, found)[0]))
    where = f"there is none of it in {root}" if root.is_dir() else f"{root} is not a folder"
    raise UserError(
        f"{entry.name} needs data that is not there: {names}, and {where}. Put it into --data-dir or $PROTOFED_DATA as "
        ".npz files or folders of these names (docs/own-data.md), or try --quick, which does with the built-in digits."
    )


def runs_and_rounds(entry: PaperEntry) -> tuple[int, int]:
    """The number of runs of the whole entry, and of rounds in all of them, without resolving every experiment."""
    runs = rounds = 0
    shared = entry.sweep.get("changes", [])
    for name in entry.experiments if entry.kind == "runs" else []:
        usual = read_experiment(name)["rounds"]
        for label, own in entry.sweep["methods"].items():
            method = method_of(label, own)
            grid = [values for key, values in entry.sweep.get("parameters", {}).items() if method_takes(method, key)]
            many = len(entry.sweep["seeds"]) * math.prod(map(len, grid))
            said = [int(word.partition("=")[2]) for word in (*shared, *own) if key_of(word) == "rounds"]
            runs += many
            rounds += many * (said[-1] if said else usual)
    return runs, rounds


def cells_of(entry: PaperEntry) -> list[Cell]:
    """Every run of the whole entry, as if all data were available."""
    return [cell for name in entry.experiments for cell in _cells(name, _without(entry.sweep), [], {})]


def check_entry(entry: PaperEntry) -> list[Cell]:
    """Every run that an entry may ask for (with one seed), as if all data were available; raises if one is not
    valid."""
    if not entry.sweep:
        return []
    whole, quick = ({**shape, "seeds": shape["seeds"][:1]} for shape in (entry.sweep, _smaller(entry)))
    cells = [cell for name in entry.experiments for cell in _cells(name, _without(whole), [], {})]
    for name in _list(quick["experiment"]):
        cells += _cells(name, _without(quick), entry.quick.changes, {})
        if entry.stand_in:
            cells += _cells(name, _without(quick), entry.stand_in.changes, entry.stand_in.methods)
        if digits := entry.quick.digits:
            smaller = _without(quick)
            smaller["parameters"] = smaller.get("parameters", {}) | digits.parameters
            cells += _cells(name, smaller, [*entry.quick.changes, *digits.changes], digits.methods)
    return cells


def _smaller(entry: PaperEntry) -> dict[str, Any]:
    """The sweep of the quick version."""
    quick, shape = entry.quick, dict(entry.sweep)
    if not shape:
        return shape
    shape |= {"seeds": quick.seeds, "experiment": quick.experiment or shape["experiment"]}
    if quick.methods:
        shape["methods"] = {label: shape["methods"][label] for label in quick.methods}
    shape["parameters"] = shape.get("parameters", {}) | quick.parameters
    return shape


def _cells(name: str, shape: dict[str, Any], extra: Sequence[str], own: dict[str, list[str]]) -> list[Cell]:
    """The runs of one experiment, with further changes for all methods and for some."""
    methods = {}
    for label, words in shape["methods"].items():
        method = method_of(label, words)
        more = [word for word in (*extra, *own.get(label, [])) if method_takes(method, word)]
        last = {key_of(word): word for word in more}
        methods[label] = [*_kept(words, more), *last.values()]
    changes = _kept(shape.get("changes", []), extra)
    sweep = Sweep.load(shape | {"experiment": name, "methods": methods, "changes": changes})
    return [cell._replace(labels=cell.labels | {"experiment": name}) for cell in sweep.cells()]


def _kept(first: Sequence[str], then: Sequence[str]) -> list[str]:
    """The first changes, without those that later ones override."""
    keys = {key_of(word) for word in then}
    void = tuple(f"{section}." for section in WHOLE if section in keys)
    return [word for word in first if key_of(word) not in keys and not (void and key_of(word).startswith(void))]


def _domains(name: str, found: set[str], changes: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """The data sets of an experiment, and those of them that are available; none if a part of one is missing."""
    data = Experiment.load(name, *changes).data
    wanted = _list(data.name)
    there = [
        one for one in [*wanted, *data.more] if one in found or one in BUILT_IN or ":" in one or kind_of(Path(one))
    ]
    if not set(data.more) <= set(there):
        return [*wanted, *data.more], []
    return wanted, [one for one in there if one in wanted]


def _list(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _without(shape: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in shape.items() if key != "experiment"}
