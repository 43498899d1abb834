"""Rules about a method's fields."""

import tomllib
from dataclasses import FrozenInstanceError, asdict, fields, replace
from inspect import get_annotations

import tomli_w

from protofed.config import schema
from protofed.config.experiment import Experiment
from protofed.importing import path_of
from protofed.method import Method
from protofed.methods import METHODS
from protofed.testing.broken import Broken, require
from protofed.testing.trial import Trial


def values(trial: Trial) -> None:
    """A method is a value: hashable, frozen, and identified by its fields alone."""
    method, kind = trial.method, type(trial.method)
    known = {field.name for field in fields(method)}
    stray = [
        name
        for cls in kind.__mro__
        if cls not in Method.__mro__
        for name, hint in get_annotations(cls).items()
        if name not in known and "ClassVar" not in str(hint)
    ]
    decorate = f"Put @dataclass(frozen=True) on {kind.__name__}."
    require(not stray, f"{', '.join(stray)} is not a field", decorate)
    for name in known:
        try:
            setattr(method, name, getattr(method, name))
        except FrozenInstanceError:
            continue
        raise Broken(f"{name} can be set. {decorate}")
    try:
        hash(method)
    except TypeError as error:
        raise Broken(f"hash() says: {error}. Let fields be numbers, strings, or tuples of these.") from error
    by_fields = replace(method) == method and kind.__dataclass_params__.eq  # type: ignore[attr-defined]
    require(by_fields, "it is not equal to a copy with equal fields alone", "Leave eq and __init__ to dataclass.")
    require(
        method.inference in method.scores,
        f"inference = {method.inference!r} is not in scores = {method.scores!r}",
        "Name all that `predict` gives in `scores`.",
    )


def toml(trial: Trial) -> None:
    """All fields survive a TOML file."""
    method, kind = trial.method, type(trial.method)
    remedy = "Let every field have a type, a default, and a value that its type and TOML allow (there is no None)."
    try:
        if kind in METHODS.values() or path_of(kind):
            back = Experiment.from_dict(tomllib.loads(Experiment(method=method).to_toml())).method
        else:
            back = kind(**schema.check_section("method", kind, tomllib.loads(tomli_w.dumps(asdict(method)))))
    except Exception as error:
        raise Broken(f"{type(error).__name__}: {error} {remedy}") from error
    for field in fields(method):
        old, new = getattr(method, field.name), getattr(back, field.name)
        require(old == new, f"{field.name} = {old!r} comes back as {new!r}", remedy)
