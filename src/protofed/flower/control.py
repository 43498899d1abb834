"""The SuperLink's control: which keys may join, and the run. It listens on loopback only."""

import contextlib
import hashlib
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, TypeVar

import httpx
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from flwr.cli.build import build_fab_from_disk
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
    UnregisterNodeRequest,
)
from flwr.proto.fab_pb2 import Fab, GetFabResponse
from flwr.proto.fleet_pb2 import ActivateNodeResponse, DeactivateNodeRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from protofed.errors import UserError

READY_SECONDS = 60.0
Returned = TypeVar("Returned")


class Control:
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
            except httpx.TransportError:
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
        """Submit the run; its id."""
        content = program()
        fab = Fab(hash_str=hashlib.sha256(content).hexdigest(), content=content)
        return int(self._call(lambda: self.client.StartRun(StartRunRequest(fab=fab))).run_id)

    def stop(self, run: int) -> None:
        """End a run; nothing happens where it has ended."""
        with contextlib.suppress(httpx.HTTPStatusError):
            self.client.StopRun(StopRunRequest(run_id=run))

    def close(self) -> None:
        self.client.close()

    def _nodes(self) -> list[Any]:
        answer = self._call(lambda: self.client.ListNodes(ListNodesRequest()))
        return [info for info in answer.nodes_info if not info.unregistered_at]

    def _call(self, ask: Callable[[], Returned]) -> Returned:
        try:
            return ask()
        except httpx.HTTPStatusError as error:
            raise UserError(f"the SuperLink refused: {error.response.text.strip()[:300]}") from None


@lru_cache(maxsize=1)
def program() -> bytes:
    """What Flower runs on either side, as the bundle that travels: the same bytes for the same files."""
    with as_file(files("protofed.flower") / "app") as folder:
        return build_fab_from_disk(folder)


def program_in(answer: bytes) -> bytes:
    """The program in a SuperLink's answer to a client that asked for it."""
    return GetFabResponse.FromString(answer).fab.content


def node_in(answer: bytes) -> int:
    """The node's id in a SuperLink's answer to a client that came."""
    return int(ActivateNodeResponse.FromString(answer).node_id)


def leave(address: str, authority: Path, key: Path, node: int) -> None:
    """Say goodbye for a SuperNode that could not: else its successor is kept out for a minute, until it is missed."""
    private = load_ssh_private_key(key.read_bytes(), None)
    signed = [NodeAuthHttpInterceptor(private, private.public_key())]
    with (
        contextlib.suppress(httpx.HTTPError),  # it is gone already, or the server is away
        FleetHttpClient.from_server_address(address, False, authority.read_bytes(), signed) as client,
    ):
        client.DeactivateNode(DeactivateNodeRequest(node_id=node))


def key_bytes(text: str, name: str) -> bytes:
    """A public key as Flower sends it."""
    try:
        return public_key_to_bytes(load_ssh_public_key(text.encode()))
    except ValueError as error:
        raise UserError(
            f"federation.toml: the public key of {name} cannot be read ({error}). Copy key.pub again."
        ) from None
