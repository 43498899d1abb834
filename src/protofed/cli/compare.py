"""`protofed compare`"""

from pathlib import Path
from typing import Annotated

import typer

from protofed.cli import report
from protofed.cli.common import DataDir, Track, console, say, track_all
from protofed.cli.sweep import closing, table_of
from protofed.errors import UserError
from protofed.experiment import find
from protofed.report import compare as comparison
from protofed.report import render
from protofed.report.gather import Run
from protofed.report.runs import gather
from protofed.results import Result
from protofed.sweep import Sweep, run_cells
from protofed.sweep.view import view
from protofed.sweep.workers import Placed


def compare(
    methods: Annotated[list[str], typer.Argument(help="Methods ('protofed list methods'); KEY=VALUE changes too.")],
    experiment: Annotated[str, typer.Option(help="A .toml file, or a shipped experiment's name.")],
    seeds: Annotated[str, typer.Option(help="Seeds, with commas.")] = "0",
    out: Annotated[Path | None, typer.Option(help="Folder for all runs; finished ones are not run again.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time; by default as in 'protofed sweep'.")] = None,
    data_dir: DataDir = None,
    track: Track = None,
) -> None:
    """Run several methods on one experiment; show mean +- std over seeds, curves, and a page with all else.

    Example:

      protofed compare local fedproto --experiment demo --seeds 0,1,2
    """
    names = [word for word in methods if "=" not in word]
    if not names or len(set(names)) < len(names):
        raise UserError(f"compare needs different methods, got {names}. See 'protofed list methods'.")
    plan = Sweep((experiment,), dict.fromkeys(names, ()), _seeds(seeds), tuple(w for w in methods if "=" in w))
    plan.check()
    track_all(track)
    folder = out or Path("runs") / f"compare-{find(experiment).stem}"
    placed = [Placed(c, folder / f"{c.labels['method']}-seed{c.experiment.seed}") for c in plan.cells()]
    outcomes = run_cells(placed, data_dir=data_dir, jobs=jobs, watch=view(console))
    results: dict[str, list[Result]] = {}
    for outcome in outcomes:
        if outcome.result is not None:
            results.setdefault(outcome.cell.labels["method"], []).append(outcome.result)
    if results:
        runs = [Run(o.folder, o.summary, o.cell.labels) for o in outcomes if o.summary is not None]
        paths = comparison.write(results, render.markdown(table_of(runs)), folder)
        first = next(iter(results.values()))[0].folder
        say(f"pictures: {paths[2]}, {first / 'partition.png'}, {first / 'clients.png'}\ntables: {paths[0]}, {paths[1]}")
        report.write(gather(run.folder for run in runs), folder / "report.html")
    closing(outcomes)


def _seeds(text: str) -> tuple[int, ...]:
    try:
        seeds = tuple(int(part) for part in text.split(","))
    except ValueError:
        seeds = ()
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds {text!r} should be different whole numbers with commas, such as 0,1,2.")
    return seeds
