"""Entries, one or many: their runs in one pool, then for each its numbers, tables and figures."""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from protofed.atomic import write_atomically
from protofed.config.experiment import Experiment
from protofed.data.split import Split
from protofed.errors import UserError
from protofed.papers.reproduce import figures, render, special
from protofed.papers.reproduce.entry import PaperColumn, PaperEntry, load_entry
from protofed.papers.reproduce.measure import TIMED, Done, Views, value
from protofed.papers.reproduce.plan import EntryPlan, plan_entry
from protofed.papers.reproduce.result import EntryResult
from protofed.runs.environment import environment
from protofed.runs.folder import RunFolder
from protofed.runs.measure import Result
from protofed.runs.probes import NO_PROBES, Probes
from protofed.sweep import Cell, CellOutcome, SweepWatch, run_cells
from protofed.sweep.run import finished_cells, place
from protofed.sweep.workers import Placed

RUNS = "runs"  # the folder of all runs: entries share those that are alike
SPIRAL_SEEDS = [0, 1, 2]
FINGERPRINT = 12  # letters of the data's that are kept


class Reproduced(NamedTuple):
    """The state of an entry after a command."""

    entry: PaperEntry
    measured: EntryResult
    folder: Path
    pictures: list[Path]
    damaged: list[str]  # runs, in words


class Report(NamedTuple):
    """What a command did."""

    done: list[Reproduced]
    failed: list[CellOutcome]
    skipped: list[str]  # entries that cannot be run here, in words
    stopped: str  # why it ended before all was done: by the user, or because time was up


def reproduce(
    names: Sequence[str],
    out: Path,
    *,
    quick: bool = False,
    data_dir: Path | None = None,
    jobs: int | None = None,
    limit: float | None = None,
    only: Mapping[str, Sequence[str]] | None = None,
    watch: SweepWatch | None = None,
    tell: Callable[[str], None] = lambda text: None,
    probes: Probes = NO_PROBES,
) -> Report:
    """Run what is not finished of these entries, the most important ones first, and measure everything that is. `only`:
    label (experiment, method, seed, a parameter) -> values; other runs are left for later.

    `only`: label (experiment, method, seed, a parameter) -> values; runs with another one are left for later.
    """
    entries = sorted((load_entry(name) for name in dict.fromkeys(names)), key=lambda entry: entry.importance)
    plans, skipped = [], []
    for entry in entries:
        try:
            plans.append(plan_entry(entry, quick, data_dir))
        except UserError as error:
            if len(entries) == 1:
                raise
            skipped.append(str(error))
    if only:
        skipped += [f"{plan.entry.name} has no runs to choose from" for plan in plans if plan.entry.kind != "runs"]
        plans = [plan for plan in plans if plan.entry.kind == "runs"]
    began = time.monotonic()
    placed = _place([cell for plan in plans if plan.entry.kind == "runs" for cell in plan.cells], out / RUNS)
    stopped, outcomes = "", list[CellOutcome]()
    if only and not placed:
        raise UserError(" ".join(["--only chooses among runs, and there are none.", *skipped]))
    todo = _only(placed, only or {})
    if todo:
        (out / RUNS).mkdir(parents=True, exist_ok=True)
        try:
            with _stopping_after(limit):
                outcomes = run_cells(todo, data_dir=data_dir, jobs=jobs, watch=_brief(watch), probes=probes)
        except KeyboardInterrupt:
            stopped = _why(began, limit)
    if any(outcome.status == "stopped" for outcome in outcomes):
        stopped = _why(began, limit)
    done = []
    for plan in plans:
        if plan.entry.kind == "runs":
            done.append(_measure(plan, placed, out, data_dir, tell))
        elif stopped:
            skipped.append(f"{plan.entry.name}: not begun")
        else:
            try:
                with _stopping_after(limit and max(0.01, limit - (time.monotonic() - began))):
                    done.append(_measure(plan, placed, out, data_dir, tell))
            except KeyboardInterrupt:
                stopped = _why(began, limit)
                skipped.append(f"{plan.entry.name}: not finished; it cannot be resumed, and starts over next time")
    return Report(done, [o for o in _once(outcomes) if o.status == "failed"], skipped, stopped)


