"""What is sent: bytes per round, by direction and by content."""

from collections.abc import Sequence

import numpy as np

from protofed.report.figure import Axis, Bars, Control, Figure, Panel, Plot, Words, rows_high
from protofed.report.groups import Group
from protofed.report.style import PARTS
from protofed.runs.numbers import amount

WAYS = {"up": "bytes_up", "down": "bytes_down"}
UNKNOWN = "not told apart"


def make(groups: Sequence[Group]) -> Figure:
    bytes_ = {(group.label, way): by_kind(group, key) for group in groups for way, key in WAYS.items()}
    kinds = {kind: sum(some.get(kind, 0.0) for some in bytes_.values()) for some in bytes_.values() for kind in some}
    if not kinds:
        return Figure("traffic", "Bytes sent", missing="No run has counted bytes.")
    colours = {kind: PARTS[i % len(PARTS)] for i, kind in enumerate(sorted(kinds, key=kinds.__getitem__, reverse=True))}
    height = rows_high(len(groups))
    plots = {
        f"{scale}": [_plot(groups, bytes_, way, colours, scale == "share", height) for way in WAYS]
        for scale in ("bytes", "share")
    }
    return Figure(
        id="traffic",
        title="Bytes sent",
        caption="Mean over rounds and seeds, as serialised, of all clients together: from clients to the server (up) "
        "and back (down), by what the bytes carry. Short bars are cheap methods; 'share' shows what a bar consists of "
        "where it is too short to see. What some methods send after the last round is not among them.",
        controls=[Control("show", ["bytes", "share"])],
        panels=[
            Panel({scale: both[i] for scale, both in plots.items()}, title)
            for i, title in enumerate(("Up: clients to server", "Down: server to clients"))
        ],
        key=[(kind, colour, "square") for kind, colour in colours.items()],
    )


def by_kind(group: Group, key: str) -> dict[str, float]:
    """Mean bytes per round, over all rounds of all seeds."""
    lines = [line for run in group.runs for line in run.rounds if line.get(key) is not None]
    total: dict[str, float] = {}
    for line in lines:
        for kind, number in (line.get(f"{key}_by") or {UNKNOWN: line[key]}).items():
            if number:
                total[kind] = total.get(kind, 0.0) + number / len(lines)
    return total


def _plot(
    groups: Sequence[Group],
    bytes_: dict[tuple[str, str], dict[str, float]],
    way: str,
    colours: dict[str, str],
    share: bool,
    height: int,
) -> Plot:
    names = [group.label for group in groups]
    totals = {group.label: sum(bytes_[group.label, way].values()) for group in groups}
    largest = max([*totals.values(), 1.0])
    factor, unit = next((f, u) for f, u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")) if largest >= f)
    marks: list[Bars | Words] = []
    for group in groups:
        total = totals[group.label]
        for kind in (kind for kind in colours if kind in bytes_[group.label, way]):
            number = bytes_[group.label, way][kind]
            long = 100 * number / max(total, 1e-12) if share else number / factor
            hover = [f"{kind}: {amount(number)}B a round, {100 * number / max(total, 1e-12):.1f} %"]
            marks.append(Bars(kind, [group.label], [long], colours[kind], group.label, sideways=True, hover=hover))
        end = 100 * (total > 0) if share else total / factor
        text = f"{amount(total)}B" if total else "nothing"
        marks.append(Words([float(end)], [group.label], [text], group.label))
    far = 100.0 if share else largest / factor
    title = "share of the bytes, %" if share else f"{unit} a round"
    return Plot(marks, Axis(title, range=(0, float(np.round(1.25 * far, 6)))), Axis(names=names), height=height)
