"""Flower's grid, which takes answers as they come: one that is announced and never sent keeps nobody waiting.

Flower's own waits in `pull_messages` until all parts of an answer have been uploaded, for up to three minutes. A client
whose upload was cut off would hold up everybody, whenever it likes.
"""

import contextlib
from collections.abc import Iterable
from typing import NamedTuple

import httpx
from flwr.app import Error, Message, Metadata
from flwr.app.message import make_message
from flwr.common.constant import ErrorCode
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.superlink.grid import HttpGrid

from protofed.remote.flower.parcel import assembled

MOST_PARTS = 4096  # of one answer; ours have three, and two for every 5 MB
MOST_BYTES = 1 << 28  # of one answer, unless the settings say otherwise
BUSY, TRIES, TRIES_SINGLY = 500, 20, 3  # the SuperLink's answer when it fails, and how often it is asked then
MOST_COMING = 1000  # answers that are announced; the oldest is given up


class Coming(NamedTuple):
    """An answer that is announced: its id, its parts, and those that are here."""

    identifier: str
    names: list[str]
    parts: dict[str, bytes]


class MailGrid(HttpGrid):  # type: ignore[misc]  # mypy does not follow Flower, which is an extra
    """Sends as Flower's does; what it gives back is whole or an error, at once."""

    most = MOST_BYTES
    _coming: dict[str, Coming]  # by the request's id

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """The answers to these requests that are whole by now."""
        self._coming = getattr(self, "_coming", {})
        wanted, failed = list(message_ids), list[Message]()
        new = [one for one in wanted if one not in self._coming]
        if new:  # an announced answer is told once: from then on the SuperLink does not know the request any more
            failed = self._announced(new)
        while len(self._coming) > MOST_COMING:
            del self._coming[next(iter(self._coming))]
        came = [message for one in wanted if (message := self._come(one)) is not None]
        return came + failed

    def _announced(self, requests: list[str]) -> list[Message]:
        """Note which answers are announced; errors in place of those that the SuperLink itself cannot read."""
        failed: list[str] = []
        try:
            self._ask_for(requests)
        except httpx.HTTPStatusError as error:
            if error.response.status_code != BUSY:
                raise
            for one in requests:  # what a single client wrote keeps the SuperLink from reading any of them together
                try:
                    self._ask_for([one], TRIES_SINGLY)
                except httpx.HTTPStatusError:
                    failed.append(one)
            if len(failed) == len(requests) > 1:
                raise
        return [self._failed(one, ErrorCode.UNKNOWN, "the SuperLink cannot read it") for one in failed]

    def _ask_for(self, requests: list[str], tries: int = TRIES) -> None:
        self._retry_invoker.tries = tries
        try:
            answer = self._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=requests))
        finally:
            self._retry_invoker.tries = TRIES
        for told, tree in zip(answer.messages_list, answer.message_object_trees, strict=True):
            names = list(dict.fromkeys(part.object_id for part in iterate_object_tree(tree)))
            coming = Coming(told.metadata.message_id, names, {})
            self._coming[told.metadata.reply_to_message_id] = coming

    def _come(self, request: str) -> Message | None:
        """The answer to a request if all of it is here; an error if that will never be."""
        coming = self._coming.get(request)
        if coming is None:
            return None
        if len(coming.names) > MOST_PARTS:
            return self._failed(request, ErrorCode.UNKNOWN, f"it has {len(coming.names)} parts")
        for name in coming.names:
            if name not in coming.parts:
                found = self._runtime_client.PullObject(
                    PullObjectRequest(node=self.node, run_id=self.run.run_id, object_id=name)
                )
                if not found.object_found:
                    return self._failed(request, ErrorCode.MESSAGE_UNAVAILABLE, "its upload was broken off")
                if not found.object_available:
                    return None
                coming.parts[name] = found.object_content
                if sum(map(len, coming.parts.values())) > self.most:
                    return self._failed(request, ErrorCode.UNKNOWN, f"it has more than {self.most:,} bytes")
        try:
            message = assembled(coming.identifier, coming.parts, self.most)
            if not isinstance(message, Message):
                raise TypeError(type(message).__name__)
        except Exception as error:  # whatever Flower's reader stumbles over in what a client sent
            return self._failed(request, ErrorCode.UNKNOWN, f"it cannot be read ({type(error).__name__})")
        self._confirm(coming)
        del self._coming[request]
        # What it answers is what the SuperLink checked, not what the client wrote into it.
        message.metadata.__dict__["_reply_to_message_id"] = request
        return message

    def _confirm(self, coming: Coming) -> None:
        """Tell the SuperLink that it need not keep an answer."""
        told = ConfirmMessageReceivedRequest(
            node=self.node, run_id=self.run.run_id, message_object_id=coming.identifier
        )  # fmt: skip
        self._runtime_client.ConfirmMessageReceived(told)

    def _failed(self, request: str, code: int, reason: str) -> Message:
        """An error in place of an answer, of which nothing is kept."""
        if coming := self._coming.pop(request, None):
            with contextlib.suppress(httpx.HTTPStatusError):
                self._confirm(coming)
        node = self.node.node_id
        metadata = Metadata(
            run_id=self.run.run_id, message_id="", src_node_id=node, dst_node_id=node, reply_to_message_id=request,
            group_id="", created_at=0.0, ttl=0.0, message_type="system",
        )  # fmt: skip
        return make_message(metadata=metadata, error=Error(code=code, reason=reason))
