"""The report's page, live: served to this machine only, and drawn again when a run's folder changes."""

import contextlib
import errno
import hashlib
import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from http.client import HTTP_PORT
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from protofed.errors import UserError
from protofed.report import html
from protofed.report.gather import HOLDS_NONE, NO_FOLDER, Gathered, gather
from protofed.report.parts import called
from protofed.report.runs import NOT_BEGUN, Run
from protofed.runs import listing

HOST = "127.0.0.1"
PORTS = 100  # tried one after another, from the one asked for
READ = (".toml", ".json", ".jsonl", ".npz")  # what of a run's folder the report is made of
PAUSE = 3.0  # as many times as it takes to draw, nothing is drawn: the run comes first
LONGEST = 5.0  # seconds of such a pause
AWAY = 75.0  # seconds: a page that has not asked for so long is closed; browsers let a hidden one ask once a minute


class DrawnPage(NamedTuple):
    """The content of the page, and a name for it that changes with the content."""

    data: dict[str, Any]
    body: bytes
    tag: str


class Page(NamedTuple):
    """When an open page last asked, and the name of the content that it has."""

    asked: float
    tag: str


class Live:
    """The report of folders that change. It only reads, and computes nothing unless a file has changed."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self.drawing = threading.Lock()  # one thread draws; the others show what there is
        self.seen: object = None
        self.next = 0.0
        self.last: DrawnPage | None = None
        self.pages = dict[str, Page]()

    def now(self) -> DrawnPage:
        """The content as it is, or was a moment ago."""
        if self.drawing.acquire(blocking=self.last is None):
            try:
                if self.last is None or time.monotonic() >= self.next:
                    self._look()
            finally:
                self.drawing.release()
        assert self.last is not None
        return self.last

    def _look(self) -> None:
        seen = sorted(_stamps(self.paths))
        if self.last is not None and seen == self.seen:
            return
        began = time.monotonic()
        self.last = _draw(self.paths, max((stamp.changed for stamp in seen), default=0))
        self.seen = seen  # not where it cannot be drawn: then every page that asks is told
        self.next = time.monotonic() + min(PAUSE * (time.monotonic() - began), LONGEST)

    def changed(self) -> float:
        """When a file of the runs last changed, in seconds since 1970."""
        return max((stamp.changed for stamp in _stamps(self.paths)), default=0) / 1e9

    def behind(self) -> bool:
        """Whether an open page does not have the latest content."""
        tags = {page.tag for page in list(self.pages.values()) if time.monotonic() - page.asked < AWAY}
        return bool(tags) and (self.last is None or tags != {self.last.tag} or sorted(_stamps(self.paths)) != self.seen)


class Stamp(NamedTuple):
    path: str
    changed: int  # nanoseconds
    size: int


def _folders(paths: Sequence[Path]) -> Iterator[tuple[Path, set[str]]]:
    """Folders and the files in them; folders inside a run's folder are not looked at."""
    for path in paths:
        for folder, below, names in os.walk(path):
            if "experiment.toml" in names:
                below.clear()
            yield Path(folder), set(names)


def _stamps(paths: Sequence[Path]) -> Iterator[Stamp]:
    """The files that the report is made of."""
    for folder, names in _folders(paths):
        for name in names:
            if name.endswith(READ) and not name.startswith("."):
                with contextlib.suppress(FileNotFoundError):  # replaced in this moment
                    about = (folder / name).stat()
                    yield Stamp(str(folder / name), about.st_mtime_ns, about.st_size)


def unfinished(paths: Sequence[Path]) -> int | None:
    """How many runs are not finished, including a sweep's runs that have not begun; None if there is no run. A failed
    cell counts as finished.

    A cell that failed is at its end.
    """
    runs: dict[Path, bool] = {}
    for folder, names in _folders(paths):
        if listing.LISTING in names:
            runs |= dict.fromkeys((folder / name for name in called(folder, [])), False)
        if "experiment.toml" in names:
            runs[folder] = "summary.json" in names
    ended = [done or listing.reason(path).is_file() for path, done in runs.items()]
    return ended.count(False) if runs else None


def _draw(paths: Sequence[Path], changed: int) -> DrawnPage:
    gathered = gather(paths)
    data = html.data(gathered) | {"live": _state(gathered) | {"changed": changed / 1e9}}
    body = json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
    return DrawnPage(data, body, f'"{hashlib.sha256(body).hexdigest()[:16]}"')


