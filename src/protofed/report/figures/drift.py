"""How far the global prototypes move in a round, and how far apart they are."""

from collections.abc import Sequence

from protofed.report.figure import Axis, Figure, Panel, Plot, thinned
from protofed.report.figures.accuracy import curve
from protofed.report.groups import Group

PANELS = {
    "drift": "Drift, mean over classes",
    "margin": "Margin, mean over classes",
    "margin_min": "Margin, smallest",
}


def make(groups: Sequence[Group]) -> Figure:
    lines = {key: [line for group in groups if (line := curve(group, key)) is not None] for key in PANELS}
    known = {key: some for key, some in lines.items() if some}
    if not known:
        missing = "No run recorded how its prototypes move (drift and margin in rounds.jsonl)."
        return Figure("drift", "Prototype drift and margin", missing=missing)
    silent = [
        group.label for group in groups if all(line.label != group.label for some in known.values() for line in some)
    ]
    return Figure(
        id="drift",
        title="Prototype drift and margin",
        caption="Drift is how far a global prototype moved since the round before, margin how far away the nearest "
        "other one is (Euclidean). Drift that falls towards 0 means convergence; a growing margin means classes that"
        " are easier to tell apart. Scales differ between methods that normalise and those that do not.",
        columns=3,
        panels=[
            Panel({"": Plot(some, Axis("round"), Axis("distance"), height=280)}, PANELS[key])
            for key, some in known.items()
        ],
        notes=[
            *thinned(max(len(run.rounds) for group in groups for run in group.runs), "rounds"),
            *([f"Without prototypes, or not recorded: {', '.join(silent)}."] if silent else []),
        ],
    )
