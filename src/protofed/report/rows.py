"""The parts of a table: rows, and an entry for each of their columns."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from protofed.report import paired
from protofed.report.columns import Column
from protofed.report.labels import label_of
from protofed.report.parts import Remark
from protofed.report.rules import KEPT, OWN, Rule, in_order
from protofed.report.runs import Run
from protofed.report.select import Choice, shown
from protofed.runs.numbers import over_seeds

DEVIATIONS = ("population", "sample")  # over seeds: divided by n, or by n - 1


@dataclass
class Entry:
    """One number of one row: its values by seed, and what is derived from them."""

    values: dict[int, float]
    rank: int = 0  # 1 best, 2 second best, 0 neither
    test: paired.Paired | None = None
    sample: bool = False  # whether the deviation is that of the sample, not of the population

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        return self._spread[0]

    @property
    def std(self) -> float:
        return self._spread[1]

    @property
    def _spread(self) -> tuple[float, float]:
        return over_seeds(self.values.values(), self.sample) or (math.nan, math.nan)


@dataclass
class Row:
    """A method with its parameters."""

    method: str
    parameters: dict[str, str]
    runs: dict[tuple[str, int], Run] = field(default_factory=dict)  # by setting and seed
    entries: dict[tuple[str, str], Entry] = field(default_factory=dict)  # by setting and column title
    other_data: set[tuple[str, int]] = field(default_factory=set)  # where it cannot be compared with the others
    choices: dict[str, Choice] = field(default_factory=dict)  # by setting, where parameters are chosen on validation

    short: str = ""  # a label that is enough to tell it from the other rows

    def odd(self, setting: str) -> list[int]:
        """The seeds in which it has other data than the other rows."""
        return sorted(seed for where, seed in self.other_data if where == setting)

    @property
    def full(self) -> str:
        """With all of its parameters."""
        return label_of(self.method, self.parameters)

    @property
    def label(self) -> str:
        return self.short or self.full

    @property
    def told(self) -> str:
        """The label, with the hyperparameters that were chosen for it."""
        found = {setting: shown(choice) for setting, choice in self.choices.items() if choice.parameters}
        if len(set(found.values())) > 1:
            return f"{self.label} ({'; '.join(f'{setting}: {text}' for setting, text in found.items())})"
        return f"{self.label} ({next(iter(found.values()))})" if found else self.label


@dataclass
class Table:
    """Rows x (settings x columns), with all remarks."""

    settings: list[str]
    columns: list[Column]
    rows: list[Row]
    baseline: str | None = None
    remarks: list[str] = field(default_factory=list)
    left_out: list[Remark] = field(default_factory=list)
    deviation: str = DEVIATIONS[0]

    @property
    def notes(self) -> list[str]:
        """All remarks."""
        return [*self.remarks, *(f"left out: {out}" for out in self.left_out)]

    def base_of(self, row: Row) -> Row | None:
        """The row to test this one against: the named one or, if a method is named, its row with the same
        parameters."""
        named = [other for other in self.rows if self.baseline in (other.label, other.full)]
        alike = [r for r in self.rows if r.method == self.baseline and r.parameters.items() <= row.parameters.items()]
        return next((other for other in (*named, *alike)), None)

    @property
    def places(self) -> list[tuple[str, Column]]:
        """The columns from left to right."""
        return [(setting, column) for setting in self.settings for column in self.columns]

    def title(self, setting: str, column: Column) -> str:
        """A short title: the experiment is named only if there are several, the number only if there is more than
        one."""
        if len(self.settings) == 1:
            return column.title
        return (setting or column.title) if len(self.columns) == 1 else f"{setting or 'others'}: {column.title}"

    @property
    def judging(self) -> str:
        """The rule by which the rows are judged; empty if no column has one."""
        if not any(column.metric.judged for column in self.columns):
            return ""
        found: dict[Rule, list[str]] = {}
        for row in self.rows:
            for rule in in_order({run.rule for run in row.runs.values()}):
                found.setdefault(rule, []).append(row.label)
        said = "; ".join(f"{rule}: {with_commas(found[rule])}" for rule in in_order(set(found)))
        marked = any(column.rule is not None and column.metric.key in KEPT for column in self.columns)
        if len(found) == 1:
            return f"{OWN} the rule of every method" if marked else f"judged by {next(iter(found))}"
        return f"{OWN} the rule of the method itself ({said})" if marked else f"each judged by its own rule ({said})"

    @property
    def seeds(self) -> int:
        """The most that any entry has."""
        return max((entry.n for row in self.rows for entry in row.entries.values()), default=0)


def windows(rows: Iterable[Row], setting: str, column: Column) -> dict[int, list[str]]:
    """The number of rounds that a column's means are taken over -> the rows with that number."""
    found: dict[int, list[str]] = {}
    for row in rows:
        for count in sorted({len(column.window(run)) for (where, _), run in row.runs.items() if where == setting}):
            found.setdefault(count, []).append(row.label)
    return found


def with_commas(items: Iterable[Any]) -> str:
    """Joined by commas; names that contain commas are in quotes."""
    return ", ".join(repr(item) if "," in str(item) else str(item) for item in items)
