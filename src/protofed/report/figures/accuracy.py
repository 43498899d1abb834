"""Accuracy and loss against rounds, seconds and megabytes, with bands over seeds."""

from collections.abc import Sequence

import numpy as np

from protofed.report.figure import Axis, Control, Figure, Line, Panel, Plot, thin, thinned
from protofed.report.groups import Group

WHAT = {
    "accuracy": "accuracy_mean",
    "worst tenth": "accuracy_worst10",
    "by head": "accuracy_head_mean",
    "by prototype": "accuracy_proto_mean",
    "global model": "global_accuracy",
    "PM(V)": "pm_v",
    "PM(L)": "pm_l",
    "loss": "loss",
}
AGAINST = {
    "rounds": "round",
    "seconds": "seconds of training and measuring",
    "megabytes": "megabytes sent, up and down",
}


def make(groups: Sequence[Group]) -> Figure:
    runs = [run for group in groups for run in group.runs]
    what = {name: key for name, key in WHAT.items() if any(len(run.column(key)[0]) > 1 for run in runs)}
    if not what:
        return Figure("accuracy", "Accuracy", missing="No run has two measured rounds.")
    plots = {f"{x}|{name}": _plot(groups, key, name, x) for name, key in what.items() for x in AGAINST}
    first = next(iter(what))
    unfinished = [run.folder.name for run in runs if run.summary is None]
    return Figure(
        id="accuracy",
        title="Accuracy",
        caption="Higher and further left is better. A line is the mean over seeds, its band one standard deviation "
        "to either side; a round's accuracy is over the clients that took part in it, on their own test sets"
        " (the global model: on the global test set). Seconds and megabytes are added up over rounds, and "
        "their mean over seeds is used. What comes after the last round (all clients measured; for some methods a last "
        "training) is in the summary alone.",
        controls=[Control("against", list(AGAINST)), Control("show", list(what))],
        panels=[Panel(plots, wide=True)],
        notes=[
            *thinned(max(len(run.rounds) for run in runs), "rounds"),
            *([f"Not finished, drawn as far as they go: {', '.join(unfinished)}."] if unfinished else []),
        ],
        paper=[f"{x}|{first}" for x in AGAINST] + [f"rounds|{name}" for name in what if name != first],
    )


def _plot(groups: Sequence[Group], key: str, name: str, against: str) -> Plot:
    percent = 1.0 if key == "loss" else 100.0
    lines = [line for group in groups if (line := curve(group, key, percent, against)) is not None]
    unit = "training loss" if key == "loss" else f"{name}, %" if name.startswith("accuracy") else f"accuracy, {name}, %"
    return Plot(lines, Axis(AGAINST[against]), Axis(unit), height=420)


def curve(group: Group, key: str, factor: float = 1.0, against: str = "rounds", dash: str = "") -> Line | None:
    """A number of the rounds: the mean over those seeds that have it, and the deviation."""
    values: dict[int, list[float]] = {}
    for run in group.runs:
        for round, value in zip(*run.column(key), strict=True):
            values.setdefault(round, []).append(factor * value)
    rounds = sorted(values)
    if not rounds:
        return None
    kept = [rounds[i] for i in thin(len(rounds))]
    places = _places(group, against)
    mean = np.array([np.mean(values[round]) for round in kept])
    std = np.array([np.std(values[round]) for round in kept])
    several = len(group.runs) > 1
    return Line(
        group.label,
        x=[places[round] for round in kept],
        y=mean.tolist(),
        colour=group.look.colour,
        dash=dash or group.look.dash,
        label=group.label,
        low=(mean - std).tolist() if several else None,
        high=(mean + std).tolist() if several else None,
    )


def _places(group: Group, against: str) -> dict[int, float]:
    """Where each round lies: what rounds take is averaged over the seeds that have them, and added up."""
    if against == "rounds":
        return {line["round"]: float(line["round"]) for run in group.runs for line in run.rounds}
    takes: dict[int, list[float]] = {}
    for line in (line for run in group.runs for line in run.rounds):
        sent = ((line.get("bytes_up") or 0) + (line.get("bytes_down") or 0)) / 1e6
        takes.setdefault(line["round"], []).append(sent if against == "megabytes" else line.get("seconds") or 0.0)
    rounds = sorted(takes)
    return dict(zip(rounds, np.cumsum([np.mean(takes[round]) for round in rounds]).tolist(), strict=True))
