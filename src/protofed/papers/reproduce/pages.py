"""The pages of results: an overview with a finding for each table, and a page for each paper."""

import re
from collections.abc import Mapping
from pathlib import Path

from protofed.papers.reproduce import board, plan, render
from protofed.papers.reproduce.entry import PAPERS, PaperEntry, entry_names, load_entry
from protofed.papers.reproduce.result import EntryResult, orderings
from protofed.runs.numbers import duration

OVERVIEW, FOLDER, IMAGES = Path("docs/results.md"), Path("docs/results"), Path("docs/images/reproduce")
START = 3.0  # seconds that a run takes besides its rounds, roughly
READ = (
    "Numbers are percentages unless a column says otherwise (cosines and silhouettes are multiplied by 100): mean ± "
    "standard deviation (of the population) over seeds. A *claim* says that one number is above (or below) another, as "
    "the paper's numbers are. It holds if all seeds agree, by however little; it does not hold if all seeds disagree; "
    "otherwise it is undecided. Where there is only one seed, the table says so."
)
MEASURES = (
    "GM is the accuracy of the global model. PM(V) and PM(L) are those of the clients' own models on the global test "
    "set, over the classes they hold, and weighted by the shares they have of each "
    "([formulas](glossary.md#gm-pmv-and-pml))."
)


def pages(numbers: Mapping[str, EntryResult]) -> dict[Path, str]:
    """Every page by its path."""
    found = {OVERVIEW: _overview(numbers), board.PAGE: board.board_page(numbers)}
    for paper in PAPERS:
        found[FOLDER / f"{paper}.md"] = _paper(paper, numbers)
    return found


def link(name: str) -> str:
    """The path of an entry, as seen from docs/."""
    return f"results/{name.partition('/')[0]}.md#{anchor(name)}"


def anchor(name: str) -> str:
    """The anchor that Markdown gives to an entry's heading."""
    return name.replace("/", "")


def _of(paper: str) -> list[PaperEntry]:
    return [entry for entry in map(load_entry, entry_names()) if entry.paper == paper]


def _overview(numbers: Mapping[str, EntryResult]) -> str:
    parts = [
        "# Results",
        "We reran the tables and figures of the papers and added studies of our own. Here is the finding of each; the "
        "page of each paper has the reported numbers, ours, and the difference. `protofed reproduce NAME` runs any of "
        "them; `--quick` runs a small version on a laptop.",
        READ,
        MEASURES,
    ]
    for paper, title in PAPERS.items():
        rows = ["| | claims that hold / undecided / do not | finding |", "|---|---|---|"]
        for entry in _of(paper):
            measured = numbers.get(entry.name)
            shown = entry.shows or entry.name.partition("/")[2]
            finding = (entry.finding if measured else "") or "Not measured yet."
            cells = [f"[{shown}]({link(entry.name)})", _verdicts(entry, measured), f"**{entry.title}.** {finding}"]
            rows.append(f"| {' | '.join(cells)} |")
        name, _, about = re.split("( \\(|: )", title, maxsplit=1)
        about = about.removesuffix(")")
        parts += [f"## {name}", f"{about[0].upper()}{about[1:]}. [All numbers](results/{paper}.md).", "\n".join(rows)]
    parts.append(
        "`protofed reproduce --write` writes these pages from `src/protofed/papers/reproduce/entries` (settings and "
        "remarks) and `docs/results.json` (the numbers of each seed)."
    )
    return "\n\n".join(parts) + "\n"


def _verdicts(entry: PaperEntry, measured: EntryResult | None) -> str:
    judged = [one for ordering in orderings(entry, measured) for one in ordering.judged] if measured else []
    if not judged:
        return "-"
    verdicts = [one.verdict for one in judged]
    counts = " / ".join(str(verdicts.count(verdict)) for verdict in ("holds", "undecided", "does not hold"))
    alone = sum(one.seeds == 1 for one in judged)
    return counts + ("" if not alone else " in one seed" if alone == len(judged) else f", {alone} of them in one seed")


def _paper(paper: str, numbers: Mapping[str, EntryResult]) -> str:
    parts = [
        f"# {PAPERS[paper]}",
        f"{READ} [Overview](../results.md).",
        "Times of runs are added up; runs that shared a machine each took longer than they do alone. Another machine "
        "rounds differently, and after many rounds the same seed gives another accuracy there. Where some runs were "
        "repeated, the entry says how far apart their numbers are (`protofed reproduce --check`).",
    ]
    for entry in _of(paper):
        parts += _section(entry, numbers.get(entry.name))
    return "\n\n".join(parts) + "\n"


def _section(entry: PaperEntry, measured: EntryResult | None) -> list[str]:
    parts = [f"## {entry.name}", f"**{entry.shows + ': ' if entry.shows else ''}{entry.title}.**", entry.about.strip()]
    if entry.replaced:
        parts.append(entry.replaced.strip())
    if entry.sweep:
        parts.append(render.settings_in_words(entry))
    parts.append(f"`protofed reproduce {entry.name}`; {takes(entry, measured)}.")
    if measured is None:
        return [*parts, "*Not measured yet.*"]
    if measured.label:
        parts.append(f"**{measured.label}**")
    parts.append(render.entry_markdown(entry, measured).strip())
    stem = entry.name.replace("/", "-")
    parts += [f"![{entry.title}](../images/reproduce/{path.name})" for path in sorted(IMAGES.glob(f"{stem}-*.png"))]
    parts += [line[0].upper() + line[1:] for line in render.notes(entry, measured)]
    parts += [f"Repeated runs: {measured.again}."] * bool(measured.again)
    if entry.remarks:
        parts.append(entry.remarks.strip())
    return parts


def takes(entry: PaperEntry, measured: EntryResult | None) -> str:
    """How long an entry takes, measured or estimated, and with how many seeds it was measured."""
    if measured and measured.seconds and not measured.missing:
        time = f"{duration(measured.seconds)} of runs on {measured.machine}"
        seeds = f"{len(measured.seeds)} seed{'s' * (len(measured.seeds) > 1)}"
        return f"measured, {seeds}: {time}" + (f" ({measured.label})" if measured.label else "")
    runs, rounds = plan.runs_and_rounds(entry)
    seconds = START * runs + rounds * entry.round_seconds
    alone = f"about {duration(seconds)}, one after another, on an H200 (estimated)"
    guess = f"{runs} runs, {alone}" if runs else "a minute or two on a CPU"
    if measured and measured.rows:
        where = f" on {measured.machine}" if measured.machine else ""
        if not measured.missing:
            return f"measured{where}; all of it {guess}"
        spent = f" ({duration(measured.seconds)} of runs)" if measured.seconds else ""
        done = f"{len(measured.runs) - measured.missing} of {len(measured.runs)} runs measured{where}{spent}"
        return f"{done}, {measured.missing} to go; all of it {alone}"
    return f"not measured; {guess}"
