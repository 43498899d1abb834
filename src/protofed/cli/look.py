"""`protofed partition`, `explain` and `list`: what there is, without training"""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from protofed.cli.common import DataDir, ExperimentName, Overrides, Trust, console, errors, note, say
from protofed.config.files import find
from protofed.errors import UserError


def partition(
    experiment: ExperimentName,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Folder for partition.npz and partition.png.")] = None,
    export: Annotated[Path | None, typer.Option(help="Folder for each client's samples, client-000.npz ...")] = None,
    trust: Trust = False,
    data_dir: DataDir = None,
) -> None:
    """Show which client has which samples, without training.

    The file it writes can be used again:  protofed run ... partition=file partition.path=FOLDER/partition.npz
    """
    from protofed.remote.shares import export_shares  # with PyTorch, which a typo should not wait for
    from protofed.report import pictures  # with Matplotlib, which takes its time
    from protofed.report.figures import partition as has
    from protofed.runs.setup import prepare_split
    from protofed.runs.trust import trusted_experiment

    plan = trusted_experiment(experiment, *(overrides or []), trust=trust, tell=note)
    domains, split = prepare_split(plan, data_dir)
    if domains[0].computed is not None:
        raise UserError(
            f"{domains[0].name} computes each client's samples when it is drawn, so there is no partition to draw."
        )
    folder = out or Path("runs") / f"partition-{find(experiment).stem}"
    if folder.is_dir() and {p.name for p in folder.iterdir()} - {"partition.npz", "partition.png"}:
        raise UserError(f"--out {folder} holds other files. Name another folder for the partition.")
    folder.mkdir(parents=True, exist_ok=True)
    split.save(folder / "partition.npz", domains)
    pictures.draw_split(split, domains, folder / "partition.png")
    for text in split.notes:
        say(f"note: {text}")
    for what, value in has.describe(split, domains).items():
        if what != "hash":
            text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
            say(f"{what}: {text}")
    if export:
        export_shares(plan, domains, export)
        say(f"samples of each client, and the server's test samples: {export}")
    say(f"hash: {split.hash}\nfile: {folder / 'partition.npz'}\npicture: {folder / 'partition.png'}")


def explain(
    method: Annotated[str, typer.Argument(help="A method ('protofed list methods'), or your own as module:Class.")],
    overrides: Overrides = None,
    experiment: Annotated[str, typer.Option(help="A .toml file, or a shipped experiment's name.")] = "demo",
    theory: Annotated[
        bool, typer.Option(help="Suggest a range for lr and lam (or rho) from the method's theorem.")
    ] = False,
    run: Annotated[
        Path | None,
        typer.Option(help="Show what this run measured of its theory (evaluate.theory), and suggest a range."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    trust: Trust = False,
    data_dir: DataDir = None,
) -> None:
    """Say what a method trains, sends and keeps private.

    Also list its settings. The numbers are those of one experiment.

    Examples:

      protofed explain fedproto

      protofed explain fedavg model=cnn_digits method.preset=official

      protofed explain fedproto --theory optimizer.lr=0.01

      protofed explain fedproto --run runs/demo

      protofed explain fednh --experiment fednh/cifar10_dir03 --data-dir DIR --json
    """
    if Path(method).is_dir():
        raise UserError(f"{method} is a folder. Write 'protofed explain METHOD --run {method}' for a run's guidance.")
    from protofed.cli import tables  # with PyTorch, which a typo should not wait for
    from protofed.config.registry import find_method
    from protofed.explain.explain import explain as explain_experiment
    from protofed.runs.trust import trusted_experiment

    find_method(method, "explain")
    for word in overrides or []:
        if word.partition("=")[0].strip() in ("method", "method.name"):
            raise UserError(
                f"{word!r} cannot be changed in explain: name the method, as in 'protofed explain {method}'."
            )
    if theory or run:
        _guide(method, overrides or [], experiment, run, as_json, trust, data_dir)
        return
    plan = trusted_experiment(experiment, f"method={method}", *(overrides or []), trust=trust, tell=note)
    with tables.bar(errors, f"playing a round of {method}") as tell:
        told = explain_experiment(plan, data_dir, tell)
    if as_json:
        console.print_json(json.dumps(told))
        return
    tables.explanation(console, told, find(experiment).stem)


def _guide(
    method: str,
    overrides: list[str],
    experiment: str,
    run: Path | None,
    as_json: bool,
    trust: bool,
    data_dir: Path | None,
) -> None:
    """`explain --theory`: of a run's measured rounds, or of the first rounds of an experiment."""
    from protofed.cli import tables
    from protofed.papers.theory.guidance import guidance, guidance_of_run
    from protofed.papers.theory.table import guidance_table
    from protofed.runs.trust import trusted_experiment

    told = None
    if run:
        plan, told = guidance_of_run(run, trust, note)
        if plan.method_name != method:
            raise UserError(f"--run {run} is a run of {plan.method_name}. Write 'protofed explain {plan.method_name}'.")
        if overrides:
            raise UserError(f"{overrides[0]!r} cannot be changed in a run. Leave it out, or --run.")
    else:
        plan = trusted_experiment(experiment, f"method={method}", *overrides, trust=trust, tell=note)
    if told is None:
        with tables.bar(errors, f"measuring the constants of {method}") as tell:
            told = guidance(plan, data_dir, tell)
    if as_json:
        console.print_json(json.dumps(told))
        return
    guidance_table(console, told)


class Kind(StrEnum):
    """What can be listed."""

    methods = "methods"
    models = "models"
    data = "data"
    partitions = "partitions"
    experiments = "experiments"


def list_(
    what: Annotated[Kind, typer.Argument(help="What to list.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every key and its default.")] = False,
    data_dir: DataDir = None,
) -> None:
    """List methods, models, data, partitions or experiments."""
    from protofed.cli import tables  # with PyTorch, which a typo should not wait for

    entries = tables.entries(what, data_dir)
    if as_json:
        console.print_json(json.dumps(entries, default=str))
        return
    for entry in entries:
        keys = ", ".join(f"{k['key']}={k['default']}" for k in entry.get("keys", []))
        say(f"{entry['name']:<20} {entry['about']}" + (f"\n{'':<20} {keys}" if keys else ""))
