"""Figures of an entry, each as PNG, SVG and PDF."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D

from protofed.atomic import write_atomically
from protofed.report.pictures import COLOURS
from protofed.reproduce.embed import cosines
from protofed.reproduce.entry import Entry
from protofed.reproduce.measure import Done, Views
from protofed.reproduce.result import Measured, columns_of, mean_std, rows_of, there

FORMATS = ("png", "svg", "pdf")
OF_NUMBERS = ("lines", "bars")  # figures that need no run's folder


def draw(entry: Entry, measured: Measured, done: Sequence[Done], views: Views, folder: Path) -> list[Path]:
    """Write the entry's figure; nothing where there is nothing to draw."""
    if entry.figure is None or not measured.rows or not (done or entry.figure.kind in OF_NUMBERS):
        return []
    kinds = {"lines": _lines, "bars": _bars, "curves": _curves, "embeddings": _embeddings, "plane": _embeddings}
    if entry.figure.kind == "similarity":
        canvas = _similarity(entry, done, views)
    else:
        canvas = kinds[entry.figure.kind](entry, measured, done, views)
    if canvas is None:
        return []
    canvas.suptitle(entry.title + (f"\n{measured.label}" if measured.label else ""), fontsize=10)
    return save(canvas, folder / "figure")


def save(canvas: Canvas, stem: Path) -> list[Path]:
    """The figure in every format."""
    FigureCanvasAgg(canvas)
    paths = []
    for kind in FORMATS:
        content = io.BytesIO()
        metadata: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})
        canvas.savefig(content, format=kind, dpi=140, metadata=metadata)
        paths.append(stem.with_suffix(f".{kind}"))
        write_atomically(paths[-1], content.getvalue())
    return paths


