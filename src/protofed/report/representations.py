"""Two-dimensional embeddings with the head's class vectors, panel by panel, as in figures 1 and 2 of FedNH."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Circle
from matplotlib.patheffects import withStroke
from PIL import Image

from protofed.atomic import write_atomically
from protofed.report.pictures import COLOURS

SHOWN = 200  # points of a class in a panel: more only hide each other and swell the file
INK, FAINT = "#333333", "#cccccc"


class Panel(NamedTuple):
    """Embeddings (N, 2) of classes (N,), and what the head compares them with: one vector (2,) per class."""

    title: str
    z: np.ndarray
    y: np.ndarray
    vectors: np.ndarray


def angles(vectors: np.ndarray) -> np.ndarray:
    """Degrees between every two rows of (C, D), in the order (0, 1), (0, 2), ..., (1, 2), ..."""
    rows = vectors.astype(np.float64)
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(min=1e-12)
    first, second = np.triu_indices(len(rows), 1)
    return np.degrees(np.arccos((rows @ rows.T)[first, second].clip(-1, 1)))


def draw(panels: Sequence[Panel], path: Path, caption: str = "", columns: int = 2) -> None:
    """Write a PNG: points coloured by class, arrows for the class vectors, one legend for all panels."""
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(3.3 * columns, 3.55 * rows + 0.75), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, panel in zip(grid, panels, strict=False):
        _panel(axes, panel)
    for axes in grid[len(panels) :]:
        axes.axis("off")
    classes = max(len(panel.vectors) for panel in panels)
    marks = [Line2D([], [], ls="", marker="o", ms=6, color=_colour(k), label=f"class {k}") for k in range(classes)]
    figure.legend(
        handles=marks, loc="outside upper center", ncols=min(classes, 6), frameon=False, labelcolor=INK, fontsize=9
    )
    figure.supxlabel(caption, fontsize=8.5, color=INK)
    FigureCanvasAgg(figure)
    content, small = io.BytesIO(), io.BytesIO()
    figure.savefig(content, dpi=140, format="png")
    few = (
        Image.open(content).convert("RGB").quantize(128, dither=Image.Dither.NONE)
    )  # a third of the size, no loss seen
    few.save(small, format="png", optimize=True)
    write_atomically(path, small.getvalue())


def _panel(axes: Axes, panel: Panel) -> None:
    length = np.linalg.norm(panel.z, axis=1)
    unit = bool(np.allclose(length, 1, atol=1e-3))
    reach = 1.0 if unit else float(np.quantile(length, 0.98))
    random = np.random.default_rng(0)
    of_class = [np.flatnonzero(panel.y == k) for k in range(len(panel.vectors))]
    shown = np.concatenate([rows[np.linspace(0, len(rows) - 1, SHOWN).astype(int)] for rows in of_class if len(rows)])
    shown = random.permutation(np.unique(shown))  # so that no class lies on top of the others
    z = panel.z[shown]
    if unit:
        axes.add_patch(Circle((0, 0), 1, fill=False, color=FAINT, lw=0.8, zorder=0))
        z = z * random.uniform(0.96, 1.04, (len(z), 1))  # a ring, because on a line they would hide each other
    axes.scatter(z[:, 0], z[:, 1], s=9, c=[_colour(k) for k in panel.y[shown]], alpha=0.55, linewidths=0, zorder=1)
    tips = panel.vectors * (0.8 * reach / np.linalg.norm(panel.vectors, axis=1).max())
    for k, tip in enumerate(tips):
        arrow = {"arrowstyle": "-|>", "color": _colour(k), "lw": 2.2, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 13}
        arrow["path_effects"] = [withStroke(linewidth=4, foreground="white")]
        axes.annotate("", tip, (0, 0), arrowprops=arrow, zorder=3)
        x, y = tip * (1 + 0.09 * reach / np.linalg.norm(tip))
        label = axes.text(x, y, str(k), color=_colour(k), fontsize=10, weight="bold", ha="center", va="center")
        label.set(path_effects=[withStroke(linewidth=3.5, foreground="white")], zorder=4)
    axes.set(xlim=(-1.15 * reach, 1.15 * reach), ylim=(-1.15 * reach, 1.15 * reach), aspect="equal")
    axes.set_title(panel.title, fontsize=9.5, color=INK)
    axes.axhline(0, color=FAINT, lw=0.6, zorder=0)
    axes.axvline(0, color=FAINT, lw=0.6, zorder=0)
    axes.tick_params(labelsize=7, colors=INK, length=2)
    for spine in axes.spines.values():
        spine.set_color(FAINT)


def _colour(k: int) -> str:
    return COLOURS[k % len(COLOURS)]
