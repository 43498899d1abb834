"""The pictures that runs write: accuracy by round, accuracy by client, and the partition."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from protofed.data.domain import Domain
from protofed.data.split import Split
from protofed.report import paper
from protofed.report.figure import Axis, Bars, Figure, Line, Panel, Plot
from protofed.report.figures import clients as fares
from protofed.report.figures import partition
from protofed.report.style import COLOURS, looks

NAMED = 40  # clients whose numbers stand below their bars
OWN = "Clients on their own test sets"


def draw_run(rounds: Sequence[Mapping[str, Any]], method: str, path: Path) -> None:
    """One run: mean accuracy with the spread over clients, and the worst tenth."""
    known = [line for line in rounds if line.get("accuracy_mean") is not None]
    x = [line["round"] for line in known]
    mean, std, worst = (
        100 * np.array([line[f"accuracy_{key}"] for line in known]) for key in ("mean", "std", "worst10")
    )
    over = f"{method}, mean over clients, ± std"
    marks = [
        Line(over, x, mean.tolist(), COLOURS[0], low=mean - std, high=np.minimum(mean + std, 100)),
        Line("worst tenth", x, worst.tolist(), COLOURS[1], "dash"),
    ]
    _save(OWN, Plot(marks, Axis("round"), Axis("accuracy, %")), path)


def draw_clients(records: Sequence[Mapping[str, Any]], method: str, path: Path) -> None:
    """One bar per client, sorted; if there are very many, one for several."""
    ranked = sorted((r for r in records if r["accuracy"] is not None), key=lambda r: r["accuracy"])
    if not ranked:
        _save(f"{method}: no client has a test set", Plot([]), path)
        return
    y = 100 * fares.parts(np.array([r["accuracy"] for r in ranked]), min(len(ranked), fares.MOST_BARS))
    mean = 100 * float(np.mean([r["accuracy"] for r in ranked]))
    names = [str(r["client"]) for r in ranked] if len(ranked) <= NAMED else None
    x = Axis(
        f"client{'' if len(y) == len(ranked) else f's, {len(y)} equal parts of them'}, from worst to best", names=names
    )
    bars = Bars(method, list(range(1, len(y) + 1)), y.tolist(), COLOURS[0])
    line = Line("", [0.5, len(y) + 0.5], [mean, mean], COLOURS[1], "dash")
    title = f"{method}: every client on its own test set (dashed: mean {mean:.1f} %)"
    _save(title, Plot([bars, line], x, Axis("accuracy, %")), path)


def draw_comparison(series: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]], path: Path, judged: str = "") -> None:
    """Several methods in one picture, each with the band of its seeds; `judged` is the rule that all share."""
    marks = []
    for look, (method, runs) in zip(looks(len(series)), series.items(), strict=True):
        by_round: dict[int, list[float]] = {}
        for line in (line for lines in runs for line in lines if line.get("accuracy_mean") is not None):
            by_round.setdefault(line["round"], []).append(100 * line["accuracy_mean"])
        marks.append(band(method, by_round, look.colour, look.dash))
    _save(OWN, Plot(marks, Axis("round"), Axis(f"mean accuracy{judged}, %")), path)


def band(name: str, by_round: Mapping[int, Sequence[float]], colour: str, dash: str = "solid") -> Line:
    """The mean over seeds, in a band from the lowest to the highest."""
    x = sorted(by_round)
    mean, low, high = ([float(of(by_round[r])) for r in x] for of in (np.mean, min, max))
    return Line(name, x, mean, colour, dash, low=low, high=high)


def draw_split(split: Split, domains: Sequence[Domain], path: str | Path) -> None:
    """The partition; clients are coloured by domain if there are several."""
    names = [domain.name for domain in domains]
    largest = max(domains, key=lambda domain: domain.classes)
    counts = split.counts(domains)
    title = f"{', '.join(names)}: {len(counts)} clients, {counts.sum():,} training samples"
    draw_counts(counts, largest.class_names, title, path, [names[d] for d in split.domain] if len(names) > 1 else None)


def draw_counts(
    counts: np.ndarray, classes: Sequence[str], title: str, path: str | Path, domains: Sequence[str] | None = None
) -> None:
    """Write a PNG of counts (clients, classes); `domains` names each client's domain."""
    known = list(dict.fromkeys(domains or []))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(known)}
    plot, notes = partition.plot_of(counts, classes, [colours[name] for name in domains] if domains else None)
    key = [(name, colour, "square") for name, colour in colours.items()]
    _save("; ".join([title, *notes]), plot, path, key)


def _save(title: str, plot: Plot, path: str | Path, key: Sequence[tuple[str, str, str]] = ()) -> None:
    paper.write_one(Figure("", title, panels=[Panel({"": plot})], key=key), Path(path).with_suffix(""), kinds=["png"])
