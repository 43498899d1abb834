"""Flower's Grid as a federation's transport."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import httpx
from flwr.app import Array, ArrayRecord, Message, RecordDict

from protofed.federation.transport import Reply

QUICKEST, SLOWEST = 0.1, 1.0  # seconds between two looks for answers; a fiftieth of what has passed
LOOK_SECONDS = 1.0  # between two looks at who is connected
PATIENT = 3.0  # deadlines, after which a request that is asked again is sent again
BUSY, TRIES, BUSY_SECONDS = (
    500,
    6,
    0.5,
)  # SuperLink's answer when SQLite is locked for long; how often it is asked again
LATE_SECONDS = 600.0  # after the deadline, in which an answer is kept: the same may be asked again
KEY, FIELD = "protofed", "bytes"


class Sent(NamedTuple):
    """A request that a node has and has not answered yet."""

    request: bytes
    identifier: str
    since: str  # when the node came, as Flower writes it
    until: float  # when it is taken to be lost


class GridTransport:
    """Sends bytes to nodes and gives back their answers as they come."""

    def __init__(self, grid: Any, numbers: Mapping[int, int], sent: Callable[[], None]) -> None:
        self.grid, self.numbers, self.sent = grid, numbers, sent
        self._open: dict[int, Sent] = {}

    def nodes(self) -> dict[int, int | None]:
        """The connected nodes, with the number that belongs to their key."""
        return {node: self.numbers.get(node) for node in self._since()}

    def exchange(self, requests: Mapping[int, bytes], deadline: float) -> Iterator[Reply]:
        """A request to every node; what came of each, until all are there or the deadline is over.

        A node that was started anew has lost the request it had: it gets it again. One that is late and is asked the
        same again is not disturbed: its late answer counts.
        """
        begin = last_look = time.monotonic()
        self._push(requests, deadline, self._since())
        waiting = set(requests)
        for node in waiting - self._open.keys():
            yield Reply(node, error="it could not be sent: the client is not connected")
        waiting &= self._open.keys()
        while waiting and (passed := time.monotonic() - begin) < deadline:
            ours = {self._open[node].identifier: node for node in waiting}
            for message in _patiently(self.grid.pull_messages, list(ours)):
                node = ours.get(message.metadata.reply_to_message_id, 0)
                if node in waiting:
                    waiting.remove(node)
                    del self._open[node]
                    yield _reply(node, message)
            if waiting and time.monotonic() - last_look > LOOK_SECONDS:
                last_look, since = time.monotonic(), self._since()
                self._push({node: requests[node] for node in waiting & since.keys()}, deadline - passed, since)
                waiting &= self._open.keys()
            if waiting:
                time.sleep(min(SLOWEST, max(QUICKEST, passed / 50), max(0.0, deadline - passed)))

    def _since(self) -> dict[int, str]:
        """The connected nodes, and when each came."""
        return {info.node_id: info.last_activated_at for info in _patiently(self.grid.get_nodes)}

    def _push(self, requests: Mapping[int, bytes], deadline: float, since: Mapping[int, str]) -> None:
        """Send what a node does not have already."""
        new = {}
        for node, request in requests.items():
            old = self._open.get(node)
            known = old is not None and (old.request, old.since) == (request, since.get(node))
            if old is None or not known or time.monotonic() > old.until:
                self._open.pop(node, None)
                new[node] = request
        messages = [
            Message(_content(request), dst_node_id=node, message_type="train", ttl=deadline + LATE_SECONDS)
            for node, request in new.items()
        ]
        identifiers = list(_patiently(self.grid.push_messages, messages)) if messages else []
        for (node, request), identifier in zip(new.items(), identifiers, strict=False):  # too large: there are none
            if identifier:
                self._open[node] = Sent(request, identifier, since.get(node, ""), time.monotonic() + PATIENT * deadline)
        if messages:
            self.sent()


def _patiently(ask: Callable[..., Iterable[Any]], *words: Any) -> Iterable[Any]:
    """Flower's grid asks again by itself when the SuperLink is away, but not when its database is busy."""
    for _ in range(TRIES):
        try:
            return ask(*words)
        except httpx.HTTPStatusError as error:
            if error.response.status_code != BUSY:
                raise
            time.sleep(BUSY_SECONDS)
    return ask(*words)


def _content(blob: bytes) -> RecordDict:
    return RecordDict({KEY: ArrayRecord({FIELD: Array("uint8", (len(blob),), "safetensors", blob)})})


def _reply(node: int, message: Message) -> Reply:
    """What a node's message says; the node is known by what it replies to, for errors come from the SuperLink."""
    if message.has_error():
        return Reply(node, error=f"Flower: {message.error.reason or 'no reason given'} (code {message.error.code})")
    try:
        return Reply(node, message.content[KEY][FIELD].data)
    except (KeyError, TypeError, AttributeError) as error:
        return Reply(node, error=f"an answer without protofed's bytes ({error!r})")
