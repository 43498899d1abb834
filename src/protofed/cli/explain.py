"""`protofed explain`"""

import json
from pathlib import Path
from typing import Annotated

import typer

from protofed.cli.common import DataDir, Overrides, Trust, console, errors, note
from protofed.config.files import find
from protofed.config.misspelt import refuse_misspelt
from protofed.config.registry import find_method, method_path
from protofed.errors import UserError


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
    method_path(method, "explain")
    refuse_misspelt(experiment, *(overrides or []))
    from protofed.cli import printing  # with PyTorch, which a typo should not wait for
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
    with printing.bar(errors, f"playing a round of {method}") as tell:
        told = explain_experiment(plan, data_dir, tell)
    if as_json:
        console.print_json(json.dumps(told))
        return
    printing.explanation(console, told, find(experiment).stem)


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
    from protofed.cli import printing
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
        with printing.bar(errors, f"measuring the constants of {method}") as tell:
            told = guidance(plan, data_dir, tell)
    if as_json:
        console.print_json(json.dumps(told))
        return
    guidance_table(console, told)
