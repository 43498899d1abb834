"""`protofed sweep`"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from protofed.cli.common import DataDir, Overrides, Track, console, errors, say, track_all
from protofed.errors import UserError
from protofed.folder import RunFolder
from protofed.report import render
from protofed.report.gather import FAILED, Run, read
from protofed.report.tabulate import Collected, Table, tabulate
from protofed.sweep import Outcome, Sweep, run_sweep
from protofed.sweep.run import check, place
from protofed.sweep.view import view


def sweep(
    file: Annotated[Path, typer.Argument(metavar="SWEEP.toml", help="Methods, experiments, seeds and parameters.")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Folder for all cells; by default runs/NAME-OF-THE-FILE.")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Cells at a time; by default as many as there are cores, or a GPU bears.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the cells, and which are done.")] = False,
    data_dir: DataDir = None,
    track: Track = None,
) -> None:
    """Run methods x experiments x seeds x parameters; the same command goes on where it was stopped.

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
    plan = Sweep.load(file, *(overrides or []))
    folder = out or Path("runs") / file.stem
    if dry_run:
        _list(plan, folder, data_dir)
        return
    track_all(track)
    outcomes = run_sweep(plan, folder, data_dir=data_dir, jobs=jobs, watch=view(console))
    if any(outcome.summary for outcome in outcomes):
        done = [(outcome.folder, outcome.cell.labels) for outcome in outcomes if outcome.summary]
        table_of(read(done), [folder for folder, _ in done])
    say(f"runs: {folder}")
    closing(outcomes)


def table_of(found: Collected | Sequence[Run], finished: Sequence[Path] = ()) -> Table:
    """Show runs as a table, with what has to be said about them; of those left out only what is finished is named, for
    the others are named elsewhere."""
    made = tabulate(found)
    console.print(render.terminal(made, console.width))
    for note in (*made.remarks, *(out for out in made.left_out if out.folder in finished)):
        say(f"note: {note}")
    return made


def closing(outcomes: Sequence[Outcome]) -> None:
    """Name what failed or is left; the exit code is 1, or after Ctrl-C 130."""
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    left = sum(outcome.status == "stopped" for outcome in outcomes)
    if failed:
        errors.print(f"{len(failed)} of {len(outcomes)} cells failed; the same command tries them again:")
    for outcome in failed:
        reason, *more = outcome.reason.splitlines()
        where = f" ({outcome.folder}{FAILED})" if more else ""
        errors.print(f"  {outcome.cell.name}: {reason}{where}", highlight=False, markup=False, soft_wrap=True)
    if left:
        say(f"{left} of {len(outcomes)} cells are left. The same command goes on.")
        raise typer.Exit(130)
    if failed:
        raise typer.Exit(1)


def _list(plan: Sweep, folder: Path, data_dir: Path | None) -> None:
    """Every cell, and whether it is done; then a UserError if one is impossible."""
    placed = place(plan.cells(), folder)
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
    check(placed, data_dir, view(console))
