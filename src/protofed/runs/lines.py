"""The numbers of a run as its files have them. Each file is data that somebody else may have written."""

import json
from pathlib import Path
from types import NoneType
from typing import Any

from protofed.errors import UserError, option

MEASURED = (  # keys of numbers
    "accuracy", "global_accuracy", "pm_", "seconds", "bytes_", "params_", "drift", "margin", "forgetting",
    "global_forgetting",
)  # fmt: skip
LISTS = ("_per_class", "_per_task")  # ends of keys that have a list of them


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, if it exists; a last line that was cut off by a kill is left out."""
    if not path.is_file():
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        return [_checked(json.loads(line, parse_int=_whole)) for line in lines if line.endswith("\n")]
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error}). Mend or remove that line, and try again.") from None


def read_summary(path: Path) -> dict[str, Any]:
    """The one table of a file."""
    try:
        return _checked(json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse, parse_int=_whole))
    except (ValueError, RecursionError) as error:
        remedy = f"Remove it, and go on: the same sweep again, or run with {option('resume', True)}"
        raise UserError(f"{path} is damaged ({error}). {remedy}.") from None


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not a number")


def _whole(digits: str) -> int:
    """Whether a value is a whole number that arithmetic can use."""
    if len(digits) > 100:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def _checked(table: Any) -> dict[str, Any]:
    """A table whose measured values are checked to be numbers."""
    if not isinstance(table, dict):
        raise ValueError("it is not a table")
    for key, value in table.items():
        inner = value.values() if key.endswith("_by") and isinstance(value, dict) else [value]
        inner = value if key.endswith(LISTS) and isinstance(value, list) else inner
        if key.startswith(MEASURED) and any(type(one) not in (int, float, NoneType) for one in inner):
            raise ValueError(f"{key} is {value!r}, which is not a number")
    return table
