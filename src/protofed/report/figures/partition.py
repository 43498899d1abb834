"""Who has what: one bubble for a client and a class."""

from collections.abc import Sequence

import numpy as np

from protofed.report.figure import Axis, Figure, Heat, Panel, Plot, Points, told_apart
from protofed.report.groups import Group
from protofed.report.runs import Run

MOST_BUBBLES = 60  # clients; with more, a heat map says it better
MOST_CLIENTS, MOST_SHOWN, MOST_CLASSES = 400, 4, 100
BLUE = "#0072b2"


def make(groups: Sequence[Group]) -> Figure:
    runs = [run for group in groups for run in group.runs]
    splits = {run.partition.hash: run for run in sorted(runs, key=lambda run: run.seed, reverse=True)}
    known = sorted((run for run in splits.values() if run.partition.counts is not None), key=lambda run: run.seed)
    if not known:
        return Figure("partition", "Partition", missing="No run has a partition.npz with counts of classes.")
    shown = known[:MOST_SHOWN]
    clients = max(len(_counts(run)) for run in shown)
    notes = [f"{len(shown)} of {len(known)} partitions are drawn."] if len(known) > len(shown) else []
    if clients > MOST_CLIENTS:
        notes.append(f"{MOST_CLIENTS} of {clients:,} clients are drawn, evenly spaced.")
    drawn = {_many(run) for run in shown}
    how = {
        False: "the area of a bubble is their number, beside the largest of its panel",
        True: "the stronger the colour, the more; empty: none",
    }
    return Figure(
        id="partition",
        title="Partition",
        caption="Training samples of each client and class: "
        + "; or, of many, ".join(how[many] for many in sorted(drawn))
        + "."
        + " Columns of one or two bubbles are clients that know little of the world.",
        panels=[Panel({"": _plot(run)}, _title(run, groups), wide=len(shown) == 1 or clients > 25) for run in shown],
        notes=notes,
    )


def _many(run: Run) -> bool:
    """Whether there are more clients or classes than bubbles can show."""
    return max(_counts(run).shape) > MOST_BUBBLES


def _counts(run: Run) -> np.ndarray:
    assert run.partition.counts is not None
    return run.partition.counts


def _title(run: Run, groups: Sequence[Group]) -> str:
    users = [group.label for group in groups if any(other.partition.hash == run.partition.hash for other in group.runs)]
    counts = _counts(run)
    whose = "" if len(users) == len(groups) else f"{', '.join(users)}: "
    largest = "" if _many(run) else f", the largest bubble {int(counts.max()):,}"
    return f"{whose}seed {run.seed}, {len(counts):,} clients, {int(counts.sum()):,} training samples{largest}"


def _plot(run: Run) -> Plot:
    counts = _counts(run)
    numbers = np.unique(np.linspace(0, len(counts) - 1, min(len(counts), MOST_CLIENTS)).round().astype(int))
    full = run.class_names or [str(c) for c in range(counts.shape[1])]
    names = told_apart(full, 16)
    if _many(run):
        shares = np.where(counts[numbers] > 0, counts[numbers], np.nan).astype(float).T
        heat = Heat(shares, [str(n) for n in numbers], names, "samples", 0, float(counts.max()))
        return Plot([heat], Axis("client"), Axis(""), height=min(900, max(300, 60 + 14 * len(names))))
    client, label = np.nonzero(counts)
    values = counts[client, label]
    largest = 22 if len(counts) <= 25 else 13
    points = Points(
        "samples",
        client.tolist(),
        label.tolist(),
        BLUE,
        sizes=(largest * np.sqrt(values / values.max())).clip(2).tolist(),
        opacity=0.85,
        hover=[f"client {c}: {n} samples of {full[k]}" for c, k, n in zip(client, label, values, strict=True)],
    )
    height = 70 + max(180, (largest + 4) * len(names))
    x = Axis("client", range=(-0.7, len(counts) - 0.3))
    return Plot([points], x, Axis("class", names=names, range=(-0.7, len(names) - 0.3)), height=height)
