"""Figures of an entry, each as PNG, SVG and PDF."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from protofed.papers.reproduce.embed import row_cosines
from protofed.papers.reproduce.entry import PaperEntry
from protofed.papers.reproduce.measure import Done, Views
from protofed.papers.reproduce.result import EntryResult, columns_of, mean_std, measured_rows, there
from protofed.report import paper, pictures
from protofed.report.figure import Axis, Bars, Figure, Heat, Line, Panel, Plot, Points
from protofed.report.style import COLOURS

OF_NUMBERS = ("lines", "bars")  # figures that need no run's folder


def draw_entry(
    entry: PaperEntry, measured: EntryResult, done: Sequence[Done], views: Views, folder: Path
) -> list[Path]:
    """Write the entry's figure, if there is anything to draw."""
    if entry.figure is None or not measured.rows or not (done or entry.figure.kind in OF_NUMBERS):
        return []
    kinds = {"lines": _lines, "bars": _bars, "curves": _curves, "embeddings": _embeddings, "plane": _embeddings}
    made = kinds.get(entry.figure.kind, _similarity)(entry, measured, done, views)
    if not made.panels:
        return []
    title = entry.title + (f"\n{measured.label}" if measured.label else "")
    return paper.write_one(replace(made, title=title), folder / "figure")


def _shown(plots: Mapping[str, Plot], columns: int = 2, key: Sequence[tuple[str, str, str]] = ()) -> Figure:
    """One panel per plot."""
    panels = [Panel({"": plot}, title) for title, plot in plots.items()]
    return Figure("figure", "", panels=panels, columns=min(columns, max(1, len(panels))), key=key)


def _fair(measured: EntryResult, points: Sequence[tuple[str, str]]) -> EntryResult:
    """For each row, the seeds that all its points have, if there are any: other seeds have other clients."""
    rows = {}
    for row, columns in measured.rows.items():
        here = {name: columns[name] for _, name in points if there(columns.get(name, []))}
        shared = [all(values[i] is not None for values in here.values()) for i in range(len(measured.seeds))]
        pick = shared if any(shared) else [True] * len(shared)
        rows[row] = {name: [v if ok else None for v, ok in zip(here[name], pick, strict=True)] for name in here}
    return measured._replace(rows=rows)


def _along(entry: PaperEntry, measured: EntryResult) -> dict[str, list[tuple[str, str]]]:
    """For each group of columns, the values of the parameter and the columns that have them."""
    assert entry.figure is not None
    found: dict[str, list[tuple[str, str]]] = {}
    for column in columns_of(entry, measured):
        value = column.at.get(entry.figure.x) or column.title.rpartition("= ")[2]
        found.setdefault(column.group, []).append((value, column.name))
    return found


def _lines(entry: PaperEntry, measured: EntryResult, done: Sequence[Done], views: Views) -> Figure:
    """A number against a parameter, one line per method, within a band of its deviation over seeds."""
    assert entry.figure is not None
    plots: dict[str, Plot] = {}
    columns = {column.name: column for column in columns_of(entry, measured)}
    for group, points in _along(entry, measured).items():
        fair = _fair(measured, points)
        marks: list[Line | Points] = []
        for colour, row in zip(COLOURS * 3, measured_rows(entry, measured), strict=False):
            known = [(float(x), mean_std(fair, row, columns[name])) for x, name in points]
            shown = [(x, *number[:2]) for x, number in known if number]
            if shown:
                x, mean, std = (np.array(part) for part in zip(*shown, strict=True))
                marks += [Line(row, x, mean, colour, low=mean - std, high=mean + std), Points(row, x, mean, colour)]
        percent = columns[points[0][1]].unit == "%"
        along = Axis(entry.figure.x, log=entry.figure.log)
        plots[group or entry.shows] = Plot(marks, along, Axis("accuracy, %" if percent else group))
    return _shown(plots)


def _bars(entry: PaperEntry, measured: EntryResult, done: Sequence[Done], views: Views) -> Figure:
    """One bar per value of the parameter, with its deviation; one panel per group of columns."""
    plots: dict[str, Plot] = {}
    columns = {column.name: column for column in columns_of(entry, measured)}
    row = measured_rows(entry, measured)[0]
    for group, points in _along(entry, measured).items():
        fair = _fair(measured, points)
        numbers = [mean_std(fair, row, columns[name]) or (np.nan, 0.0, 0) for _, name in points]
        ends = [(mean - std, mean + std) for mean, std, _ in numbers]
        colours = [COLOURS[i % len(COLOURS)] for i in range(len(points))]
        bars = Bars(row, list(range(1, len(points) + 1)), [mean for mean, _, _ in numbers], colours)
        spread = [Line("", [i, i], list(end), "#333333") for i, end in enumerate(ends, 1)]
        y = Axis("accuracy, %", range=(max(0.0, float(np.nanmin(ends)) - 5), float(np.nanmax(ends)) + 2))
        plots[group] = Plot([bars, *spread], Axis("K", names=[x for x, _ in points]), y)
    return _shown(plots, 3)


def _curves(entry: PaperEntry, measured: EntryResult, done: Sequence[Done], views: Views) -> Figure:
    """Accuracy by round with a band for the seeds; one panel per experiment."""
    assert entry.figure is not None
    plots: dict[str, Plot] = {}
    named = [(entry.figure.metric, "", "solid")]
    if entry.figure.dashed:
        named = [(entry.figure.metric, ", by classifier", "solid"), (entry.figure.dashed, ", by prototype", "dash")]
    for experiment in dict.fromkeys(one.cell.labels["experiment"] for one in done):
        lines = []
        for colour, row in zip(COLOURS * 3, entry.rows, strict=False):
            runs = [
                o.result for o in done if (o.cell.labels["experiment"], o.cell.labels["method"]) == (experiment, row)
            ]
            for key, called, dash in named:
                by_round: dict[int, list[float]] = {}
                for line in (line for run in runs for line in run.rounds if line.get(key) is not None):
                    by_round.setdefault(line["round"], []).append(100 * line[key])
                if by_round:
                    lines.append(pictures.band(row + called, by_round, colour, dash))
        plots[experiment] = Plot(lines, Axis("round"), Axis("accuracy, %"))
    return _shown(plots)


