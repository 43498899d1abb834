"""A table as text: for a terminal, as Markdown, as LaTeX (booktabs) and as CSV."""

import csv
import io
import re
import textwrap
import unicodedata
from collections.abc import Callable, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Group
from rich.table import Table as RichTable
from rich.text import Text

from protofed.report.columns import ABOUT, ACCURACY, METRICS, Column
from protofed.report.rows import Entry, Row, Table
from protofed.report.rules import OWN
from protofed.report.select import shown
from protofed.runs.numbers import amount

PADDING = 2  # between columns on a screen
GAP = PADDING + 1  # with what stands between them
LABEL = 16  # letters that a row's label has there at least
MINUS = "\N{MINUS SIGN}"


def number(value: float, column: Column, plus: bool = False) -> str:
    """A value in the form of its column."""
    if column.metric.unit == "%":
        text = f"{100 * value:+.2f}" if plus else f"{100 * value:.2f}"
    elif column.metric.unit == "s":
        text = f"{value:.1f}"
    else:
        text = f"{value:.4g}" if abs(value) < 1000 else amount(value)
    return text.replace("-", MINUS)


def entry(table: Table, row: Row, setting: str, column: Column) -> str:
    """The mean, with the deviation if there are several seeds, and with their number if some are missing."""
    found = row.entries.get((setting, column.title))
    if found is None:
        return "-"
    text = number(found.mean, column)
    if table.seeds > 1 and column.metric.better:
        text += f" ± {number(found.std, column)}" if found.n > 1 else ""
        text += f" (n={found.n})" if found.n < table.seeds else ""
    text += OWN if any(column.marked(run) for (where, _), run in row.runs.items() if where == setting) else ""
    odd = any(where == setting for where, _ in row.other_data)
    return f"{text} ≠" if odd else text


def tested(found: Entry | None, column: Column) -> str:
    """The difference from the baseline, p, and in how many seeds it is above."""
    test = found.test if found is not None else None
    if test is None:
        return ""
    p = "" if test.p is None else ", p < 0.001" if test.p < 0.001 else f", p = {test.p:.2g}"
    star = "*" if test.marked else ""
    return f"{number(test.difference, column, plus=True)}{star}{p}, {test.higher}/{test.n}"


def _grid(table: Table, mark: Callable[[str, int], str]) -> tuple[list[str], list[list[str]]]:
    """Titles and cells as formatted by `mark`, which is told whether a cell is the best (1) or second best (2)."""
    titles = [mark("method", 0)]
    for place in table.places:
        titles.append(mark(table.title(*place), 0))
        if _has_tests(table, place[1]):
            titles.append(mark("Δ", 0))
    lines = []
    for row in table.rows:
        cells = [mark(row.told, 0)]
        for setting, column in table.places:
            found = row.entries.get((setting, column.title))
            cells.append(mark(entry(table, row, setting, column), found.rank if found else 0))
            if _has_tests(table, column):
                cells.append(mark(tested(found, column), 0))
        lines.append(cells)
    return titles, lines


def _has_tests(table: Table, column: Column) -> bool:
    return table.baseline is not None and bool(column.metric.better)


def caption(table: Table) -> str:
    """What the numbers are, and the rule by which they are judged."""
    one = len(table.columns) == 1  # whose title does not stand above the numbers, where settings do
    where = table.settings[0] if len(table.settings) == 1 else table.columns[0].title if one else ""
    seeds = sorted({seed for row in table.rows for _, seed in row.runs})
    listed = ", ".join(map(str, seeds))
    spread = (
        f"mean ± standard deviation (of the {table.deviation}) over seeds {listed}" if seeds[1:] else f"seed {listed}"
    )
    accuracy = any(column.metric == ACCURACY for column in table.columns)
    percent = any(column.metric.unit == "%" for column in table.columns)
    unit = "accuracy in %, " if accuracy else "%, " if percent else ""
    metrics = {column.metric for column in table.columns}
    about = [f"{METRICS[name].title}: {text}" for name, text in ABOUT.items() if METRICS[name] in metrics]
    chosen = "parameters chosen on validation samples" if any(row.choices for row in table.rows) else ""
    return "; ".join(filter(None, [": ".join(filter(None, [where, f"{unit}{spread}"])), table.judging, chosen, *about]))


