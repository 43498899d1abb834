"""Which client has which samples: one bubble per client and class."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from protofed.data.domain import Domain
from protofed.data.split import Split
from protofed.report.figure import Axis, Figure, Heat, Panel, Plot, Points, told_apart
from protofed.report.groups import Group
from protofed.report.runs import Run
from protofed.report.style import COLOURS

MOST_BUBBLES = 60  # clients; with more, a heat map says it better
MOST_CLIENTS, MOST_SHOWN, MOST_CLASSES = 400, 4, 100


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
        False: "the area of a bubble is their number, relative to the largest of its panel",
        True: "the stronger the colour, the more; empty: none",
    }
    return Figure(
        id="partition",
        title="Partition",
        caption="Training samples of each client and class: "
        + "; or, of many, ".join(how[many] for many in sorted(drawn))
        + "."
        + " A column of one or two bubbles is a client with few classes.",
        panels=[Panel({"": _plot(run)}, _title(run, groups), wide=len(shown) == 1 or clients > 25) for run in shown],
        notes=notes,
    )


def _many(run: Run) -> bool:
    """Whether there are more clients or classes than bubbles can show."""
    return bool(max(_counts(run).shape) > MOST_BUBBLES)


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
    return plot_of(counts, run.class_names or [str(c) for c in range(counts.shape[1])])[0]


def plot_of(counts: np.ndarray, classes: Sequence[str], colours: Sequence[str] | None = None) -> tuple[Plot, list[str]]:
    """Training samples (clients, classes), with the colour of each client's domain, and remarks."""
    names, largest = told_apart(classes, 16), max(int(counts.max()), 1)
    if max(counts.shape) > MOST_BUBBLES:
        return _heat(counts, names, largest, colours)
    client, label = np.nonzero(counts)
    values = counts[client, label]
    size = 22 if len(counts) <= 25 else 13
    points = Points(
        "samples",
        client.tolist(),
        label.tolist(),
        [colours[int(c)] for c in client] if colours else COLOURS[0],
        sizes=(size * np.sqrt(values / largest)).clip(2).tolist(),
        opacity=0.85,
        hover=[f"client {c}: {n} samples of {classes[int(k)]}" for c, k, n in zip(client, label, values, strict=True)],
    )
    height = 70 + max(180, (size + 4) * len(names))
    x = Axis("client", range=(-0.7, len(counts) - 0.3))
    y = Axis("class", names=names, range=(-0.7, len(names) - 0.3))
    return Plot([points], x, y, height=height), [f"the largest bubble has {largest:,}"]


def _heat(
    counts: np.ndarray, names: Sequence[str], largest: int, colours: Sequence[str] | None
) -> tuple[Plot, list[str]]:
    numbers = np.unique(np.linspace(0, len(counts) - 1, min(len(counts), MOST_CLIENTS)).round().astype(int))
    shares = np.where(counts[numbers] > 0, counts[numbers], np.nan).astype(float).T
    heat = Heat(shares, [str(n) for n in numbers], names, "samples", 0, float(largest))
    marks: list[Heat | Points] = [heat]
    above = -0.5
    if colours:  # a stripe above the cells says whose domain is which
        above = -0.5 - 0.08 * len(names)
        places, middle = list(range(len(numbers))), (above - 0.5) / 2
        marks.append(Points("domain", places, [middle] * len(numbers), [colours[n] for n in numbers], 4, "square"))
    y = Axis("class", range=(len(names) - 0.5, above)) if colours else Axis("")
    plot = Plot(marks, Axis("client"), y, height=min(900, max(300, 60 + 14 * len(names))))
    return plot, [f"{len(numbers)} of {len(counts):,} clients are shown"] if len(numbers) < len(counts) else []


def describe(split: Split, domains: Sequence[Domain]) -> dict[str, Any]:
    """The same in numbers, ready for JSON."""
    counts = split.counts(domains)
    classes = next(d for d in domains if d.classes == counts.shape[1]).class_names
    held = {"validation": _range(np.array([len(rows) for rows in split.validation]))} if split.validation else {}
    return {
        "clients": len(counts),
        "train": _range(counts.sum(1)),
        **held,
        "test": _range(np.array([len(rows) for rows in split.test])),
        "classes_per_client": _range(np.count_nonzero(counts, axis=1)),
        "per_class": {name: int(total) for name, total in zip(classes, counts.sum(0), strict=True)},
        "hash": split.hash,
    }


def _range(values: np.ndarray) -> dict[str, float]:
    return {
        "min": int(values.min()),
        "median": float(np.median(values)),
        "mean": float(values.mean()),
        "max": int(values.max()),
        "total": int(values.sum()),
    }