def _grid(many: int, columns: int, width: float = 3.6, height: float = 3.3) -> tuple[Canvas, list[Any]]:
    columns = min(many, columns)
    rows = -(-many // columns)
    canvas = Canvas(figsize=(width * columns, height * rows + 0.5), layout="constrained")
    axes = canvas.subplots(rows, columns, squeeze=False).ravel().tolist()
    for spare in axes[many:]:
        spare.axis("off")
    return canvas, axes[:many]


def _plain(axes: Any, title: str, x: str = "", y: str = "") -> None:
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.25, lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _fair(measured: Measured, points: Sequence[tuple[str, str]]) -> Measured:
    """Of every row the seeds that all its points have, where there is one: other seeds have other clients."""
    rows = {}
    for row, columns in measured.rows.items():
        here = {name: columns[name] for _, name in points if there(columns.get(name, []))}
        shared = [all(values[i] is not None for values in here.values()) for i in range(len(measured.seeds))]
        pick = shared if any(shared) else [True] * len(shared)
        rows[row] = {name: [v if ok else None for v, ok in zip(here[name], pick, strict=True)] for name in here}
    return measured._replace(rows=rows)


def _along(entry: Entry, measured: Measured) -> dict[str, list[tuple[str, str]]]:
    """By group of columns, the values of the parameter and the columns that have them."""
    assert entry.figure is not None
    found: dict[str, list[tuple[str, str]]] = {}
    for column in columns_of(entry, measured):
        value = column.at.get(entry.figure.x) or column.title.rpartition("= ")[2]
        found.setdefault(column.group, []).append((value, column.name))
    return found


def _lines(entry: Entry, measured: Measured, done: Sequence[Done], views: Views) -> Canvas:
    """A number against a parameter, one line a method with its deviation over seeds."""
    assert entry.figure is not None
    by_group = _along(entry, measured)
    canvas, grid = _grid(len(by_group), 2, 4.4)
    columns = {column.name: column for column in columns_of(entry, measured)}
    for axes, (group, points) in zip(grid, by_group.items(), strict=True):
        fair = _fair(measured, points)
        for colour, row in zip(COLOURS * 3, rows_of(entry, measured), strict=False):
            known = [(float(x), mean_std(fair, row, columns[name])) for x, name in points]
            shown = [(x, *number[:2]) for x, number in known if number]
            if shown:
                x, mean, std = (np.array(part) for part in zip(*shown, strict=True))
                axes.errorbar(x, mean, std, color=colour, marker="o", ms=4, lw=1.6, capsize=2.5, label=row)
        if entry.figure.log:
            axes.set_xscale("log")
            axes.set_xticks([float(x) for x, _ in points], [x for x, _ in points])
            axes.minorticks_off()
        percent = columns[points[0][1]].unit == "%"
        _plain(axes, group or entry.shows, entry.figure.x, "accuracy, %" if percent else group)
        axes.legend(frameon=False, fontsize=7)
    return canvas


def _bars(entry: Entry, measured: Measured, done: Sequence[Done], views: Views) -> Canvas:
    """One bar a value of the parameter, one panel a group of columns."""
    by_group = _along(entry, measured)
    canvas, grid = _grid(len(by_group), 4, 2.6)
    columns = {column.name: column for column in columns_of(entry, measured)}
    row = rows_of(entry, measured)[0]
    for axes, (group, points) in zip(grid, by_group.items(), strict=True):
        fair = _fair(measured, points)
        numbers = [mean_std(fair, row, columns[name]) or (np.nan, 0, 0) for _, name in points]
        heights, errors = [number[0] for number in numbers], [number[1] for number in numbers]
        axes.bar(range(len(points)), heights, yerr=errors, capsize=3, color=COLOURS[: len(points)])
        axes.set_xticks(range(len(points)), [x for x, _ in points])
        low = np.nanmin(np.array(heights) - np.array(errors))
        axes.set_ylim(max(0, low - 5), None)
        _plain(axes, group, "K", "accuracy, %")
    return canvas


def _curves(entry: Entry, measured: Measured, done: Sequence[Done], views: Views) -> Canvas:
    """Accuracy by round with the band of the seeds, one panel an experiment."""
    assert entry.figure is not None
    experiments = list(dict.fromkeys(one.cell.labels["experiment"] for one in done))
    canvas, grid = _grid(len(experiments), 2, 4.6)
    named = [(entry.figure.metric, "", "-")]
    if entry.figure.dashed:
        named = [(entry.figure.metric, ", by classifier", "-"), (entry.figure.dashed, ", by prototype", "--")]
    for axes, experiment in zip(grid, experiments, strict=True):
        for colour, row in zip(COLOURS * 3, entry.rows, strict=False):
            runs = [
                o.result for o in done if (o.cell.labels["experiment"], o.cell.labels["method"]) == (experiment, row)
            ]
            for key, called, style in named:
                by_round: dict[int, list[float]] = {}
                for line in (line for run in runs for line in run.rounds if line.get(key) is not None):
                    by_round.setdefault(line["round"], []).append(100 * line[key])
                if by_round:
                    x = sorted(by_round)
                    low, high = [min(by_round[r]) for r in x], [max(by_round[r]) for r in x]
                    axes.fill_between(x, low, high, color=colour, alpha=0.15, lw=0)
                    axes.plot(x, [np.mean(by_round[r]) for r in x], style, color=colour, lw=1.6, label=row + called)
        _plain(axes, experiment, "round", "accuracy, %")
        axes.legend(frameon=False, fontsize=7, loc="lower right")
    return canvas


def _first(entry: Entry, done: Sequence[Done]) -> dict[str, Done]:
    """The run of the first seed of every method that the figure shows."""
    assert entry.figure is not None
    shown: dict[str, Done] = {}
    for one in done:
        label = one.cell.labels["method"]
        if not entry.figure.methods or label in entry.figure.methods:
            shown.setdefault(label, one)
    return shown


class Panel(NamedTuple):
    """Points (N, 2) of classes (N,), and a mark (2,) for some of them."""

    title: str
    points: np.ndarray
    y: np.ndarray
    marks: np.ndarray


def _panels(entry: Entry, done: Sequence[Done], views: Views) -> tuple[list[Panel], list[int]]:
    """One panel a method, or a method and client, and the classes that they show."""
    assert entry.figure is not None
    figure, panels = entry.figure, []
    classes: list[int] = []
    for label, one in _first(entry, done).items():
        view = views.view(one)
        classes = view["classes"].tolist()
        vectors = view.get("vectors", np.zeros((0, 0)))
        if figure.kind == "embeddings" and (figure.clients or one.cell.experiment.method_name != "fedproto"):
            vectors = vectors[:0]  # rows of a head are no points among the samples
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
                panels.append(Panel(title, flat[: len(z)][own], y[own], marks))
    return panels, classes


def _embeddings(entry: Entry, measured: Measured, done: Sequence[Done], views: Views) -> Canvas:
    """Test samples in two dimensions, coloured by class; large points are prototypes, lines are class vectors."""
    assert entry.figure is not None
    panels, classes = _panels(entry, done, views)
    colours = {c: COLOURS[i % len(COLOURS)] for i, c in enumerate(classes)}
    canvas, grid = _grid(len(panels), 2)
    for axes, (title, points, y, marks) in zip(grid, panels, strict=True):
        axes.scatter(
            points[:, 0],
            points[:, 1],
            s=6 if len(points) > 300 else 16,
            c=[colours[int(c)] for c in y],
            alpha=0.6,
            linewidths=0,
        )
        shown = [colours[c] for c in range(len(marks))]
        if entry.figure.kind == "plane":
            reach = float(np.quantile(np.linalg.norm(points, axis=1), 0.99))
            for colour, (x, up) in zip(shown, marks / np.linalg.norm(marks, axis=1, keepdims=True), strict=True):
                axes.plot([0, reach * x], [0, reach * up], color=colour, lw=1.5, ls="--")
            axes.set(xlim=(-1.1 * reach, 1.1 * reach), ylim=(-1.1 * reach, 1.1 * reach), aspect="equal")
        else:
            axes.scatter(marks[:, 0], marks[:, 1], s=90, c=shown, edgecolors="black")
        axes.set_title(title, fontsize=9)
        axes.set_xticks([])
        axes.set_yticks([])
    names = dict(zip(entry.figure.classes, entry.figure.names, strict=True))
    handles = [Line2D([], [], ls="", marker="o", color=colours[c], label=names.get(c, f"class {c}")) for c in classes]
    canvas.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=7)
    return canvas