def _why(began: float, limit: float | None) -> str:
    """The reason why it was stopped."""
    return "time is up" if limit and time.monotonic() - began >= limit else "stopped"


def _only(placed: Sequence[Placed], only: Mapping[str, Sequence[str]]) -> list[Placed]:
    for label, wanted in only.items():
        there = list(dict.fromkeys(p.cell.labels[label] for p in placed if label in p.cell.labels))
        for word in wanted:
            if word not in there:
                known = list(dict.fromkeys(key for p in placed for key in p.cell.labels))
                choice = f"{label} is one of {', '.join(there)}" if there else f"the labels are {', '.join(known)}"
                raise UserError(f"--only {label}={word} is not among the runs of what was named: {choice}.")
    chosen = [p for p in placed if all(p.cell.labels.get(label) in wanted for label, wanted in only.items())]
    if placed and not chosen:
        words = " ".join(f"--only {label}={','.join(wanted)}" for label, wanted in only.items())
        raise UserError(f"{words}: no run of what was named is all of this. Leave one of them out.")
    return chosen


def _brief(watch: SweepWatch | None) -> SweepWatch | None:
    """Remarks, of which one that many runs have is given once."""
    if watch is not None:
        said, note = set(), watch.note

        def once(text: str) -> None:
            remark = text.partition(": ")[2] or text
            if remark not in said:
                said.add(remark)
                note(text)

        watch.note = once  # type: ignore[method-assign]
    return watch


def _place(cells: Sequence[Cell], folder: Path) -> list[Placed]:
    """The place of every run; a run that two entries need is there once."""
    where: dict[str, Path] = {}
    for cell, path in place(cells, folder):
        where.setdefault(cell.hash, path)
    return [Placed(cell, where[cell.hash]) for cell in cells]


def _once(outcomes: Sequence[CellOutcome]) -> list[CellOutcome]:
    return list({outcome.folder: outcome for outcome in outcomes}.values())


@contextmanager
def _stopping_after(seconds: float | None) -> Iterator[None]:
    """Act as if the user pressed Ctrl-C when the time is up: running rounds are finished and saved."""
    timer = threading.Timer(seconds or 0, os.kill, (os.getpid(), signal.SIGINT))
    timer.daemon = True
    usual = signal.getsignal(signal.SIGINT)
    if seconds:
        if usual is signal.SIG_IGN:  # as in a shell's background
            signal.signal(signal.SIGINT, signal.default_int_handler)
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, usual)


def _measure(
    plan: EntryPlan, placed: Sequence[Placed], out: Path, data_dir: Path | None, tell: Callable[[str], None]
) -> Reproduced:
    """The numbers, page and figures of an entry, from its finished runs."""
    folder = out / f"{plan.entry.name}{'-quick' if plan.quick else ''}"
    folder.mkdir(parents=True, exist_ok=True)
    began, lost = time.perf_counter(), list[str]()
    if plan.entry.kind != "runs":
        measured, pictures = _special(plan, folder, data_dir, tell)
        seconds = time.perf_counter() - began
        parts = dict.fromkeys(cell.labels["experiment"] for cell in plan.cells) or [plan.entry.kind]
        measured = measured._replace(runs={part: seconds / len(parts) for part in parts})
    else:
        wanted = {cell.hash for cell in plan.cells}
        by_hash = {p.cell.hash: (p.folder, s) for p, s in finished_cells([p for p in placed if p.cell.hash in wanted])}
        done = [Done(c, Result(*by_hash[c.hash])) for c in plan.cells if c.hash in by_hash]
        views = Views(plan.entry, data_dir, folder / "views")
        done, lost = _shown(done, views)
        measured = measure_columns(plan._replace(left_out=[*plan.left_out, *lost]), done, views)
        pictures = figures.draw_entry(plan.entry, measured, done, views, folder)
    measured.save(folder / "result.json")
    write_atomically(folder / "result.md", render.entry_page(plan.entry, measured).encode())
    return Reproduced(plan.entry, measured, folder, pictures, lost)


