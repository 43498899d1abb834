"""How every client fares: sorted bars, the worst tenth, and how fair the outcome is."""

import math
from collections.abc import Sequence

import numpy as np

from protofed.report.figure import MOST_PANELS, Axis, Bars, Figure, Line, Panel, Plot, columns, not_drawn
from protofed.report.groups import Group, judged, titled
from protofed.report.runs import Run
from protofed.runs.numbers import over_seeds

MOST_BARS = 100
WORST = "#2b2f36"


def make(groups: Sequence[Group]) -> Figure:
    known = [group for group in groups if any(map(accuracies, group.runs))]
    if not known:
        return Figure("clients", "Clients", missing="No run is finished: clients.jsonl comes at its end.")
    titles = titled(known)
    most = max(len(accuracies(run)) for group in known for run in group.runs)
    return Figure(
        id="clients",
        title="Clients",
        caption="Every client's accuracy on its own test set after the last round, from worst to best; the dashed "
        "line is the mean, the worst tenth is black (white on a dark page). Over several seeds the clients "
        "of one rank are averaged. A flat row of bars is a fair outcome.",
        panels=[
            Panel({"": _bars(group)}, titles[group.label], group.label, wide=len(known) == 1)
            for group in known[:MOST_PANELS]
        ],
        columns=columns(len(known)),
        notes=[
            "Deviation: of the clients around their mean, in points; 0 is equal. Jain's index: (sum of accuracies)² "
            "/ (clients x sum of squares); 1 is equal, 1/clients is all for one. Mean ± deviation over seeds.",
            *([f"A bar is the mean of several clients: {most:,} are too many to draw."] if most > MOST_BARS else []),
            *not_drawn([group.label for group in known]),
        ],
        table=_fairness(known),
    )


def accuracies(run: Run) -> list[float]:
    """Of all clients that have a test set."""
    return [client["accuracy"] for client in run.clients if client.get("accuracy") is not None]


def _ranked(group: Group) -> np.ndarray:
    """Accuracy in % by rank, averaged over seeds."""
    runs = [np.sort(accuracies(run)) for run in group.runs if accuracies(run)]
    bins = min(MOST_BARS, max(map(len, runs)))
    mean: np.ndarray = 100 * np.mean([parts(row, bins) for row in runs], axis=0)
    return mean


def parts(row: np.ndarray, bins: int) -> np.ndarray:
    """Means of equal parts of a sorted row; a client on a border counts on both sides by its share."""
    total = np.interp(np.linspace(0, len(row), bins + 1), np.arange(len(row) + 1), [0, *np.cumsum(row)])
    return row if bins == len(row) else np.diff(total) * bins / len(row)


def _bars(group: Group) -> Plot:
    y = _ranked(group)
    worst = math.ceil(len(y) / 10)
    colours = [WORST if i < worst else group.look.colour for i in range(len(y))]
    ranks = [f"rank {i + 1} of {len(y)}" + (", worst tenth" if i < worst else "") for i in range(len(y))]
    run = group.runs[0]
    if len(group.runs) == 1 and len(y) == len(accuracies(run)):
        order = sorted((c for c in run.clients if c.get("accuracy") is not None), key=lambda c: c["accuracy"])
        ranks = [
            f"client {c['client']}, {c['architecture']}, {c['train']} training samples, {len(c['classes'])} classes"
            for c in order
        ]
    bars = Bars(group.label, list(range(1, len(y) + 1)), y.tolist(), colours, group.label, hover=ranks, unit=" %")
    mean = Line("mean", [0.5, len(y) + 0.5], [float(y.mean())] * 2, "#7f7f7f", "dash", group.label)
    binned = any(len(accuracies(some)) not in (0, len(y)) for some in group.runs)
    what = f"{len(y)} equal parts of the clients" if binned else "clients"
    x = Axis(f"{what}, from worst to best", range=(0.4, len(y) + 0.6))
    return Plot([bars, mean], x, Axis("accuracy, %", range=(0, 103)), height=280)


def _fairness(groups: Sequence[Group]) -> list[list[str]]:
    rows = [["method", "mean, %", "worst tenth, %", "best tenth, %", "deviation", "Jain's index"]]
    rules = judged(groups)
    rows[0][1:1] = ["judged by"] if rules else []
    for group in groups:
        numbers = np.array([fairness(accuracies(run)) for run in group.runs if accuracies(run)])
        cells = [over_seeds(column) for column in numbers.T.tolist()]
        places = (2, 2, 2, 2, 4)
        several = len(numbers) > 1
        shown = [
            f"{cell[0]:.{n}f}" + (f" ± {cell[1]:.{n}f}" if several else "")
            for cell, n in zip(cells, places, strict=True)
            if cell is not None
        ]
        rows.append([group.label, *([rules[group.label]] if rules else []), *shown])
    return rows


def fairness(values: Sequence[float]) -> list[float]:
    """Mean, worst tenth, best tenth and population deviation in %, and Jain's index."""
    a = np.sort(values)
    tenth = max(1, math.ceil(len(a) / 10))
    squares = float((a**2).sum())
    jain = float(a.sum()) ** 2 / (len(a) * squares) if squares > 0 else 1.0
    return [100 * a.mean(), 100 * a[:tenth].mean(), 100 * a[-tenth:].mean(), 100 * a.std(), jain]