def terminal(table: Table, width: int) -> Group:
    """For a person: the best is bold and ¹, the second best ². Columns that are too wide for the screen continue
    below."""
    titles, lines = _grid(table, lambda text, rank: text.replace(" ± ", "±") + ("", "¹", "²")[rank])
    ranks = {found.rank for row in table.rows for found in row.entries.values()}
    legend = "".join(text for rank, text in ((1, "; ¹ best"), (2, ", ² second best")) if rank in ranks)
    columns = list(zip(titles, *lines, strict=True))
    longest, *whole = [max(map(cell_len, column)) for column in columns]
    numbers = [
        max(map(cell_len, (*title.split(), *column))) for title, *column in columns[1:]
    ]  # titles in several lines
    if longest + sum(size + GAP for size in whole) + GAP <= width:
        numbers = whole
    label, blocks = _blocks(titles, longest, numbers, width)
    shown = []
    for block in blocks:
        part = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, PADDING, 0, 0))
        part.add_column(Text(titles[0]), max_width=label, overflow="fold")
        for place in block:
            head = Text("\n".join(textwrap.wrap(titles[place], numbers[place - 1])))
            part.add_column(head, justify="right", no_wrap=numbers[place - 1] <= width - label, overflow="fold")
        for cells in lines:
            row = [cells[0], *(cells[place] for place in block)]
            part.add_row(*(Text(text, style="bold" if text.endswith("¹") else "") for text in row))
        shown.append(part)
    return Group(Text(caption(table) + legend, style="italic"), *shown)


