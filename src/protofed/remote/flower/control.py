"""The SuperLink's control: which keys may join, and the run. It listens on loopback only."""

import contextlib
import hashlib
import math
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, TypeVar

import httpx
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.cli.build import build_fab_from_disk
from flwr.common.constant import SUPERLINK_NODE_ID, Status
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
    UnregisterNodeRequest,
)
from flwr.proto.fab_pb2 import Fab
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse, PushMessagesRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from protofed.errors import UserError
from protofed.remote.flower.parcel import PIECE

READY_SECONDS = 120.0
PROBE_SECONDS, ANSWER_SECONDS = 4.0, 20.0  # between two probes; for an answer
PATIENCE_SECONDS = 20.0  # in which a busy SuperLink is asked again
AWAY = (500, 502, 503, 504)
FEW_PARTS = 16  # of an answer, each of which the SuperLink keeps by itself; ours have three and two for every 5 MB
LATEST = 1e11  # seconds since 1970; no time in an answer is later, and none is NaN
Returned = TypeVar("Returned")


class SuperLinkAway(Exception):
    """The SuperLink does not answer now."""


class SuperLinkControl:
    """What an operator would do with `flwr supernode register` and `flwr run`."""

    def __init__(self, address: str, certificate: Path | None) -> None:
        authority = certificate.read_bytes() if certificate else None
        self.client = ControlHttpClient.from_server_address(address, certificate is None, authority, interceptors=())

    def ready(self, alive: Callable[[], bool]) -> bool:
        """Wait until it answers; False where its process ended or it took too long."""
        end = time.monotonic() + READY_SECONDS
        while alive() and time.monotonic() < end:
            try:
                self.client.ListNodes(ListNodesRequest())
                return True
            except httpx.HTTPError:
                time.sleep(0.1)
        return False

    def register(self, keys: Mapping[int, str], names: Mapping[int, str]) -> dict[int, int]:
        """Let these keys join, by the clients' numbers, and no others; node ids -> numbers."""
        wanted = {key_bytes(text, names[number]): number for number, text in keys.items()}
        there = {info.public_key: info.node_id for info in self._nodes()}
        for key in there.keys() - wanted.keys():
            self._call(lambda: self.client.UnregisterNode(UnregisterNodeRequest(node_id=there[key])))  # noqa: B023
        for key in wanted.keys() - there.keys():
            request = RegisterNodeRequest(public_key=key, name=names[wanted[key]])
            there[key] = self._call(lambda: self.client.RegisterNode(request)).node_id  # noqa: B023
        return {there[key]: number for key, number in wanted.items()}

    def start(self) -> int:
        """Submit the run, in place of whatever ran before; its id."""
        for run in self._call(lambda: self.client.ListRuns(ListRunsRequest())).run_dict.values():
            if run.status.status != Status.FINISHED:
                self.stop(run.run_id)
        content = program()
        fab = Fab(hash_str=hashlib.sha256(content).hexdigest(), content=content)
        return int(self._call(lambda: self.client.StartRun(StartRunRequest(fab=fab))).run_id)

    def stop(self, run: int) -> None:
        """End a run; nothing happens where it has ended."""
        with contextlib.suppress(UserError):
            self._call(lambda: self.client.StopRun(StopRunRequest(run_id=run)))

    def close(self) -> None:
        self.client.close()

    def _nodes(self) -> list[Any]:
        answer = self._call(lambda: self.client.ListNodes(ListNodesRequest()))
        return [info for info in answer.nodes_info if not info.unregistered_at]

    def _call(self, ask: Callable[[], Returned]) -> Returned:
        """Its answer; an Away where there is none, as its process ended or is stuck."""
        end = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return ask()
            except httpx.HTTPStatusError as error:
                if error.response.status_code not in AWAY:
                    raise UserError(f"the SuperLink refused: {error.response.text.strip()[:300]}") from None
                if time.monotonic() > end:
                    raise SuperLinkAway(f"the SuperLink is busy ({error.response.status_code})") from None
            except httpx.TransportError as error:
                raise SuperLinkAway(f"the SuperLink does not answer ({error!r})") from None
            time.sleep(0.5)


class Probe(threading.Thread):
    """Counts the answers of a SuperLink to whether it is there, whatever they say."""

    def __init__(self, address: str, authority: Path | None) -> None:
        super().__init__(name="probe", daemon=True)
        self.url = f"{'https' if authority else 'http'}://{address}/"
        self.tls = ssl.create_default_context(cafile=authority) if authority else False
        self.answers = 0

    def run(self) -> None:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                httpx.get(self.url, verify=self.tls, timeout=ANSWER_SECONDS, trust_env=False)
                self.answers += 1
            time.sleep(PROBE_SECONDS)


@lru_cache(maxsize=1)
def program() -> bytes:
    """What Flower runs on either side, as the bundle that travels: the same bytes for the same files."""
    with as_file(files("protofed.remote.flower") / "app") as folder:
        bundle: bytes = build_fab_from_disk(folder)
    return bundle


def node_asking(request: bytes) -> int:
    """The node's id in a client's call for work; 0 where it names none."""
    try:
        return int(PullMessagesRequest.FromString(request).node.node_id)
    except DecodeError:
        return 0


def most_parts(limit: int) -> int:
    """Parts that an answer of so many bytes has at most."""
    return FEW_PARTS + 2 * math.ceil(limit / PIECE)


def sound(request: bytes, parts: int) -> bool:
    """Whether a call that announces an answer is of the form that ours have, with so many parts at most.

    The SuperLink believes what a client writes about its answer: times that are not numbers, which it cannot read back
    later, and another client's node. And it keeps all parts that are announced with an answer, also if they are not
    part of that answer, and again with each announcement of the same answer.
    """
    try:
        told = PushMessagesRequest.FromString(request)
    except DecodeError:
        return False
    if len(told.messages_list) != 1 or len(told.message_object_trees) != 1:
        return False
    about, tree = told.messages_list[0].metadata, told.message_object_trees[0]
    if tree.object_id != about.message_id or sum(1 for _ in iterate_object_tree(tree)) > parts:
        return False
    numbers = (about.created_at, about.ttl, *told.clientapp_runtime_list)
    whose = about.src_node_id == told.node.node_id and about.dst_node_id == SUPERLINK_NODE_ID
    return whose and all(0 <= number < LATEST for number in numbers)


def run_in(answer: bytes) -> int:
    """The run that the work in a SuperLink's answer belongs to; 0 where there is none."""
    messages = PullMessagesResponse.FromString(answer).messages_list
    return int(messages[0].metadata.run_id) if messages else 0


def key_bytes(text: str, name: str) -> bytes:
    """A public key as Flower sends it."""
    try:
        key: bytes = public_key_to_bytes(load_ssh_public_key(text.encode()))
    except ValueError as error:
        raise UserError(
            f"federation.toml: the public key of {name} cannot be read ({error}). Copy key.pub again."
        ) from None
    return key
