"""The door is not closed to others by one who calls without end: connections, calls and bytes are bounded."""

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs Flower: pip install 'protofed[flower]'")

import httpx

from protofed.remote.flower import gate, proxy
from protofed.remote.flower.certificates import make_inner
from protofed.remote.flower.proxy import Answer, Headers, Relay, Request, listen

ROOM = 8
CALL = "/call"


class Held:
    """A relay whose calls are answered when the test says so; callers name themselves in a header."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.authority, certificate, key = make_inner(folder)
        self.relay = Relay(
            listen("127.0.0.1", 0, "it"), self._handle, routes={CALL: "POST"}, caller=self._caller,
            limit=lambda route: 1000, certificate=certificate, key=key,
        )  # fmt: skip
        self.relay.gate.room = ROOM
        self.answer, self.bodies = threading.Event(), list[bytes]()
        self.port: int = self.relay.listener.getsockname()[1]
        self.tls = ssl.create_default_context(cafile=self.authority)
        self.relay.start()

    def _caller(self, headers: Headers) -> bytes:
        return next((value for name, value in headers if name == b"who"), b"")

    async def _handle(self, method: str, request: Request) -> Answer:
        self.bodies.append(request.body)
        while request.body == b"wait" and not self.answer.is_set():
            await asyncio.sleep(0.01)
        return Answer(200, request.body)

    def call(self, who: str, body: bytes = b"") -> httpx.Response:
        headers = {"who": who} if who else {}
        return httpx.post(f"https://127.0.0.1:{self.port}{CALL}", content=body, headers=headers, verify=self.tls)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    made = Held(tmp_path)
    yield made
    made.answer.set()
    made.relay.stop()


def test_whoever_opens_connections_without_end_shuts_nobody_out(held: Held) -> None:
    """More connections than there is room for: with TLS and without, with half a request; who asks is not disturbed."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(held.call, "somebody", b"wait")
        until(lambda: held.bodies)
        crowd = []
        for number in range(5 * ROOM):
            one = socket.create_connection(("127.0.0.1", held.port), 10)
            if number % 2:
                one = held.tls.wrap_socket(one, server_hostname="127.0.0.1")
                one.sendall(f"POST {CALL} HTTP/1.1\r\nhost: x\r\nwho: half".encode())
            crowd.append(one)
            assert len(held.relay.gate._open) <= ROOM
        assert held.call("another", b"here").content == b"here"
        held.answer.set()
        assert asked.result(10).content == b"wait"
    until(lambda: sum(map(closed, crowd)) >= 4 * ROOM)
    for one in crowd:
        one.close()


def test_one_caller_has_so_many_calls_at_a_time_and_others_have_theirs(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "MOST_CALLS", 3)
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(held.call, "greedy", b"wait") for _ in range(3)]
        until(lambda: len(held.bodies) == 3)
        assert held.call("greedy").status_code == 429
        assert held.call("modest", b"here").content == b"here"
        held.answer.set()
        assert [one.result(10).status_code for one in asked] == [200] * 3
    assert held.call("greedy").status_code == 200


def test_nothing_that_a_stranger_sends_is_read_and_a_call_that_stops_coming_ends(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    held.call("", b"a stranger's words")
    assert held.bodies == [b""]
    assert held.call("known", bytes(1001)).status_code == 413
    monkeypatch.setattr(proxy, "QUIET_SECONDS", 0.3)
    with held.tls.wrap_socket(
        socket.create_connection(("127.0.0.1", held.port), 10), server_hostname="127.0.0.1"
    ) as one:
        one.sendall(f"POST {CALL} HTTP/1.1\r\nhost: x\r\nwho: known\r\ncontent-length: 9\r\n\r\nhalf".encode())
        assert one.recv(100).startswith(b"HTTP/1.1 408")
    until(lambda: not held.relay._calls)


def test_the_room_for_connections_follows_from_the_files_that_may_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [1024, 1024]
    monkeypatch.setattr(gate.resource, "getrlimit", lambda what: tuple(limits))
    monkeypatch.setattr(gate.resource, "setrlimit", lambda what, new: limits.__setitem__(slice(2), list(new)))
    assert (gate.connections_possible(), limits) == (462, [1024, 1024])
    limits[:] = [1024, 524_288]  # as systemd starts a service
    assert (gate.connections_possible(), limits) == (4096, [16384, 524_288])
    limits[:] = [64, 64]
    assert gate.connections_possible() == 8


def closed(one: socket.socket) -> bool:
    one.setblocking(False)
    try:
        return one.recv(1) == b""
    except (BlockingIOError, ssl.SSLWantReadError):
        return False
    except OSError:
        return True


def until(what: object, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not what():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.01)
