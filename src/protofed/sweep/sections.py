"""The tables of a sweep's file, each checked as it is read."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from protofed.errors import UserError


def read_sweep(path: Path) -> dict[str, Any]:
    """The tables of a file."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"there is no sweep file {str(path)!r}. Write one: see 'protofed sweep --help'.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not valid TOML: {error}.") from None
    if not {"experiment", "methods"} & set(tables) and {"method", "rounds", "partition", "extends"} & set(tables):
        raise UserError(
            f"{path} is an experiment, not a sweep. Write: protofed run {path}. A sweep names an experiment and "
            "methods: see 'protofed sweep --help'."
        )
    return tables


def checked_words(key: str, value: Any, empty: bool = False) -> tuple[str, ...]:
    """Different strings, at least one unless `empty` says otherwise."""
    if not isinstance(value, list | tuple) or not all(isinstance(word, str) for word in value):
        raise UserError(f"{key} = {value!r} should be a list of strings.")
    if not value and not empty:
        raise UserError(f'the sweep names no {key}. Write, for example, {key} = "demo".')
    if len(set(value)) < len(value):
        raise UserError(f"{key} = {list(value)!r} names something twice. Remove one.")
    return tuple(value)


def checked_methods(value: Any) -> dict[str, tuple[str, ...]]:
    """Label -> changes, from such a table or from a list of labels."""
    table = dict.fromkeys(value, ()) if isinstance(value, list) and all(isinstance(v, str) for v in value) else value
    if not isinstance(table, dict) or not table:
        raise UserError("the sweep names no methods. Write a table [methods] with lines such as fedproto = [].")
    if isinstance(value, list) and len(table) < len(value):
        raise UserError(f"methods = {value!r} names something twice. Remove one.")
    if bad := [label for label in table if not label.strip() or not label.isprintable()]:
        raise UserError(f"methods: the label {bad[0]!r} should be one line with something in it.")
    return {label: checked_words(f"methods.{label}", own, empty=True) for label, own in table.items()}


def checked_seeds(value: Any) -> tuple[int, ...]:
    """Different whole numbers."""
    whole = isinstance(value, list) and all(isinstance(s, int) and not isinstance(s, bool) and s >= 0 for s in value)
    if not whole or not value or len(set(value)) < len(value):
        raise UserError(f"seeds = {value!r} should be a list of different whole numbers, such as [0, 1, 2].")
    return tuple(value)


def checked_parameters(value: Any, prefix: str = "") -> dict[str, tuple[Any, ...]]:
    """Key -> values; keys with dots may be quoted or not."""
    if not isinstance(value, dict):
        raise UserError(f'parameters = {value!r} should be a table: write [parameters] and lines "key" = [values].')
    found: dict[str, tuple[Any, ...]] = {}
    for key, values in value.items():
        if isinstance(values, dict):
            inner = checked_parameters(values, f"{prefix}{key}.")
            if twice := found.keys() & inner.keys():
                raise UserError(f"parameters: {min(twice)} is there twice, in quotes and without. Remove one.")
            found |= inner
            continue
        if not isinstance(values, list) or not values:
            raise UserError(f"parameters: {prefix}{key} = {values!r} should be a list of values to try.")
        if len({float(v) if type(v) in (int, float) else text(v) for v in values}) < len(values):
            raise UserError(f"parameters: {prefix}{key} = {values!r} has a value twice. Remove one.")
        if f"{prefix}{key}" in found:
            raise UserError(f"parameters: {prefix}{key} is there twice, in quotes and without. Remove one.")
        found[f"{prefix}{key}"] = tuple(values)
    return found


def text(value: Any) -> str:
    """A value as it is written after `key=`, on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {text(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(text, value)) + "]"
    return tomli_w.dumps({"v": value}).partition("=")[2].strip()


def _key(name: str) -> str:
    """A key as TOML writes it."""
    return tomli_w.dumps({name: 0}).rpartition("=")[0].strip()