def _first(entry: PaperEntry, done: Sequence[Done]) -> dict[str, Done]:
    """The first seed's run of every method that the figure shows."""
    assert entry.figure is not None
    shown: dict[str, Done] = {}
    for one in done:
        label = one.cell.labels["method"]
        if not entry.figure.methods or label in entry.figure.methods:
            shown.setdefault(label, one)
    return shown


class ScatterPanel(NamedTuple):
    """Points (N, 2) of classes (N,), and a mark (2,) for some of them."""

    title: str
    points: np.ndarray
    y: np.ndarray
    marks: np.ndarray


def _panels(entry: PaperEntry, done: Sequence[Done], views: Views) -> tuple[list[ScatterPanel], list[int]]:
    """One panel per method, or per method and client, and the classes that they show."""
    assert entry.figure is not None
    figure, panels = entry.figure, []
    classes: list[int] = []
    for label, one in _first(entry, done).items():
        view = views.view(one)
        classes = view["classes"].tolist()
        vectors = view.get("vectors", np.zeros((0, 0)))
        if figure.kind == "embeddings" and (figure.clients or one.cell.experiment.method_name != "fedproto"):
            vectors = vectors[:0]  # rows of a head are not points among the samples
        everyone = np.unique(view["client"])
        who = everyone[: len(figure.clients)] if figure.clients else everyone
        for clients in [[client] for client in who] if figure.by == "tsne" and figure.clients else [who]:
            rows = np.isin(view["client"], clients)  # t-SNE places each by itself; all else has one plane for all
            z, y, owner = view["z"][rows], view["y"][rows], view["client"][rows]
            flat = _flat(np.concatenate([z, vectors]) if len(vectors) else z, figure.by)
            for client in clients if figure.clients else [None]:
                own = np.ones(len(z), bool) if client is None else owner == client
                title = label if client is None else f"{label}, client {client}"
                marks = flat[len(z) :]
                if client is not None and "own" in view:
                    marks = view["own"][everyone.tolist().index(client)]
                panels.append(ScatterPanel(title, flat[: len(z)][own], y[own], marks))
    return panels, classes


def _embeddings(entry: PaperEntry, measured: EntryResult, done: Sequence[Done], views: Views) -> Figure:
    """Test samples in two dimensions, coloured by class. Large points are prototypes, and lines are class vectors."""
    assert entry.figure is not None
    panels, classes = _panels(entry, done, views)
    colours = {c: COLOURS[i % len(COLOURS)] for i, c in enumerate(classes)}
    plots: dict[str, Plot] = {}
    for title, points, y, marks in panels:
        size = 4.0 if len(points) > 300 else 6.5
        dots = Points("samples", points[:, 0], points[:, 1], [colours[int(c)] for c in y], size, opacity=0.6)
        shown = [colours[c] for c in range(len(marks))]
        side = Axis(bare=True)
        drawn: list[Line | Points] = [dots]
        if entry.figure.kind == "plane":
            reach = float(np.quantile(np.linalg.norm(points, axis=1), 0.99))
            side = Axis(bare=True, range=(-1.1 * reach, 1.1 * reach))
            tips = reach * marks / np.linalg.norm(marks, axis=1, keepdims=True)
            drawn += [Line("", [0, x], [0, up], colour, "dash") for colour, (x, up) in zip(shown, tips, strict=True)]
        elif len(marks):
            drawn.append(Points("prototypes", marks[:, 0], marks[:, 1], shown, 15, outline=True))
        plots[title] = Plot(drawn, side, side, square=entry.figure.kind == "plane")
    names = dict(zip(entry.figure.classes, entry.figure.names, strict=True))
    return _shown(plots, key=[(names.get(c, f"class {c}"), colours[c], "circle") for c in classes])


def _flat(z: np.ndarray, by: str) -> np.ndarray:
    from sklearn.decomposition import PCA  # a library that takes a second to load
    from sklearn.manifold import TSNE

    if z.shape[1] == 2:
        return z
    close = min(30, max(2, len(z) // 4))
    how = PCA(2, random_state=0) if by == "pca" else TSNE(2, perplexity=close, init="pca", random_state=0)
    flat: np.ndarray = how.fit_transform(z)
    return flat


def _similarity(entry: PaperEntry, measured: EntryResult, done: Sequence[Done], views: Views) -> Figure:
    """The cosine of every two class vectors, with classes in the order of their groups."""
    plots: dict[str, Plot] = {}
    for label, view in ((label, views.view(one)) for label, one in _first(entry, done).items()):
        if "vectors" not in view:
            continue
        groups = view.get("groups", np.arange(len(view["vectors"])))
        order = np.argsort(groups, kind="stable")
        breaks = (np.flatnonzero(np.diff(groups[order])) + 1).tolist() if "groups" in view else []
        names = [str(i) for i in order]
        z = row_cosines(view["vectors"])[order][:, order]
        heat = Heat(z, names, names, "cosine", -1, 1, diverging=True, breaks=breaks)
        plots[label] = Plot([heat], square=True)
    return _shown(plots, 3)
