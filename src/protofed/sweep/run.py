"""Running a sweep: everything is checked before the first cell starts, and what is finished is not run again."""

import dataclasses
import os
import tomllib
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tomli_w
import torch

from protofed.atomic import write_atomically
from protofed.data.domain import Domain
from protofed.data.sources import load
from protofed.errors import UserError
from protofed.runs import listing
from protofed.runs.environment import changed_code
from protofed.runs.folder import RunFolder
from protofed.runs.probes import NO_PROBES, Probes
from protofed.runs.setup import prepare, prepare_split
from protofed.sweep.bundles import bundled
from protofed.sweep.plan import Cell, Sweep
from protofed.sweep.watch import SweepWatch
from protofed.sweep.workers import CellOutcome, Crew, Placed, Share

SHOWN = 5  # damaged cells that are named
GPU_JOBS = 4  # processes on one GPU
GPU_SHARED = 0.9  # share of a GPU's memory that they get; the rest is for what each keeps besides its tensors
GPU_MEMORY = 16 * 2**30  # bytes of a GPU for each of them


def run_sweep(
    sweep: Sweep,
    out: str | Path,
    *,
    data_dir: str | Path | None = None,
    jobs: int | None = None,
    watch: SweepWatch | None = None,
    probes: Probes = NO_PROBES,
    fuse: bool = True,
) -> list[CellOutcome]:
    """Run every cell that is not finished, each in `OUT/<readable>-<hash>`; returns one outcome per cell, in order.
    `fuse`: train cells that differ only in seed, partition or numbers together, if that is faster.

    `fuse`: train cells that differ only in seed, partition or numbers together, if that is faster."""
    out = Path(out)
    watch = watch or SweepWatch()
    placed = place(sweep.cells(watch.note), out)

    def keep() -> None:
        out.mkdir(parents=True, exist_ok=True)
        copy = out / "sweep.toml"
        if not _by_hand(copy):
            write_atomically(copy, sweep.to_toml(out).encode())
        elif sweep.file is None or copy.resolve() != sweep.file.resolve():
            watch.note(f"{copy} was written by hand, and stays as it is")
        listing.write_cells(out, [(folder.name, cell.hash, cell.labels) for cell, folder in placed])

    return run_cells(placed, data_dir=data_dir, jobs=jobs, watch=watch, keep=keep, probes=probes, fuse=fuse)


def _by_hand(file: Path) -> bool:
    """Whether a person wrote this file: it is not what we would write for the same content."""
    try:
        content = file.read_text(encoding="utf-8")
        return content != tomli_w.dumps(tomllib.loads(content))
    except FileNotFoundError:
        return False
    except (OSError, ValueError, RecursionError):
        return True


def place(cells: Sequence[Cell], out: Path) -> list[Placed]:
    """Where every cell is, or will be: a folder is found by its hash, whatever its name."""
    if out.is_file():
        raise UserError(f"{out} is a file. Name a folder for the runs with --out.")
    there = (
        {path.name.rpartition("-")[2]: path for path in sorted(out.iterdir()) if path.is_dir()} if out.is_dir() else {}
    )
    return [Placed(cell, there.setdefault(cell.hash, out / cell.folder)) for cell in cells]


def run_cells(
    placed: Sequence[Placed],
    *,
    data_dir: str | Path | None = None,
    jobs: int | None = None,
    watch: SweepWatch | None = None,
    keep: Callable[[], None] = lambda: None,
    probes: Probes = NO_PROBES,
    fuse: bool = True,
) -> list[CellOutcome]:
    """Run cells in folders of the caller's choice. `keep` is called when all are known to be possible, before the first
    starts."""
    watch = watch or SweepWatch()
    where = Path(data_dir) if data_dir is not None else None
    todo, kept = check_sweep(placed, where, watch, probes)
    keep()
    seeds = [p.cell.experiment.seed for p in placed]
    todo.sort(key=lambda p: seeds.index(p.cell.experiment.seed))  # a sweep that is stopped has whole seeds
    shares = share_out([p.cell for p in placed], jobs)
    outcomes = dict(kept)
    alone = [[placed] for placed in todo]
    bundles = bundled([(p, p.cell.experiment) for p in todo], len(shares)) if fuse else alone
    watch.start([p.cell for p in todo], list(kept.values()), min(len(shares), len(bundles)))
    try:
        for outcome in Crew(shares, where, watch, probes).work(bundles) if todo else ():
            outcomes[outcome.folder] = outcome
            _write_reason(outcome, watch)
            watch.ended(outcome)
    finally:
        watch.end()
    return [
        outcomes.get(folder, CellOutcome(cell, folder, "stopped", "not begun"))._replace(cell=cell)
        for cell, folder in placed
    ]


def check_sweep(
    placed: Sequence[Placed], data_dir: Path | None, watch: SweepWatch, probes: Probes = NO_PROBES
) -> tuple[list[Placed], dict[Path, CellOutcome]]:
    """The cells to run and the finished ones, if all are possible."""
    kept = {folder: CellOutcome(cell, folder, "kept", summary=done) for (cell, folder), done in finished_cells(placed)}
    todo = list({p.folder: p for p in placed if p.folder not in kept}.values())  # two cells may be the same run
    _note_changed_code(list(kept.values()), watch)
    check_cells(todo, list(kept.values()), data_dir, watch, probes)
    return todo, kept


