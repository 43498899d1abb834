"""A table of runs: mean and deviation over seeds, the best marked, each row tested against a baseline."""

import collections
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from protofed.errors import UserError, nearest
from protofed.report import paired
from protofed.report.columns import LAST, USUAL, Column, choose, deviation
from protofed.report.gather import Collected, LeftOut, Run, collect, unlike

__all__ = ["Collected", "Entry", "Row", "Table", "collect", "tabulate"]
# What makes another task of it: columns, not rows.
SETTING = ("data", "partition", "clients", "held_out_clients", "evaluate.validation")
DIGITS = 2  # of a percentage; what reads alike is marked alike


@dataclass
class Entry:
    """One number of one row: its values by seed, and what follows from them."""

    values: dict[int, float]
    rank: int = 0  # 1 best, 2 second best, 0 neither
    test: paired.Paired | None = None

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        return deviation(list(self.values.values()))[0]

    @property
    def std(self) -> float:
        return deviation(list(self.values.values()))[1]


@dataclass
class Row:
    """A method with its parameters."""

    method: str
    parameters: dict[str, str]
    runs: dict[tuple[str, int], Run] = field(default_factory=dict)  # by setting and seed
    entries: dict[tuple[str, str], Entry] = field(default_factory=dict)  # by setting and column title
    other_data: set[tuple[str, int]] = field(default_factory=set)  # where it cannot be compared with the others

    @property
    def label(self) -> str:
        return _join(self.method, self.parameters)


@dataclass
class Table:
    """Rows x (settings x columns), with all that has to be said about them."""

    settings: list[str]
    columns: list[Column]
    rows: list[Row]
    baseline: str | None = None
    remarks: list[str] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        """Everything that has to be said."""
        return [*self.remarks, *map(str, self.left_out)]

    def base_of(self, row: Row) -> Row | None:
        """The row to test this one against: the one that is named, or of a method that is named the one with the same
        parameters."""
        named = [other for other in self.rows if other.label == self.baseline]
        alike = [r for r in self.rows if r.method == self.baseline and r.parameters.items() <= row.parameters.items()]
        return next((other for other in (*named, *alike)), None)

    @property
    def places(self) -> list[tuple[str, Column]]:
        """The columns from left to right."""
        return [(setting, column) for setting in self.settings for column in self.columns]

    def title(self, setting: str, column: Column) -> str:
        """Short: an experiment is named only where there are several, a number only where it is not the only one."""
        if len(self.settings) == 1:
            return column.title
        return (setting or column.title) if len(self.columns) == 1 else f"{setting or 'others'}: {column.title}"

    @property
    def seeds(self) -> int:
        """The most that any entry has."""
        return max((entry.n for row in self.rows for entry in row.entries.values()), default=0)


def tabulate(found: Collected | Sequence[Run], columns: str | None = None, baseline: str | None = None) -> Table:
    """The table of some runs. `columns` as on the command line, `baseline` the label of the row to test against."""
    runs, left_out = found if isinstance(found, Collected) else (list(found), [])
    if not runs:
        reasons = "; ".join(f"{out.folder}: {out.reason}" for out in left_out[:3])
        raise UserError(f"there is no finished run to tabulate. {reasons or 'Name a folder that holds runs.'}")
    left_out = list(left_out)
    rows, settings = _rows(runs, left_out)
    usual = USUAL if len(settings) == 1 and baseline is None else USUAL[: 2 if len(settings) == 1 else 1]
    table = Table(settings, choose(columns, runs, usual), rows, baseline, left_out=left_out)
    if baseline is not None and not any(table.base_of(row) for row in rows):
        names = {name for row in rows for name in (row.label, row.method)}
        raise UserError(f"--baseline {baseline!r} is no row of the table. {nearest(baseline, names)}")
    bases = [row.label for row in rows if row.method == baseline]
    if len(bases) > 1 and baseline not in bases and not any(table.base_of(row) not in (None, row) for row in rows):
        raise UserError(f"--baseline {baseline!r} is several rows. Name one of {', '.join(map(repr, bases))}.")
    _find_other_data(table)
    for setting, column in table.places:
        _fill(table, setting, column)
    table.remarks = _remarks(table)
    return table


