"""Accuracy and loss against rounds, seconds and megabytes, with bands over seeds."""

from collections.abc import Sequence

import numpy as np

from protofed.report.columns import ABOUT, METRICS, Column, Metric, chosen_columns
from protofed.report.figure import Axis, Control, Figure, Line, Panel, Plot, thin, thinned
from protofed.report.groups import Group
from protofed.runs.numbers import over_seeds

SHOWN = ("accuracy", "head", "proto", "worst10", "global", "pm_v", "pm_l", "attack")
LOSS = Column(Metric("loss", "loss", "", ""))
AGAINST = {
    "rounds": "round",
    "seconds": "seconds of training and measuring",
    "megabytes": "megabytes sent, up and down",
}


def make(groups: Sequence[Group]) -> Figure:
    runs = [run for group in groups for run in group.runs]
    what = {
        column.title: column
        for column in (*chosen_columns(None, runs, SHOWN), LOSS)
        if any(len(column.along(run)[0]) > 1 for run in runs)
    }
    if not what:
        return Figure("accuracy", "Accuracy", missing="No run has two measured rounds.")
    lettered = {METRICS[name].title: ABOUT[name] for name in ("pm_v", "pm_l")}
    lettered = {title: text for title, text in lettered.items() if any(one.startswith(title) for one in what)}
    plots = {f"{x}|{name}": _plot(groups, column, x) for name, column in what.items() for x in AGAINST}
    first = next(iter(what))
    unfinished = [run.folder.name for run in runs if run.summary is None]
    return Figure(
        id="accuracy",
        title="Accuracy",
        caption="Higher and further left is better (backdoor success: lower). All lines of a plot are judged by one "
        "rule. A line is the mean over seeds, and its "
        "band is one standard deviation to either side. A round's accuracy is the mean over the clients that took part "
        "in it, on their own test sets (for the global model: on the global test set). Seconds and megabytes are added "
        "up over rounds and averaged over seeds. What is measured after the last round (all clients; for some methods "
        "after a last training) is only in the summary."
        + "".join(f" {title}: {text}." for title, text in lettered.items()),
        controls=[Control("against", list(AGAINST)), Control("show", list(what))],
        panels=[Panel(plots, wide=True)],
        notes=[
            *thinned(max(len(run.rounds) for run in runs), "rounds"),
            *([f"Not finished, drawn as far as they go: {', '.join(unfinished)}."] if unfinished else []),
        ],
        paper=[f"{x}|{first}" for x in AGAINST] + [f"rounds|{name}" for name in what if name != first],
    )


def _plot(groups: Sequence[Group], column: Column, against: str) -> Plot:
    percent = 100.0 if column.metric.unit == "%" else 1.0
    lines = [line for group in groups if (line := curve(group, column, percent, against)) is not None]
    what = column.title if column.metric.better == "low" else f"accuracy, {column.title}"
    unit = "training loss" if column == LOSS else f"{what}, %"
    return Plot(lines, Axis(AGAINST[against]), Axis(unit), height=420)


def curve(
    group: Group, what: str | Column, factor: float = 1.0, against: str = "rounds", dash: str = ""
) -> Line | None:
    """A number by round: the mean over the seeds that have it, and the deviation."""
    values: dict[int, list[float]] = {}
    for run in group.runs:
        for round, value in zip(*(what.along(run) if isinstance(what, Column) else run.column(what)), strict=True):
            values.setdefault(round, []).append(factor * value)
    rounds = sorted(values)
    if not rounds:
        return None
    kept = [rounds[i] for i in thin(len(rounds))]
    places = _places(group, against)
    mean, std = np.array([over_seeds(values[round]) for round in kept]).T
    several = len(group.runs) > 1
    return Line(
        group.name,
        x=[places[round] for round in kept],
        y=mean.tolist(),
        colour=group.look.colour,
        dash=dash or group.look.dash,
        label=group.label,
        low=(mean - std).tolist() if several else None,
        high=(mean + std).tolist() if several else None,
    )


def _places(group: Group, against: str) -> dict[int, float]:
    """The position of each round on the axis: the cost of rounds, averaged over the seeds that have them and summed
    up."""
    if against == "rounds":
        return {line["round"]: float(line["round"]) for run in group.runs for line in run.rounds}
    takes: dict[int, list[float]] = {}
    for line in (line for run in group.runs for line in run.rounds):
        sent = ((line.get("bytes_up") or 0) + (line.get("bytes_down") or 0)) / 1e6
        takes.setdefault(line["round"], []).append(sent if against == "megabytes" else line.get("seconds") or 0.0)
    rounds = sorted(takes)
    return dict(zip(rounds, np.cumsum([np.mean(takes[round]) for round in rounds]).tolist(), strict=True))
