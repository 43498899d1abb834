"""Flower's Fleet API from a client's side: join, ask for work, answer, and stay known. All of it in this process.

Flower's SuperNode does the same, then starts a process for every message. Here the caller answers. The program that the
server submitted to Flower is never fetched, and nothing that arrives is executed.
"""

import contextlib
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import httpx
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ObjectTree,
    PullObjectRequest,
    PushObjectRequest,
)
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_id,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from protofed.errors import UserError
from protofed.remote.flower.agreed import FINISHED, HOLD_SECONDS, STRANGER, UNKNOWN, UNSIGNED
from protofed.remote.flower.diagnose import CannotJoin, explain_failure
from protofed.remote.flower.parcel import assembled, content_of, unpacked

Returned = TypeVar("Returned")
CONNECT_SECONDS, SLOW_SECONDS = 10.0, 20.0  # for a connection; for an answer, beyond what the door holds a call
GOODBYE_SECONDS = 3.0
HEARTBEAT_SECONDS = 30.0  # Flower takes a client to be gone after two of these without a heartbeat
OBJECT_SECONDS, LOOK_SECONDS = 60.0, 0.2  # for the server to have all of a message that it announced
MOST_OBJECTS, MOST_BYTES = 4096, 1 << 32  # of one message
BUSY, STARTING, LARGE = (429, 500), (502, 503, 504), 413
STILL_THERE, TAKEN = 412, 409  # for who joins: it is connected already; for who registers: it is registered already


class ServerAway(Exception):
    """The server cannot be reached now; says why."""


class Unsigned(Exception):
    """The server does not accept the signature, or not for this node."""


class Unwanted(Exception):
    """The server does not take this call, and never will; says why."""


class Lost(Exception):
    """A request that cannot be read any more: it is given again to a client that joins again."""


class Finished(Exception):
    """The federation is over."""


class WaitingRequest(NamedTuple):
    """A request that waits at the server; its content is still there."""

    message: Message
    tree: ObjectTree

    @property
    def expires(self) -> float:
        return float(self.message.metadata.created_at + self.message.metadata.ttl)