def _rows(runs: Iterable[Run], left_out: list[LeftOut]) -> tuple[list[Row], list[str]]:
    rows: dict[tuple[str, str], Row] = {}
    settings: dict[str, None] = {}
    for run in runs:
        labels = {key: value for key, value in run.labels.items() if key not in ("experiment", "method", "seed")}
        task = {key: value for key, value in labels.items() if _in_setting(key)}
        setting = _join(run.labels.get("experiment", ""), task)
        own = {key: value for key, value in labels.items() if key not in task}
        label = _join(run.labels["method"], own)
        row = rows.setdefault((run.labels["method"], str(own)), Row(run.labels["method"], own))
        settings[setting] = None
        beside = next((other for (where, _), other in row.runs.items() if where == setting), run)
        if others := unlike(run, beside):
            left_out.append(LeftOut(run.folder, f"other settings than {beside.folder}: {'; '.join(others)}"))
            continue
        first = row.runs.setdefault((setting, run.seed), run)
        if first is not run and first.folder != run.folder:
            left_out.append(LeftOut(run.folder, f"a second run of {label}, seed {run.seed}, beside {first.folder}"))
    return list(rows.values()), list(settings)


def _in_setting(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in SETTING)


def _join(name: str, labels: Mapping[str, Any]) -> str:
    """A name and what is particular about it, without the sections of keys where that is clear."""
    short = {key: key.partition(".")[2] or key for key in labels}
    short |= {key: key.removesuffix(".name") for key in labels if key.endswith(".name")}
    twice = {one for one, many in collections.Counter(short.values()).items() if many > 1}
    said = [f"{key if short[key] in twice else short[key]}={value}" for key, value in labels.items()]
    return ", ".join(filter(None, [name, *said]))


def _find_other_data(table: Table) -> None:
    """Rows are compared on the same data, dealt the same way: that of the baseline, or else of most rows."""
    for place in {place for row in table.rows for place in row.runs}:
        here = [(row, row.runs[place].data) for row in table.rows if place in row.runs]
        bases = {id(table.base_of(row)) for row in table.rows} if table.baseline else set()
        usual = next((data for row, data in here if id(row) in bases), None)
        usual = usual or collections.Counter(data for _, data in here).most_common(1)[0][0]
        for row, data in here:
            if data[0] != usual[0] or (data[1] != usual[1] and data[1] and usual[1]):
                row.other_data.add(place)


def _fill(table: Table, setting: str, column: Column) -> None:
    """One column: values by seed, ranks, tests."""
    at = (setting, column.title)
    for row in table.rows:
        values = {seed: column.of(run) for (where, seed), run in row.runs.items() if where == setting}
        known = {seed: value for seed, value in sorted(values.items()) if value is not None}
        if known:
            row.entries[at] = Entry(known)
    comparable = _comparable(table, setting, column)
    if column.metric.better and len(comparable) > 1:
        scale = 100 if column.metric.unit == "%" else 1
        shown = [float(f"{scale * row.entries[at].mean:.{DIGITS}f}") for row in comparable]
        order = sorted(set(shown), reverse=column.metric.better == "high")
        best = order[: 2 if len(order) > 2 else 1]  # what is second of two is the worst
        for row, value in zip(comparable, shown, strict=True):
            row.entries[at].rank = best.index(value) + 1 if value in best else 0
    if table.baseline is not None and column.metric.better:
        _test(table, setting, at)


def _comparable(table: Table, setting: str, column: Column) -> list[Row]:
    """The rows that can be ranked: of the same data, of the same seeds and no fewer than any has, of as many rounds."""
    at = (setting, column.title)
    rows = [row for row in table.rows if at in row.entries and not _odd(row, setting)]
    most = max((row.entries[at].n for row in rows), default=0)
    rows = [row for row in rows if row.entries[at].n == most]
    seeds = {tuple(row.entries[at].values) for row in rows}
    return rows if len(seeds) == 1 and len(_windows(rows, setting, column)) <= 1 else []


def _windows(rows: Iterable[Row], setting: str, column: Column) -> dict[int, list[str]]:
    """Of how many rounds the numbers of a column are the mean -> the rows of which that is so."""
    found: dict[int, list[str]] = {}
    for row in rows:
        for count in sorted({len(column.window(run)) for (where, _), run in row.runs.items() if where == setting}):
            found.setdefault(count, []).append(row.label)
    return found


def _odd(row: Row, setting: str) -> list[int]:
    """The seeds in which a row has other data than the others."""
    return sorted(seed for where, seed in row.other_data if where == setting)


def _test(table: Table, setting: str, at: tuple[str, str]) -> None:
    pairs = [(row, table.base_of(row)) for row in table.rows if at in row.entries]
    others = [(row, base) for row, base in pairs if base is not None and base is not row and at in base.entries]
    tests = [paired.compare(_fair(row, at), _fair(base, at)) for row, base in others]
    for (row, _), test in zip(others, paired.holm(tests), strict=True):
        row.entries[at].test = test


