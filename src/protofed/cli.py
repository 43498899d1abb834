"""The command line: `protofed run`, `compare`, `partition`, `explain`, `bench` and `list`."""

import json
import os
import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from protofed import progress, schema, tables
from protofed.bench import WORKLOADS
from protofed.bench import bench as run_bench
from protofed.errors import UserError, nearest
from protofed.experiment import Experiment, find
from protofed.explain import explain as explain_experiment
from protofed.folder import RunFolder
from protofed.methods import METHODS
from protofed.prepare import prepare, prepare_split
from protofed.report import bubbles
from protofed.report import compare as comparison
from protofed.run import Interrupted, Result
from protofed.run import run as run_experiment
from protofed.version import VERSION

app = typer.Typer(
    name="protofed",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="""Prototype-based federated learning.

    Start with:  protofed run demo

    See what there is:  protofed list methods   (models, data, partitions, experiments)

    See what a method does, sends and keeps private:  protofed explain fedproto

    Change anything:  protofed run demo method=fedavg model=cnn_digits rounds=20 optimizer.lr=0.05""",
)
console = Console(width=None if sys.stdout.isatty() else 120)
errors = Console(stderr=True)

ExperimentName = Annotated[
    str, typer.Argument(help="A .toml file, or a shipped experiment's name ('protofed list experiments').")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes, such as method.lam=0.5 rounds=10.")
]
DataDir = Annotated[
    Path | None, typer.Option(help="Where data sets lie; else $PROTOFED_DATA, else ./data.", envvar="PROTOFED_DATA")
]


