"""One client: its data, its model and its state, and an answer to every request."""

from collections.abc import Callable
from pathlib import Path


class Worker:
    """A client as a long-lived object."""

    def answer(self, request: bytes) -> bytes:
        """The answer to a request; never raises: an error is an answer that says so."""
        raise NotImplementedError

    def describe(self) -> str:
        """What it will send: which arrays, shapes, types, bytes, and whether the server sees them singly."""
        raise NotImplementedError


def make_worker(
    bundle: Path, *, data: str | None, model: str | None, state: Path, min_count: int, tell: Callable[[str], None]
) -> Worker:
    """A client from its bundle; a UserError where it cannot take part."""
    raise NotImplementedError
