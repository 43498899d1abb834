"""Accuracies from counters that can be added, so methods never count by hand."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from protofed.method import Method


class Correct(NamedTuple):
    """Right answers (C,) and samples (C,) by true class."""

    right: Tensor
    samples: Tensor
    # If requested, answers (C, C) by true and predicted class, or pairs of scores and labels. () + () is ().
    said: Any = ()

    def __add__(self, other: "Correct") -> "Correct":  # type: ignore[override]
        return Correct(self.right + other.right, self.samples + other.samples, self.said + other.said)

    def accuracy(self, weight: Tensor | None = None) -> float | None:
        """Share of right answers, weighted by class; None if there are no samples.

        FedNH's weights: all ones give GM; ones for the classes a client holds give PM(V); each class's share of the
        training data gives PM(L).
        """
        weight = torch.ones_like(self.samples) if weight is None else weight.to(self.samples)
        asked = float((weight * self.samples).sum())
        return float((weight * self.right).sum()) / asked if asked > 0 else None

    def per_class(self) -> list[float | None]:
        return [float(r / n) if n > 0 else None for r, n in zip(self.right, self.samples, strict=True)]

    def balanced(self) -> float | None:
        """Balanced accuracy: the share of right answers in each class, averaged over the classes with samples."""
        return spread(self.per_class()).mean


Tally = dict[str, Correct]  # "head", "head_own", "proto", "proto_own"
SCORES = "scores of "  # in front of the name of a count that should keep all scores
NOBODY = -1  # the label of padding


def tally(
    scores: Mapping[str, Tensor], y: Tensor, own: Tensor, mask: Tensor | None = None, confusion: str = ""
) -> Tally:
    """Count right answers for every score (B, C), among all classes and among the client's own (C,); mask 0 is padding.

    `confusion` names the count that also records the predicted classes or, behind SCORES, the scores themselves.
    """
    result: Tally = {}
    for name, score in scores.items():
        classes = score.shape[1]
        numbers = torch.arange(classes, device=y.device)
        truth = (y[:, None] == numbers).to(torch.float64)
        truth = truth if mask is None else truth * mask[:, None]
        for suffix, allowed in (("", score), ("_own", score.masked_fill(~own, -torch.inf))):
            best, guess = allowed.max(1)
            answered = torch.isfinite(best)  # -inf everywhere means no answer
            right = ((guess == y) & answered).to(truth.dtype)
            said: Any = ()
            if name + suffix == confusion:
                said = truth.T @ ((guess[:, None] == numbers) & answered[:, None]).to(truth.dtype)
            if SCORES + name + suffix == confusion:
                said = ((allowed.double(), y if mask is None else torch.where(mask > 0, y, NOBODY)),)
            result[name + suffix] = Correct(truth.T @ right, truth.sum(0), said)
    return result


def add(left: Tally, right: Tally) -> Tally:
    return {name: left[name] + right[name] for name in left}


def without_answers(tallies: Sequence[Tally]) -> list[Tally]:
    """The same without confusion matrices and scores, which are large."""
    return [{kind: correct._replace(said=()) for kind, correct in tally.items()} for tally in tallies]


def of_one_length(tallies: Sequence[Tally]) -> list[Tally]:
    """The same, so that they can be stacked: the scores of each in one piece, padded to the longest."""
    kinds = [kind for kind in (tallies[0] if tallies else ()) if isinstance(tallies[0][kind].said, tuple)]
    found = [dict(tally) for tally in tallies]
    for kind in (kind for kind in kinds if tallies[0][kind].said):
        longest = max(sum(len(y) for _, y in tally[kind].said) for tally in tallies)
        for tally in found:
            scores, y = _in_one(tally[kind].said)
            more = longest - len(y)
            padded = (
                torch.cat([scores, scores.new_zeros(more, scores.shape[1])]),
                torch.cat([y, y.new_full((more,), NOBODY)]),
            )
            tally[kind] = tally[kind]._replace(said=(padded,))
    return found


def _in_one(said: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    scores, labels = zip(*said, strict=True)
    return torch.cat(scores), torch.cat(labels)


def auc(correct: Correct) -> float | None:
    """Area under the ROC curve, from the scores that a count kept. For each class, it is the share of pairs (a sample
    of the class and one of another class) in which the first has the higher odds of the class; ties count half. Then
    the mean over the classes that have both kinds of samples. With two classes, both have the same area. None if no
    class has both."""
    if not correct.said:
        return None
    scores, y = (part.cpu().numpy() for part in _in_one(correct.said))
    scores, y = scores[y != NOBODY], y[y != NOBODY]
    areas = [_area(_odds(scores, c), y == c) for c in np.unique(y)] if len(np.unique(y)) > 1 else []
    return float(np.mean(areas)) if areas else None


def _odds(scores: np.ndarray, c: int) -> np.ndarray:
    """Log odds (B,) of a class by the softmax of scores (B, C); of two classes exactly the difference."""
    others = np.delete(scores, c, axis=1)
    best = others.max(1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        rest = np.log(np.exp(others - np.where(np.isfinite(best), best, 0)).sum(1)) + best[:, 0]
        odds: np.ndarray = scores[:, c] - rest
    return np.where(np.isnan(odds), 0, odds)  # no class has a score: all samples tie


def _area(odds: np.ndarray, positive: np.ndarray) -> float:
    """The share of pairs in the right order, computed from ranks; equal odds share their mean rank."""
    _, place, many = np.unique(odds, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(many) - (many - 1) / 2)[place]
    p, n = int(positive.sum()), int((~positive).sum())
    return float((ranks[positive].sum() - p * (p + 1) / 2) / (p * n))


class Spread(NamedTuple):
    """How a number varies over clients."""

    mean: float | None
    std: float | None  # of the population
    worst10: float | None  # mean of the worst tenth, at least one client


def spread(values: Sequence[float | None]) -> Spread:
    """Computed over the clients that have the number."""
    known = np.sort([v for v in values if v is not None])
    if not len(known):
        return Spread(None, None, None)
    worst = known[: max(1, math.ceil(len(known) / 10))]
    return Spread(float(known.mean()), float(known.std()), float(worst.mean()))


def judged_by(method: Method) -> str:
    """The name of the count that a client's own test set is judged by."""
    return method.inference + ("_own" if method.candidates == "own" else "")