def _blocks(titles: list[str], label: int, numbers: list[int], width: int) -> tuple[int, list[list[int]]]:
    """The width of the labels, and which columns are side by side: a test goes next to its number."""
    groups: list[list[int]] = []
    for place, title in enumerate(titles[1:], 1):
        if title == "Δ":
            groups[-1].append(place)
        else:
            groups.append([place])
    sizes = [sum(numbers[place - 1] + GAP for place in group) for group in groups]
    if label + GAP + sum(sizes) > width:
        label = min(label, max(LABEL, min(2 * width // 5, width - GAP - max(sizes, default=0))))
    return label, [[place for at in block for place in groups[at]] for block in packed(sizes, width - GAP - label)]


def packed(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Groups of items of these sizes that fit side by side, in order; every item is in one group."""
    blocks: list[list[int]] = []
    left = 0
    for place, size in enumerate(sizes):
        if not blocks or size > left:
            blocks.append([])
            left = room
        blocks[-1].append(place)
        left -= size
    return blocks


def markdown(table: Table) -> str:
    """For a web page: the best is bold, the second best in italics."""
    titles, lines = _grid(table, lambda text, rank: f"{('', '**', '*')[rank]}{_md(text)}{('', '**', '*')[rank]}")
    rows = ["| " + " | ".join(cells) + " |" for cells in (titles, *lines)]
    ruler = "|---|" + "---:|" * (len(titles) - 1)
    head = f"{_md(caption(table))}. Best in bold, second best in italics.\n\n"
    notes = "".join(f"\n- {_md(note)}" for note in table.notes)
    return head + "\n".join([rows[0], ruler, *rows[1:]]) + "\n" + (notes + "\n" if notes else "")


def _md(text: str) -> str:
    """Plain text, escaped for Markdown."""
    return re.sub(r"[\\|*`]|<(?=[A-Za-z/!])", r"\\\g<0>", text)


def latex(table: Table) -> str:
    """For a paper, with \\usepackage{booktabs}: the caption names the rule; best bold, second best underlined."""

    def mark(text: str, rank: int) -> str:
        return (_tex(text), f"\\textbf{{{_tex(text)}}}", f"\\underline{{{_tex(text)}}}")[rank]

    titles, lines = _grid(table, mark)
    rows = [" & ".join(cells) + r" \\" for cells in lines]
    rows = [f"{{}}{row}" if row.startswith(("[", "*")) else row for row in rows]  # which \\ would take for its own
    head = " & ".join(titles) + r" \\"
    body = [r"\toprule", head, r"\midrule", *rows, r"\bottomrule"]
    said = f"{caption(table)}. Best in bold, second best underlined."
    label = re.sub(r"[^a-z0-9]+", "-", table.settings[0].lower()).strip("-") if len(table.settings) == 1 else ""
    notes = [f"% {_tex(note)}" for note in table.notes] + [r"% needs \usepackage{booktabs}"]
    about = [rf"\caption{{{_tex(said[0].upper() + said[1:])}}}", rf"\label{{tab:{label or 'results'}}}"]
    begin = [r"\begin{table}", r"\centering", *about, rf"\begin{{tabular}}{{l{'r' * (len(titles) - 1)}}}"]
    return "\n".join([*notes, *begin, *body, r"\end{tabular}", r"\end{table}"]) + "\n"


TEX = {
    **{
        "±": r"$\pm$",
        MINUS: "$-$",
        "Δ": r"$\Delta$",
        "≠": r"$\neq$",
        OWN: r"$^\dagger$",
        "<": "$<$",
        ">": "$>$",
        '"': "''",
    },
    **{"\\": r"\textbackslash{}", "|": r"\textbar{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{c: "\\" + c for c in "%&#_${}"},
}


def _tex(text: str) -> str:
    """Plain text, escaped for TeX."""
    return "".join(TEX.get(c) or _greek(c) or c for c in text)


def _greek(letter: str) -> str:
    """A small Greek letter as TeX's command for it."""
    kind, _, called = unicodedata.name(letter, "").rpartition(" ")
    command = {"lamda": "lambda", "omicron": "mathrm{o}"}.get(called.lower(), called.lower())
    return f"$\\{command}$" if kind == "GREEK SMALL LETTER" else ""


def as_csv(table: Table) -> str:
    """For a program: one line for each row, setting and column, unrounded, with every seed's value."""
    seeds = sorted({seed for row in table.rows for _, seed in row.runs})
    names = ["setting", "row", "column", "judged_by", "own_rule"]
    names += ["n", "mean", "std", "deviation", "rank", "comparable"]
    against = ["baseline", "difference", "low95", "high95", "p_t", "p_holm", "p_wilcoxon", "higher_in", "of"]
    content = io.StringIO()
    out = csv.writer(content, lineterminator="\n")
    selected = any(row.choices for row in table.rows)
    names += ["chosen", "validation", "candidates"] if selected else []
    out.writerow([*names, *against, *(f"seed {seed}" for seed in seeds)])
    for setting, column in table.places:
        for row in table.rows:
            found = row.entries.get((setting, column.title))
            if found is None:
                continue
            odd = any(where == setting for where, _ in row.other_data)
            t = found.test
            std = found.std if found.n > 1 else ""
            own = next(run.rule for (where, _), run in row.runs.items() if where == setting).of(column.metric.judged)
            rule = (column.rule or own) if column.metric.judged else ""
            judged = [rule, rule == own] if rule else ["", ""]
            about = [setting, row.label, column.title, *judged]
            about += [found.n, found.mean, std, table.deviation, found.rank or "", not odd]
            if selected:
                choice = row.choices[setting]
                about += [shown(choice), choice.accuracy, choice.tried]
            base = table.base_of(row)
            test = (
                [base.label if base else "", t.difference, t.low, t.high, t.p, t.p_holm, t.p_wilcoxon, t.higher, t.n]
                if t
                else [""] * 9
            )
            out.writerow(
                [*about, *("" if v is None else v for v in test), *(found.values.get(seed, "") for seed in seeds)]
            )
    return content.getvalue()


FORMATS: dict[str, Callable[[Table], str]] = {"markdown": markdown, "latex": latex, "csv": as_csv}
