"""`protofed reproduce`"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from protofed.cli.common import DataDir, Jobs, console, errors, say
from protofed.errors import UserError

if TYPE_CHECKING:
    from protofed.papers.reproduce.run import Report


def reproduce(
    entries: Annotated[
        list[str] | None, typer.Argument(help="Tables and figures (see --list); PAPER/ stands for all of a paper's.")
    ] = None,
    listing: Annotated[
        bool, typer.Option("--list", help="List every table and figure, and how long it takes.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Run a smaller version for a laptop; its results are labelled so.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for runs, tables and figures.")] = Path("runs/reproduce"),
    jobs: Jobs = None,
    limit: Annotated[
        str, typer.Option(help="Stop cleanly after this time (480s, 20m, 2h). The same command resumes.")
    ] = "",
    only: Annotated[
        list[str] | None,
        typer.Option(help="Run only a part: seed=0, or method=fednh,fedavg. Repeat it for several labels."),
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="In a checkout: write the results in --out into docs/results.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="In a checkout: note in docs/results how far the results in --out differ.")
    ] = False,
    data_dir: DataDir = None,
) -> None:
    """Reproduce tables and figures of the papers.

    It shows what the papers report, what is measured here, and the difference.

    Examples:

      protofed reproduce --list

      protofed reproduce fedproto/table-mnist --quick

      protofed reproduce fedproto/table-mnist fedpr/figure-2 --data-dir DIR --limit 20m

      protofed reproduce fednh/table-1-cifar10 --data-dir DIR --only seed=0 --only method=fedavg,fednh
    """
    if not (entries or listing or write or check):
        raise UserError("name what to reproduce; 'protofed reproduce --list' says what there is.")
    if write and check:
        raise UserError("--write takes numbers over, and --check leaves those that are there. Use one of them.")
    from protofed.papers.reproduce import published, render  # with PyTorch, which a typo should not wait for
    from protofed.papers.reproduce.entry import entry_names
    from protofed.papers.reproduce.result import again
    from protofed.probes import ALL
    from protofed.sweep.progress import view

    if listing:
        _list(_named(entries) if entries else entry_names(), data_dir)
        return
    if write or check:
        published.check_page()
    report = None
    if entries:
        from protofed.papers.reproduce.run import reproduce as run_entries  # with Matplotlib, which takes its time

        report = run_entries(
            _named(entries),
            out,
            quick=quick,
            data_dir=data_dir,
            jobs=jobs,
            limit=_seconds(limit),
            only=_labels(only or []),
            watch=view(console),
            tell=say,
            probes=ALL,
        )
        before = published.kept()
        for one in report.done:
            render.entry_text(console, one.entry, one.measured)
            if text := again(one.entry, before[one.entry.name], one.measured) if one.entry.name in before else "":
                say(f"compared with the numbers that come with protofed: {text}")
            drawn = f"; figures: {', '.join(map(str, one.pictures))}" if one.pictures else ""
            say(f"kept in {one.folder}: result.md, result.json{drawn}\n")
    if write or check:
        for line in published.write_page(out) if write else published.note_difference(out):
            say(line)
    if report:
        _end(report)


def _end(report: "Report") -> None:
    from protofed.runs import progress

    for text in report.skipped:
        say(f"skipped: {text}")
    for outcome in report.failed:
        progress.say_on(errors, f"failed: {outcome.cell.name}: {outcome.reason.splitlines()[0]}")
    if report.stopped:
        say(f"{report.stopped} before all was finished. Run the same command to continue.")
        raise typer.Exit(130)
    if report.failed or not report.done or any(one.damaged for one in report.done):
        raise typer.Exit(1)


def _named(words: list[str]) -> list[str]:
    from protofed.papers.reproduce.entry import entry_names

    found: list[str] = []
    for word in words:
        here = [name for name in entry_names() if name.startswith(word)] if word.endswith("/") else [word]
        if not here:
            raise UserError(f"{word} names nothing. See 'protofed reproduce --list'.")
        found += here
    return found


def _labels(words: list[str]) -> dict[str, list[str]]:
    """label=value,value: what to run."""
    found: dict[str, list[str]] = {}
    for word in words:
        label, equals, values = word.partition("=")
        if not (label and equals and values):
            raise UserError(f"--only {word!r} should be label=value, such as seed=0 or method=fednh,fedavg.")
        found.setdefault(label.strip(), []).extend(value.strip() for value in values.split(","))
    return found


def _seconds(text: str) -> float | None:
    if not text:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h)?", text)
    if not found or not float(found[1]):
        raise UserError(f"--limit {text!r} should be a time such as 480s, 20m or 2h.")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2] or "s"]


def _list(wanted: list[str], data_dir: Path | None) -> None:
    from protofed.papers.reproduce import pages, published
    from protofed.papers.reproduce.entry import PAPERS, load_entry
    from protofed.papers.reproduce.plan import data_of

    measured = published.kept()
    paper = ""
    for name in wanted:
        entry = load_entry(name)
        if entry.paper != paper:
            paper = entry.paper
            say(f"\n{PAPERS[paper]}")
        say(f"  {name:<26} {entry.shows + ': ' if entry.shows else ''}{entry.title}")
        say(f"  {'':<26} {pages.takes(entry, measured.get(name))}")
        if data := data_of(entry, data_dir):
            say(f"  {'':<26} data: {data}")
