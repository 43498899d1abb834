"""Errors a user can mend: one line that says what, got what, do what."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Shown as one line, without a traceback; the command ends with exit code 2."""


def nearest(word: str, known: Iterable[str]) -> str:
    """'Did you mean ...?' where something is near, else what there is."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.55)
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(names)}."
