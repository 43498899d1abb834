"""What a reader of a table has to know before comparing rows."""

from collections.abc import Iterator

from protofed.report import paired
from protofed.report.columns import LAST
from protofed.report.rows import Table, windows, with_commas
from protofed.report.runs import code_notes


def remarks_on(table: Table) -> list[str]:
    """What a reader has to know before comparing rows."""
    tests = _about_tests(table) if table.baseline is not None else []
    code = (note for row in table.rows for note in code_notes(row.label, row.runs.values()))
    parts = (_about_labels(table), _about_data(table), _about_seeds(table), _about_rounds(table), code, tests)
    return [note for part in parts for note in part]


def _about_labels(table: Table) -> Iterator[str]:
    """The settings that labels leave out because they would be too long."""
    said = [f"{row.label!r} is {row.full!r}" for row in table.rows if row.label != row.full]
    if said:
        yield f"labels are shortened to what tells rows of one method apart: {'; '.join(said)}"


def _about_data(table: Table) -> Iterator[str]:
    """The rows whose data differ from the others'."""
    for row in table.rows:
        for setting in table.settings:
            if odd := row.odd(setting):
                where = f" of {setting}" if setting else ""
                yield (
                    f"cannot be compared: {row.label}{where}, seeds {with_commas(odd)}, had other data or another "
                    "partition than the other rows; it is neither ranked nor tested there"
                )


def _about_seeds(table: Table) -> Iterator[str]:
    """Whether all numbers are of the same seeds."""
    columns = [[row.entries[at] for row in table.rows if at in row.entries] for at in _filled(table)]
    counts = [{entry.n for entry in column} for column in columns]
    many = with_commas(sorted(set().union(*counts)))
    if any(len(some) > 1 for some in counts):
        yield f"rows have different numbers of seeds ({many}); those with fewer say so and are not ranked"
    elif len({*map(frozenset, counts)}) > 1:
        yield f"columns have different numbers of seeds ({many}); those with fewer say so"
    elif any(len({tuple(entry.values) for entry in column}) > 1 for column in columns):
        seeds = {row.label: sorted({seed for _, seed in row.runs}) for row in table.rows}
        shown = "; ".join(f"{label}: {with_commas(some)}" for label, some in seeds.items())
        yield f"rows have different seeds ({shown}), and so other clients: compare the same seeds"


def _about_rounds(table: Table) -> list[str]:
    """The means that are taken over fewer rounds than their title says."""
    notes: dict[str, None] = {}
    for setting, column in table.places:
        counts = windows(table.rows, setting, column)
        if column.at not in ("", "validation") and set(counts) - {0, LAST}:
            shown = "; ".join(f"{count}: {with_commas(rows)}" for count, rows in counts.items() if count)
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
