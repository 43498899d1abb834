"""How similar the global prototypes are: the cosine between every two classes."""

from collections.abc import Sequence

import numpy as np

from protofed.report.figure import MOST_NAMED, MOST_PANELS, Figure, Heat, Panel, Plot, columns, not_drawn, told_apart
from protofed.report.groups import Group
from protofed.report.runs import Run

USUAL, TALL = 400, 520  # pixels of a heat map with few classes and with many
MOST_NUMBERS = 12  # classes; with more, there is no room for a number in a cell


def make(groups: Sequence[Group]) -> Figure:
    pairs = [(group, run) for group in groups if (run := group.first(has_prototypes)) is not None]
    if not pairs:
        missing = "No run kept global prototypes of two classes or more (views.npz)."
        return Figure("similarity", "Prototype similarity", missing=missing)
    grouped = any(run.superclasses for _, run in pairs)
    shown = pairs[:MOST_PANELS]
    plots = [_plot(run, group.label) for group, run in shown]
    many = any(plot.height == TALL for plot in plots)
    return Figure(
        id="similarity",
        title="Prototype similarity",
        caption="Cosine between the global prototypes of two classes after the last round that was kept. Blue is "
        "alike and orange opposed; if only the diagonal is blue, the classes are well separated. Several prototypes"
        " of a class are averaged first."
        + (" Lines separate the superclasses, whose members should be more alike." if grouped else ""),
        columns=2 if many else columns(len(pairs)),
        panels=[
            Panel({"": plot}, f"{group.label}, seed {run.seed}", group.label, wide=many and len(pairs) == 1)
            for (group, run), plot in zip(shown, plots, strict=True)
        ],
        notes=not_drawn([group.label for group, _ in pairs]),
    )


def has_prototypes(run: Run) -> bool:
    return (
        "global_held" in run.views
        and bool(run.views["global_held"].shape[0])
        and bool(run.views["global_held"][-1].sum() > 1)
    )


def cosines(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """The classes that have a prototype (C,), and the cosine between every two (C, C)."""
    held = run.views["global_held"][-1]
    vectors = run.views["global_prototypes"][-1][held].astype(np.float64)
    kind = run.views["global_class"][held]
    classes = np.unique(kind)
    means = np.stack([vectors[kind == c].mean(0) for c in classes])
    means /= np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-12)
    return classes, means @ means.T


def class_order(run: Run, classes: np.ndarray) -> tuple[list[int], list[int]]:
    """Places in `classes`, superclass by superclass, and where a new one begins."""
    above = superclasses(run, classes)
    if not above:
        return list(range(len(classes))), []
    places = sorted(range(len(classes)), key=lambda i: (above[i], i))
    return places, [i for i in range(1, len(places)) if above[places[i]] != above[places[i - 1]]]


def superclasses(run: Run, classes: np.ndarray) -> list[str]:
    """The superclass of each class; empty if there are none."""
    known = run.superclasses if run.superclasses and len(run.superclasses) > int(classes.max()) else None
    return [known[c] for c in classes] if known else []


def high(classes: int) -> int:
    """The height in pixels of a heat map of this many classes."""
    return USUAL if classes <= MOST_NAMED else TALL


def names_of(run: Run, classes: Sequence[int]) -> list[str]:
    """Short names that tell these classes apart."""
    known = run.class_names
    return told_apart([known[c] if c < len(known) else str(c) for c in classes], 16)


def _plot(run: Run, label: str) -> Plot:
    classes, values = cosines(run)
    places, breaks = class_order(run, classes)
    names = names_of(run, [int(classes[i]) for i in places])
    numbers = ".1f" if len(names) <= MOST_NUMBERS else None
    values = values[np.ix_(places, places)]
    above = superclasses(run, classes[places])
    heat = Heat(values, names, names, "cosine", -1, 1, True, numbers, breaks, above, label)
    return Plot([heat], height=high(len(names)), square=True)
