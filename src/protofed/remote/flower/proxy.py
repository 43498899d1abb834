"""A small HTTP relay: takes requests for some routes, with or without TLS, and passes them on to one other server."""

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import uvicorn

from protofed.errors import UserError
from protofed.remote.flower.gate import BACKLOG, Gate

START_SECONDS = 10.0
MOST_CALLS = 16  # of one caller at a time; a client makes two, and those that a fault cut off end within a minute
QUIET_SECONDS = 60.0  # in which no byte of a call came
DROPPED = {b"host", b"connection", b"content-length", b"transfer-encoding", b"keep-alive", b"upgrade", b"expect",
           b"proxy-connection", b"te", b"trailer", b"accept-encoding", b"content-encoding"}  # fmt: skip
Headers = list[tuple[bytes, bytes]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Request(NamedTuple):
    """One call of a client."""

    route: str
    headers: Headers
    body: bytes


class Answer(NamedTuple):
    """What is sent back."""

    status: int
    body: bytes = b""
    headers: Headers = []  # never mutated


class Upstream:
    """The server that requests are passed on to."""

    def __init__(self, address: str, tls: ssl.SSLContext | None, timeout: float) -> None:
        self.base = f"{'https' if tls else 'http'}://{address}"
        self.tls, self.timeout = tls, timeout
        self._client: httpx.AsyncClient | None = None

    async def ask(self, request: Request, method: str = "POST") -> Answer:
        """Its answer; an httpx.TransportError where there is none."""
        if self._client is None:
            self._client = httpx.AsyncClient(
                verify=self.tls or False, timeout=self.timeout, trust_env=False,
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=60),
            )  # fmt: skip
        back = await self._client.request(
            method, self.base + request.route, content=request.body, headers=_forwarded(request.headers)
        )
        return Answer(back.status_code, back.content, _forwarded(back.headers.raw))


class Relay:
    """Listens on a socket, in a thread; `handle` says what becomes of a request for one of `routes`.

    `caller` says by a request's headers who calls, or that it is a stranger (empty), of whose request no body is read;
    `limit` how many bytes of a body are read, by its route."""

    def __init__(
        self, listener: socket.socket, handle: Callable[[str, Request], Awaitable[Answer]], *, routes: dict[str, str],
        caller: Callable[[Headers], bytes], limit: Callable[[str], int], certificate: Path | None = None,
        key: Path | None = None,
    ) -> None:  # fmt: skip
        self.listener, self.handle, self.routes, self.limit = listener, handle, routes, limit
        self.caller, self.gate = caller, Gate(listener)
        self.certificate, self.key = certificate, key
        self.received: Counter[str] = Counter()  # bytes of the bodies of requests, by route
        self._calls: Counter[bytes] = Counter()  # that are under way, by caller
        config = uvicorn.Config(
            self._app, interface="asgi3", lifespan="off", ws="none", workers=1, log_level="critical", access_log=False,
            timeout_keep_alive=75, proxy_headers=False,
            ssl_certfile=certificate, ssl_keyfile=key, timeout_graceful_shutdown=1, server_header=False,
        )  # fmt: skip
        self._config, self._server = config, _Server(config, self.gate)
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)

    def start(self) -> None:
        self._thread.start()
        end = time.monotonic() + START_SECONDS
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > end:
                raise UserError("the relay of the federation did not start; see its log.")
            time.sleep(0.01)

    def stop(self) -> None:
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(5)
        self.listener.close()

    def reload(self) -> None:
        """Take the certificate from its file again; open connections go on with the old one."""
        if self._config.ssl is not None:
            self._config.ssl.load_cert_chain(str(self.certificate), str(self.key))

    def _run(self) -> None:
        self._server.run(sockets=[])

    async def _app(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if self.routes.get(scope["path"]) != scope["method"]:
            await _reply(send, Answer(404, b"no such thing here\n"))
            return
        request = Request(scope["path"], list(scope["headers"]), b"")
        caller = self.caller(request.headers)
        if not caller:
            await _reply(send, await self.handle(scope["method"], request))
        elif self._calls[caller] >= MOST_CALLS:
            await _reply(send, Answer(429, b"too many calls at a time\n"))
        else:
            self._calls[caller] += 1
            try:
                with self.gate.asking(scope["client"]):
                    await self._serve(scope["method"], request, receive, send)
            finally:
                self._calls -= Counter([caller])

    async def _serve(self, method: str, request: Request, receive: Receive, send: Send) -> None:
        try:
            body = await _body(receive, self.limit(request.route))
        except TimeoutError:
            await _reply(send, Answer(408, b"too slow\n"))
            return
        if body is None:
            await _reply(send, Answer(413, b"too large\n"))
            return
        self.received[request.route] += len(body)
        answer = await _unless_gone(self.handle(method, request._replace(body=body)), receive)
        if answer is not None:
            await _reply(send, answer)


class _Server(uvicorn.Server):  # type: ignore[misc]  # mypy does not follow what Flower brings
    """uvicorn, with a gate that takes the connections."""

    def __init__(self, config: uvicorn.Config, gate: Gate) -> None:
        super().__init__(config)
        self.gate = gate

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.gate.listener.listen(BACKLOG)
        self._taking = asyncio.create_task(self.gate.take(self._protocol, self.config.ssl))
        await super().startup(sockets=[])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._taking.cancel()
        await super().shutdown(sockets=[])

    def _protocol(self) -> asyncio.Protocol:
        made: asyncio.Protocol = self.config.http_protocol_class(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made


async def _body(receive: Receive, limit: int) -> bytes | None:
    """All of a request's body, or None where it is larger than the limit; a TimeoutError where it stops coming."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await asyncio.wait_for(receive(), QUIET_SECONDS)
        if message["type"] == "http.disconnect":
            return b"".join(parts)
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            return None
        if not message.get("more_body"):
            return b"".join(parts)


async def _unless_gone(work: Awaitable[Answer], receive: Receive) -> Answer | None:
    """The answer, or None where the one who asked has hung up: then nothing more is done for it."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(receive())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for future in (task, gone):
            if not future.done():
                future.cancel()
                with contextlib.suppress(asyncio.CancelledError, httpx.HTTPError):
                    await future


async def _reply(send: Send, answer: Answer) -> None:
    headers = [*answer.headers, (b"content-length", str(len(answer.body)).encode())]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})


def _forwarded(headers: Headers) -> Headers:
    """Without those that concern one connection, and the date, which every server gives itself."""
    return [(name.lower(), value) for name, value in headers if name.lower() not in DROPPED | {b"date", b"server"}]


def listen(host: str, port: int, what: str) -> socket.socket:
    """A socket to listen on; a UserError where the port is taken or the address is not this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))  # whoever calls before the relay is started is refused, and does not wait
    except OSError as error:
        listener.close()
        raise UserError(
            f"{what} cannot listen on {host}:{port}: {(error.strerror or str(error)).lower()}. "
            "End what listens there, or choose another port or --bind."
        ) from None
    return listener


def free_port() -> int:
    """A port on loopback that nobody has at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