def _version(asked: bool) -> None:
    if asked:
        _say(f"protofed {VERSION}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Options before any command."""


@app.command()
def run(
    experiment: ExperimentName,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; by default a new one in runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Run one experiment and write its folder.

    Examples:

      protofed run demo

      protofed run configs/fedproto/mnist_n3.toml --data-dir DIR rounds=20

      protofed run demo method=local seed=1 --out runs/alone
    """
    plan = Experiment.load(experiment, *(overrides or []))
    folder = out or _new_folder(f"{find(experiment).stem}-{plan.method_name}-seed{plan.seed}", resume)
    if resume and not RunFolder(folder).exists:
        raise UserError(f"--resume: there is no run in {folder}. Check --out, or start it without --resume.")
    try:
        result = run_experiment(
            plan, folder, resume=resume, data_dir=data_dir, watch=progress.watch(console, plan.method_name)
        )
    except Interrupted as stop:
        again = ["protofed", "run", experiment, *(overrides or []), "--out", str(folder), "--resume"]
        if data_dir is not None and "PROTOFED_DATA" not in os.environ:
            again += ["--data-dir", str(data_dir)]
        _say(f"{stop}. Go on with:\n  {shlex.join(again)}")
        raise typer.Exit(130) from None
    tables.result(console, result)


def _new_folder(name: str, resume: bool) -> Path:
    """runs/NAME, or NAME-2, NAME-3, ...: a new one, or when resuming the newest there is."""
    taken = [Path("runs") / name]
    while taken[-1].exists():
        taken.append(Path("runs") / f"{name}-{len(taken) + 1}")
    return taken[-2] if resume and len(taken) > 1 else taken[-1]


@app.command()
def compare(
    methods: Annotated[list[str], typer.Argument(help="Methods ('protofed list methods'); KEY=VALUE changes too.")],
    experiment: Annotated[str, typer.Option(help="A .toml file, or a shipped experiment's name.")],
    seeds: Annotated[str, typer.Option(help="Seeds, with commas.")] = "0",
    out: Annotated[Path | None, typer.Option(help="Folder for all runs; finished ones are not run again.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Run several methods on one experiment; show mean +- std over seeds, and the curves in one picture.

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
            _say(f"{stop}. The same command goes on from there.")
            raise typer.Exit(130) from None
        results[name].append(result)
    paths = comparison.write(results, folder)
    tables.compared(console, comparison.rows(results), find(experiment).stem)
    first = next(iter(results.values()))[0].folder
    _say(f"pictures: {paths[2]}, {first / 'partition.png'}, {first / 'clients.png'}\ntables: {paths[0]}, {paths[1]}")


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


@app.command()
def partition(
    experiment: ExperimentName,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Folder for partition.npz and partition.png.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Draw and describe who has what, without training.

    The file it writes can be used again:  protofed run ... partition=file partition.path=FOLDER/partition.npz
    """
    plan = Experiment.load(experiment, *(overrides or []))
    domains, split = prepare_split(plan, data_dir)
    folder = out or Path("runs") / f"partition-{find(experiment).stem}"
    if folder.is_dir() and {p.name for p in folder.iterdir()} - {"partition.npz", "partition.png"}:
        raise UserError(f"--out {folder} holds other files. Name another folder for the partition.")
    folder.mkdir(parents=True, exist_ok=True)
    split.save(folder / "partition.npz", domains)
    bubbles.draw_split(split, domains, folder / "partition.png")
    for note in split.notes:
        _say(f"note: {note}")
    for what, value in bubbles.describe(split, domains).items():
        if what != "hash":
            text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
            _say(f"{what}: {text}")
    _say(f"hash: {split.hash}\nfile: {folder / 'partition.npz'}\npicture: {folder / 'partition.png'}")


@app.command()
def explain(
    method: Annotated[str, typer.Argument(help="A method ('protofed list methods').")],
    overrides: Overrides = None,
    experiment: Annotated[str, typer.Option(help="A .toml file, or a shipped experiment's name.")] = "demo",
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Say what a method trains, sends, keeps private and can be set to, with the numbers of one experiment.

    Examples:

      protofed explain fedproto

      protofed explain fedavg model=cnn_digits method.preset=official

      protofed explain fednh --experiment fednh/cifar10_dir03 --data-dir DIR --json
    """
    if method not in METHODS:
        raise UserError(f"there is no method {method!r}. {nearest(method, METHODS)}")
    for word in overrides or []:
        if word.partition("=")[0].strip() in ("method", "method.name"):
            raise UserError(
                f"{word!r} cannot be changed in explain: name the method, as in 'protofed explain {method}'."
            )
    plan = Experiment.load(experiment, f"method={method}", *(overrides or []))
    with tables.bar(errors, f"playing a round of {method}") as tell:
        told = explain_experiment(plan, data_dir, tell)
    if as_json:
        console.print_json(json.dumps(told))
        return
    tables.explanation(console, told, find(experiment).stem)


@app.command()
def bench(
    workload: Annotated[str, typer.Argument(help="One of: " + ", ".join(WORKLOADS) + ".")],
    overrides: Overrides = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that are timed, after some to warm up.")] = 5,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Time one workload on the reference engine and on the stacked one, as it is and compiled, in one run.

    Example:

      protofed bench digits-100 --json
    """
    changes = tuple(overrides or [])
    found = run_bench(
        workload,
        rounds=rounds,
        device=device,
        changes=changes,
        data_dir=data_dir,
        tell=lambda engine: errors.print(f"timing the {engine} engine ...", highlight=False),
    )
    if as_json:
        console.print_json(json.dumps(found))
    else:
        tables.bench(console, found)


class Kind(StrEnum):
    """What can be listed."""

    methods = "methods"
    models = "models"
    data = "data"
    partitions = "partitions"
    experiments = "experiments"


@app.command("list")
def list_(
    what: Annotated[Kind, typer.Argument(help="What to list.")],
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, with every key and its default.")] = False,
    data_dir: DataDir = None,
) -> None:
    """List methods, models, data, partitions or experiments."""
    entries = tables.entries(what, data_dir)
    if as_json:
        console.print_json(json.dumps(entries, default=str))
        return
    for entry in entries:
        keys = ", ".join(f"{k['key']}={k['default']}" for k in entry.get("keys", []))
        _say(f"{entry['name']:<20} {entry['about']}" + (f"\n{'':<20} {keys}" if keys else ""))


def _say(text: str) -> None:
    tables.say(console, text)


def main() -> None:
    """Errors that a user can mend are one line and exit code 2."""
    try:
        app(prog_name="protofed")
    except UserError as error:
        _refuse(str(error))
    except OSError as error:  # a folder that may not be written, a path that is too long
        _refuse(f"{error.filename or 'a file'}: {error.strerror or error}. Use another --out or --data-dir.")


def _refuse(message: str) -> NoReturn:
    errors.print(f"error: {' '.join(message.split())}", highlight=False, markup=False, soft_wrap=True)
    sys.exit(2)
