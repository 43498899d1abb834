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

from protofed.remote.flower.agreed import ABOUT, FINISHED, FLEET, HOLD_SECONDS, STRANGER, UNKNOWN, UNSIGNED
from protofed.remote.flower.control import most_parts, node_asking, run_in, sound
from protofed.remote.flower.installed import need_flower
from protofed.remote.flower.parcel import PIECE
from protofed.remote.flower.processes import changed
from protofed.remote.flower.proxy import Answer, Headers, Relay, Request, Upstream
from protofed.remote.flower.signed import named_key, signed
from protofed.version import VERSION

ROUTES = ("activate-node", "deactivate-node", "send-node-heartbeat", "pull-messages", "push-messages",
          "push-object", "pull-object", "confirm-message-received")  # fmt: skip
WITHOUT_KEYS = ("register-node",)  # in insecure mode clients register themselves
FAREWELL_SECONDS = 6.0  # in which every client asks at least once
LOOK_SECONDS = 0.05
BUSY, TRIES, BUSY_SECONDS = 500, 6, 0.5  # SuperLink's answer when SQLite is locked for long; it is asked again
BESIDE = 1_048_576  # bytes of a call that are not the answer itself
LARGE = FLEET + "push-object"  # the only call that can be longer: it has a piece of an answer
RELOAD_SECONDS = 5.0
WAITING = "flower/waiting.json"  # in the server's folder: the nodes that wait for work


class Door:
    """The public side of a server."""

    def __init__(
        self, folder: Path, listener: socket.socket, superlink: str, inner: Path | None, experiment: str, limit: int,
        keys: Collection[bytes] | None,
    ) -> None:  # fmt: skip
        self.folder, self.experiment = folder, experiment
        self.keys = None if keys is None else {base64.b64encode(key) for key in keys}  # None: whoever comes
        self.largest, self.parts = min(limit, PIECE) + BESIDE, most_parts(limit)
        self.stamp, self.certificate = pushed_file(folder), folder / "server.crt"
        tls = ssl.create_default_context(cafile=inner) if inner else None
        self.upstream = Upstream(superlink, tls, timeout=60)
        names = ROUTES if inner else ROUTES + WITHOUT_KEYS
        self.relay = Relay(
            listener, self._handle, routes={FLEET + name: "POST" for name in names} | {ABOUT: "GET"},
            caller=self._caller, limit=self._limit,
            certificate=self.certificate if inner else None, key=folder / "server.key" if inner else None,
        )  # fmt: skip
        self._changed = changed(self.certificate)
        self._looked = time.monotonic()
        self.finished = False
        self.run = 0  # which clients work for; 0: any
        self._idle: dict[int, float] = {}  # nodes that wait for work: when they asked, and there was none
        self._noted: dict[int, float] = {}
        self._here: set[bytes] = set()  # clients that asked for work
        self._told: set[bytes] = set()  # and were told that it is over

    def farewell(self) -> None:
        """Tell all clients that the federation is finished, as far as they ask in the next seconds."""
        self.finished, end = True, time.monotonic() + FAREWELL_SECONDS
        while self._here - self._told and time.monotonic() < end:
            time.sleep(LOOK_SECONDS)
        time.sleep(4 * LOOK_SECONDS)  # for the last answer to go out

    def look(self) -> bool:
        """Note who waits for work; whether a renewed certificate was found and is used from now on."""
        if (idle := dict(self._idle)) != self._noted:
            scratch = (self.folder / WAITING).with_suffix(".partial")
            scratch.write_text(json.dumps(idle))
            scratch.replace(self.folder / WAITING)  # whole or not at all; it is of no use after a power cut
            self._noted = idle
        if time.monotonic() - self._looked < RELOAD_SECONDS or changed(self.certificate) == self._changed:
            return False
        self._looked, now = time.monotonic(), changed(self.certificate)
        try:
            self.relay.reload()
        except OSError:  # the key is there before its certificate: the next look finds both
            return False
        self._changed = now
        return True

    async def _handle(self, method: str, request: Request) -> Answer:
        if request.route == ABOUT:
            return self._about()
        import httpx

        caller = self._caller(request.headers)
        if not caller:
            return Answer(UNSIGNED) if self._known(request.headers) else Answer(UNKNOWN, STRANGER)
        try:
            if request.route == FLEET + "pull-messages":
                return await self._pull(request, caller)
            if request.route == FLEET + "push-messages" and not sound(request.body, self.parts):
                return Answer(400, b"this is not a client's answer\n")
            return await self._ask(request)
        except httpx.TransportError:
            return Answer(503, b"the federation's server is starting\n")

    def _caller(self, headers: Headers) -> bytes:
        """The key that a call is signed with; empty if it is not one of the federation's, or did not sign it."""
        return named_key(headers) if self.keys is None or (self._known(headers) and signed(headers)) else b""

    def _known(self, headers: Headers) -> bool:
        """Whether a call names a key of the federation's, which anybody may do."""
        return self.keys is not None and named_key(headers) in self.keys

    def _limit(self, route: str) -> int:
        """How many bytes of a call are read before anybody has checked its signature."""
        return self.largest if route == LARGE else BESIDE

    async def _ask(self, request: Request) -> Answer:
        """SuperLink's answer; where its database was busy, and so nothing was done, the next one."""
        for _ in range(TRIES):
            answer = await self.upstream.ask(request)
            if answer.status != BUSY:
                break
            await asyncio.sleep(BUSY_SECONDS)
        return answer

    async def _pull(self, request: Request, caller: bytes) -> Answer:
        """Work for a client as soon as there is some: an answer without any is empty.

        What is left of a run that has ended is thrown away here: nobody would take the answer.
        """
        end, node, asked = time.monotonic() + HOLD_SECONDS, node_asking(request.body), 0.0
        self._here.add(caller)
        try:
            while not self.finished:
                seen, asked = changed(self.stamp), time.monotonic()
                answer = await self._ask(request)
                if answer.status == 200 and answer.body and self.run and run_in(answer.body) not in (0, self.run):
                    continue
                if answer.status != 200 or answer.body:
                    return answer
                self._idle[node] = asked
                while changed(self.stamp) == seen and not self.finished:
                    if time.monotonic() > end:
                        return answer
                    await asyncio.sleep(LOOK_SECONDS)
        finally:
            if self._idle.get(node) == asked:
                del self._idle[node]
        self._told.add(caller)
        return Answer(FINISHED)

    def _about(self) -> Answer:
        about = {"protofed": VERSION, "flwr": need_flower(), "experiment": self.experiment}
        return Answer(200, json.dumps(about).encode(), [(b"content-type", b"application/json")])


def waiting(folder: Path) -> dict[int, float]:
    """The nodes that wait for work, and when (by this machine's monotonic clock) they asked and got none."""
    try:
        return {int(node): asked for node, asked in json.loads((folder / WAITING).read_bytes()).items()}
    except FileNotFoundError:
        return {}


def pushed_file(folder: Path) -> Path:
    """Touched by the ServerApp whenever it has sent something."""
    return folder / "flower" / "pushed"
