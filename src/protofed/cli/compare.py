"""`protofed compare`"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from protofed.cli import report
from protofed.cli.common import DataDir, Jobs, Track, Trust, console, note, say, track_all
from protofed.cli.sweep import closing, table_of
from protofed.config.files import find
from protofed.config.misspelt import refuse_misspelt
from protofed.errors import UserError

if TYPE_CHECKING:
    from protofed.runs.measure import Result


def compare(
    methods: Annotated[
        list[str], typer.Argument(help="Methods ('protofed list methods'), and changes such as KEY=VALUE.")
    ],
    experiment: Annotated[str, typer.Option(help="A .toml file, or a shipped experiment's name.")],
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0",
    out: Annotated[Path | None, typer.Option(help="Folder for all runs. Finished runs are not repeated.")] = None,
    jobs: Jobs = None,
    trust: Trust = False,
    data_dir: DataDir = None,
    track: Track = None,
) -> None:
    """Run several methods on one experiment and compare them.

    It prints mean +- std over seeds and curves, and writes a page with all details.

    Example:

      protofed compare local fedproto --experiment demo --seeds 0,1,2
    """
    names = [word for word in methods if "=" not in word]
    if not names or len(set(names)) < len(names):
        raise UserError(f"compare needs different methods, got {names}. See 'protofed list methods'.")
    changes = [word for word in methods if "=" in word]
    for name in names:
        refuse_misspelt(experiment, f"method={name}", *changes)
    from protofed.probes import ALL  # with PyTorch, which a typo should not wait for
    from protofed.report import compare as comparison
    from protofed.report import render
    from protofed.report.gather import gather
    from protofed.report.runs import read_finished
    from protofed.sweep import Sweep, run_cells
    from protofed.sweep.progress import view
    from protofed.sweep.workers import Placed

    plan = Sweep((experiment,), dict.fromkeys(names, ()), _seeds(seeds), tuple(changes), trust=trust)
    plan.check()
    track_all(track)
    folder = out or Path("runs") / f"compare-{find(experiment).stem}"
    placed = [Placed(c, folder / f"{c.labels['method']}-seed{c.experiment.seed}") for c in plan.cells(note)]
    outcomes = run_cells(placed, data_dir=data_dir, jobs=jobs, watch=view(console), probes=ALL)
    results: dict[str, list[Result]] = {}
    for outcome in outcomes:
        if outcome.result is not None:
            results.setdefault(outcome.cell.labels["method"], []).append(outcome.result)
    if results:
        runs = [read_finished(o.folder, o.cell.labels) for o in outcomes if o.summary is not None]
        paths = comparison.write(results, render.markdown(table_of(runs)), folder)
        first = next(iter(results.values()))[0].folder
        say(f"pictures: {paths[2]}, {first / 'partition.png'}, {first / 'clients.png'}\ntables: {paths[0]}, {paths[1]}")
        report.write_report(gather(run.folder for run in runs), folder / "report.html")
    closing(outcomes)


def _seeds(text: str) -> tuple[int, ...]:
    try:
        seeds = tuple(int(part) for part in text.split(","))
    except ValueError:
        seeds = ()
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds {text!r} should be different whole numbers with commas, such as 0,1,2.")
    return seeds
