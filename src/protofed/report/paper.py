"""The figures for papers: PNG, SVG and PDF, drawn with matplotlib from the same marks as the page."""

import io
import re
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from protofed.atomic import write_atomically
from protofed.report.figure import Axis, Bars, Figure, Heat, Line, Panel, Plot, Points, Words, told_apart
from protofed.report.marks import MOST_NAMES, SYMBOLS, draw_mark
from protofed.report.style import LINES, counted

FORMATS = ("png", "svg", "pdf")
STYLE: dict[Any, Any] = {
    "font.size": 9, "axes.titlesize": 9, "axes.labelsize": 9, "xtick.labelsize": 8, "ytick.labelsize": 8,
    "legend.fontsize": 8, "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.7,
    "axes.grid": True, "grid.color": "#e6e9ed", "grid.linewidth": 0.6, "axes.axisbelow": True, "lines.linewidth": 1.5,
    "pdf.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "protofed", "xtick.major.size": 2.5,
    "ytick.major.size": 2.5, "text.parse_math": False,
}  # fmt: skip
WIDTHS, TALL = {1: 5.4, 2: 3.5, 3: 2.4}, 2.4  # inches of a panel, by how many are side by side
LETTERS = 13  # of a title in an inch
SMALL = 17  # of a warning


def save(
    figures: Sequence[Figure],
    folder: Path,
    tell: Callable[[int, int], None] | None = None,
    note: Callable[[str], object] = warnings.warn,
    caveats: Sequence[str] = (),
) -> int:
    """Write every figure in every format, with warnings for readers; returns the number of figures."""
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [(some, key) for some in figures if some.panels for key in _keys(some)]
    fonts, lacking = fallbacks(set("".join(caveats)).union(*(_letters(some, key) for some, key in jobs)))
    if lacking:
        note(f"{folder}: no installed font has {' '.join(sorted(lacking))}; the figures have boxes instead")
    for done, (some, key) in enumerate(jobs):
        if tell is not None:
            tell(done, len(jobs))
        _write(partial(draw, some, key, caveats), folder / name(some, key), FORMATS, fonts, 300)
    return len(jobs)


def write_one(some: Figure, stem: Path, key: str = "", kinds: Sequence[str] = FORMATS) -> list[Path]:
    """Write one figure with its title above it; returns the files."""
    fonts, _ = fallbacks(_letters(some, key) | set(some.title))
    return _write(partial(draw, some, key, title=some.title), stem, kinds, fonts, 140)


def _write(make: Callable[[], Canvas], stem: Path, kinds: Sequence[str], fonts: Sequence[str], dpi: int) -> list[Path]:
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in kinds]
    with mpl.rc_context(STYLE | {"font.family": ["sans-serif", *fonts]}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # what a note says
        canvas = make()
        for kind, path in zip(kinds, paths, strict=True):
            content = io.BytesIO()
            stamp = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)  # the same bytes again
            canvas.savefig(content, format=kind, dpi=dpi, bbox_inches="tight", pad_inches=0.04, metadata=stamp)
            write_atomically(path, content.getvalue())
    return paths


def _keys(some: Figure) -> list[str]:
    return list(some.paper if some.paper is not None else some.panels[0].plots)


def _letters(some: Figure, key: str) -> set[str]:
    """All choices of a figure's controls that are written."""
    texts = [text for text, _, _ in some.key]
    for panel in some.panels:
        plot = panel.plots[key]
        texts += [panel.title, plot.x.title, plot.y.title, *(plot.x.names or ()), *(plot.y.names or ())]
        for mark in plot.marks:
            texts += [mark.name] if isinstance(mark, Line) else mark.text if isinstance(mark, Words) else ()
            texts += [*mark.rows, *mark.columns] if isinstance(mark, Heat) else ()
    return {letter for text in texts for letter in text if letter.isprintable()}


def fallbacks(letters: set[str]) -> tuple[list[str], set[str]]:
    """Installed fonts that have the letters that the usual font lacks, and the letters that no font has."""
    lacking = letters - _has(font_manager.findfont(font_manager.FontProperties()), letters)
    plain = [font for font in font_manager.fontManager.ttflist if font.style == "normal" and font.weight == 400]
    files = {font.name: font.fname for font in plain if "Last Resort" not in font.name} if lacking else {}  # has boxes
    found = {font: has for font, file in sorted(files.items()) if (has := _has(file, lacking))}
    fonts = []
    while lacking and found:
        best = max(found, key=lambda font: (len(found[font] & lacking), "Sans" in font))
        if more := found.pop(best) & lacking:
            fonts.append(best)
            lacking -= more
    return fonts, lacking


def _has(file: str, letters: set[str]) -> set[str]:
    font = font_manager.get_font(file)
    return {letter for letter in letters if font.get_char_index(ord(letter))}


def name(some: Figure, key: str) -> str:
    """The file's name, from the figure and the choice."""
    return "-".join([some.id, *re.findall(r"[a-z0-9]+", key.lower())])


