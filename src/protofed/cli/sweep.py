"""`protofed sweep`"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from protofed.cli.common import DataDir, Jobs, Overrides, Track, Trust, console, errors, note, say, track_all
from protofed.errors import UserError

if TYPE_CHECKING:
    from protofed.report.gather import Collected
    from protofed.report.rows import Table
    from protofed.report.runs import Run
    from protofed.sweep import CellOutcome, Sweep
    from protofed.sweep.workers import Placed


def sweep(
    file: Annotated[Path, typer.Argument(metavar="SWEEP.toml", help="Methods, experiments, seeds and parameters.")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Folder for all cells; by default runs/NAME-OF-THE-FILE.")] = None,
    jobs: Jobs = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the cells, and estimate how long the unfinished ones take.")
    ] = False,
    trial: Annotated[
        bool,
        typer.Option("--trial", help="With --dry-run: run a few rounds of each new kind of cell for the estimate."),
    ] = False,
    fuse: Annotated[
        bool,
        typer.Option(
            "--fuse/--no-fuse",
            help="Train cells that differ only in seed, partition or numbers together, if that is faster.",
        ),
    ] = True,
    trust: Trust = False,
    data_dir: DataDir = None,
    track: Track = None,
) -> None:
    """Run methods x experiments x seeds x parameters.

    If a sweep was stopped, the same command resumes it.

    A sweep file:

      experiment = "demo"      # or a list

      seeds = [0, 1, 2]

      changes = ["rounds=50"]  # for every cell

      methods.local = []       # label = changes

      methods.fedproto = []

      methods.strong = ["method=fedproto", "method.lam=4"]

      parameters."optimizer.lr" = [0.01, 0.1]  # a grid, for the methods that have the key

    Then:

      protofed table runs/NAME --baseline local
    """
    if trial and not dry_run:
        raise UserError("--trial is for --dry-run: it times a few rounds and keeps nothing. Add --dry-run.")
    from protofed.probes import ALL  # with PyTorch, which a typo should not wait for
    from protofed.report.gather import finished_runs
    from protofed.sweep import Sweep, run_sweep
    from protofed.sweep.progress import view

    plan = Sweep.load(file, *(overrides or []), trust=trust)
    folder = out or Path("runs") / file.stem
    if dry_run:
        from protofed.sweep.forecast import forecast

        placed = _list(plan, folder, data_dir)
        say(forecast(placed, data_dir, jobs, trial=trial, watch=view(console), probes=ALL))
        return
    track_all(track)
    outcomes = run_sweep(plan, folder, data_dir=data_dir, jobs=jobs, watch=view(console), probes=ALL, fuse=fuse)
    if any(outcome.summary for outcome in outcomes):
        done = [(outcome.folder, outcome.cell.labels) for outcome in outcomes if outcome.summary]
        table_of(finished_runs(done), [folder for folder, _ in done])
    say(f"runs: {folder}")
    closing(outcomes)


def table_of(found: "Collected | Sequence[Run]", done: Sequence[Path] = ()) -> "Table":
    """Show runs as a table, with remarks. Of the runs that were left out, only finished ones are named here; the others
    are named elsewhere."""
    from protofed.report import render
    from protofed.report.tabulate import tabulate

    made = tabulate(found)
    console.print(render.terminal(made, console.width))
    for remark in (*made.remarks, *(f"left out: {out}" for out in made.left_out if out.folder in done)):
        say(f"note: {remark}")
    return made


def closing(outcomes: Sequence["CellOutcome"]) -> None:
    """Name the cells that failed or were left. The exit code is 1, or 130 after Ctrl-C."""
    from protofed.runs import listing, progress

    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    left = sum(outcome.status == "stopped" for outcome in outcomes)
    if failed:
        errors.print(f"{len(failed)} of {len(outcomes)} cells failed; the same command tries them again:")
    for outcome in failed:
        reason, *more = outcome.reason.splitlines()
        where = f" ({listing.reason(outcome.folder)})" if more else ""
        progress.say_on(errors, f"  {outcome.cell.name}: {reason}{where}")
    if left:
        say(f"{left} of {len(outcomes)} cells are left. Run the same command to continue.")
        raise typer.Exit(130)
    if failed:
        raise typer.Exit(1)


def _list(plan: "Sweep", folder: Path, data_dir: Path | None) -> list["Placed"]:
    """Every cell, and whether it is done; then a UserError if one is impossible."""
    from protofed.probes import ALL
    from protofed.runs.folder import RunFolder
    from protofed.sweep.progress import view
    from protofed.sweep.run import check_sweep, place

    placed = place(plan.cells(note), folder)
    done = 0
    for cell, path in placed:
        run = RunFolder(path)
        try:
            state = "done" if run.finished and run.summary() else f"{len(run.rounds())} rounds done"
            state = state if run.exists else "to run"
        except UserError:  # which `check` reports
            state = "damaged"
        done += state == "done"
        say(f"{state:<15} {cell.hash}  {cell.name}")
    say(f"{len(placed)} cells, {done} done: {folder}")
    check_sweep(placed, data_dir, view(console), ALL)
    return placed
