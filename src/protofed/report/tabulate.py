"""A table of runs: mean and deviation over seeds, the best marked, each row tested against a baseline."""

import collections
from collections.abc import Iterable, Iterator, Sequence

from protofed.errors import UserError, did_you_mean
from protofed.report import paired
from protofed.report.columns import SHORT, USUAL, Column, chosen_columns
from protofed.report.gather import Collected, unlike
from protofed.report.labels import label_of, short_labels
from protofed.report.parts import Remark
from protofed.report.remarks import remarks_on
from protofed.report.rows import DEVIATIONS, Entry, Row, Table, windows
from protofed.report.runs import Run
from protofed.report.select import SELECT, Candidate, choose_candidate, told

# What makes another task of it: columns, not rows.
SETTING = (
    "data", "partition", "clients", "held_out_clients", "evaluate.validation", "attack", "skew", "stragglers",
    "incremental",
)  # fmt: skip
DIGITS = 2  # of a percentage; what reads alike is marked alike


def tabulate(
    found: Collected | Sequence[Run],
    columns: str | None = None,
    baseline: str | None = None,
    *,
    deviation: str = DEVIATIONS[0],
    select: str | None = None,
) -> Table:
    """The table of some runs. `columns` as on the command line, `baseline` the label of the row to test against.

    `deviation` over seeds is of the population or of the sample. `select` (of SELECT) shows of each method only the
    parameters that are best on validation samples."""
    if deviation not in DEVIATIONS:
        raise UserError(f"--deviation {deviation!r} is unknown. {did_you_mean(deviation, DEVIATIONS)}")
    runs, left_out = found if isinstance(found, Collected) else (list(found), [])
    if not runs:
        reasons = "; ".join(f"{out.folder}: {out.reason}" for out in left_out[:3])
        raise UserError(f"there is no finished run to tabulate. {reasons or 'Name a folder that holds runs.'}")
    left_out = list(left_out)
    rows, settings = _rows(runs, left_out)
    usual = USUAL if len(settings) == 1 and baseline is None else SHORT[: 2 if len(settings) == 1 else 1]
    table = Table(
        settings, chosen_columns(columns, runs, usual), rows, baseline, left_out=left_out, deviation=deviation
    )
    chosen = list(_select(table, select)) if select is not None else []
    rows = table.rows
    if baseline is not None and not any(table.base_of(row) for row in rows):
        names = {name for row in rows for name in (row.label, row.method)}
        raise UserError(f"--baseline {baseline!r} is not a row of the table. {did_you_mean(baseline, names)}")
    bases = [row.label for row in rows if row.method == baseline]
    if len(bases) > 1 and baseline not in bases and not any(table.base_of(row) not in (None, row) for row in rows):
        raise UserError(f"--baseline {baseline!r} is several rows. Name one of {', '.join(map(repr, bases))}.")
    _find_other_data(table)
    for setting, column in table.places:
        _fill(table, setting, column)
    table.remarks = [*chosen, *remarks_on(table)]
    return table


def _select(table: Table, select: str) -> Iterator[str]:
    """For each method and setting, keep only the row that is best on validation samples; say which."""
    if select not in SELECT:
        raise UserError(
            f"--select {select!r} is unknown. {did_you_mean(select, SELECT)} The test set is never chosen by."
        )
    best_round = all(column.at == "validation" for column in table.columns)
    rows: dict[str, Row] = {}
    for setting, row in ((setting, row) for row in table.rows for setting in table.settings):
        alike = [other for other in table.rows if other.method == row.method]
        kept = rows.setdefault(row.method, Row(row.method, {}))
        found = [Candidate(one.parameters, _by_seed(one, setting)) for one in alike if _by_seed(one, setting)]
        if setting not in kept.choices and found:
            candidate, kept.choices[setting] = choose_candidate(row.method, found, SELECT[select], best_round)
            kept.runs |= {(setting, seed): run for seed, run in candidate.runs.items()}
    table.rows = list(rows.values())
    yield from told({row.method: row.choices for row in table.rows}, SELECT[select], best_round)


def _by_seed(row: Row, setting: str) -> dict[int, Run]:
    return {seed: run for (where, seed), run in row.runs.items() if where == setting}