def _fair(row: Row, at: tuple[str, str]) -> dict[int, float]:
    """The values of the seeds in which a row can be compared."""
    return {seed: value for seed, value in row.entries[at].values.items() if seed not in _odd(row, at[0])}


def _remarks(table: Table) -> list[str]:
    """What a reader must know before comparing."""
    notes = []
    for row in table.rows:
        for setting in table.settings:
            if odd := _odd(row, setting):
                where = f" of {setting}" if setting else ""
                notes.append(
                    f"cannot be compared: {row.label}{where}, seeds {_list(odd)}, had other data or another partition "
                    "than the other rows; it is neither ranked nor tested there"
                )
    counts = [{row.entries[at].n for row in table.rows if at in row.entries} for at in _filled(table)]
    many = _list(sorted(set().union(*counts)))
    if any(len(some) > 1 for some in counts):
        notes.append(f"rows have different numbers of seeds ({many}); those with fewer say so and are not ranked")
    elif len({*map(frozenset, counts)}) > 1:
        notes.append(f"columns have different numbers of seeds ({many}); those with fewer say so")
    elif any(len({tuple(r.entries[at].values) for r in table.rows if at in r.entries}) > 1 for at in _filled(table)):
        seeds = {row.label: sorted({seed for _, seed in row.runs}) for row in table.rows}
        shown = "; ".join(f"{label}: {_list(some)}" for label, some in seeds.items())
        notes.append(f"rows have different seeds ({shown}), and so other clients: compare the same seeds")
    notes += _about_windows(table)
    for row in table.rows:
        if len({str(run.environment["own"]) for run in row.runs.values() if "own" in run.environment}) > 1:
            notes.append(f"{row.label}: its code was changed between its runs, which are not of one method or model")
        elif changed := sorted({name for run in row.runs.values() for name in run.changed_code()}):
            notes.append(f"{row.label}: the file of {_list(changed)} has changed since its runs")
    judged: dict[str, list[str]] = {}
    for row in table.rows:
        summary = next(iter(row.runs.values())).summary
        judged.setdefault(f"{summary.get('inference')}, {summary.get('candidates')} classes", []).append(row.label)
    if len(judged) > 1 and any(column.metric.key.startswith("accuracy_") for column in table.columns):
        notes.append("accuracy is judged by " + "; by ".join(f"{how}: {_list(who)}" for how, who in judged.items()))
    if table.baseline is not None:
        notes += _about_tests(table)
    return notes


def _about_windows(table: Table) -> list[str]:
    """Which means are of fewer rounds than their title says."""
    notes: dict[str, None] = {}
    for setting, column in table.places:
        counts = _windows(table.rows, setting, column)
        if column.at not in ("", "validation") and set(counts) - {0, LAST}:
            shown = "; ".join(f"{count}: {_list(rows)}" for count, rows in counts.items() if count)
            unlike = ", and not ranked, since they differ" if len(set(counts) - {0}) > 1 else ""
            notes[f"{column.title}: means of fewer than {LAST} tested rounds ({shown}){unlike}"] = None
    return list(notes)


def _filled(table: Table) -> set[tuple[str, str]]:
    return {at for row in table.rows for at in row.entries}


def _about_tests(table: Table) -> list[str]:
    tests = [entry.test for row in table.rows for entry in row.entries.values() if entry.test is not None]
    if not tests:
        return [f"no row has a seed in common with {table.baseline}: nothing is tested"]
    least, most = min(test.n for test in tests), max(test.n for test in tests)
    text = (
        f"Δ: mean difference to {table.baseline} over the seeds both have, p of the two-sided paired t-test, and the "
        "seeds in which the row is higher"
    )
    if most >= paired.FEWEST:
        text += f"; *: p below {paired.LEVEL} after Holm's correction for the rows of a column"
    if least < paired.FEWEST:
        text += (
            f". With {least} seed{'s' * (least != 1)} p is a hint at most (the t-test trusts that differences are "
            f"normal; the signed-rank test cannot fall below {2 / 2**least:.2g}): nothing is starred below "
            f"{paired.FEWEST} seeds"
        )
    return [text]


def _list(items: Iterable[Any]) -> str:
    """With commas, and in quotes what has some itself."""
    return ", ".join(repr(item) if "," in str(item) else str(item) for item in items)
