"""The parts of a figure, whether it is drawn on a page (interactive.py) or for a paper (paper.py)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

MOST_POINTS = 250  # of a line; a screen shows no more
MOST_NAMED = 30  # classes named next to a heat map; with more, superclasses are named if there are some
MOST_PANELS = 12  # one a method

Numbers = Sequence[float] | np.ndarray


@dataclass(frozen=True)
class Line:
    """A line, with a band if `low` and `high` are given; hiding the method `label` hides it."""

    name: str
    x: Numbers
    y: Sequence[float | None] | np.ndarray
    colour: str
    dash: str = "solid"
    label: str | None = None
    low: Sequence[float | None] | np.ndarray | None = None
    high: Sequence[float | None] | np.ndarray | None = None
    hover: Sequence[str] | None = None


@dataclass(frozen=True)
class Bars:
    """Bars from 0, stacked on those before them at the same place; `x` are names or numbers."""

    name: str
    x: Sequence[Any]
    y: Sequence[float]
    colours: str | Sequence[str]
    label: str | None = None
    sideways: bool = False
    hover: Sequence[str] | None = None
    unit: str = ""


@dataclass(frozen=True)
class Words:
    """Short texts, each to the right of a point."""

    x: Sequence[float]
    y: Sequence[Any]
    text: Sequence[str]
    label: str | None = None


@dataclass(frozen=True)
class Points:
    """Marks at places; sizes are diameters in pixels."""

    name: str
    x: Numbers
    y: Numbers
    colours: str | Sequence[str]
    sizes: float | Sequence[float] = 6.0
    symbol: str = "circle"
    opacity: float = 1.0
    outline: bool = False
    label: str | None = None
    hover: Sequence[str] | None = None


@dataclass(frozen=True)
class Heat:
    """A table of numbers as colours; a new group begins before each of the rows and columns in `breaks`."""

    z: np.ndarray
    columns: Sequence[str]
    rows: Sequence[str]
    unit: str
    low: float
    high: float
    diverging: bool = False
    numbers: str | None = None
    """The format of the number in each cell, such as ".0f"; None: no numbers."""
    breaks: Sequence[int] = ()
    above: Sequence[str] = ()
    """The superclass of each row, which is a class."""
    label: str | None = None

    def blocks(self, apart: float = 0) -> list[tuple[float, str]]:
        """The middle and the name of each superclass, except those too close to the previous one."""
        ends = [0, *self.breaks, len(self.above)]
        found: list[tuple[float, str]] = []
        for start, end in pairwise(ends) if self.above else ():
            middle = (start + end - 1) / 2
            if not found or middle - found[-1][0] >= apart:
                found.append((middle, self.above[start]))
        return found


@dataclass(frozen=True)
class Axis:
    """One side of a plot: its title, range and ticks."""

    title: str = ""
    log: bool = False
    range: tuple[float, float] | None = None
    names: Sequence[str] | None = None
    bare: bool = False
    """No numbers, because they have no meaning."""


@dataclass(frozen=True)
class Plot:
    """Marks on a pair of axes."""

    marks: Sequence[Line | Bars | Words | Points | Heat]
    x: Axis = field(default_factory=Axis)
    y: Axis = field(default_factory=Axis)
    height: int = 340
    square: bool = False


@dataclass(frozen=True)
class Panel:
    """A place on the page: one plot for every choice of the figure's controls ("rounds|accuracy")."""

    plots: Mapping[str, Plot]
    title: str = ""
    label: str | None = None
    wide: bool = False


@dataclass(frozen=True)
class Control:
    """A choice that all panels of a figure follow."""

    name: str
    options: Sequence[str]
    slider: bool = False
    start: int = 0


@dataclass(frozen=True)
class Figure:
    """A figure with a sentence on how to read it; if it has no panels, `missing` says why."""

    id: str
    title: str
    caption: str = ""
    panels: Sequence[Panel] = ()
    columns: int = 2
    """Panels are side by side on a wide screen."""
    controls: Sequence[Control] = ()
    notes: Sequence[str] = ()
    key: Sequence[tuple[str, str, str]] = ()
    """What colours mean apart from methods: name, colour, symbol."""
    table: Sequence[Sequence[str]] = ()
    """Numbers that belong to the figure; the first row names the columns, the first column the methods."""
    missing: str = ""
    paper: Sequence[str] | None = None
    """The choices that are saved for papers; None: all."""


def thin(count: int, most: int = MOST_POINTS) -> np.ndarray:
    """Indices of the points to draw: evenly spaced, including the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))


def thinned(count: int, what: str, most: int = MOST_POINTS) -> list[str]:
    """A note if not all are drawn."""
    return [f"{most} of {count:,} {what} are drawn, evenly spaced."] if count > most else []


def columns(panels: int) -> int:
    """The number of panels side by side: three, or two if that leaves no gap."""
    return 2 if panels in (1, 2, 4) else 3


def rows_high(rows: int) -> int:
    """Pixels of a plot with a bar in every row."""
    return 90 + rows * (46 if rows <= 6 else 28)


def not_drawn(labels: Sequence[str], most: int = MOST_PANELS) -> list[str]:
    """A note that names the methods that have no panel, because there are too many."""
    return [f"Not drawn, because {len(labels)} are many: {'; '.join(labels[most:])}."] if len(labels) > most else []


def shorten(name: str, most: int = 16) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def told_apart(names: Sequence[str], most: int) -> list[str]:
    """Names shortened to about this many letters. Names that begin alike keep their ends too, and more if that is not
    enough."""
    short = [shorten(name, most) for name in names]
    ends = [f"{name[:4]}…{name[5 - most :]}" if len(name) > most else name for name in names]
    cut = [end if short.count(start) > 1 else start for start, end in zip(short, ends, strict=True)]
    return cut if len(set(cut)) == len(set(names)) else told_apart(names, most + 4)