def _flat(z: np.ndarray, by: str) -> np.ndarray:
    from sklearn.decomposition import PCA  # a library that takes a second to load
    from sklearn.manifold import TSNE

    if z.shape[1] == 2:
        return z
    if by == "pca":
        return PCA(2, random_state=0).fit_transform(z)
    return TSNE(2, perplexity=min(30, max(2, len(z) // 4)), init="pca", random_state=0).fit_transform(z)


def _similarity(entry: Entry, done: Sequence[Done], views: Views) -> Canvas | None:
    """Cosine of every two class vectors, classes in the order of their groups."""
    shown: list[tuple[str, Mapping[str, np.ndarray]]] = [(k, views.view(one)) for k, one in _first(entry, done).items()]
    shown = [(label, view) for label, view in shown if "vectors" in view]
    if not shown:
        return None
    canvas, grid = _grid(len(shown), 3)
    for axes, (label, view) in zip(grid, shown, strict=True):
        groups = view.get("groups", np.arange(len(view["vectors"])))
        order = np.argsort(groups, kind="stable")
        image = axes.imshow(cosines(view["vectors"])[order][:, order], cmap="RdBu_r", vmin=-1, vmax=1)
        if "groups" in view:
            for edge in np.flatnonzero(np.diff(groups[order])) + 0.5:
                axes.axhline(edge, color="black", lw=0.15)
                axes.axvline(edge, color="black", lw=0.15)
        axes.set_title(label, fontsize=9)
        axes.set_xticks([])
        axes.set_yticks([])
    canvas.colorbar(image, ax=grid, shrink=0.7, label="cosine")
    return canvas
