"""`protofed table`"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from protofed.atomic import write_atomically
from protofed.cli.common import console, errors, say
from protofed.errors import UserError
from protofed.report import render
from protofed.report.tabulate import collect, tabulate

ENDINGS = {".md": "markdown", ".tex": "latex", ".csv": "csv"}


class Format(StrEnum):
    """How a table can be written."""

    terminal = "terminal"
    markdown = "markdown"
    latex = "latex"
    csv = "csv"


def table(
    folders: Annotated[list[Path], typer.Argument(help="The folder of a sweep, or of runs, or several.")],
    columns: Annotated[
        str | None,
        typer.Option(
            help="With commas: accuracy, worst10, std, head, proto, global, global-own, pm_v, pm_l, held-out, "
            "held-out-proto, held-out-alone, params, bytes_up, bytes_down, seconds, or any key of summary.json: after "
            "the last round. Behind it @last10: the mean of the last ten rounds; @validation: of the round "
            "that is best on validation; @50: the mean of rounds 41 to 50."
        ),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="The row that every other is tested against, over seeds.")
    ] = None,
    format: Annotated[Format, typer.Option(help="By default as the ending of --out says.")] = Format.terminal,
    out: Annotated[Path | None, typer.Option(help="A file to write it to: .md, .tex or .csv.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Runs too that are not cells of the sweep.")] = False,
    any_version: Annotated[bool, typer.Option("--any-version", help="Mix runs of different versions.")] = False,
) -> None:
    """Show runs as a table: mean and deviation over seeds, the best marked.

    Examples:

      protofed table runs/my-sweep --baseline fedavg

      protofed table runs/my-sweep --columns accuracy,accuracy@last10,worst10 --out table.tex
    """
    kind = str(format)
    if out is not None and out.is_dir():
        raise UserError(f"--out {out} is a folder. Name a file in it, such as {out / 'table.md'}.")
    if out is not None and format is Format.terminal:
        if out.suffix not in ENDINGS:
            raise UserError(f"--out {out} should end in {', '.join(ENDINGS)}, or say --format.")
        kind = ENDINGS[out.suffix]
    made = tabulate(collect(folders, everything=everything, any_version=any_version), columns, baseline)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, render.FORMATS[kind](made).encode())
        say(f"table: {out}")
    elif kind == "terminal":
        console.print(render.terminal(made, console.width))
    else:
        typer.echo(render.FORMATS[kind](made), nl=False)
    for note in made.notes if out is not None or kind in ("terminal", "csv") else ():
        errors.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
