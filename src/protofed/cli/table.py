"""`protofed table`"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from protofed.atomic import write_atomically
from protofed.cli.common import console, note, pour, say
from protofed.errors import UserError

ENDINGS = {".md": "markdown", ".tex": "latex", ".csv": "csv"}


class Format(StrEnum):
    """How a table can be written."""

    terminal = "terminal"
    markdown = "markdown"
    latex = "latex"
    csv = "csv"


class Select(StrEnum):
    """What parameters can be chosen by."""

    validation = "validation"
    validation_global = "validation-global"


class Deviation(StrEnum):
    """Which standard deviation is shown."""

    population = "population"
    sample = "sample"


def table(
    folders: Annotated[list[Path], typer.Argument(help="The folder of a sweep, or of runs. You can give several.")],
    columns: Annotated[
        str | None,
        typer.Option(
            help="Columns, joined by commas. By the rule of each method (one column per rule if methods differ): "
            "accuracy, worst10, std, global, global-own, pm_v, pm_l, attack, held-out, held-out-proto, held-out-alone. "
            "Accuracy by another rule: head and proto-all (classifier or nearest prototype, among all classes), "
            "head-own and proto-own (among a client's own classes), proto (as the method). "
            "global is the global model on the whole test set (GM); pm_v and pm_l are the clients' own models on it, "
            "over the classes that each holds or weighted by its shares of them (PM(V), PM(L)). Also params, bytes_up, "
            "bytes_down, seconds, and any key of summary.json. Numbers are those after the last round; add @last10 for "
            "the mean of the last ten rounds, @50 for that of rounds 41 to 50, and @validation for the round that is "
            "best on validation samples."
        ),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="The row that all others are compared with, seed by seed.")
    ] = None,
    select: Annotated[
        Select | None,
        typer.Option(
            help="For each method, show only the parameters that are best on validation samples (evaluate.validation), "
            "by the clients' own accuracy there or by the global model's."
        ),
    ] = None,
    deviation: Annotated[
        Deviation, typer.Option(help="The standard deviation over seeds: divided by n, or by n - 1.")
    ] = Deviation.population,
    format: Annotated[Format, typer.Option(help="Format of the output; by default, that of --out.")] = Format.terminal,
    out: Annotated[Path | None, typer.Option(help="Also write the table to this file: .md, .tex or .csv.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Include runs that are not cells of the sweep.")] = False,
    any_version: Annotated[bool, typer.Option("--any-version", help="Mix runs of different versions.")] = False,
) -> None:
    """Show runs as a table: mean and deviation over seeds.

    The best result of each column is marked.

    Examples:

      protofed table runs/my-sweep --baseline fedavg

      protofed table runs/my-sweep --select validation --deviation sample

      protofed table runs/my-sweep --columns accuracy,accuracy@last10,worst10 --out table.tex
    """
    kind = str(format)
    if out is not None and out.is_dir():
        raise UserError(f"--out {out} is a folder. Name a file in it, such as {out / 'table.md'}.")
    if out is not None and format is Format.terminal:
        if out.suffix not in ENDINGS:
            raise UserError(f"--out {out} should end in {', '.join(ENDINGS)}, or say --format.")
        kind = ENDINGS[out.suffix]
    from protofed.report import render  # with PyTorch, which a typo should not wait for
    from protofed.report.gather import collect
    from protofed.report.tabulate import tabulate

    made = tabulate(
        collect(folders, everything=everything, any_version=any_version),
        columns,
        baseline,
        deviation=deviation,
        select=select,
    )
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, render.FORMATS[kind](made).encode(errors="replace"))
        say(f"table: {out}")
    elif kind == "terminal":
        console.print(render.terminal(made, console.width))
    else:
        pour(render.FORMATS[kind](made))
    for text in made.notes if out is not None or kind in ("terminal", "csv") else ():
        note(text)
