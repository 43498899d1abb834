"""Tables of the paper's numbers, ours and the differences: for a terminal and for Markdown."""

import textwrap
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from protofed.papers.reproduce.entry import PAPERS, PaperColumn, PaperEntry
from protofed.papers.reproduce.plan import QUICK
from protofed.papers.reproduce.result import (
    EntryResult,
    Judged,
    Ordering,
    cells,
    columns_of,
    measured_rows,
    orderings,
    there,
)
from protofed.report.render import GAP, packed
from protofed.runs.numbers import duration
from protofed.runs.progress import say_on
from protofed.sweep.plan import key_of

TITLE = 18  # letters of a column's title in a line
WIDE = 3  # columns of paper, here and difference that fit side by side


def groups(columns: list[PaperColumn], reported: bool) -> Iterator[list[PaperColumn]]:
    """Columns of one table: those of one group, as many as fit."""
    most = WIDE if reported else 3 * WIDE
    for group in dict.fromkeys(column.group for column in columns):
        members = [column for column in columns if column.group == group]
        for start in range(0, len(members), most):
            yield members[start : start + most]


def _parts(entry: PaperEntry) -> tuple[str, ...]:
    return ("paper", "here", "difference") if any(any(texts) for texts in entry.reported.values()) else ("here",)


def entry_text(console: Console, entry: PaperEntry, measured: EntryResult) -> None:
    """Everything that can be said about an entry."""
    console.print(heading(entry), style="bold", highlight=False, markup=False)
    if measured.label:
        console.print(measured.label, style="yellow", highlight=False, markup=False)
    columns = columns_of(entry, measured)
    for group in dict.fromkeys(column.group for column in columns):
        _tables(console, entry, measured, [column for column in columns if column.group == group])
    for line in orders(entry, measured):
        say_on(console, line.replace("**", ""))
    for line in (*notes(entry, measured), *to_go(measured)):
        say_on(console, f"note: {line}")
    if entry.replaced:
        console.print(f"\nnot as in the paper: {' '.join(entry.replaced.split())}", highlight=False, markup=False)


def _tables(console: Console, entry: PaperEntry, measured: EntryResult, columns: list[PaperColumn]) -> None:
    """Columns of one group side by side, as many as fit; one line per number if not even one fits."""
    parts, rows = _parts(entry), measured_rows(entry, measured)
    heads, texts, sizes = [], [], []  # of each column: of its parts, and of its parts in every row
    for column in columns:
        title = textwrap.fill(column.title, TITLE)
        heads.append([f"{title}\n{part}" if len(parts) > 1 else title for part in parts])
        found = [cells(entry, measured, row, column) for row in rows]
        texts.append([triple if len(parts) > 1 else triple[1:2] for triple in found])
        spread = zip(*texts[-1], strict=True)  # nothing where there are no rows
        sizes.append(sum(GAP + max(map(len, (*h.splitlines(), *t))) for h, t in zip(heads[-1], spread, strict=False)))
    room = console.width - max(map(len, rows), default=0)
    for block in packed(sizes, room):
        if sizes[block[0]] > room:
            _lines(console, rows, columns[block[0]], parts, texts[block[0]])
            continue
        table = Table(title=columns[0].group or None, title_justify="left", show_edge=False, pad_edge=False)
        table.add_column("", no_wrap=True)
        for head in (head for at in block for head in heads[at]):
            table.add_column(head, justify="right", no_wrap=True)
        for row, *found in zip(rows, *(texts[at] for at in block), strict=True):
            table.add_row(row, *(text for triple in found for text in triple))
        console.print(table)
        console.print()


def _lines(
    console: Console, rows: list[str], column: PaperColumn, parts: Sequence[str], texts: Sequence[Sequence[str]]
) -> None:
    for row, found in zip(rows, texts, strict=True):
        said = ", ".join(f"{part} {text}" for part, text in zip(parts, found, strict=True) if text)
        console.print(f"{row}, {column.name}: {said or '-'}", highlight=False, markup=False)
    console.print()


def heading(entry: PaperEntry) -> str:
    return f"{entry.name}: {entry.shows + ': ' if entry.shows else ''}{entry.title}"


def entry_markdown(entry: PaperEntry, measured: EntryResult) -> str:
    """The tables and the orderings."""
    parts, blocks = _parts(entry), []
    for columns in groups(columns_of(entry, measured), len(parts) > 1):
        titles = [
            column.title if len(parts) == 1 else f"{column.title}, {part}" for column in columns for part in parts
        ]
        lines = [f"| {columns[0].group} | " + " | ".join(titles) + " |", "|---|" + "---:|" * len(titles)]
        for row in measured_rows(entry, measured):
            texts = [cells(entry, measured, row, column) for column in columns]
            shown = [text for triple in texts for text in (triple if len(parts) > 1 else triple[1:2])]
            lines.append(f"| {row} | " + " | ".join(text or "-" for text in shown) + " |")
        blocks.append("\n".join(lines))
    if found := list(orders(entry, measured)):
        blocks.append("\n".join(found))
    return "\n\n".join(blocks) + "\n"


def entry_page(entry: PaperEntry, measured: EntryResult) -> str:
    """The result of one entry as its own page."""
    parts = [f"# {heading(entry)}", PAPERS[entry.paper] + "."]
    if measured.label:
        parts.append(f"**{measured.label}**")
    parts += [entry.about.strip(), entry.replaced.strip(), settings_in_words(entry), _smaller(entry, measured)]
    parts.append(entry_markdown(entry, measured).strip())
    parts += [f"- {line}" for line in (*notes(entry, measured), *to_go(measured))]
    return "\n\n".join(part for part in parts if part) + "\n"


