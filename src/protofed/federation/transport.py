"""What carries requests to clients and their answers back."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol


class Reply(NamedTuple):
    """What came of one request."""

    node: int
    content: bytes | None = None
    error: str | None = None  # where there is no content: why


class Transport(Protocol):
    """The server's side of whatever carries bytes."""

    def nodes(self) -> dict[int, int | None]:
        """The nodes that are connected now, with the client's number where their registered key tells it."""

    def exchange(self, requests: Mapping[int, bytes], deadline: float) -> Iterator[Reply]:
        """Send each node its request; answers as they come, until all came or `deadline` seconds are over.

        It never raises for one node's fault.
        """
