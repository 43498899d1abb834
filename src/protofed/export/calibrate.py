"""Confidence for an exported model: temperatures, and the distance from which a sample is unknown."""

from typing import Any

import torch
from torch import Tensor

from protofed.data.batches import Samples
from protofed.export.graph import Network, Subject, raw

CHUNK = 256


def calibrate(subject: Subject, network: Network, quantile: float) -> dict[str, Any]:
    """Temperatures by likelihood, and the distance from which a sample is unknown, from samples that the client
    knows."""
    samples = _few(subject.known)
    candidates = subject.own if subject.method.candidates == "own" else torch.ones_like(subject.own)
    of = f"{len(samples.y)} {subject.known_from} samples"
    told: dict[str, Any] = {"temperature": {"head": 1.0, "proto": 1.0}, "fitted_to": of, "unknown": None}
    if not len(samples.y):
        return told | {"fitted_to": "nothing: there are no samples"}
    judge = network if subject.judge is None else Network(subject._replace(client=subject.judge)).eval()
    scores, apart = _answers(subject, judge, samples)
    told["temperature"]["head"] = temperature(scores, samples.y, candidates)
    if apart is None:
        return told
    told["temperature"]["proto"] = temperature(-(apart**2), samples.y, candidates)
    near = _nearest(apart, candidates)
    near = near[torch.isfinite(near)]
    if not len(near):
        return told
    above = float(torch.quantile(near, quantile))
    told["unknown"] = {
        "above": above,
        "quantile": quantile,
        "of": f"the distances of {of} to the nearest prototype",
        "own_test_unknown": _share(subject, network, above, candidates),
    }
    return told


def temperature(scores: Tensor, y: Tensor, candidates: Tensor) -> float:
    """The divisor of the scores (N, C) that makes the labels most likely, to two steps in ten."""
    allowed = candidates & torch.isfinite(scores).any(0)
    scores = scores.masked_fill(~allowed, -torch.inf)
    inside = allowed[y] & torch.isfinite(scores.gather(1, y[:, None])[:, 0])
    scores, y = scores[inside], y[inside]
    if not len(y) or int(allowed.sum()) < 2:
        return 1.0
    spread = (scores.amax(1) - scores.masked_fill(~torch.isfinite(scores), torch.inf).amin(1)).median().clamp(min=1e-6)
    choices = (spread * torch.logspace(-2, 1, 31)).tolist()
    return float(min(choices, key=lambda t: float(torch.nn.functional.cross_entropy(scores / t, y))))


def _nearest(apart: Tensor, candidates: Tensor) -> Tensor:
    """Distances (N,) to the nearest prototype of any candidate."""
    return apart.masked_fill(~candidates, torch.inf).amin(1)


def _answers(subject: Subject, network: Network, samples: Samples) -> tuple[Tensor, Tensor | None]:
    parts = []
    with torch.no_grad():
        for x in torch.split(samples.x, CHUNK):
            parts.append(network(raw(x, subject.inputs)))
    columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    return columns[1], columns[2] if len(columns) > 2 else None


def _share(subject: Subject, network: Network, above: float, candidates: Tensor) -> float | None:
    """The share of the client's own test samples that would be called unknown."""
    samples = _few(subject.test)
    if not len(samples.y):
        return None
    _, apart = _answers(subject, network, samples)
    assert apart is not None
    return float((_nearest(apart, candidates) > above).double().mean())


def _few(samples: Samples, most: int = 2000) -> Samples:
    """Evenly spaced samples if there are very many."""
    rows = torch.linspace(0, len(samples.y) - 1, min(most, len(samples.y))).long()
    return Samples(samples.x[rows], samples.y[rows])