def _rows(runs: Iterable[Run], left_out: list[Remark]) -> tuple[list[Row], list[str]]:
    rows: dict[tuple[str, str], Row] = {}
    settings: dict[str, None] = {}
    for run in runs:
        labels = {key: value for key, value in run.labels.items() if key not in ("experiment", "method", "seed")}
        task = {key: value for key, value in labels.items() if _in_setting(key)}
        setting = label_of(run.labels.get("experiment", ""), task)
        own = {key: value for key, value in labels.items() if key not in task}
        called = label_of(run.labels["method"], own)
        row = rows.setdefault((run.labels["method"], str(own)), Row(run.labels["method"], own))
        settings[setting] = None
        beside = next((other for (where, _), other in row.runs.items() if where == setting), run)
        if others := unlike(run, beside):
            left_out.append(Remark(run.folder, f"other settings than {beside.folder}: {'; '.join(others)}"))
            continue
        first = row.runs.setdefault((setting, run.seed), run)
        if first is not run and first.folder != run.folder:
            left_out.append(Remark(run.folder, f"a second run of {called}, seed {run.seed}, next to {first.folder}"))
    shown = short_labels([(row.method, row.parameters) for row in rows.values()])
    for row, short in zip(rows.values(), shown, strict=True):
        row.short = short
    return list(rows.values()), list(settings)


def _in_setting(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in SETTING)


def _find_other_data(table: Table) -> None:
    """Rows are compared on the same data and partition: the baseline's, or else that of most rows."""
    for place in {place for row in table.rows for place in row.runs}:
        here = [(row, _data(row.runs[place])) for row in table.rows if place in row.runs]
        bases = {id(table.base_of(row)) for row in table.rows} if table.baseline else set()
        usual = next((data for row, data in here if id(row) in bases), None)
        usual = usual or collections.Counter(data for _, data in here).most_common(1)[0][0]
        for row, data in here:
            if data[0] != usual[0] or (data[1] != usual[1] and data[1] and usual[1]):
                row.other_data.add(place)


def _data(run: Run) -> tuple[str, str]:
    """The data and partition: the hash of the partition, and the fingerprint of the data if it was kept."""
    return run.partition.hash, run.partition.fingerprint


def _fill(table: Table, setting: str, column: Column) -> None:
    """One column: its values by seed, ranks and tests."""
    at = (setting, column.title)
    for row in table.rows:
        values = {seed: column.of(run) for (where, seed), run in row.runs.items() if where == setting}
        known = {seed: value for seed, value in sorted(values.items()) if value is not None}
        if known:
            row.entries[at] = Entry(known, sample=table.deviation == "sample")
    comparable = _comparable(table, setting, column)
    if column.metric.better and len(comparable) > 1:
        scale = 100 if column.metric.unit == "%" else 1
        shown = [float(f"{scale * row.entries[at].mean:.{DIGITS}f}") for row in comparable]
        order = sorted(set(shown), reverse=column.metric.better == "high")
        best = order[: 2 if len(order) > 2 else 1]  # what is second of two is the worst
        for row, value in zip(comparable, shown, strict=True):
            row.entries[at].rank = best.index(value) + 1 if value in best else 0
    if table.baseline is not None and column.metric.better:
        _test(table, at)


def _comparable(table: Table, setting: str, column: Column) -> list[Row]:
    """The rows that can be ranked: with the same data and the same seeds, no fewer than any other row, and the same
    number of rounds."""
    at = (setting, column.title)
    rows = [row for row in table.rows if at in row.entries and not row.odd(setting)]
    most = max((row.entries[at].n for row in rows), default=0)
    rows = [row for row in rows if row.entries[at].n == most]
    seeds = {tuple(row.entries[at].values) for row in rows}
    return rows if len(seeds) == 1 and len(windows(rows, setting, column)) <= 1 else []


def _test(table: Table, at: tuple[str, str]) -> None:
    pairs = [(row, table.base_of(row)) for row in table.rows if at in row.entries]
    others = [(row, base) for row, base in pairs if base is not None and base is not row and at in base.entries]
    tests = [paired.paired_test(_fair(row, at), _fair(base, at)) for row, base in others]
    for (row, _), test in zip(others, paired.holm(tests), strict=True):
        row.entries[at].test = test


def _fair(row: Row, at: tuple[str, str]) -> dict[int, float]:
    """The values of the seeds in which a row can be compared."""
    return {seed: value for seed, value in row.entries[at].values.items() if seed not in row.odd(at[0])}
