"""Errors that a user can fix: one line that says what is wrong, what was given, and what to do."""

import difflib
import functools
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_PYTHON: ContextVar[bool] = ContextVar("python", default=False)  # whether the user has called a function, not a command

# All control characters except tabs and line breaks: in names that somebody else chose, they could control the
# terminal. So could characters that reverse the direction of text. Lone surrogates cannot be printed at all.
STEERING: dict[int, str | None] = {
    **dict.fromkeys([*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)]),
    **dict.fromkeys(range(0xD800, 0xE000), "\N{REPLACEMENT CHARACTER}"),
}


class UserError(Exception):
    """Shown as one line, without a traceback; the command ends with exit code 2."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """'Did you mean ...?' if a known word is close, or else a list of the known words."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.55)
    if close:
        return f"Did you mean {close[0]!r}?"
    return f"Known: {', '.join(repr(name) if ',' in name else name for name in names)}."


def option(name: str, value: object = None) -> str:
    """An option as its user writes it: `--data-dir PATH` in a shell, `data_dir=PATH` in Python. For a flag, `value` is
    True."""
    if _PYTHON.get():
        return f"{name.replace('-', '_')}={'' if value is None else value}"
    return f"--{name}" if value is None or value is True else f"--{name} {value}"


def asked_in_python() -> bool:
    """Whether the caller is Python code rather than a command."""
    return _PYTHON.get()


def in_python(function: Callable[P, T]) -> Callable[P, T]:
    """The same function for Python: its errors name arguments (out=) instead of options (--out)."""

    @functools.wraps(function)
    def spoken(*args: P.args, **kwargs: P.kwargs) -> T:
        before = _PYTHON.set(True)
        try:
            return function(*args, **kwargs)
        finally:
            _PYTHON.reset(before)

    return spoken


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(". ") if lines else type(error).__name__
