"""What was measured for an entry: numbers by row, column and seed, kept as JSON; and whether claims hold."""

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from protofed.atomic import write_atomically
from protofed.errors import UserError
from protofed.papers.reproduce.entry import Claim, PaperColumn, PaperEntry
from protofed.papers.reproduce.measure import TIMED
from protofed.runs.numbers import over_seeds

SCALES = {"%": 100.0, "MB": 1e-6}  # from a number as it is measured to its unit

Verdict = Literal["holds", "does not hold", "undecided"]


class EntryResult(NamedTuple):
    """The numbers of one entry: rows -> columns -> one number per seed (None: not run, or the method does not have
    it)."""

    entry: str
    label: str  # how it differs from the entry: quick, other data; empty if it does not
    seeds: list[int]
    rows: dict[str, dict[str, list[float | None]]]
    left_out: list[str]
    runs: dict[str, float | None]  # a run's hash -> seconds that it took (None: not finished; 0: not known)
    machine: str
    data: dict[str, str]  # an experiment -> the fingerprint of its data, where it is known
    again: str = ""  # how far numbers of some of these runs, made once more, were from these, in words

    @property
    def missing(self) -> int:
        """Runs that are not finished."""
        return sum(seconds is None for seconds in self.runs.values())

    @property
    def seconds(self) -> float:
        """Seconds of the runs, one after another; 0 if some are not known."""
        spent = there(list(self.runs.values()))
        return sum(spent) if all(spent) else 0.0

    @property
    def most(self) -> int:
        """The seeds of the number that has the most."""
        return max((len(there(values)) for row in self.rows.values() for values in row.values()), default=0)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (json.dumps(self._asdict(), indent=1) + "\n").encode())

    @classmethod
    def load(cls, path: Path) -> "EntryResult":
        try:
            found = cls(**json.loads(path.read_text(encoding="utf-8")))
            if any(len(values) != len(found.seeds) for row in found.rows.values() for values in row.values()):
                raise ValueError("a number of another seed")
            return found
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UserError(
                f"{path} is not a result of 'protofed reproduce' ({error}). Remove it and try again."
            ) from None

    def numbers(self, row: str, column: str) -> list[float | None]:
        return self.rows.get(row, {}).get(column, [])


def same_runs(before: EntryResult, now: EntryResult) -> bool:
    """Whether earlier measurements belong to runs that are wanted now, or the wanted runs are some of the earlier ones;
    and on the same data, as far as that is known."""
    measured = {run for run, seconds in before.runs.items() if seconds is not None}
    wanted = now.runs.keys()
    same_data = all(now.data.get(name, there) == there for name, there in before.data.items())
    return (
        (before.label, before.seeds) == (now.label, now.seeds)
        and (measured <= wanted or wanted <= before.runs.keys())
        and same_data
    )


def with_earlier(before: EntryResult, now: EntryResult) -> EntryResult:
    """The new measurements, and the rest of the earlier ones."""
    whole = before if now.runs.keys() < before.runs.keys() else now
    rows = {row: dict(columns) for row, columns in now.rows.items()}
    for row, columns in before.rows.items():
        for name, old in columns.items():
            new = rows.setdefault(row, {}).get(name, [None] * len(old))
            rows[row][name] = [a if a is not None else b for a, b in zip(new, old, strict=True)]
    runs = {run: before.runs.get(run) if now.runs.get(run) is None else now.runs[run] for run in whole.runs}
    kept = any(now.runs.get(run) is None and seconds is not None for run, seconds in runs.items())
    machines = [*now.machine.split(", "), *(before.machine.split(", ") if kept else [])]
    return now._replace(
        rows=rows, runs=runs, left_out=whole.left_out, data=before.data | now.data, again=before.again,
        machine=", ".join(dict.fromkeys(filter(None, machines))),
    )  # fmt: skip


def again(entry: PaperEntry, before: EntryResult, now: EntryResult) -> str:
    """How far the numbers are from earlier ones, in words; empty if they cannot be compared."""
    found: list[tuple[float, str]] = []
    columns = [column for column in entry.columns if column.unit == "%" and TIMED not in column.metric]
    for row, column in product(now.rows, columns if same_runs(before, now) else []):
        old, new = before.numbers(row, column.name), now.numbers(row, column.name)
        for seed, was, is_ in zip(now.seeds, old, new, strict=False):
            if was is not None and is_ is not None:
                texts = [show(scaled(number, column), column) for number in (is_, was)]
                found.append(
                    (abs(scaled(is_ - was, column)), f"{row}, {column.name}, seed {seed}: {' instead of '.join(texts)}")
                )
    if not found:
        return ""
    apart, where = max(found, key=lambda one: one[0])
    many = f"{len(found)} numbers" if len(found) > 1 else "1 number"
    if apart < 0.005:
        return f"{many} on {now.machine}, the same"
    mean = np.mean([distance for distance, _ in found])
    return f"{many} on {now.machine}, {mean:.2f} points apart on average, {apart:.2f} at most ({where})"