def _smaller(entry: PaperEntry, measured: EntryResult) -> str:
    """What a quick version changes in these settings."""
    if not (entry.sweep and measured.label.startswith(QUICK)):
        return ""
    quick = entry.quick
    words, grid = list(quick.changes), dict(quick.parameters)
    if entry.stand_in and entry.stand_in.says in measured.label:
        words = [*entry.stand_in.changes, *words]
    elif quick.digits and "digits" in measured.label:
        words, grid = [*words, *quick.digits.changes], grid | quick.digits.parameters
    said = [f"`{name}`" for name in quick.experiment[: 1 if "digits" in measured.label else None]]
    last = {key_of(word): word for word in words}
    said += [f"`{word}`" for word in last.values()] + [
        f"`{key}` = {', '.join(map(str, some))}" for key, some in grid.items()
    ]
    said.append(f"seeds {', '.join(map(str, measured.seeds))}")
    return f"What is above is the whole entry. This quick version: {'; '.join(said)}."


def settings_in_words(entry: PaperEntry) -> str:
    """The runs of the whole entry in words."""
    if not entry.sweep:
        return ""
    shape = entry.sweep
    shared = [f"`{word}`" for word in shape.get("changes", [])]
    grid = [f"`{key}` = {', '.join(map(str, values))}" for key, values in shape.get("parameters", {}).items()]
    rows = [f"{label} (`{' '.join(own)}`)" if own else label for label, own in shape["methods"].items()]
    seeds = ", ".join(map(str, shape["seeds"]))
    experiments = ", ".join(f"`{name}`" for name in entry.experiments)
    return f"Settings: {experiments}; {'; '.join([*shared, *grid, f'seeds {seeds}', *rows])}."


def notes(entry: PaperEntry, measured: EntryResult) -> list[str]:
    """What a reader of the tables has to know."""
    found = [f"left out: {what}." for what in measured.left_out]
    if measured.missing and not measured.label.startswith(QUICK):
        found += [f"not measured yet: {' and '.join(absent)}." for absent in [_absent(entry, measured)] if absent]
    counts = {len(seeds) for row in measured.rows.values() for values in row.values() if (seeds := there(values))}
    if len(counts) > 1:
        found.append("[n]: a mean over n seeds only. Claims are judged by the seeds that both have.")
    elif counts == {1} and len(measured.seeds) > 1:
        found.append("all numbers are of one seed.")
    return found


def _absent(entry: PaperEntry, measured: EntryResult) -> list[str]:
    """Rows and columns without any number, and what the paper reports that others lack."""
    rows, columns = measured_rows(entry, measured), columns_of(entry, measured)
    lacking = {
        "row": [row for row in entry.rows if row not in rows],
        "column": [column.name for column in entry.columns if column not in columns],
    }
    found = [f"the {kind}{'s' * (len(some) > 1)} {'; '.join(some)}" for kind, some in lacking.items() if some]
    for row in rows:
        holes = [column.name for column in columns if cells(entry, measured, row, column)[1] == "-"]
        found += [f"{row} in {'; '.join(holes)}"] * bool(holes)
    return found


def to_go(measured: EntryResult) -> list[str]:
    """What is missing, and how long the rest took."""
    found = []
    if measured.missing:
        runs = "1 run is" if measured.missing == 1 else f"{measured.missing} runs are"
        quick = " --quick" if measured.label.startswith(QUICK) else ""
        found.append(
            f"{runs} not finished; 'protofed reproduce {measured.entry}{quick}' continues with the same --out."
        )
    if measured.seconds:
        found.append(f"{duration(measured.seconds)} of runs, added up, on {measured.machine}.")
    return found


def orders(entry: PaperEntry, measured: EntryResult) -> Iterator[str]:
    """One line per claim: the columns in which it holds and those in which it does not, and where seeds disagree."""
    for ordering in orderings(entry, measured):
        paper = f" (the paper: {ordering.says})" if ordering.says else ""
        yield f"- {ordering.text}{paper}: {_verdicts(entry, ordering)}"


def _verdicts(entry: PaperEntry, ordering: Ordering) -> str:
    if len(ordering.judged) == 1:
        one = ordering.judged[0]
        where = f", {one.column}" if len(entry.columns) > 1 else ""
        seeds = "seed" if one.seeds == 1 else "seeds"
        return f"{_mark(one.verdict)}{where}: {_gain(one)} in {one.agree} of {one.seeds} {seeds}."
    parts, alone = [], all(one.seeds == 1 for one in ordering.judged)
    for verdict in ("holds", "undecided", "does not hold"):
        members = [one for one in ordering.judged if one.verdict == verdict]
        if members:
            one_seed = [" in one seed" if one.seeds == 1 and not alone else "" for one in members]
            each = "; ".join(f"{m.column} {_gain(m)}{said}" for m, said in zip(members, one_seed, strict=True))
            parts.append(f"{_mark(verdict)} in {len(members)} of {len(ordering.judged)} ({each})")
    return "; ".join(parts) + (", in one seed." if alone else ".")


def _mark(verdict: str) -> str:
    return f"**{verdict}**" if verdict == "does not hold" else verdict


def _gain(one: Judged) -> str:
    return f"{one.gain:+,.0f}" if abs(one.gain) >= 1000 else f"{one.gain:+.2f}"
