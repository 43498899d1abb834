"""Every mark of a figure, drawn with Matplotlib."""

from functools import singledispatch
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap

from protofed.report.figure import Bars, Heat, Line, Points, Words, shorten
from protofed.report.style import LINES, SCALES, ink

SYMBOLS = {"circle": "o", "diamond": "D", "star": "*", "square": "s"}
PLAIN = LinearSegmentedColormap.from_list("plain", SCALES["light"]["plain"])
TWO = LinearSegmentedColormap.from_list("two", SCALES["light"]["two"])
MOST_NAMES = 24  # along the side of a heat map


@singledispatch
def draw_mark(mark: Any, axes: Axes, ends: dict[Any, float]) -> None:
    """Draw one mark; `ends` is how far the bars at each place reach."""
    raise TypeError(f"cannot draw {type(mark).__name__}")


@draw_mark.register
def _(mark: Line, axes: Axes, ends: dict[Any, float]) -> None:
    y = np.array(mark.y, dtype=float)
    axes.plot(mark.x, y, color=mark.colour, ls=LINES[mark.dash], marker="o" if len(y) == 1 else None, ms=4)
    if mark.low is not None and mark.high is not None:
        low, high = np.array(mark.low, dtype=float), np.array(mark.high, dtype=float)
        axes.fill_between(mark.x, low, high, color=mark.colour, alpha=0.18, lw=0)


@draw_mark.register
def _(mark: Bars, axes: Axes, ends: dict[Any, float]) -> None:
    starts = [ends.get(x, 0.0) for x in mark.x]
    colours: Any = mark.colours if isinstance(mark.colours, str) else list(mark.colours)
    if mark.sideways:
        rows = [ends.setdefault(("row", x), len([k for k in ends if isinstance(k, tuple)])) for x in mark.x]
        axes.barh(rows, mark.y, left=starts, color=colours, height=0.7)
    else:
        axes.bar(mark.x, mark.y, bottom=starts, color=colours, width=0.82)
    for x, long in zip(mark.x, mark.y, strict=True):
        ends[x] = ends.get(x, 0.0) + long


@draw_mark.register
def _(mark: Words, axes: Axes, ends: dict[Any, float]) -> None:
    for x, y, text in zip(mark.x, mark.y, mark.text, strict=True):
        row = ends.setdefault(("row", y), len([k for k in ends if isinstance(k, tuple)]))
        axes.annotate(text, (x, row), (3, 0), textcoords="offset points", va="center", fontsize=8)


@draw_mark.register
def _(mark: Points, axes: Axes, ends: dict[Any, float]) -> None:
    smaller = 0.62  # a page's pixel in points, at the size of a column
    area = (np.asarray(mark.sizes, dtype=float) * smaller) ** 2 * (1.6 if mark.symbol == "star" else 1.0)
    axes.scatter(
        mark.x,
        mark.y,
        s=area,
        c=mark.colours if isinstance(mark.colours, str) else list(mark.colours),
        marker=SYMBOLS[mark.symbol],
        alpha=mark.opacity,
        edgecolors="white" if mark.outline else "none",
        linewidths=0.6 if mark.outline else 0,
        zorder=3 if mark.outline else 2,
    )


@draw_mark.register
def _(mark: Heat, axes: Axes, ends: dict[Any, float]) -> None:
    image = axes.imshow(
        mark.z,
        cmap=TWO if mark.diverging else PLAIN,
        vmin=mark.low,
        vmax=mark.high,
        interpolation="nearest",
        aspect="equal" if mark.z.shape[0] == mark.z.shape[1] else "auto",
    )
    axes.grid(False)
    for along, names, turn in ((axes.xaxis, mark.columns, 90), (axes.yaxis, mark.rows, 0)):
        step = -(-len(names) // MOST_NAMES)
        ticks = [(at, shorten(name)) for at, name in mark.blocks(len(names) / MOST_NAMES)] if step > 1 else []
        ticks = ticks or [(at, names[at]) for at in range(0, len(names), step)]
        long = max(len(name) for _, name in ticks) > 2
        size = 7 if len(ticks) < 16 else 5.5
        places, shown = zip(*ticks, strict=True)
        along.set_ticks(places, shown, rotation=turn if long else 0, fontsize=size)
    for at in mark.breaks:
        width = 0.8 if len(mark.rows) <= MOST_NAMES else 0.3
        axes.axhline(at - 0.5, color="#5c6670", lw=width)
        axes.axvline(at - 0.5, color="#5c6670", lw=width)
    if mark.numbers:
        for (row, column), value in np.ndenumerate(mark.z):
            if np.isfinite(value):
                axes.text(
                    column,
                    row,
                    _written(value, mark.numbers),
                    ha="center",
                    va="center",
                    fontsize=6,
                    color=ink(image.cmap(image.norm(value))[:3]),
                )
    bar = axes.figure.colorbar(image, ax=axes, shrink=0.85, pad=0.02)
    bar.set_label(mark.unit)
    bar.outline.set_visible(False)


def _written(value: float, how: str) -> str:
    """A number as the page writes it: ".1f" with halves rounded away from zero, and without "-0.0"."""
    unit = 10.0 ** -int(how[1:-1])
    return f"{np.copysign(np.floor(abs(value) / unit + 0.5), value) * unit + 0.0:{how}}"