def draw(some: Figure, key: str, caveats: Sequence[str] = (), title: str = "") -> Canvas:
    """One figure with one choice of its controls; warnings or a title are above it."""
    panels = [panel for panel in some.panels if panel.plots[key].marks]
    columns = 1 if some.id == "partition" else min(some.columns, max(1, len(panels)))
    rows = -(-len(panels) // columns)
    square = bool(panels) and panels[0].plots[key].square
    wide = min(3.5, WIDTHS[columns]) if square else WIDTHS[columns]
    tall = max((_height(panel.plots[key]) for panel in panels), default=TALL)
    canvas = Canvas(figsize=(columns * wide, rows * tall), layout="constrained")
    FigureCanvasAgg(canvas)
    places: list[Axes] = list(canvas.subplots(rows, columns, squeeze=False).flat) if panels else []
    for place, panel in zip(places, panels, strict=False):
        _panel(place, panel, key, wide)
    for place in places[len(panels) :]:
        place.set_visible(False)
    room = _legend(canvas, some, panels, key) + _above(canvas, caveats or [title], bool(caveats))
    canvas.set_size_inches(columns * wide, rows * tall + room)  # the plots keep their size
    return canvas


def _height(plot: Plot) -> float:
    bars = [mark for mark in plot.marks if isinstance(mark, Bars) and mark.sideways]
    if bars:
        return 0.7 + 0.28 * len(plot.y.names or ())
    if any(isinstance(mark, Points) for mark in plot.marks) and plot.y.names:
        return 0.8 + 0.19 * len(plot.y.names)
    heat = next((mark for mark in plot.marks if isinstance(mark, Heat)), None)
    if heat is not None and not plot.square:
        return max(TALL, 0.8 + 0.13 * min(len(heat.rows), MOST_NAMES))
    return 3.1 if plot.square or plot.x.bare else TALL


def _panel(axes: Axes, panel: Panel, key: str, wide: float) -> None:
    plot = panel.plots[key]
    if panel.title:
        axes.set_title(textwrap.fill(panel.title, int(LETTERS * wide)), loc="left")
    ends: dict[Any, float] = {}
    for mark in plot.marks:
        draw_mark(mark, axes, ends)
    for side, axis in (("x", plot.x), ("y", plot.y)):
        _axis(axes, side, axis)
    if plot.square and not axes.images:
        axes.set_aspect("equal")


def _axis(axes: Axes, side: str, axis: Axis) -> None:
    along = axes.xaxis if side == "x" else axes.yaxis
    along.set_label_text(axis.title)
    if axis.log:
        (axes.set_xscale if side == "x" else axes.set_yscale)("log")
    if axis.range is not None:
        (axes.set_xlim if side == "x" else axes.set_ylim)(*axis.range)
    if axis.bare:
        along.set_ticks([])
        axes.spines[:].set_visible(False)
    if axis.names is not None and side == "x":  # of bars, which are counted from 1
        along.set_ticks(range(1, len(axis.names) + 1), axis.names, fontsize=7 if len(axis.names) > 20 else 8)
    elif axis.names is not None:
        along.set_ticks(range(len(axis.names)), told_apart(axis.names, 32))
        along.set_inverted(True)
        if axis.range is None:
            along.grid(False)
            axes.set_ylim(len(axis.names) - 0.5, -0.5)
    elif counted(axis.title) and not axis.log:
        along.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))


def _legend(canvas: Canvas, some: Figure, panels: Sequence[Panel], key: str) -> float:
    """A legend of methods, if a panel has several, and of other colours; returns its height in inches."""
    lines = [m for panel in panels if panel.label is None for m in panel.plots[key].marks if isinstance(m, Line)]
    marks = {m.name: Line2D([], [], color=m.colour, ls=LINES[m.dash], label=m.name) for m in lines if m.name}
    for text, colour, symbol in some.key:
        marks[text] = Line2D([], [], ls="", marker=SYMBOLS[symbol], color=colour or "#555555", ms=5, label=text)
    if len(marks) < 2:
        return 0.0
    columns, letters = min(len(marks), 6), int(LETTERS * canvas.get_figwidth() / 2)  # longer names take several lines
    while (size := (legend := _listed(canvas, marks, columns, letters)).get_window_extent()).width > canvas.bbox.width:
        if columns == 1 and letters < 5:
            break
        legend.remove()
        columns, letters = (columns - 1, letters) if columns > 1 else (1, 3 * letters // 4)
    return float(size.height) / canvas.dpi + 0.1


def _above(canvas: Canvas, texts: Sequence[str], warning: bool) -> float:
    """Warnings for readers, or a title, above all panels; returns the height in inches."""
    room = int((SMALL if warning else LETTERS) * canvas.get_figwidth())
    lines = [line for text in texts for part in text.splitlines() for line in textwrap.wrap(part, room)]
    if lines:
        look = {"fontsize": 7, "color": "#b3261e"} if warning else {"fontsize": 9}
        canvas.suptitle("\n".join(lines), x=0.01, ha="left", **look)
    return (0.13 if warning else 0.16) * len(lines)


def _listed(canvas: Canvas, marks: Mapping[str, Line2D], columns: int, letters: int) -> Legend:
    names = [textwrap.fill(name, letters) for name in marks]
    return canvas.legend(list(marks.values()), names, loc="outside lower center", ncols=columns, frameon=False)
