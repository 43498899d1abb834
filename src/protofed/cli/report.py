"""`protofed report`"""

from pathlib import Path
from typing import Annotated

import typer

from protofed import tables
from protofed.atomic import write_atomically
from protofed.cli.common import errors, say
from protofed.errors import UserError
from protofed.report import html
from protofed.report.runs import Gathered, gather


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders with runs in them.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    figures: Annotated[
        Path | None, typer.Option(help="A folder for every figure as PNG, SVG and PDF, for papers.")
    ] = None,
) -> None:
    """Write one page, that opens offline, of any number of runs.

    Examples:

      protofed report runs/demo --out demo.html

      protofed report runs/first runs/second --figures figures
    """
    write(gather(runs), out, figures)


def write(gathered: Gathered, out: Path, figures: Path | None = None) -> None:
    """The page, and the figures where they are asked for; says what was left out."""
    for remark in (*gathered.left_out, *gathered.remarks):
        _note(f"{remark.folder}: {remark.reason}")
    if not gathered.runs:
        raise UserError("there is no run that can be read. Name the folder of a run, or one that has runs in it.")
    if out.is_dir():
        raise UserError(f"--out {out} is a folder. Name a file, such as {out / 'report.html'}.")
    with tables.bar(errors, "drawing the report") as tell:
        shown, drawn = html.build(gathered, tell)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, html.render(shown).encode())
    say(f"report: {out} (runs: {len(gathered.runs)})")
    if figures is not None:
        from protofed.report import paper  # with Matplotlib, which takes its time

        with tables.bar(errors, "saving the figures") as tell:
            count = paper.save(drawn, figures, tell, _note)
        say(f"figures: {count} in {figures}, each as PNG, SVG and PDF")


def _note(text: str) -> None:
    errors.print(f"note: {text}", highlight=False, markup=False, soft_wrap=True)
