"""Accuracies from counters that add: nothing is counted twice, and nothing by hand."""

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
    said: Any = ()  # answers (C, C) by true class and class said, where that was asked; nothing adds to nothing

    def __add__(self, other: "Correct") -> "Correct":  # type: ignore[override]
        return Correct(self.right + other.right, self.samples + other.samples, self.said + other.said)

    def accuracy(self, weight: Tensor | None = None) -> float | None:
        """Share of right answers, classes weighted; None where there is no sample to judge by.

        With FedNH's weights: all ones is GM, one for every class held is PM(V), the share of each class in the
        training data is PM(L).
        """
        weight = torch.ones_like(self.samples) if weight is None else weight.to(self.samples)
        asked = float((weight * self.samples).sum())
        return float((weight * self.right).sum()) / asked if asked > 0 else None

    def per_class(self) -> list[float | None]:
        return [float(r / n) if n > 0 else None for r, n in zip(self.right, self.samples, strict=True)]


Tally = dict[str, Correct]  # "head", "head_own", "proto", "proto_own"


def tally(
    scores: Mapping[str, Tensor], y: Tensor, own: Tensor, mask: Tensor | None = None, confusion: str = ""
) -> Tally:
    """Count right answers for every score (B, C), among all classes and among the client's own (C,); mask 0 is none.

    `confusion` names the count in which every answer is counted by the class that was said.
    """
    result: Tally = {}
    for name, score in scores.items():
        classes = score.shape[1]
        numbers = torch.arange(classes, device=y.device)
        truth = (y[:, None] == numbers).to(torch.float64)
        truth = truth if mask is None else truth * mask[:, None]
        for suffix, allowed in (("", score), ("_own", score.masked_fill(~own, -torch.inf))):
            best, guess = allowed.max(1)
            answered = torch.isfinite(best)  # -inf everywhere is no answer
            right = ((guess == y) & answered).to(truth.dtype)
            said: Any = ()
            if name + suffix == confusion:
                said = truth.T @ ((guess[:, None] == numbers) & answered[:, None]).to(truth.dtype)
            result[name + suffix] = Correct(truth.T @ right, truth.sum(0), said)
    return result


def add(left: Tally, right: Tally) -> Tally:
    return {name: left[name] + right[name] for name in left}


def without_answers(tallies: Sequence[Tally]) -> list[Tally]:
    """The same without who said what, which is large."""
    return [{kind: correct._replace(said=()) for kind, correct in tally.items()} for tally in tallies]


class Spread(NamedTuple):
    """How a number is spread over clients."""

    mean: float | None
    std: float | None  # of the population
    worst10: float | None  # mean of the worst tenth, at least one client


def spread(values: Sequence[float | None]) -> Spread:
    """Over those clients that have the number."""
    known = np.sort([v for v in values if v is not None])
    if not len(known):
        return Spread(None, None, None)
    worst = known[: max(1, math.ceil(len(known) / 10))]
    return Spread(float(known.mean()), float(known.std()), float(worst.mean()))


def judged_by(method: Method) -> str:
    """The count that decides on a client's own test set."""
    return method.inference + ("_own" if method.candidates == "own" else "")


def accuracies(tallies: Sequence[Tally], kind: str) -> list[float | None]:
    """The accuracy of every client, all at once."""
    right = torch.stack([t[kind].right for t in tallies]).sum(1).tolist()
    asked = torch.stack([t[kind].samples for t in tallies]).sum(1).tolist()
    return [r / n if n > 0 else None for r, n in zip(right, asked, strict=True)]


def own_numbers(method: Method, tallies: Sequence[Tally]) -> dict[str, Any]:
    """Clients on their own test sets."""
    main = spread(accuracies(tallies, judged_by(method)))
    mean = {kind: spread(accuracies(tallies, kind)).mean for kind in tallies[0]}
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


def global_own_numbers(method: Method, tallies: Sequence[Tally]) -> dict[str, Any]:
    """The global model on the clients' own test sets."""
    return {"accuracy_global_mean": spread(accuracies(tallies, judged_by(method))).mean}


def validation_numbers(method: Method, tallies: Sequence[Tally], who: str) -> dict[str, Any]:
    """Personal models, or the global one, on the clients' validation samples: to choose a round by."""
    key = "validation_mean" if who == "personal" else "validation_global_mean"
    return {key: spread(accuracies(tallies, judged_by(method))).mean}


def global_numbers(method: Method, tally: Tally | None) -> dict[str, Any]:
    """The global model on the global test set: GM."""
    by = {kind: tally[kind].accuracy() if tally and kind in tally else None for kind in ("head", "proto")}
    return {
        "global_accuracy": by[method.inference],
        "global_accuracy_head": by["head"],
        "global_accuracy_proto": by["proto"],
    }


def personal_numbers(method: Method, tallies: Sequence[Tally], counts: Tensor) -> dict[str, Any]:
    """Personal models on the global test set: PM(V) counts the classes a client holds, PM(L) by how often."""
    each = [personal(t[method.inference], n) for t, n in zip(tallies, counts, strict=True)]
    return {"pm_v": spread([held for held, _ in each]).mean, "pm_l": spread([share for _, share in each]).mean}


def personal(correct: Correct, counts: Tensor) -> tuple[float | None, float | None]:
    """PM(V) and PM(L) of one client with these training samples per class (C,)."""
    return correct.accuracy((counts > 0).double()), correct.accuracy(counts / counts.sum().clamp(min=1))
