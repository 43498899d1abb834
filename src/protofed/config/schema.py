"""Configuration from ordinary signatures: a class's parameters are the keys of its section in an experiment."""

import ast
import functools
import inspect
import itertools
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, get_type_hints

from pydantic import ConfigDict, ValidationError, create_model

from protofed.errors import UserError, asked_in_python, did_you_mean

LARGEST = 1_000_000_000  # no key accepts a larger number


def fields(target: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """Every key that a class takes, with its type and default."""
    base = target.func if isinstance(target, functools.partial) else target
    hints = get_type_hints(base.__init__ if inspect.isclass(base) else base, include_extras=True)
    parameters = inspect.signature(target).parameters.values()
    keys = [p for p in parameters if p.default is not p.empty]
    factories = getattr(base, "__dataclass_fields__", {})
    found = {}
    for p in keys:
        factory = factories[p.name].default_factory if p.name in factories else None
        found[p.name] = (hints[p.name], factory() if callable(factory) else p.default)
    return found


def check_section(section: str, target: Callable[..., Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a section, validated; a UserError names the key, the value and the remedy."""
    known = fields(target)
    for key, value in raw.items():
        if key not in known:
            raise unknown_key(section, key, value, known)
        if isinstance(value, int) and abs(value) > LARGEST:
            raise UserError(f"{key_path(section, key)} = {value} is too large. Use at most {LARGEST:,}.")
    config = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)
    model = create_model("Section", __config__=config, **{k: (t, d) for k, (t, d) in known.items()})  # type: ignore[call-overload]
    given = {k: tuple(v) if isinstance(v, list) and isinstance(known[k][1], tuple) else v for k, v in raw.items()}
    try:
        valid = model.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        wanted = first["msg"].removeprefix("Input ").removeprefix("Value error, ")
        default = "" if asked_in_python() else f" (default {known[key][1]!r})"  # functions have defaults of their own
        raise UserError(f"{key_path(section, key)} = {raw.get(key)!r} {wanted}{default}.") from None
    return {key: getattr(valid, key) for key in known}


def unknown_key(section: str, key: str, value: Any, known: Iterable[str]) -> UserError:
    """The error for a key that its section does not have."""
    return UserError(f"unknown key {key_path(section, key)} = {value!r}. {did_you_mean(key, known)}")


def key_path(section: str, key: str) -> str:
    """A key with its section, as it is written in a command."""
    return f"{section}.{key}" if section else key


@functools.cache
def docs(target: Any) -> dict[str, str]:
    """The documentation of each key: the docstring under a field, or a line "key: text" in the class docstring."""
    base: Any = target.func if isinstance(target, functools.partial) else target
    found: dict[str, str] = {}
    for cls in reversed(inspect.getmro(base)):
        if cls.__module__.split(".")[0] in ("abc", "builtins", "torch", "typing"):
            continue
        for line in (inspect.getdoc(cls) or "").splitlines():
            key, colon, text = line.partition(": ")
            if colon and key.isidentifier():
                found[key] = text
        try:
            source = inspect.getsource(cls)
        except (OSError, TypeError):  # a class that was not read from a file
            continue
        body = ast.parse(textwrap.dedent(source)).body[0].body  # type: ignore[attr-defined]
        for here, after in itertools.pairwise(body):
            if (
                isinstance(here, ast.AnnAssign)
                and isinstance(here.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                found[here.target.id] = inspect.cleandoc(str(after.value.value))
    return found


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """The keys that differ, with both values."""
    found = []
    for key in [*old, *(k for k in new if k not in old)]:
        name, left, right = f"{prefix}{key}", old.get(key), new.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            found += differences(left, right, f"{name}.")
        elif left != right:
            found.append(f"{name} {left!r} -> {right!r}")
    return found


def changed_keys(section: Any) -> dict[str, Any]:
    """The keys of a section that are not at their defaults."""
    usual = asdict(type(section)())
    return {key: value for key, value in asdict(section).items() if value != usual[key]}


def without_usual(section: Any, later: Sequence[str]) -> dict[str, Any]:
    """All keys of a section, except later ones that are at their defaults."""
    return {key: value for key, value in asdict(section).items() if key not in later or key in changed_keys(section)}


def without_none(given: Any) -> dict[str, Any]:
    """A dataclass's fields, except those that are None by default, because a file cannot say None."""
    known = fields(type(given))
    return {key: value for key, value in asdict(given).items() if value is not None or known[key][1] is not None}
