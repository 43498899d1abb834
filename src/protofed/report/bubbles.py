"""Who has what, as a picture (clients x classes, area by count) and as a few numbers."""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from protofed.atomic import write_atomically
from protofed.data.domain import Domain
from protofed.data.split import Split

COLOURS = ("#1f6fb4", "#d9622b", "#2a9d5c", "#8a4fb0", "#c23b4a", "#b8a11c", "#19a7b5", "#7a5230", "#e377c2", "#6b6b6b")
# From a tint that still shows on white, to a blue dark enough to tell the largest counts apart.
BLUES = LinearSegmentedColormap.from_list("blues", ["#b9d6ee", "#4a94cf", "#12407a"])
MOST_BUBBLES = 60  # clients or classes; with more, a bubble is too small to compare and a heat map says it better
MOST_SHOWN = 1000  # clients; with more, a column of the heat map is thinner than a pixel
INK, FAINT = "#333333", "#dddddd"
FONT = 8

Mark = tuple[str, float, Any]
"""A label, an area in square points, a colour."""


def draw_split(split: Split, domains: Sequence[Domain], path: str | Path) -> None:
    """The picture of a split; clients are coloured by domain where there are several."""
    names = [domain.name for domain in domains]
    largest = max(domains, key=lambda domain: domain.classes)
    counts = split.counts(domains)
    title = f"{', '.join(names)}: {len(counts)} clients, {counts.sum():,} training samples"
    per_client = [names[d] for d in split.domain] if len(domains) > 1 else None
    draw(counts, largest.class_names, title, path, per_client)


def draw(
    counts: np.ndarray, class_names: Sequence[str], title: str, path: str | Path, domains: list[str] | None = None
) -> None:
    """Write a PNG of counts (clients, classes); `domains` names each client's domain."""
    every = -(-len(counts) // MOST_SHOWN)
    if every > 1:
        while domains and math.gcd(every, len(set(domains))) > 1:
            every += 1  # clients are often dealt to domains in turn, and all of these are to be seen
        title = f"{title}; one client in {every} is shown"
        counts, domains = counts[::every], domains and domains[::every]
    clients, classes = counts.shape
    bubbles = max(clients, classes) <= MOST_BUBBLES
    # Inches per client and per class: fixed while there is room, then the whole picture is what is fixed.
    cell = next(size for most, size in ((25, 0.42), (40, 0.3), (np.inf, 0.2)) if max(clients, classes) <= most)
    width = max(clients * cell, 2.4) if bubbles else float(np.clip(clients * 0.1, 6, 14))
    height = max(classes * cell, 1.2) if bubbles else float(np.clip(classes * 0.26, 2.2, 9))
    figure = Figure(figsize=(width + 3, height + 1.6))
    FigureCanvasAgg(figure)
    # Placed in inches, so that a bubble's size in points can be computed from its cell; savefig crops the rest.
    axes = figure.add_axes((1.5 / (width + 3), 0.8 / (height + 1.6), width / (width + 3), height / (height + 1.6)))
    if bubbles:
        _bubbles(figure, axes, counts, cell, domains)
    else:
        _heat(figure, axes, counts)
    _labels(axes, class_names, clients, every, width, height)
    if domains is not None and not bubbles:
        _stripe(axes, domains)
    # Left-aligned above the plot: a long title then grows into the legend's room and not over both edges.
    axes.set_title(title, fontsize=10, color=INK, loc="left", pad=18 if domains is not None and not bubbles else 8)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150, bbox_inches="tight", pad_inches=0.15)
    write_atomically(Path(path), content.getvalue())


