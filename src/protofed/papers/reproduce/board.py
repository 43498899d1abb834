"""The leaderboard: every method in every setting that all of them run in, on one page that can be sorted in a
browser."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from protofed.papers.reproduce.entry import PaperColumn, PaperEntry, entry_names, load_entry
from protofed.papers.reproduce.plan import cells_of
from protofed.papers.reproduce.result import EntryResult, mean_std, measured_rows, show
from protofed.sweep import Cell

PAGE = Path("docs/board.md")
GROUPS = ("board", "natural")  # whose entries have a place on it
STUDIES = ("studies/label-skew", "studies/feature-skew")  # these too, which have every method
RULES = {  # how samples are judged, always among all classes; the table of all settings is made for each rule
    "classifier": ("head", ("accuracy_head_mean",)),
    "nearest prototype": ("proto", ("accuracy_proto_all_mean", "accuracy_proto_mean")),
}
COLUMNS = (  # of a setting's own table, as far as it has them
    "accuracy_head_mean", "accuracy_proto_all_mean", "accuracy_proto_mean", "accuracy_mean@chosen",
    "accuracy_mean@best", "accuracy_worst10", "accuracy_global_mean", "accuracy_global_mean@chosen",
    "accuracy_global_mean@best", "auc_mean", "held_out_start_mean", "bytes_up", "seconds",
)  # fmt: skip
ABOUT = """
# Leaderboard

Every method in every setting that we have measured, by one evaluator. A number is the mean over clients of each one's
accuracy on its own test samples, by its own model, among all classes, after the last round. It is a mean over seeds,
with their standard deviation (of the population). Click on a column's title to sort by it. A number leads to the runs
that it comes from, with their experiment, their hashes and the command that repeats them.

A classifier and the nearest prototype are different judges of the same embedding, so each has its own table. † marks
the rule that the method itself uses.

A rank in one setting says little about another one, and settings have few seeds: read a difference next to its
deviation. [Which method?](choose.md) says what we make of it.
"""
UNMEASURED = "Settings that are ready to run and not measured yet: "


class _Setting(NamedTuple):
    entry: PaperEntry
    measured: EntryResult
    runs: Mapping[str, list[Cell]]  # by row

    @property
    def key(self) -> str:
        return self.entry.name.replace("/", "-")

    @property
    def title(self) -> str:
        return self.entry.name.partition("/")[2].replace("-", " ")

    def columns(self) -> list[PaperColumn]:
        by = {column.metric: column for column in reversed(self.entry.columns)}
        known = [by[metric] for metric in COLUMNS if metric in by]
        return [column for column in known if any(mean_std(self.measured, row, column) for row in self.rows)]

    def rule(self, row: str) -> str:
        """The rule that the method itself is judged by."""
        return self.runs[row][0].experiment.method.inference if row in self.runs else ""

    @property
    def rows(self) -> list[str]:
        return measured_rows(self.entry, self.measured)


def board_page(numbers: Mapping[str, EntryResult]) -> str:
    """The page as Markdown, with tables in HTML that `docs/assets/sort.js` sorts."""
    entries = [entry for entry in map(load_entry, entry_names()) if entry.paper in GROUPS or entry.name in STUDIES]
    settings = [_setting(entry, numbers[entry.name]) for entry in entries if entry.name in numbers]
    parts = [ABOUT.strip()]
    for rule in RULES if settings else ():
        parts += [f"## All settings, by {rule}", _overview(settings, rule)]
    for setting in settings:
        parts += list(_own(setting))
    waiting = [f"`{entry.name}` ({entry.title})" for entry in entries if entry.name not in numbers]
    parts += [f"{UNMEASURED}{', '.join(waiting)}."] * bool(waiting)
    return "\n\n".join(parts) + "\n"


def _setting(entry: PaperEntry, measured: EntryResult) -> _Setting:
    runs: dict[str, list[Cell]] = {}
    for cell in cells_of(entry):
        if measured.runs.get(cell.hash) is not None:
            runs.setdefault(cell.labels["method"], []).append(cell)
    return _Setting(entry, measured, runs)


def _overview(settings: Sequence[_Setting], rule: str) -> str:
    """One row per method, one column per setting."""
    kind, metrics = RULES[rule]
    first = [next((column for column in s.columns() if column.metric in metrics), None) for s in settings]
    shown = [(setting, column) for setting, column in zip(settings, first, strict=True) if column]
    rows = dict.fromkeys(row for s, c in shown for row in s.rows if mean_std(s.measured, row, c))
    heads = [f'<a href="#{setting.key}">{escape(setting.title)}</a>' for setting, _ in shown]
    body = [[escape(row), *(_number(s, row, c, own=s.rule(row) == kind) for s, c in shown)] for row in rows]
    return _table(["method", *heads], body)


def _own(setting: _Setting) -> Iterator[str]:
    entry, measured = setting.entry, setting.measured
    yield f"## {setting.title} {{ #{setting.key} }}"
    seeds = f"{measured.most} seed{'s' * (measured.most != 1)}, on {measured.machine}"
    yield f"{entry.title}: {seeds}. [More columns, and what is special](results/{entry.paper}.md#{_anchor(entry)})."
    heads, body = ["method"], [[escape(row)] for row in setting.rows]
    for column in setting.columns():
        head = f"{column.title} ({column.unit})" if column.unit else column.title
        theirs = [entry.paper_number(row, column.name) for row in setting.rows]
        heads += [head, f"{head}, theirs"] if any(theirs) else [head]
        for row, cells, number in zip(setting.rows, body, theirs, strict=True):
            cells.append(_number(setting, row, column))
            cells += [show(number.value, column) if number else ""] * any(theirs)
    yield _table([escape(head) for head in heads], body)
    yield _runs(setting)


def _number(setting: _Setting, row: str, column: PaperColumn, own: bool = False) -> str:
    found = mean_std(setting.measured, row, column)
    if found is None:
        return ""
    mean, std, seeds = found
    text = show(mean, column) + (f" ± {show(std, column, mean)}" if seeds > 1 else "")
    return f'<a href="#{setting.key}-{row}">{text}</a>{"†" * own}'


def _runs(setting: _Setting) -> str:
    """Where each number comes from: the experiment, its changes, the runs' hashes, and the command."""
    lines = []
    for row in setting.rows:
        cells = setting.runs.get(row, [])
        hashes = ", ".join(f"<code>{cell.hash}</code>" for cell in cells) or "not known: the entry has changed since"
        experiments = ", ".join(f"<code>configs/{name}.toml</code>" for name in setting.entry.experiments)
        changes = " ".join(setting.entry.sweep["methods"][row])
        command = f"protofed reproduce {setting.entry.name} --only method={row}"
        lines.append(
            f'<li id="{setting.key}-{row}"><b>{escape(row)}</b>: {experiments}'
            + (f" with <code>{escape(changes)}</code>" if changes else "")
            + f"; runs {hashes}; <code>{escape(command)}</code></li>"
        )
    return f'<details class="runs"><summary>Runs</summary><ul>\n{chr(10).join(lines)}\n</ul></details>'


def _table(heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    top = "".join(f'<th scope="col">{head}</th>' for head in heads)
    rows = "\n".join(f"<tr>{''.join(f'<td>{text}</td>' for text in row)}</tr>" for row in body)
    table = f'<table class="sortable"><thead><tr>{top}</tr></thead><tbody>\n{rows}\n</tbody></table>'
    return f'<div class="wide">{table}</div>'


def _anchor(entry: PaperEntry) -> str:
    return entry.name.replace("/", "")
