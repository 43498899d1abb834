"""Flower's Grid as a federation's transport."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, Message, RecordDict

from protofed.federation.transport import Reply

QUICKEST, SLOWEST = 0.1, 1.0  # seconds between two looks for answers; a fiftieth of what has passed
LOOK_SECONDS = 1.0  # between two looks at who is connected
KEY, FIELD = "protofed", "bytes"


class GridTransport:
    """Sends bytes to nodes and gives back their answers as they come."""

    def __init__(self, grid: Any, numbers: Mapping[int, int], sent: Callable[[], None]) -> None:
        self.grid, self.numbers, self.sent = grid, numbers, sent

    def nodes(self) -> dict[int, int | None]:
        """The connected nodes, with the number that belongs to their key."""
        return {node.node_id: self.numbers.get(node.node_id) for node in self.grid.get_nodes()}

    def exchange(self, requests: Mapping[int, bytes], deadline: float) -> Iterator[Reply]:
        """A request to every node; what came of each, until all are there or the deadline is over.

        A node that was started anew has lost the request it had: it gets it again.
        """
        begin = last_look = time.monotonic()
        since = {info.node_id: info.last_activated_at for info in self.grid.get_nodes()}
        pending: dict[str, int] = {}  # message id -> node
        for node, identifier in self._push(requests, deadline).items():
            if identifier:
                pending[identifier] = node
            else:
                yield Reply(node, error="it could not be sent: the client is not connected")
        waiting = set(pending.values())
        while waiting and (passed := time.monotonic() - begin) < deadline:
            for message in self.grid.pull_messages(list(pending)):
                node = pending.pop(message.metadata.reply_to_message_id, 0)
                if node in waiting:
                    waiting.remove(node)
                    yield _reply(node, message)
            if time.monotonic() - last_look > LOOK_SECONDS:
                last_look = time.monotonic()
                again = self._restarted(since, waiting)
                left = deadline - passed
                for node, identifier in self._push({n: requests[n] for n in again}, left).items():
                    if identifier:
                        pending[identifier] = node
            if waiting:
                time.sleep(min(SLOWEST, max(QUICKEST, passed / 50), max(0.0, deadline - passed)))

    def _push(self, requests: Mapping[int, bytes], ttl: float) -> dict[int, str | None]:
        if not requests:
            return {}
        messages = [
            Message(_content(blob), dst_node_id=node, message_type="train", ttl=ttl) for node, blob in requests.items()
        ]
        identifiers = list(self.grid.push_messages(messages))
        identifiers += [None] * (len(messages) - len(identifiers))
        self.sent()
        return dict(zip(requests, identifiers, strict=True))

    def _restarted(self, since: dict[int, str], waiting: set[int]) -> list[int]:
        """Those we wait for that came anew since we last looked."""
        again = []
        for info in self.grid.get_nodes():
            if info.node_id in waiting and since.get(info.node_id) != info.last_activated_at:
                again.append(info.node_id)
            since[info.node_id] = info.last_activated_at
        return again


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
