"""Where the seconds of a round go."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from protofed.report.figure import Axis, Bars, Control, Figure, Panel, Plot, Words, rows_high
from protofed.report.groups import Group
from protofed.report.style import PARTS

WORK, MEASURE = "train and combine", "evaluate"  # as far as an older run tells


def make(groups: Sequence[Group]) -> Figure:
    seconds = {group.label: split(group) for group in groups}
    parts = list(dict.fromkeys(part for some in seconds.values() for part in some))
    if not parts:
        return Figure("time", "Time", missing="No run has timed its rounds.")
    colours = {part: PARTS[i % len(PARTS)] for i, part in enumerate(parts)}
    plots = {scale: _plot(groups, seconds, colours, scale == "share") for scale in ("seconds", "share")}
    return Figure(
        id="time",
        title="Time",
        caption="Seconds of a round, by what they were spent on: the median over rounds, averaged over seeds, without "
        "what comes after the last round. Compare only runs of one machine that did nothing else.",
        controls=[Control("show", ["seconds", "share"])],
        panels=[Panel(plots, wide=True)],
        key=[(part, colour, "square") for part, colour in colours.items()],
    )


def split(group: Group) -> dict[str, float]:
    """Median seconds of each part, mean over seeds."""
    total: dict[str, float] = {}
    timed = [lines for run in group.runs if (lines := [parts for line in run.rounds if (parts := _parts(line))])]
    for lines in timed:
        for part in dict.fromkeys(part for parts in lines for part in parts):
            middle = median(parts.get(part, 0.0) for parts in lines)
            total[part] = total.get(part, 0.0) + middle / len(timed)
    return total


def _parts(line: Mapping[str, Any]) -> dict[str, float]:
    if line.get("parts"):
        return dict(line["parts"])
    if line.get("seconds") is None or line.get("seconds_train") is None:
        return {}
    return {WORK: line["seconds_train"], MEASURE: line["seconds"] - line["seconds_train"]}


def _plot(
    groups: Sequence[Group], seconds: Mapping[str, Mapping[str, float]], colours: Mapping[str, str], share: bool
) -> Plot:
    totals = {label: sum(parts.values()) for label, parts in seconds.items()}
    far = 100.0 if share else max([*totals.values(), 1e-9])
    marks: list[Bars | Words] = []
    for group in groups:
        total = totals[group.label]
        for part, value in seconds[group.label].items():
            long = 100 * value / max(total, 1e-12) if share else value
            hover = [f"{part}: {value:.3g} s a round, {100 * value / max(total, 1e-12):.0f} %"]
            marks.append(Bars(part, [group.label], [long], colours[part], group.label, sideways=True, hover=hover))
        marks.append(Words([100.0 if share else total], [group.label], [f"{total:.3g} s"], group.label))
    title = "share of a round, %" if share else "seconds a round"
    names = [group.label for group in groups]
    return Plot(marks, Axis(title, range=(0, 1.18 * far)), Axis(names=names), height=rows_high(len(groups)))
