"""Errors a user can mend: one line that says what, got what, do what."""

import difflib
import functools
import re
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class UserError(Exception):
    """Shown as one line, without a traceback; the command ends with exit code 2."""


def nearest(word: str, known: Iterable[str]) -> str:
    """'Did you mean ...?' where something is near, else what there is."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.55)
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(names)}."


def in_python(function: Callable[P, T]) -> Callable[P, T]:
    """The same for whoever calls it from Python: its errors speak of arguments (out=), not of options (--out)."""

    @functools.wraps(function)
    def spoken(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except UserError as error:
            text = str(error).replace("--resume", "resume=True")
            raise type(error)(re.sub(r"--([a-z-]+) ?", lambda m: f"{m[1].replace('-', '_')}=", text)) from None

    return spoken