def _shown(done: Sequence[Done], views: Views) -> tuple[list[Done], list[str]]:
    """The runs whose files are whole, including models if the entry needs them; and what is left out, in words."""
    kept, lost = [], []
    for one in done:
        try:
            _check(one.result)
            if views.wanted:
                views.view(one)
            kept.append(one)
        except UserError as error:
            lost.append(f"{one.cell.name}: {str(error).rstrip('.')}")
    return kept, lost


def _check(result: Result) -> None:
    """Raise if a file of a finished run is damaged."""
    try:
        _fingerprint(result.folder)
        whole = result.rounds and result.clients and float(result.summary["seconds"]) >= 0
    except (UserError, OSError, ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise UserError(f"its files are damaged. Remove {result.folder} to run it again.")


def measure_columns(plan: EntryPlan, done: Sequence[Done], views: Views) -> EntryResult:
    """The numbers of every column, one per seed."""
    seeds = list(dict.fromkeys(int(cell.labels["seed"]) for cell in plan.cells))
    rows: dict[str, dict[str, list[float | None]]] = {}
    spent = {one.cell.hash: float(one.result.summary["seconds"]) for one in done}
    for column in _columns(plan):
        for one in done:
            if special.matches(column, one.cell):
                row = rows.setdefault(one.cell.labels["method"], {})
                values = row.setdefault(column.name, [None] * len(seeds))
                number = value(column.metric, one, partial(_sibling, done, one), views)
                values[seeds.index(int(one.cell.labels["seed"]))] = number
                if number is None and TIMED in column.metric:  # the run that sets the time is missing
                    spent.pop(one.cell.hash, None)
    machines = Counter(machine(RunFolder(one.result.folder).environment()) for one in done)
    by = ", ".join(name for name, _ in machines.most_common())
    runs = {cell.hash: spent.get(cell.hash) for cell in plan.cells}
    data = {one.cell.labels["experiment"]: _fingerprint(one.result.folder) for one in done}
    return EntryResult(plan.entry.name, plan.label, seeds, rows, plan.left_out, runs, by, data)


def _fingerprint(run: Path) -> str:
    return Split.load(run / "partition.npz").fingerprint[:FINGERPRINT]


def _columns(plan: EntryPlan) -> list[PaperColumn]:
    """The entry's columns; if a smaller version has other parameters, one for each of their values."""
    known = [column for column in plan.entry.columns if any(special.matches(column, cell) for cell in plan.cells)]
    if known:
        return known
    points = [{k: v for k, v in c.labels.items() if k not in ("experiment", "method", "seed")} for c in plan.cells]
    unique = {", ".join(f"{key.rpartition('.')[2]} = {v}" for key, v in point.items()): point for point in points}
    return [PaperColumn(title=title, at=point) for title, point in unique.items()]


def _sibling(done: Sequence[Done], one: Done, method: str) -> Result | None:
    wanted = one.cell.labels | {"method": method}
    return next((other.result for other in done if other.cell.labels == wanted), None)


def machine(about: dict[str, Any]) -> str:
    """The name of the GPU, or the number of cores."""
    if "device" not in about:
        return "a machine that is not known"
    return str(about["device"]) if about["device"] != "cpu" else f"{about.get('cpus', '?')} CPU cores"


def _special(
    plan: EntryPlan, folder: Path, data_dir: Path | None, tell: Callable[[str], None]
) -> tuple[EntryResult, list[Path]]:
    pictures: list[Path] = []
    seeds = [0]
    if plan.entry.kind == "count":
        rows = special.count(plan, data_dir)
    elif plan.entry.kind == "partition":
        rows, pictures = special.partition_pictures(plan, data_dir, folder)
    else:
        seeds = plan.entry.quick.seeds if plan.quick else SPIRAL_SEEDS
        rows, pictures = special.spirals(plan, seeds, folder, tell)
    here = machine(environment(Experiment(device="cpu")))
    return EntryResult(plan.entry.name, plan.label, seeds, rows, plan.left_out, {}, here, {}), pictures