def finished_cells(placed: Sequence[Placed]) -> list[tuple[Placed, dict[str, Any]]]:
    """The cells that need not be run, with their summaries; a UserError if a folder holds something else."""
    found, bad = [], []
    for cell, path in placed:
        folder = RunFolder(path)
        try:
            folder.check(cell.experiment, resume=True)
            if folder.finished:
                folder.check_rounds(cell.experiment.rounds)
                found.append((Placed(cell, path), folder.summary()))
        except UserError as error:
            bad.append(f"{cell.name}: {error} To run this cell again, remove {path}.")
    if bad:
        more = [f"And {len(bad) - SHOWN} more."] if len(bad) > SHOWN else []
        raise UserError(" ".join([*bad[:SHOWN], *more]))
    return found


def _note_changed_code(kept: Sequence[CellOutcome], watch: SweepWatch) -> None:
    """Say which finished cells stay although the user's own method or model has changed since."""
    changed: dict[str, list[str]] = {}
    for outcome in kept:
        for name in changed_code(RunFolder(outcome.folder)):
            changed.setdefault(name, []).append(outcome.folder.name)
    for name, folders in changed.items():
        watch.note(
            f"the file of {name} has changed since {len(folders)} finished cell{'s' * (len(folders) > 1)} of it. They "
            f"stay as they are; to run one again, remove its folder, such as {folders[0]}"
        )


def check_cells(
    todo: Sequence[Placed],
    kept: Sequence[CellOutcome],
    data_dir: Path | None,
    watch: SweepWatch,
    probes: Probes = NO_PROBES,
) -> None:
    """Refuse now what would be refused after hours: data, partitions (each checked once) and methods, without a GPU."""
    domains: list[Domain] | None = None
    loaded, splits, done = None, {}, set()
    bad: list[tuple[Cell, UserError]] = []
    ordered = sorted(todo, key=lambda p: str(p.cell.experiment.data))  # only one data set is in memory at a time
    for number, (cell, _) in enumerate(ordered):
        watch.checking(number, len(ordered))
        plan = cell.experiment
        try:
            plan.torch_device()
            if loaded != plan.data:
                domains, loaded = None, plan.data
                domains = load(plan.data, data_dir)
            if _case(cell) not in splits:
                splits[_case(cell)] = prepare_split(plan, data_dir, domains)[1].hash
            alike = str({key: value for key, value in plan.to_dict().items() if key not in ("seed", "optimizer")})
            if alike not in done:
                prepare(dataclasses.replace(plan, device="cpu"), data_dir, domains, probes=probes)
                done.add(alike)
        except UserError as error:
            bad.append((cell, error))
        except Exception as error:  # raised by the user's own method or model
            at = traceback.extract_tb(error.__traceback__)[-1]
            bad.append((cell, UserError(f"{type(error).__name__}: {error} ({at.filename}, line {at.lineno}).")))
    watch.checking(len(ordered), len(ordered))
    if bad:
        more = f" So are {len(bad) - 1} more: {'; '.join(cell.name for cell, _ in bad[1:4])}." if len(bad) > 1 else ""
        raise UserError(f"{bad[0][0].name} is impossible: {bad[0][1]}{more}")
    for outcome in kept:
        now, then = splits.get(_case(outcome.cell)), (outcome.summary or {}).get("partition")
        if now is not None and now != then:
            raise UserError(
                f"{outcome.folder} is finished, but the data here gives another partition for {outcome.cell.name}: "
                "its numbers could not be compared. Restore the data, or use another --out."
            )


def _case(cell: Cell) -> tuple[Any, ...]:
    """Everything that a partition depends on."""
    plan = cell.experiment
    return str(plan.data), str(plan.partition), plan.clients, plan.seed, plan.evaluate.validation


def share_out(cells: Sequence[Cell], jobs: int | None = None) -> list[Share]:
    """The number of processes, and what each gets. It does not depend on what is finished: a resumed cell has the same
    cores as before, and so gives the same bits."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    devices = {cell.experiment.device for cell in cells}
    gpus = _gpus() if devices - {"cpu"} else []
    if jobs is None:
        threads = max(cell.experiment.engine.threads for cell in cells)
        jobs = max(1, cores // max(1, threads))
        if gpus:
            each = torch.cuda.get_device_properties(0).total_memory // GPU_MEMORY
            jobs = max(1, min(jobs, len(gpus) * max(1, min(GPU_JOBS, each))))
        jobs = min(jobs, len({cell.hash for cell in cells}))
    dealt = len(gpus) > 1 and devices <= {"auto", "cuda", "cpu"}
    on_one = -(-jobs // len(gpus)) if dealt else jobs
    part = GPU_SHARED / on_one if gpus and on_one > 1 else 1.0
    return [Share(max(1, cores // jobs), gpus[i % len(gpus)] if dealt else None, part) for i in range(jobs)]


def _gpus() -> list[str]:
    """The GPUs that torch sees, by their names in CUDA_VISIBLE_DEVICES."""
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named or [str(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []


def _write_reason(outcome: CellOutcome, watch: SweepWatch) -> None:
    """Keep a failure's traceback next to the folder, until the cell succeeds."""
    path = listing.reason(outcome.folder)
    try:
        if outcome.status == "failed":
            write_atomically(path, (outcome.reason + "\n").encode())
        elif outcome.status == "done":
            path.unlink(missing_ok=True)
    except OSError as error:  # a full disk; the other cells go on
        watch.note(f"{path} cannot be written ({error.strerror or error})")