def columns_of(entry: PaperEntry, measured: EntryResult) -> list[PaperColumn]:
    """The columns that have a number; a smaller version may have columns that the entry does not have."""
    used = {name for row in measured.rows.values() for name, values in row.items() if there(values)}
    known = [column for column in entry.columns if column.name in used]
    return known + [PaperColumn(title=name) for name in sorted(used - {column.name for column in known})]


def measured_rows(entry: PaperEntry, measured: EntryResult) -> list[str]:
    return [row for row in entry.rows if any(there(values) for values in measured.rows.get(row, {}).values())]


class Judged(NamedTuple):
    """One comparison in one column, over the seeds."""

    column: str
    expected: Literal["above", "below"]
    verdict: Verdict
    gain: float  # mean difference in the column's unit
    agree: int  # seeds that are as expected
    seeds: int


class Ordering(NamedTuple):
    """One claim about two rows, in all columns in which it is expected."""

    text: str
    says: str
    judged: list[Judged]

    def count(self, verdict: Verdict) -> int:
        return sum(one.verdict == verdict for one in self.judged)


def orderings(entry: PaperEntry, measured: EntryResult) -> list[Ordering]:
    """Every claim that the measurements can decide. A claim is undecided unless all seeds agree."""
    columns = {column.name: column for column in columns_of(entry, measured)}
    found = []
    for claim in entry.claims:
        for other in claim.above:
            names = [name for name in claim.in_ or columns if name in columns]
            judged = [one for name in names if (one := _judge(entry, measured, claim, other, columns[name]))]
            for expected in ("above", "below"):
                if some := [one for one in judged if one.expected == expected]:
                    found.append(Ordering(_text(claim, other, expected), claim.says, some))
    return found


def _text(claim: Claim, other: str, expected: str) -> str:
    if other == claim.is_:
        return f"{claim.is_}: {'higher' if expected == 'above' else 'lower'} than at {claim.than}"
    return f"{claim.is_} {expected} {other}" + (f" ({claim.than})" if claim.than else "")


def _judge(entry: PaperEntry, measured: EntryResult, claim: Claim, other: str, column: PaperColumn) -> Judged | None:
    left = measured.numbers(claim.is_, column.name)
    right = measured.numbers(other, claim.than or column.name)
    gains = [a - b for a, b in zip(left, right, strict=False) if a is not None and b is not None]
    if not gains:
        return None
    expected: Literal["above", "below"] = "above"
    if entry.reported and not claim.says:
        ours, theirs = entry.paper_number(claim.is_, column.name), entry.paper_number(other, claim.than or column.name)
        if ours is None or theirs is None or ours.value == theirs.value:
            return None
        expected = "above" if ours.value > theirs.value else "below"
    sign = 1 if expected == "above" else -1
    agree = sum(sign * gain > 0 for gain in gains)
    against = sum(sign * gain < 0 for gain in gains)
    verdict: Verdict = "holds" if agree == len(gains) else "does not hold" if against == len(gains) else "undecided"
    return Judged(column.name, expected, verdict, scaled(float(np.mean(gains)), column), agree, len(gains))


def there(values: Sequence[float | None]) -> list[float]:
    """The values that exist."""
    return [value for value in values if value is not None]


def scaled(number: float, column: PaperColumn) -> float:
    return number * SCALES.get(column.unit, 1.0)


def show(number: float, column: PaperColumn, beside: float | None = None) -> str:
    """A number in its column's unit, with as many digits as the one next to it."""
    size = abs(number if beside is None else beside)
    small = column.unit in ("", "MB") and 0 < size < 0.1
    return f"{number:,.{0 if size >= 1000 else 4 if small else 2}f}"


def mean_std(measured: EntryResult, row: str, column: PaperColumn) -> tuple[float, float, int] | None:
    """Mean and deviation over seeds, and their number."""
    found = [scaled(value, column) for value in there(measured.numbers(row, column.name))]
    known = over_seeds(found)
    return (*known, len(found)) if known else None


def cells(entry: PaperEntry, measured: EntryResult, row: str, column: PaperColumn) -> tuple[str, str, str]:
    """The paper's number, ours and the difference as texts."""
    paper = entry.paper_number(row, column.name) if column in entry.columns else None
    here = mean_std(measured, row, column)
    reported = "" if paper is None else show(paper.value, column) + (f" ± {paper.std:.2f}" if paper.std else "")
    if here is None:
        return reported, "-" if reported else "", ""
    mean, std, seeds = here
    text = show(mean, column) + (f" ± {show(std, column, mean)}" if seeds > 1 and abs(mean) < 1000 else "")
    text += f" [{seeds}]" if seeds < measured.most else ""
    difference = "" if paper is None else f"{mean - paper.value:+,.{0 if abs(mean) >= 1000 else 2}f}"
    return reported, text, difference


def as_dict(measured: EntryResult) -> dict[str, Any]:
    found = measured._asdict()
    return {key: found[key] for key in found if key != "entry" and (key != "again" or found[key])}
