"""Proof of a method: `check_method(MyMethod())` plays it on a tiny federation and names the rule it breaks."""

import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import protofed
from protofed.method import Method
from protofed.testing.absence import absent, empty
from protofed.testing.broken import Broken
from protofed.testing.fields import toml, values
from protofed.testing.sameness import grouping, order, padding, purity, stacking
from protofed.testing.scores import predictions
from protofed.testing.travel import privacy, serialisation, uploads
from protofed.testing.trial import Trial

__all__ = ["RULES", "check_method"]

RULES: tuple[Callable[[Trial], None], ...] = (
    values,
    toml,
    uploads,
    purity,
    absent,
    grouping,
    order,
    padding,
    empty,
    predictions,
    serialisation,
    stacking,
    privacy,
)


def check_method(method: Method, *, private: str | Sequence[str] | None = None) -> None:
    """Raise an AssertionError that names the first broken rule, what differed and what to do.

    What of a client's parameters is not sent under its name must not be sent at all; `private` (prefixes, such as
    "head.") claims that these are among them. Give a method whose server trains for long a copy with fewer steps.
    """
    trial = Trial(method, (private,) if isinstance(private, str) else tuple(private or ()))
    for rule in RULES:
        said = (rule.__doc__ or "").splitlines()[0]
        about = f"{type(method).__name__} breaks the rule {rule.__name__!r}: {said}"
        try:
            with torch.random.fork_rng(devices=[]):
                rule(trial)
        except Broken as broken:
            raise AssertionError(f"{about} {broken}") from broken.__cause__
        except Exception as error:
            raise AssertionError(f"{about} It raised {type(error).__name__}: {error}{_where(error)}") from error


def _where(error: Exception) -> str:
    """The last line outside protofed and torch that the error passed through."""
    ours = tuple(str(Path(package.__file__ or "").parent) for package in (protofed, torch))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    return f" ({frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""
