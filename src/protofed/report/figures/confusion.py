"""Which classes are mistaken for which."""

from collections.abc import Sequence

import numpy as np

from protofed.report.figure import MOST_PANELS, Axis, Control, Figure, Heat, Panel, Plot, columns, not_drawn
from protofed.report.figures.similarity import MOST_NUMBERS, TALL, class_order, high, names_of, superclasses
from protofed.report.groups import Group, titled

KINDS = {"own test sets": "personal", "global test set": "global"}


def make(groups: Sequence[Group]) -> Figure:
    known = [group for group in groups if any(run.confusion for run in group.runs)]
    kinds = [
        title
        for title, key in KINDS.items()
        if any(run.confusion.get(key, np.zeros(0)).sum() for group in known for run in group.runs)
    ]
    if not kinds:
        return Figure("confusion", "Confusion", missing="No run counted who is taken for whom (confusion.npz).")
    shown = known[:MOST_PANELS]
    plots = [{title if len(kinds) > 1 else "": _plot(group, title) for title in kinds} for group in shown]
    titles = titled(shown)
    many = any(plot.height == TALL for some in plots for plot in some.values())
    return Figure(
        id="confusion",
        title="Confusion",
        caption="Of the test samples of a true class (row), the share in % that was taken for each class (column). "
        "All on the diagonal is perfect. On own test sets: every client's own model, judged by the method's own "
        "rule, with counts added over clients and seeds. On the global test set: the global model, if there is one.",
        controls=[Control("on", kinds)] if len(kinds) > 1 else [],
        columns=2 if many else columns(len(shown)),
        panels=[
            Panel(some, titles[group.label], group.label, wide=many and len(shown) == 1)
            for group, some in zip(shown, plots, strict=True)
        ],
        notes=not_drawn([group.label for group in known]),
    )


def _plot(group: Group, title: str) -> Plot:
    tables = [run.confusion[KINDS[title]] for run in group.runs if KINDS[title] in run.confusion]
    if not tables:
        return Plot([])
    counts = np.stack([table for table in tables if table.shape == tables[0].shape]).sum(0).astype(np.float64)
    run = group.runs[0]
    asked = np.flatnonzero(counts.sum(0) + counts.sum(1))
    if not len(asked):
        return Plot([])
    places, breaks = class_order(run, asked)
    some = asked[places]
    counts = counts[np.ix_(some, some)]
    rows = counts.sum(1, keepdims=True)
    share = np.divide(100 * counts, rows, out=np.full_like(counts, np.nan), where=rows > 0)
    names = names_of(run, [int(c) for c in some])
    numbers = ".0f" if len(names) <= MOST_NUMBERS else None
    above = superclasses(run, some)
    heat = Heat(share, names, names, "% of row", 0, 100, False, numbers, breaks, above, group.label)
    return Plot([heat], Axis("said"), Axis("true"), height=high(len(names)), square=True)
