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


class Answers(Protocol):
    """Whatever answers requests, such as a Worker."""

    def answer(self, request: bytes) -> bytes: ...


class LocalTransport:
    """Workers in this process, for tests and for trying a federation out; nodes can come and go."""

    def __init__(self, workers: Mapping[int, Answers]) -> None:
        self.workers = dict(workers)
        self.sent: list[tuple[int, bytes, bytes]] = []  # node, request, answer

    def nodes(self) -> dict[int, int | None]:
        return dict.fromkeys(self.workers)

    def exchange(self, requests: Mapping[int, bytes], deadline: float) -> Iterator[Reply]:
        for node, request in requests.items():
            if node in self.workers:
                answer = self.workers[node].answer(request)
                self.sent.append((node, request, answer))
                yield Reply(node, answer)
            else:
                yield Reply(node, None, "it is gone")
