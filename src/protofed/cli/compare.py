"""`protofed compare`"""

from pathlib import Path
from typing import Annotated

import typer

from protofed import progress, schema, tables
from protofed.cli import report
from protofed.cli.common import DataDir, console, say
from protofed.errors import UserError
from protofed.experiment import Experiment, find
from protofed.folder import RunFolder
from protofed.methods import METHODS
from protofed.prepare import prepare
from protofed.report import compare as comparison
from protofed.report.runs import gather
from protofed.results import Result
from protofed.run import Interrupted
from protofed.run import run as run_experiment


def compare(
    methods: Annotated[list[str], typer.Argument(help="Methods ('protofed list methods'); KEY=VALUE changes too.")],
    experiment: Annotated[str, typer.Option(help="A .toml file, or a shipped experiment's name.")],
    seeds: Annotated[str, typer.Option(help="Seeds, with commas.")] = "0",
    out: Annotated[Path | None, typer.Option(help="Folder for all runs; finished ones are not run again.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Run several methods on one experiment; show mean +- std over seeds, curves, and a page with all else.

    Example:

      protofed compare local fedproto --experiment demo --seeds 0,1,2
    """
    names = [word for word in methods if "=" not in word]
    if not names or len(set(names)) < len(names):
        raise UserError(f"compare needs different methods, got {names}. See 'protofed list methods'.")
    plans = [
        (name, Experiment.load(experiment, f"method={name}", *overrides, f"seed={seed}"))
        for name, overrides in _shared_overrides(names, [word for word in methods if "=" in word]).items()
        for seed in _seeds(seeds)
    ]
    folder = out or Path("runs") / f"compare-{find(experiment).stem}"
    for name, plan in plans:  # refuse now what would be refused after hours
        RunFolder(folder / f"{name}-seed{plan.seed}").check(plan, resume=True)
        prepare(plan, data_dir)
    results: dict[str, list[Result]] = {name: [] for name in names}
    for number, (name, plan) in enumerate(plans, 1):
        label = f"[{number}/{len(plans)}] {name} seed {plan.seed}"
        try:
            result = run_experiment(
                plan,
                folder / f"{name}-seed{plan.seed}",
                resume=True,
                data_dir=data_dir,
                watch=progress.watch(console, label.replace("[", "(").replace("]", ")")),
            )
        except Interrupted as stop:
            say(f"{stop}. The same command goes on from there.")
            raise typer.Exit(130) from None
        results[name].append(result)
    paths = comparison.write(results, folder)
    tables.compared(console, comparison.rows(results), find(experiment).stem)
    first = next(iter(results.values()))[0].folder
    say(f"pictures: {paths[2]}, {first / 'partition.png'}, {first / 'clients.png'}\ntables: {paths[0]}, {paths[1]}")
    report.write(gather(result.folder for runs in results.values() for result in runs), folder / "report.html")


def _shared_overrides(names: list[str], overrides: list[str]) -> dict[str, list[str]]:
    """The changes for each method: a key of [method] goes to those methods that have it."""
    result: dict[str, list[str]] = {name: [] for name in names}
    for word in overrides:
        key = word.partition("=")[0].strip()
        if key in ("method", "method.name", "seed"):
            raise UserError(f"{word!r} cannot be changed in compare: name the methods, and give --seeds.")
        field = key.removeprefix("method.") if key.startswith("method.") else None
        takers = [
            n for n in names if field in (None, "preset") or (n in METHODS and field in schema.fields(METHODS[n]))
        ]
        if not takers:
            raise UserError(f"unknown key {word!r}: none of {', '.join(names)} has it. See 'protofed list methods'.")
        for name in takers:
            result[name].append(word)
    return result


def _seeds(text: str) -> list[int]:
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        seeds = []
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds {text!r} should be different whole numbers with commas, such as 0,1,2.")
    return seeds