def _bubbles(figure: Figure, axes: Axes, counts: np.ndarray, cell: float, domains: list[str] | None) -> None:
    largest = max(int(counts.max()), 1)
    full = (0.88 * cell * 72) ** 2  # scatter's sizes are areas in square points
    client, label = np.nonzero(counts)
    values = counts[client, label]
    known = list(dict.fromkeys(domains or []))
    colour = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(known)}
    shade = BLUES(_tint(values, largest))
    axes.scatter(
        client,
        label,
        s=full * values / largest,
        c=[colour[domains[i]] for i in client] if domains is not None else shade,
        linewidths=0,
        zorder=2,
    )
    axes.set_xlim(-0.5, counts.shape[0] - 0.5)
    axes.set_ylim(counts.shape[1] - 0.5, -0.5)
    axes.set_xticks(np.arange(counts.shape[0] + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(counts.shape[1] + 1) - 0.5, minor=True)
    axes.grid(which="minor", color=FAINT, lw=0.6, zorder=0)
    axes.set_axisbelow(True)
    grey = "#9a9a9a"
    sizes = [
        (f"{n:,}", full * n / largest, BLUES(_tint(n, largest)) if domains is None else grey)
        for n in _round_counts(largest)
    ]
    _panel(figure, axes, sizes, [(_short(name), 50.0, colour[name]) for name in known])


def _tint(count: Any, largest: int) -> Any:
    # Not from the very lightest: the smallest bubble is two pixels wide and has to show.
    return 0.25 + 0.75 * np.sqrt(count / largest)


def _panel(figure: Figure, axes: Axes, sizes: list[Mark], domains: list[Mark]) -> None:
    """What sizes and colours mean, on the right: matplotlib's own legend makes no room for large markers."""
    place = axes.get_position()
    panel = figure.add_axes((place.x1 + 0.12 / figure.get_figwidth(), place.y0, 0.1, place.height))
    # One unit is one point, downwards from the upper edge; nothing is clipped, so the panel may outgrow the plot.
    panel.set(xlim=(0, 7.2 * figure.get_figwidth()), ylim=(72 * place.height * figure.get_figheight(), 0))
    panel.axis("off")
    widest = max(np.sqrt(area) for _, area, _ in sizes + domains)
    y = 0.0
    for title, marks in (("training samples", sizes), ("domain", domains)):
        if marks:
            panel.text(0, y, title, fontsize=FONT, color=INK, va="top")
            y += 16
        for label, area, tint in marks:
            row = max(float(np.sqrt(area)) + 3, 13)
            panel.scatter([widest / 2], [y + row / 2], s=area, color=tint, linewidths=0, clip_on=False)
            panel.text(widest + 6, y + row / 2, label, fontsize=FONT, color=INK, va="center_baseline")
            y += row
        y += 8


def _heat(figure: Figure, axes: Axes, counts: np.ndarray) -> None:
    shown = np.ma.masked_equal(counts.T, 0)
    # The square root, as with a bubble's radius: a few samples stay visible beside a few thousand.
    largest = max(int(counts.max()), 2)
    norm = PowerNorm(0.5, vmin=1, vmax=largest)
    image = axes.imshow(shown, cmap=BLUES, norm=norm, aspect="auto", interpolation="nearest")
    left, bottom, width, height = axes.get_position().bounds
    bar = figure.colorbar(
        image,
        cax=figure.add_axes(
            (left + width + 0.15 / figure.get_figwidth(), bottom, 0.15 / figure.get_figwidth(), height)
        ),
    )
    ticks = np.array(MaxNLocator(5, integer=True).tick_values(1, largest))
    bar.set_ticks([1, *ticks[(ticks > 1) & (ticks <= largest)]])
    bar.set_label("training samples (white: none)", fontsize=9, color=INK)
    bar.ax.tick_params(labelsize=FONT, colors=INK)
    bar.outline.set_visible(False)


def _stripe(axes: Axes, domains: list[str]) -> None:
    """A coloured band above the heat map, one cell per client, that says whose domain is which."""
    known = list(dict.fromkeys(domains))
    axes.broken_barh(
        [(i - 0.5, 1) for i in range(len(domains))],
        (1.02, 0.04),
        facecolors=[COLOURS[known.index(name) % len(COLOURS)] for name in domains],
        lw=0,
        clip_on=False,
        transform=axes.get_xaxis_transform(),
    )
    marks = [
        Line2D([], [], ls="", marker="s", ms=7, color=COLOURS[i % len(COLOURS)], label=_short(name))
        for i, name in enumerate(known)
    ]
    axes.legend(
        handles=marks,
        loc="upper left",
        bbox_to_anchor=(0, -0.16),
        ncols=6,
        frameon=False,
        fontsize=FONT,
        labelcolor=INK,
    )


def _labels(axes: Axes, class_names: Sequence[str], clients: int, every: int, width: float, height: float) -> None:
    wide = 0.3 if clients * every <= 1000 else 0.06 * len(str(clients * every)) + 0.1  # inches of a label
    step = _step(clients, width / wide)
    shown = range(0, clients, step)
    axes.set_xticks(list(shown), [str(i * every) for i in shown], fontsize=FONT)
    step = _step(len(class_names), height / 0.16)
    axes.set_yticks(np.arange(0, len(class_names), step), [_short(name) for name in class_names[::step]], fontsize=FONT)
    axes.set_xlabel("client", fontsize=9, color=INK)
    axes.set_ylabel("class", fontsize=9, color=INK)
    axes.tick_params(which="both", length=0, colors=INK)
    for spine in axes.spines.values():
        spine.set_color(FAINT)


def _step(count: int, room: float) -> int:
    """Every how many-th label is written so that they do not touch: 1, 2, 5, 10, ..."""
    steps = [m * 10**e for e in range(6) for m in (1, 2, 5)]
    return next(step for step in steps if count / step <= room)


def _round_counts(largest: int) -> list[int]:
    """Up to three round numbers for the legend: near the largest, a third of it, a tenth of it."""
    rounded = []
    for wanted in (largest, largest / 3, largest / 10):
        power = 10 ** int(np.floor(np.log10(max(wanted, 1))))
        rounded.append(max(m * power for m in (1, 2, 5) if m * power <= max(wanted, 1)))
    return list(dict.fromkeys(rounded))


def _short(name: str, most: int = 20) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


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