def _state(gathered: Gathered) -> dict[str, Any]:
    """How far the runs are, and whether some are left out for a reason other than not having begun."""
    going = [run for run in gathered.runs if run.summary is None]
    out = [remark for remark in gathered.left_out if remark.reason != NOT_BEGUN]
    return {
        "runs": len(gathered.runs),
        "left": len(going) + len(gathered.left_out) - len(out),
        "out": len(out),
        "to_come": [str(remark) for remark in out if remark.reason in (NO_FOLDER, HOLDS_NONE)],
        "round": sum(len(run.rounds) for run in gathered.runs),
        "rounds": sum(int(run.settings["rounds"]) for run in gathered.runs),
        "seconds": sum((int(run.settings["rounds"]) - len(run.rounds)) * _pace(run) for run in going),
        "pace": max(map(_pace, gathered.runs), default=0.0),
    }


def _pace(run: Run) -> float:
    """Seconds per round recently; 0 if unknown."""
    late = [line["seconds"] for line in run.rounds[-10:] if line.get("seconds") is not None]
    return sum(late) / len(late) if late else 0.0


class Server(ThreadingHTTPServer):
    """Serves one live report on the loopback interface."""

    daemon_threads = True

    def __init__(self, port: int, live: Live) -> None:
        self.live = live
        super().__init__((HOST, port), Handler)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a page that was closed in the middle of an answer."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """Serves two things: the page, and its data."""

    protocol_version = "HTTP/1.1"
    server_version = "protofed"
    sys_version = ""
    timeout = 60  # seconds that a connection may be idle
    server: Server

    def do_GET(self) -> None:
        names = {f"{name}:{self.server.server_port}" for name in (HOST, "localhost")}
        if self.server.server_port == HTTP_PORT:  # which browsers leave out
            names |= {HOST, "localhost"}
        if self.headers.get("Host") not in names:  # another name that leads here: a page from elsewhere is asking
            self._answer(HTTPStatus.FORBIDDEN, b"Only for this machine.\n")
        elif self.path in ("/", "/data.json"):
            self._show()
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"There is / and /data.json.\n")

    do_HEAD = do_GET

    def _show(self) -> None:
        """Answer with the page or its data, and note who has which."""
        live, has = self.server.live, self.headers.get("If-None-Match", "")
        page = secrets.token_hex(8) if self.path == "/" else self.headers.get("Page", "")
        live.pages[page] = Page(time.monotonic(), has)
        try:
            shown = live.now()
        except Exception as error:
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}\n".encode())
            raise
        if self.path == "/":
            script = f"const SHOWN = {json.dumps(shown.tag)}, PAGE = {json.dumps(page)};\n{_script()}"
            self._answer(HTTPStatus.OK, html.render(shown.data, script).encode(errors="replace"), "text/html")
        elif has == shown.tag:
            self._answer(HTTPStatus.NOT_MODIFIED, b"", tag=shown.tag)
        else:
            self._answer(HTTPStatus.OK, shown.body, "application/json", shown.tag)
        live.pages[page] = Page(time.monotonic(), shown.tag)

    def _answer(self, status: HTTPStatus, body: bytes, kind: str = "text/plain", tag: str | None = None) -> None:
        self.send_response(status)
        headers = {
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
        }
        if tag is not None:
            headers |= {"ETag": tag, "Changed": f"{self.server.live.changed():.3f}"}
        if status != HTTPStatus.NOT_MODIFIED:
            headers |= {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: nobody wants to read a line per second."""


def _script() -> str:
    return (files("protofed.report") / "page" / "live.js").read_text(encoding="utf-8")


@contextlib.contextmanager
def serving(paths: Sequence[str | Path], port: int) -> Iterator[Server]:
    """The live report of these folders on this port or, if it is in use, the next free one; 0: any port."""
    server = _bind(port, Live([Path(path) for path in paths]))
    thread = threading.Thread(target=server.serve_forever, name="watch", daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def _bind(port: int, live: Live) -> Server:
    for candidate in range(port, min(port + PORTS, 65536)):
        try:
            return Server(candidate, live)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise UserError(f"--port {candidate} cannot be used: {error.strerror}. Name another.") from None
    raise UserError(f"no port from {port} on is free. Name another with --port, or 0 for any.")