def client_accuracies(tallies: Sequence[Tally], kind: str) -> list[float | None]:
    """The accuracies of all clients, computed together."""
    right = torch.stack([t[kind].right for t in tallies]).sum(1).tolist()
    asked = torch.stack([t[kind].samples for t in tallies]).sum(1).tolist()
    return [r / n if n > 0 else None for r, n in zip(right, asked, strict=True)]


def own_numbers(method: Method, tallies: Sequence[Tally]) -> dict[str, Any]:
    """Clients on their own test sets."""
    main = spread(client_accuracies(tallies, judged_by(method)))
    mean = {kind: spread(client_accuracies(tallies, kind)).mean for kind in tallies[0]}
    suffix = "_own" if method.candidates == "own" else ""
    return {
        "accuracy_mean": main.mean,
        "accuracy_std": main.std,
        "accuracy_worst10": main.worst10,
        "accuracy_head_mean": mean["head"],
        "accuracy_head_own_mean": mean["head_own"],
        "accuracy_proto_mean": mean.get(f"proto{suffix}"),
        "accuracy_proto_own_mean": mean.get("proto_own"),
        "accuracy_proto_all_mean": mean.get("proto"),
    }


def mean_accuracy(method: Method, tallies: Sequence[Tally]) -> float | None:
    """Mean accuracy over clients, by the count that their own test sets are judged by."""
    return spread(client_accuracies(tallies, judged_by(method))).mean


def global_numbers(method: Method, tally: Tally | None) -> dict[str, Any]:
    """The global model on the global test set: GM."""
    by = {kind: tally[kind].accuracy() if tally and kind in tally else None for kind in ("head", "proto")}
    return {
        "global_accuracy": by[method.inference],
        "global_accuracy_head": by["head"],
        "global_accuracy_proto": by["proto"],
    }


def personal_numbers(method: Method, tallies: Sequence[Tally], counts: Tensor) -> dict[str, Any]:
    """Personal models on the global test set: PM(V) averages over the classes a client holds, PM(L) by their shares."""
    each = [personal(t[method.inference], n) for t, n in zip(tallies, counts, strict=True)]
    return {"pm_v": spread([held for held, _ in each]).mean, "pm_l": spread([share for _, share in each]).mean}


def personal(correct: Correct, counts: Tensor) -> tuple[float | None, float | None]:
    """PM(V) and PM(L) of one client with these training samples per class (C,)."""
    return correct.accuracy((counts > 0).double()), correct.accuracy(counts / counts.sum().clamp(min=1))
