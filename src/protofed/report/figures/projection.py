"""Embeddings of all rounds in one plane, so that a point of one round can be compared with that of another."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from protofed.report.runs import Run

MOST_ROUNDS, MOST_LOCAL, MOST_GLOBAL, MOST_SAMPLES = 6, 40, 100, 150
MOST_TOGETHER = 1000  # points of all rounds together; t-SNE of that many takes some three seconds
LEAST_SAMPLES = 40


class Chosen(NamedTuple):
    """The part of a run's views that is drawn: numbers of rounds, samples, global and local prototypes (client,
    class)."""

    rounds: np.ndarray
    samples: np.ndarray
    global_: np.ndarray
    local: np.ndarray


class Projected(NamedTuple):
    """Places (rounds, points, 2) of the chosen points; NaN if a prototype is missing."""

    samples: np.ndarray
    global_: np.ndarray
    local: np.ndarray


def choose_samples(run: Run) -> Chosen:
    """Evenly spaced rounds, samples and prototypes, no more than can be drawn and projected in seconds."""
    views = run.views
    rounds = _spaced(len(views["rounds"]), MOST_ROUNDS)
    globals_ = np.flatnonzero(views["global_held"].any(0))
    globals_ = globals_[_spaced(len(globals_), MOST_GLOBAL)]
    local = np.argwhere(views["local_held"].any(0))
    local = local[_spaced(len(local), MOST_LOCAL)]
    room = MOST_TOGETHER // max(1, len(rounds)) - len(globals_) - len(local)
    samples = _spaced(len(views["labels"]), min(MOST_SAMPLES, max(LEAST_SAMPLES, room)))
    return Chosen(rounds, samples, globals_, local)


def _spaced(count: int, most: int) -> np.ndarray:
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)) if count else np.zeros(0, int)


def project(run: Run, chosen: Chosen) -> dict[str, Projected]:
    """By t-SNE and PCA, each fitted once to the points of all rounds."""
    views, (rounds, samples, globals_, local) = run.views, chosen
    parts = [views["z"][rounds][:, samples]]
    if len(globals_):
        held = views["global_held"][rounds][:, globals_]
        parts.append(np.where(held[..., None], views["global_prototypes"][rounds][:, globals_], np.nan))
    if len(local):
        rows = (rounds[:, None], local[:, 0], local[:, 1])
        parts.append(np.where(views["local_held"][rows][..., None], views["local_prototypes"][rows], np.nan))
    points = np.concatenate(parts, axis=1).astype(np.float64)
    known = np.isfinite(points).all(-1)
    cuts = np.cumsum([len(samples), len(globals_)])
    placed = {}
    for name, flat in _remembered(points[known].tobytes(), points.shape[-1]).items():
        plane = np.full((*points.shape[:2], 2), np.nan)
        plane[known] = flat
        placed[name] = Projected(*np.split(plane, cuts, axis=1))
    return placed


@lru_cache(maxsize=16)
def _remembered(points: bytes, width: int) -> dict[str, np.ndarray]:
    """The places of points (points, width), cached: a page that follows a run asks for the same ones again and
    again."""
    return _planes(np.frombuffer(points).reshape(-1, width))


def _planes(points: np.ndarray) -> dict[str, np.ndarray]:
    """Places (points, 2), computed in one thread so that sums, and therefore places, are always the same."""
    from sklearn.decomposition import PCA  # a library that takes a second to load
    from sklearn.manifold import TSNE

    points = points - points.mean(0)
    width = min(points.shape)
    with threadpool_limits(1):
        narrow = PCA(min(30, width), svd_solver="full").fit_transform(points)
        if width < 2:
            narrow = np.pad(narrow, ((0, 0), (0, 2 - width)))
        planes = {"PCA": narrow[:, :2]}
        if len(points) > 10 and narrow.std() > 0:
            perplexity = min(30.0, (len(points) - 1) / 4)
            tsne = TSNE(2, init="pca", random_state=0, perplexity=perplexity).fit_transform(narrow)
            planes = {"t-SNE": tsne, **planes}
    return planes
