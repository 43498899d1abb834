"""Proof of a method: `check_method(MyMethod())` plays it on a tiny federation and names the rule it breaks."""

from collections.abc import Callable, Sequence

import torch

from protofed.method import Method
from protofed.testing.absence import absent, empty, of_nobodys, remembered
from protofed.testing.broken import Broken, require, require_finite, require_same
from protofed.testing.fields import toml, values
from protofed.testing.sameness import grouping, order, padded_to, padding, purity, stacking, step
from protofed.testing.scores import predictions, require_prototypes, require_scores
from protofed.testing.travel import privacy, serialisation, uploads
from protofed.testing.trees import (
    Leaves,
    copied,
    difference,
    floats,
    leaked,
    leaves,
    means,
    names,
    names_on,
    numbers,
    under_names,
)
from protofed.testing.trial import (
    BATCH,
    CHUNK,
    CLASSES,
    COHORT,
    DIM,
    EMPTY,
    EPOCHS,
    HIDDEN,
    LABELS,
    NEVER,
    NOBODYS,
    OPTIMIZER,
    SEED,
    SHAPE,
    Round,
    Trial,
    padded,
    split,
    state_of,
)

__all__ = [
    "BATCH", "CHUNK", "CLASSES", "COHORT", "DIM", "EMPTY", "EPOCHS", "HIDDEN", "LABELS", "NEVER", "NOBODYS",
    "OPTIMIZER", "RULES", "SEED", "SHAPE", "Broken", "Leaves", "Round", "Trial", "absent", "check_method", "copied",
    "difference", "empty", "floats", "grouping", "leaked", "leaves", "means", "names", "names_on", "numbers",
    "of_nobodys", "order", "padded", "padded_to", "padding", "predictions", "privacy", "purity", "remembered",
    "require", "require_finite", "require_prototypes", "require_same", "require_scores", "serialisation", "split",
    "stacking", "state_of", "step", "toml", "under_names", "uploads", "values",
]  # fmt: skip

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
            raise AssertionError(f"{about} It raised {type(error).__name__}: {error}") from error
