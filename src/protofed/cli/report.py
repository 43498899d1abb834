"""`protofed report`"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from protofed.atomic import write_atomically
from protofed.cli.common import errors, note, say
from protofed.errors import UserError

if TYPE_CHECKING:
    from protofed.report.gather import Gathered

NO_PAGES = (".pdf", ".png", ".svg", ".md", ".tex", ".csv", ".json", ".docx")  # what a page is not


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders with runs in them.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    figures: Annotated[
        Path | None, typer.Option(help="A folder; every figure is saved there as PNG, SVG and PDF, for papers.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Include runs that are no longer cells of their sweep.")
    ] = False,
) -> None:
    """Write a page about any number of runs. It opens offline.

    Examples:

      protofed report runs/demo --out demo.html

      protofed report runs/first runs/second --figures figures
    """
    if out.suffix.lower() in NO_PAGES:
        raise UserError(
            f"--out {out} should end in .html, because a report is a page. --figures FOLDER saves PNG, SVG and PDF; "
            "'protofed table' writes .md, .tex and .csv."
        )
    from protofed.report.gather import gather  # with PyTorch, which a typo should not wait for

    write_report(gather(runs, everything=everything), out, figures)


def write_report(gathered: "Gathered", out: Path, figures: Path | None = None) -> None:
    """Write the page, and the figures if requested; say what was left out."""
    for remark in (*gathered.left_out, *gathered.remarks):
        note(str(remark))
    if not gathered.runs:
        raise UserError("there is no run that can be read. Name the folder of a run, or one that has runs in it.")
    if out.is_dir():
        raise UserError(f"--out {out} is a folder. Name a file, such as {out / 'report.html'}.")
    from protofed.cli import printing
    from protofed.report import html

    with printing.bar(errors, "drawing the report") as tell:
        shown, drawn = html.build(gathered, tell)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, html.render(shown).encode(errors="replace"))
    say(f"report: {out} (runs: {len(gathered.runs)})")
    if figures is not None:
        from protofed.report import paper  # with Matplotlib, which takes its time

        with printing.bar(errors, "saving the figures") as tell:
            count = paper.save(drawn, figures, tell, note, [*shown["incomparable"], *shown["unfinished"]])
        say(f"figures: {count} in {figures}, each as PNG, SVG and PDF")