class Fleet:
    """A client's calls to one server, one at a time: threads need one each."""

    def __init__(self, address: str, tls: ssl.SSLContext | None, key: EllipticCurvePrivateKey) -> None:
        self.address, self.tls, self.key = address, tls, key
        self.public = public_key_to_bytes(key.public_key())
        self.client = self._connected()

    def _connected(self) -> FleetHttpClient:
        return FleetHttpClient(
            f"{'https' if self.tls else 'http'}://{self.address}",
            interceptors=[NodeAuthHttpInterceptor(self.key, self.key.public_key())],
            verify=self.tls or False,
            timeout=httpx.Timeout(HOLD_SECONDS + SLOW_SECONDS, connect=CONNECT_SECONDS),
        )

    def close(self) -> None:
        self.client.close()

    def join(self) -> int:
        """Become one of the server's nodes; the node's id. Flower gives again what is not answered yet."""
        if self.tls is None:
            with contextlib.suppress(Unwanted):  # registered already, before this process was started
                self._call(lambda: self.client.RegisterNode(RegisterNodeFleetRequest(public_key=self.public)))
        request = ActivateNodeRequest(public_key=self.public, heartbeat_interval=HEARTBEAT_SECONDS)
        try:
            return int(self._call(lambda: self.client.ActivateNode(request)).node_id)
        except Unwanted as unwanted:
            if unwanted.args[1:] == (STILL_THERE,):
                raise ServerAway("this client is still connected, from before or with the same key elsewhere") from None
            raise CannotJoin(f"the server does not let this client join: {unwanted.args[0]}") from None

    def leave(self, node: int) -> None:
        """Say goodbye for a node; nothing happens where it is gone already."""
        with contextlib.suppress(Unwanted, Unsigned):
            self._call(lambda: self.client.DeactivateNode(DeactivateNodeRequest(node_id=node)))

    def beat(self, node: int) -> bool:
        """Tell the server that this client is alive; False where it does not know the node."""
        request = SendNodeHeartbeatRequest(node=Node(node_id=node), heartbeat_interval=HEARTBEAT_SECONDS)
        return bool(self._call(lambda: self.client.SendNodeHeartbeat(request)).success)

    def pull(self, node: int) -> WaitingRequest | None:
        """The next request, or None where there was none for as long as the server holds the call."""
        request = PullMessagesRequest(node=Node(node_id=node))
        try:
            answer = self._call(lambda: self.client.PullMessages(request))
        except Unwanted as unwanted:
            raise ServerAway(f"it gives this client no work ({unwanted.args[0]})") from None
        if not answer.messages_list or not answer.message_object_trees:
            return None
        try:
            return WaitingRequest(message_from_proto(answer.messages_list[0]), answer.message_object_trees[0])
        except (ValueError, TypeError, KeyError) as error:
            raise Lost(f"it cannot be read ({type(error).__name__})") from None

    def content(self, node: int, asked: WaitingRequest) -> bytes:
        """The bytes of a request. Empty where they are not ours: the worker says what is wrong with that."""
        run, contents, size = asked.message.metadata.run_id, {}, 0
        names = {tree.object_id for tree in iterate_object_tree(asked.tree)}
        if len(names) > MOST_OBJECTS:
            raise Unwanted(f"it has {len(names)} parts; this client takes {MOST_OBJECTS} at most")
        for name in names:
            contents[name] = part = self._object(node, run, name)
            size += len(part)
            if size > MOST_BYTES:
                raise Unwanted(f"it has more than {MOST_BYTES} bytes")
            if get_object_id(part) != name:
                raise Lost("it is damaged")
        try:
            return unpacked(assembled(asked.tree.object_id, contents, MOST_BYTES).content)
        except Exception:  # whatever Flower's reader stumbles over in what was sent
            return b""

    def _object(self, node: int, run: int, name: str) -> bytes:
        """One part of a request; the server announces a request before it has all parts."""
        request = PullObjectRequest(node=Node(node_id=node), run_id=run, object_id=name)
        end = time.monotonic() + OBJECT_SECONDS
        while True:
            answer = self._call(lambda: self.client.PullObject(request))
            if answer.object_available:
                return bytes(answer.object_content)
            if not answer.object_found or time.monotonic() > end:
                raise Lost("the server has lost a part of it")
            time.sleep(LOOK_SECONDS)

    def confirm(self, node: int, asked: WaitingRequest) -> None:
        """Tell the server that it need not keep the request."""
        name, run = asked.tree.object_id, asked.message.metadata.run_id
        request = ConfirmMessageReceivedRequest(node=Node(node_id=node), run_id=run, message_object_id=name)
        self._call(lambda: self.client.ConfirmMessageReceived(request))

    def push(self, node: int, reply: Message) -> None:
        """Send an answer; the same one can be sent again, and counts once."""
        with no_object_id_recompute():
            tree, parts = get_object_tree(reply), get_all_nested_objects(reply)
            request = PushMessagesRequest(
                node=Node(node_id=node), messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[tree], clientapp_runtime_list=[0.0],
            )  # fmt: skip
            told = self._call(lambda: self.client.PushMessages(request))
            for name in told.objects_to_push:
                if name not in parts:
                    raise Unwanted("it asks for something else")
                one = PushObjectRequest(
                    node=Node(node_id=node), run_id=reply.metadata.run_id, object_id=name,
                    object_content=parts[name].deflate(), session_id=told.session_id,
                )  # fmt: skip
                if not self._call(lambda: self.client.PushObject(one)).stored:  # noqa: B023
                    raise ServerAway("it has lost what this client was sending")

    def _call(self, ask: Callable[[], Returned]) -> Returned:
        """What comes of one call, in our words."""
        try:
            return ask()
        except httpx.TransportError as error:
            self.client.close()  # its connections may be dead without knowing it
            self.client = self._connected()
            raise ServerAway(explain_failure(error, self.address, joined=True)) from None
        except httpx.HTTPStatusError as error:
            status, body = error.response.status_code, error.response.content
        except (httpx.HTTPError, ValueError):  # something else answers, such as a proxy's page
            raise ServerAway(f"what answers at {self.address} is not a protofed server") from None
        if status == FINISHED:
            raise Finished
        if status in STARTING:
            raise ServerAway("it is starting")
        if status in BUSY:
            raise ServerAway("it is busy")
        if status == UNSIGNED:
            raise Unsigned
        if status == UNKNOWN and body == STRANGER:
            raise CannotJoin(
                f"the server {self.address} does not know the key of this bundle, or no longer. Its operator makes a "
                "new one with 'protofed federation rekey', restarts the server, and gives you the new key."
            )
        raise Unwanted("it is too large" if status == LARGE else f"the round or the run is over ({status})", status)


def reply_to(asked: WaitingRequest, answer: bytes) -> Message:
    """An answer as Flower sends it."""
    reply = Message(content_of(answer), reply_to=asked.message)
    reply.metadata.__dict__["_message_id"] = reply.object_id  # as Flower's own ClientApp does it
    return reply


def load_key(path: Path) -> EllipticCurvePrivateKey:
    """A client's private key from its file."""
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except ValueError as error:
        raise UserError(f"{path} cannot be read ({error}). Copy it again from the server's operator.") from None
    if not isinstance(key, EllipticCurvePrivateKey):
        raise UserError(f"{path} is not an EC key. Copy it again from the server's operator.")
    return key
