"""Embeddings of test samples with local and global prototypes, round by round."""

from collections.abc import Sequence

import numpy as np

from protofed.report.figure import Axis, Control, Figure, Panel, Plot, Points, columns, not_drawn, shorten
from protofed.report.figures.projection import Chosen, Projected, choose_samples, project
from protofed.report.groups import Group
from protofed.report.runs import Run
from protofed.report.style import class_colours

MOST_METHODS, MOST_KEY = 8, 20
_known: dict[tuple[str, int], tuple[Chosen, dict[str, Projected]]] = {}


def make(groups: Sequence[Group]) -> Figure:
    pairs = [(group, run) for group in groups if (run := group.first(_has)) is not None]
    if not pairs:
        return Figure("embeddings", "Embeddings and prototypes", missing="No run kept embeddings (views.npz).")
    pairs.sort(key=lambda pair: not _prototyped(pair[1]))  # those with prototypes first, else as they come
    shown = pairs[:MOST_METHODS]
    placed = [_projected(run) for _, run in shown]
    names = _names(shown[0][1])
    steps = max(len(chosen.rounds) for chosen, _ in placed)
    planes = [name for name in ("t-SNE", "PCA") if all(name in planes for _, planes in placed)]
    ticks = [_tick(shown, placed, step) for step in range(steps)]
    panels = [
        Panel(
            {
                f"{plane}|{tick}": _plot(run, chosen, planes_of[plane], min(step, len(chosen.rounds) - 1), group.label)
                for plane in planes
                for step, tick in enumerate(ticks)
            },
            f"{group.label}, seed {run.seed}",
            group.label,
            wide=len(shown) == 1,
        )
        for (group, run), (chosen, planes_of) in zip(shown, placed, strict=True)
    ]
    colours = class_colours(len(names))
    same = all(_names(run) == names for _, run in shown)
    few = same and len(names) <= MOST_KEY
    return Figure(
        id="embeddings",
        title="Embeddings and prototypes",
        caption="Test samples as the clients' own models embed them (dots), with local (diamonds) and global "
        "prototypes (stars), coloured by class. Training with prototypes should give separate clusters, each around "
        "its star. All rounds of a method share one projection, so a point that moves has moved. Between methods, "
        "and for t-SNE between far-off clusters, distances mean nothing.",
        controls=[Control("projection", planes), Control("round", ticks, slider=True, start=steps - 1)],
        columns=columns(len(shown)),
        panels=panels,
        key=[
            ("test sample", "", "circle"), ("local prototype", "", "diamond"), ("global prototype", "", "star"),
            *[(shorten(name), colour, "circle") for name, colour in zip(names, colours, strict=True) if few],
        ],
        notes=[
            "Each projection is fitted once to samples and prototypes of all rounds kept, with a fixed seed.",
            *([] if few or not same else [f"{len(names)} classes are too many for a key: hover names them."]),
            *([] if same else ["Classes differ between methods, and so do their colours: hover names them."]),
            *not_drawn([group.label for group, _ in pairs], MOST_METHODS),
        ],
        paper=[f"{plane}|{tick}" for plane in planes for tick in dict.fromkeys((ticks[0], ticks[-1]))],
    )  # fmt: skip


def _prototyped(run: Run) -> bool:
    """Whether there are prototypes to show, of clients or of the server."""
    return bool(run.views["local_held"].any()) or len(run.views["global_class"]) > 0


def _has(run: Run) -> bool:
    return "z" in run.views and run.views["z"].size > 0


def _projected(run: Run) -> tuple[Chosen, dict[str, Projected]]:
    """Projected once while the file is unchanged, for pages that refresh."""
    key = (str(run.folder.resolve()), (run.folder / "views.npz").stat().st_mtime_ns)
    if key not in _known:
        chosen = choose_samples(run)
        _known[key] = chosen, project(run, chosen)
    return _known[key]


def _names(run: Run) -> list[str]:
    most = max(int(run.views["labels"].max()) + 1, run.views["local_held"].shape[2])
    return run.class_names if len(run.class_names) >= most else [str(c) for c in range(most)]


def _tick(shown: Sequence[tuple[Group, Run]], placed: Sequence[tuple[Chosen, dict[str, Projected]]], step: int) -> str:
    """The round of a step; methods that kept other rounds are listed with theirs."""
    rounds = [
        int(run.views["rounds"][chosen.rounds[min(step, len(chosen.rounds) - 1)]])
        for (_, run), (chosen, _) in zip(shown, placed, strict=True)
    ]
    return " / ".join(map(str, dict.fromkeys(rounds)))


def _plot(run: Run, chosen: Chosen, places: Projected, step: int, label: str) -> Plot:
    names, colours = _names(run), class_colours(len(_names(run)))
    views = run.views
    labels = views["labels"][chosen.samples]
    clients = views["client"][chosen.samples]
    samples = Points(
        "test samples",
        *_xy(places.samples[step]),
        colours=[colours[c] for c in labels],
        sizes=6,
        opacity=0.75,
        label=label,
        hover=[f"{names[c]}, client {k}" for c, k in zip(labels, clients, strict=True)],
    )
    marks = [samples]
    if len(chosen.local):
        owner, kind = views["local_clients"][chosen.local[:, 0]], chosen.local[:, 1]
        hover = [f"{names[c]}, local prototype of client {k}" for c, k in zip(kind, owner, strict=True)]
        marks.append(_prototypes("local prototypes", places.local[step], kind, colours, 9, "diamond", hover, label))
    if len(chosen.global_):
        kind = views["global_class"][chosen.global_]
        hover = [f"{names[c]}, global prototype" for c in kind]
        marks.append(
            _prototypes(
                "global prototypes",
                places.global_[step],
                kind,
                colours,
                17 if len(names) <= 30 else 10,
                "star",
                hover,
                label,
            )
        )
    every = np.concatenate([part.reshape(-1, 2) for part in places])
    (left, low), (right, high) = np.nanmin(every, 0), np.nanmax(every, 0)
    across, up = 0.05 * (right - left) + 1e-9, 0.05 * (high - low) + 1e-9
    at = int(views["rounds"][chosen.rounds[step]])
    x = Axis(f"round {at}", range=(float(left - across), float(right + across)), bare=True)
    y = Axis(range=(float(low - up), float(high + up)), bare=True)
    return Plot(marks, x, y, height=400)


def _prototypes(
    name: str,
    at: np.ndarray,
    kind: np.ndarray,
    colours: list[str],
    size: float,
    symbol: str,
    hover: list[str],
    label: str,
) -> Points:
    here = [i for i in range(len(at)) if np.isfinite(at[i]).all()]
    return Points(
        name,
        *_xy(at[here]),
        colours=[colours[kind[i]] for i in here],
        sizes=size,
        symbol=symbol,
        opacity=1.0 if symbol == "star" else 0.6,  # of many, what lies below is seen
        outline=True,
        label=label,
        hover=[hover[i] for i in here],
    )


def _xy(at: np.ndarray) -> tuple[list[float], list[float]]:
    return at[:, 0].tolist(), at[:, 1].tolist()
