"""Pictures of a run: accuracy against rounds, and who fares how."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from protofed.atomic import write_atomically
from protofed.report.style import LINES, looks

COLOURS = ("#1f6fb4", "#d9622b", "#2a9d5c", "#8a4fb0", "#c23b4a", "#6b6b6b", "#b8a11c", "#19a7b5", "#7a5230", "#e377c2")
MOST_BARS = 300  # with more, the gaps between them are thinner than a pixel, and each takes its time


def curve(rounds: Sequence[Mapping[str, Any]], method: str, path: Path) -> None:
    """One run: mean accuracy with the spread over clients, and the worst tenth."""
    known = [line for line in rounds if line.get("accuracy_mean") is not None]
    x = [line["round"] for line in known]
    mean = 100 * np.array([line["accuracy_mean"] for line in known])
    std = 100 * np.array([line["accuracy_std"] for line in known])
    figure, axes = _canvas("Clients on their own test sets", "round", "accuracy, %")
    axes.fill_between(x, mean - std, np.minimum(mean + std, 100), color=COLOURS[0], alpha=0.15, lw=0, label="± std")
    axes.plot(x, mean, color=COLOURS[0], lw=2, label=f"{method}, mean over clients", marker="o" if len(x) < 3 else "")
    worst = [100 * line["accuracy_worst10"] for line in known]
    axes.plot(x, worst, color=COLOURS[1], lw=1.2, ls="--", label="worst tenth")
    axes.legend(frameon=False, loc="lower right")
    save(figure, path)


def clients(records: Sequence[Mapping[str, Any]], method: str, path: Path) -> None:
    """One bar a client, sorted; of very many, their outline."""
    ranked = sorted((r for r in records if r["accuracy"] is not None), key=lambda r: r["accuracy"])
    values = [100 * r["accuracy"] for r in ranked]
    mean = float(np.mean(values)) if values else 0.0
    title = f"{method}: every client on its own test set (dashed: mean {mean:.1f} %)"
    figure, axes = _canvas(title, "client, sorted", "accuracy, %")
    axes.grid(visible=False, axis="x")
    places = np.arange(len(ranked))
    if len(ranked) <= MOST_BARS:
        axes.bar(places, values, color=COLOURS[0], width=0.8)
    else:
        axes.fill_between(places, values, step="mid", color=COLOURS[0], lw=0)
    axes.axhline(mean, color=COLOURS[1], lw=1.4, ls="--")
    if len(ranked) <= 40:
        axes.set_xticks(places, [str(r["client"]) for r in ranked], fontsize=8)
    save(figure, path)


def curves(series: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]], path: Path, key: str = "accuracy_mean") -> None:
    """Several methods in one picture, each with the band of its seeds."""
    figure, axes = _canvas("Clients on their own test sets", "round", "mean accuracy, %")
    for look, (method, runs) in zip(looks(len(series)), series.items(), strict=True):
        by_round: dict[int, list[float]] = {}
        for lines in runs:
            for line in lines:
                if line.get(key) is not None:
                    by_round.setdefault(line["round"], []).append(100 * line[key])
        x = sorted(by_round)
        mean = np.array([np.mean(by_round[r]) for r in x])
        low, high = (np.array([pick(by_round[r]) for r in x]) for pick in (min, max))
        axes.fill_between(x, low, high, color=look.colour, alpha=0.15, lw=0)
        kind: dict[str, Any] = {"color": look.colour, "ls": LINES[look.dash], "marker": "o" if len(x) < 3 else ""}
        axes.plot(x, mean, lw=2, label=method, **kind)
    axes.legend(frameon=False, loc="lower right")
    save(figure, path)


def _canvas(title: str, x: str, y: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.25, lw=0.6)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure: Figure, path: Path) -> None:
    """As PNG, whole or not at all."""
    FigureCanvasAgg(figure)
    content = io.BytesIO()
    figure.savefig(content, dpi=140, format="png")
    write_atomically(path, content.getvalue())
