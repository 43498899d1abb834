"""Flower's Grid as a federation's transport."""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from flwr.app import Message
from flwr.common.constant import ErrorCode

from protofed.remote.flower.parcel import content_of, unpacked
from protofed.remote.transport import Reply

QUICKEST, SLOWEST = 0.1, 1.0  # seconds between two looks for answers; a fiftieth of what has passed
LOOK_SECONDS = 1.0  # between two looks at who is connected
PATIENT = 3.0  # deadlines, after which a request that is asked again is sent again
LATE_SECONDS = 600.0  # after the deadline, in which an answer is kept: the same may be asked again
MOST_OPEN = 8  # requests of one node that are waited for; the oldest is given up
GONE = "its connection was lost"
LOST = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)  # on the way: the node is asked again


class Sent(NamedTuple):
    """A request that was sent to a node and not answered yet."""

    digest: bytes  # of the request
    identifier: str
    since: str  # when the node came, as Flower writes it
    at: float
    until: float  # when it is taken to be lost


class GridTransport:
    """Sends bytes to nodes and gives back their answers as they come.

    A node may answer late, or twice, or answer what nobody wants to know any more. So every request stays open until
    its own answer has come, even if another one was sent since: an answer counts if it is to the same bytes as the
    present request, and is dropped if not.
    """

    def __init__(
        self,
        grid: Any,
        numbers: Mapping[int, int],
        sent: Callable[[], None],
        waiting: Callable[[], Mapping[int, float]],
    ) -> None:
        self.grid, self.numbers, self.sent = grid, numbers, sent
        self.waiting = waiting  # nodes that wait for work: when they asked, and got none
        self._open: dict[int, list[Sent]] = {}  # the latest last

    def nodes(self) -> dict[int, int | None]:
        """The connected nodes, with the number that belongs to their key."""
        return {node: self.numbers.get(node) for node in self._since()}

    def exchange(self, requests: Mapping[int, bytes], deadline: float) -> Iterator[Reply]:
        """A request to every node; what came of each, until all are there or the deadline is over.

        A node that was started again, or waits for work without having answered, has lost the request: it gets it
        again. One that is late and is asked the same again is not disturbed: its late answer counts.
        """
        begin = last_look = time.monotonic()
        digests = {node: hashlib.sha256(request).digest() for node, request in requests.items()}
        self._push(requests, digests, deadline, self._since())
        waiting = {node for node in requests if self._asked(node, digests[node])}
        for node in requests.keys() - waiting:
            yield Reply(node, error="it is not connected")
        while waiting and (passed := time.monotonic() - begin) < deadline:
            idle = self.waiting()
            for reply in list(self._answers(waiting, digests)):  # all of them: whoever listens may stop listening
                waiting.remove(reply.node)
                yield reply
            if waiting and time.monotonic() - last_look > LOOK_SECONDS:
                last_look, since = time.monotonic(), self._since()
                self._give_up(waiting, idle)
                again = {node: requests[node] for node in waiting & since.keys()}
                self._push(again, digests, deadline - passed, since)
                for node in {node for node in waiting - since.keys() if not self._asked(node, digests[node])}:
                    waiting.remove(node)
                    yield Reply(node, error=GONE)
            if waiting:
                time.sleep(min(SLOWEST, max(QUICKEST, passed / 50), max(0.0, deadline - passed)))

    def _answers(self, waiting: set[int], digests: Mapping[int, bytes]) -> Iterator[Reply]:
        """One reply for each node that has answered its present request."""
        ours = {sent.identifier: (node, sent) for node in waiting for sent in self._open.get(node, ())}
        answered = set()
        for message in self.grid.pull_messages(list(ours)) if ours else ():
            node, sent = ours.pop(message.metadata.reply_to_message_id, (0, None))
            if sent is None:
                continue
            self._open[node].remove(sent)
            stale = sent.digest != digests[node] or node in answered
            # An error of one copy of a request says nothing where another copy is still on its way.
            lost = message.has_error() and (message.error.code in LOST or self._asked(node, digests[node]))
            if not stale and not lost:
                answered.add(node)
                yield _reply(node, message)

    def _asked(self, node: int, digest: bytes) -> bool:
        return any(sent.digest == digest for sent in self._open.get(node, ()))

    def _give_up(self, nodes: Iterable[int], idle: Mapping[int, float]) -> None:
        """Take for lost what a node cannot have: it asked for work after all of that was sent, and there was none."""
        for node in nodes:
            if (sent := self._open.get(node)) and idle.get(node, 0.0) > sent[-1].at:
                sent[-1] = sent[-1]._replace(until=0.0)  # its answer may come yet, and then counts

    def _since(self) -> dict[int, str]:
        """The connected nodes, and when each came."""
        return {info.node_id: info.last_activated_at for info in self.grid.get_nodes()}

    def _push(
        self, requests: Mapping[int, bytes], digests: Mapping[int, bytes], deadline: float, since: Mapping[int, str]
    ) -> None:
        """Send what a node does not have already."""
        new, now = {}, time.monotonic()
        for node, request in requests.items():
            last = next(iter(reversed(self._open.get(node, ()))), None)
            known = last is not None and (last.digest, last.since) == (digests[node], since.get(node))
            if last is None or not known or now > last.until:
                new[node] = request
        messages = [
            Message(content_of(request), dst_node_id=node, message_type="train", ttl=deadline + LATE_SECONDS)
            for node, request in new.items()
        ]
        identifiers = list(self.grid.push_messages(messages)) if messages else []
        now = time.monotonic()
        for node, identifier in zip(new, identifiers, strict=False):  # too large: there are none
            if identifier:
                sent = Sent(digests[node], identifier, since.get(node, ""), now, now + PATIENT * deadline)
                self._open[node] = [*self._open.get(node, ()), sent][-MOST_OPEN:]
        if messages:
            self.sent()


def _reply(node: int, message: Message) -> Reply:
    """What a node's message says; the node is known by what it replies to, for errors come from the SuperLink."""
    if message.has_error():
        code = message.error.code
        return Reply(node, error=GONE if code == ErrorCode.NODE_UNAVAILABLE else f"it failed (Flower's error {code})")
    try:
        return Reply(node, unpacked(message.content))
    except (KeyError, TypeError, AttributeError) as error:
        return Reply(node, error=f"an answer without protofed's bytes ({error!r})")
