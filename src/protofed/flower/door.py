"""The server's door: all that can be reached from where clients connect.

SuperLink has its control and its clients' routes on one port, and no account for the former; so it listens on loopback
only, and the door lets through what a client needs and nothing else. A client that asks for work waits here until there
is some, where by itself it would sleep for three seconds between two questions.
"""

import asyncio
import base64
import json
import socket
import ssl
import time
from collections.abc import Collection
from pathlib import Path

from protofed.flower.installed import need_flower
from protofed.flower.proxy import Answer, Relay, Request, Upstream
from protofed.version import VERSION

FLEET = "/v1/fleet/"
ROUTES = ("activate-node", "deactivate-node", "send-node-heartbeat", "pull-messages", "push-messages", "get-run",
          "get-fab", "push-object", "pull-object", "confirm-message-received")  # fmt: skip
WITHOUT_KEYS = ("register-node", "unregister-node")  # in insecure mode clients register themselves
ABOUT = "/protofed"
CALLER = b"flwr-public-key"
UNKNOWN = 403  # the answer to somebody with another key,
STRANGER = b"this key is not in federation.toml\n"  # with these words: it is also Flower's to other things
FINISHED = 410  # the answer to a client that asks for work when the federation is over
FAREWELL_SECONDS = 6.0  # in which every client asks at least once
HOLD_SECONDS = 20.0  # that a client waits for work in one call; Flower's calls time out after 30
LOOK_SECONDS = 0.05
BUSY, TRIES, BUSY_SECONDS = (
    500,
    6,
    0.5,
)  # SuperLink's answer when SQLite is locked for long; how often it is asked again
BESIDE = 1_048_576  # bytes of a call that are not the answer itself
RELOAD_SECONDS = 5.0


class Door:
    """The public side of a server."""

    def __init__(
        self, folder: Path, listener: socket.socket, superlink: str, inner: Path | None, experiment: str, limit: int,
        keys: Collection[bytes] | None,
    ) -> None:  # fmt: skip
        self.folder, self.experiment = folder, experiment
        self.keys = None if keys is None else {base64.b64encode(key) for key in keys}  # None: whoever comes
        self.stamp = pushed_file(folder)
        tls = ssl.create_default_context(cafile=inner) if inner else None
        self.upstream = Upstream(superlink, tls, timeout=60, by_environment=False)
        names = ROUTES if inner else ROUTES + WITHOUT_KEYS
        self.relay = Relay(
            listener, self._handle, routes={FLEET + name: "POST" for name in names} | {ABOUT: "GET"},
            limit=limit + BESIDE,
            certificate=folder / "server.crt" if inner else None, key=folder / "server.key" if inner else None,
        )  # fmt: skip
        self._changed = self._certificate_time()
        self._looked = time.monotonic()
        self.finished = False
        self._here: set[bytes] = set()  # clients that asked for work
        self._told: set[bytes] = set()  # and were told that it is over

    def farewell(self) -> None:
        """Tell all clients that the federation is finished, as far as they ask in the next seconds."""
        self.finished, end = True, time.monotonic() + FAREWELL_SECONDS
        while self._here - self._told and time.monotonic() < end:
            time.sleep(LOOK_SECONDS)
        time.sleep(4 * LOOK_SECONDS)  # for the last answer to go out

    def look(self) -> bool:
        """Whether a renewed certificate was found and is used from now on."""
        if time.monotonic() - self._looked < RELOAD_SECONDS or self._certificate_time() == self._changed:
            return False
        self._looked, changed = time.monotonic(), self._certificate_time()
        try:
            self.relay.reload()
        except OSError:  # the key is there before its certificate: the next look finds both
            return False
        self._changed = changed
        return True

    async def _handle(self, method: str, request: Request) -> Answer:
        if request.route == ABOUT:
            return self._about()
        import httpx

        caller = next((value for name, value in request.headers if name == CALLER), b"")
        if self.keys is not None and caller not in self.keys:
            return Answer(UNKNOWN, STRANGER)
        try:
            if request.route == FLEET + "pull-messages":
                return await self._pull(request, caller)
            return await self._ask(request)
        except httpx.TransportError:
            return Answer(503, b"the federation's server is starting\n")

    async def _ask(self, request: Request) -> Answer:
        """SuperLink's answer; where its database was busy, and so nothing was done, the next one."""
        for _ in range(TRIES):
            answer = await self.upstream.ask(request)
            if answer.status != BUSY:
                break
            await asyncio.sleep(BUSY_SECONDS)
        return answer

    async def _pull(self, request: Request, caller: bytes) -> Answer:
        """Work for a client as soon as there is some: an answer without any is empty."""
        end = time.monotonic() + HOLD_SECONDS
        self._here.add(caller)
        while not self.finished:
            seen = self._pushes()
            answer = await self._ask(request)
            if answer.status != 200 or answer.body:
                return answer
            while self._pushes() == seen and not self.finished:
                if time.monotonic() > end:
                    return answer
                await asyncio.sleep(LOOK_SECONDS)
        self._told.add(caller)
        return Answer(FINISHED)

    def _pushes(self) -> int:
        try:
            return self.stamp.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def _about(self) -> Answer:
        about = {"protofed": VERSION, "flwr": need_flower(), "experiment": self.experiment}
        return Answer(200, json.dumps(about).encode(), [(b"content-type", b"application/json")])

    def _certificate_time(self) -> int:
        try:
            return (self.folder / "server.crt").stat().st_mtime_ns
        except FileNotFoundError:
            return 0


def pushed_file(folder: Path) -> Path:
    """Touched by the ServerApp whenever it has sent something."""
    return folder / "flower" / "pushed"
