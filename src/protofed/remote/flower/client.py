"""`protofed client`: a worker with the data, which joins the server, answers what it asks, and comes back after faults.

The main thread asks for work and does it; another one sends heartbeats, so that long training does not look like a
death. Every call has a time limit, and nothing but the main thread keeps the process alive.
"""

import contextlib
import random
import re
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from protofed.atomic import write_atomically
from protofed.errors import UserError
from protofed.remote.client.bundle import make_worker
from protofed.remote.client.worker import ClientWorker
from protofed.remote.flower.certificates import make_client_key, write_private
from protofed.remote.flower.diagnose import CannotJoin, look
from protofed.remote.flower.fleet import (
    Finished,
    Fleet,
    Lost,
    ServerAway,
    Unsigned,
    Unwanted,
    WaitingRequest,
    load_key,
    reply_to,
)
from protofed.remote.flower.installed import need_flower
from protofed.remote.flower.processes import Stopped, locked, private, stoppable
from protofed.remote.settings import experiment_hash, load_client, load_experiment

AGAIN_SECONDS = 1.0  # between two looks at a server that is not there
BEAT_SECONDS = 15.0  # between two heartbeats; Flower waits for four of these
GOODBYE_SECONDS = 3.0
UNSIGNED_TRIES = 3  # a signature may have been made before the machine was suspended
Returned = TypeVar("Returned")
INSECURE = (
    "--insecure: nothing is encrypted, and the server is not checked. Whoever is on the way to {address} can read and "
    "change what is sent, and whoever answers there can have this machine train. For trials on one machine only."
)


class Node:
    """One client of one server."""

    def __init__(
        self, make: Callable[[], Fleet], home: Path, worker: ClientWorker, tell: Callable[[str], None]
    ) -> None:
        self.fleet, self.beats_by = make(), make()
        self.worker, self.tell = worker, tell
        self.remembered = home / "node"
        self.node = _number_in(self.remembered)  # Flower's number for us
        self.again = True  # join before anything else
        self.joined = self.away = self.finished = False
        self._end, self._joining = threading.Event(), threading.Lock()
        self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def take_part(self) -> None:
        """Answer until the federation is finished; a UserError where going on is of no use."""
        self._heart.start()
        try:
            while True:
                try:
                    self._turn()
                except (Unsigned, Lost):
                    self.again = True
                    time.sleep(AGAIN_SECONDS)
        except Finished:
            self.finished = True

    def close(self) -> None:
        """Say goodbye, so that the server need not find out by itself; not for long."""
        self._end.set()
        if self.joined and not self.finished:
            goodbye = threading.Thread(target=self._leave, name="goodbye", daemon=True)
            goodbye.start()
            goodbye.join(GOODBYE_SECONDS)

    def _turn(self) -> None:
        """Join where that is needed, ask for work once, and do it."""
        if self.again:
            self._join()
        try:
            asked = self._reached(lambda: self.fleet.pull(self.node))
        except ServerAway as away:  # a request may have been lost on its way; it is given again to who joins again
            self.again = True
            self._pause(away)
            return
        if asked is None:
            return
        try:
            self._answer(asked)
        except Unwanted as unwanted:
            self.tell(f"the server does not take this answer: {unwanted.args[0]}")
        if self.worker.refusal:
            raise UserError(f"the server refuses this client: {self.worker.refusal}")

    def _answer(self, asked: WaitingRequest) -> None:
        request = self._insist(lambda: self.fleet.content(self.node, asked), asked.expires)
        self._insist(lambda: self.fleet.confirm(self.node, asked), asked.expires)
        reply = reply_to(asked, self.worker.answer(request))
        self._insist(lambda: self.fleet.push(self.node, reply), asked.expires)

    def _join(self) -> None:
        """Become one of the server's nodes, after a goodbye for the node that we were."""

        def join() -> int:
            with self._joining:  # a heartbeat in between would bring the old one back
                if self.node:
                    self.fleet.leave(self.node)
                return self.fleet.join()

        for left in reversed(range(UNSIGNED_TRIES)):
            try:
                self.node = self._insist(join)
                break
            except Unsigned:
                if not left:
                    raise CannotJoin(
                        "the server did not accept the signature of this client: its key was removed from the "
                        f"federation, or the clocks differ (here it is {time.strftime('%Y-%m-%d %H:%M:%S %Z')}). Set "
                        "the clock, or get a new bundle."
                    ) from None
                time.sleep(AGAIN_SECONDS)
        self.again = False
        write_atomically(self.remembered, str(self.node).encode())
        if not self.joined:
            self.joined = True
            self.tell("joined; the worker answers when the server asks")

    def _insist(self, call: Callable[[], Returned], until: float = float("inf")) -> Returned:
        """What comes of a call, as soon as the server is there, unless that is too late."""
        while True:
            try:
                return self._reached(call)
            except ServerAway as away:
                if time.time() > until:
                    raise Unwanted("the server was away for too long") from None
                self._pause(away)

    def _reached(self, call: Callable[[], Returned]) -> Returned:
        found = call()
        if self.away:
            self.away = False
            self.tell("the server is there")
        return found

    def _pause(self, away: ServerAway) -> None:
        if not self.away:
            self.away = True
            self.tell(f"waiting for the server: {away}")
        time.sleep(AGAIN_SECONDS * random.uniform(0.5, 1.5))  # clients that lost it together do not return at once

    def _beat(self) -> None:
        """Heartbeats, whatever the main thread does."""
        pause = BEAT_SECONDS
        while not self._end.wait(pause * random.uniform(0.8, 1.2)):
            pause = AGAIN_SECONDS  # what is wrong, the main thread hears and says
            with contextlib.suppress(ServerAway, Unsigned, Unwanted, Finished, CannotJoin), self._joining:
                if self.joined and not self._end.is_set():
                    self.again = not self.beats_by.beat(self.node) or self.again
                    pause = BEAT_SECONDS

    def _leave(self) -> None:
        with contextlib.suppress(ServerAway, Finished, CannotJoin), self._joining:
            self.beats_by.leave(self.node)


def run_client(
    bundle: Path, *, data: str | None, model: str | None, min_count: int, state: Path | None, dry_run: bool,
    insecure: bool, wait: float, tell: Callable[[str], None], trust: bool = False,
) -> bool:  # fmt: skip
    """Take part until the federation is finished (True) or somebody ends it (False)."""
    need_flower()
    settings, _ = load_client(bundle)
    if not re.fullmatch(r"\S+:\d{1,5}", settings.server):
        raise UserError(
            f"{bundle}/client.toml: server = {settings.server!r} is not host:port. Ask the server's operator."
        )
    if state is None:
        _check_links(bundle / "state")
    state = (state or bundle / "state").resolve()
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    if insecure:
        tell(INSECURE.format(address=settings.server))
    else:
        _check_files(bundle)
    with private(state):
        worker = make_worker(bundle, data=data, model=model, state=state, min_count=min_count, tell=tell, trust=trust)
        with contextlib.closing(worker):
            tell(worker.describe())
            return dry_run or _take_part(bundle, state, settings.server, worker, insecure, wait, tell)


def _take_part(
    bundle: Path,
    state: Path,
    server: str,
    worker: ClientWorker,
    insecure: bool,
    wait: float,
    tell: Callable[[str], None],
) -> bool:
    with locked(state / "client.pid", f"a client with the state {state}"), stoppable():
        node = None
        try:
            authority = None if insecure else bundle / "ca.crt"
            _wait_for_server(server, authority, experiment_hash(load_experiment(bundle)), wait, tell)
            home = state / "flower"
            home.mkdir(exist_ok=True, mode=0o700)
            tls = ssl.create_default_context(cafile=authority) if authority else None
            key = load_key(_own_key(home / "key") if insecure else bundle / "key")
            node = Node(lambda: Fleet(server, tls, key), home, worker, tell)
            node.take_part()
        except Stopped:
            return False
        finally:
            if node is not None:
                node.close()
    return True


def _own_key(path: Path) -> Path:
    """Without the operator's keys, a client makes one, by which it is the same node when it is started again."""
    if not path.exists():
        write_private(path, make_client_key().key)
    return path


def _number_in(path: Path) -> int:
    """The node that we were; 0 if that is not known: the server finds out by itself that it is gone."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (FileNotFoundError, ValueError):
        return 0


def _check_links(state: Path) -> None:
    """A bundle is somebody else's: with links in it, this client would write and remove files elsewhere."""
    for path in [state, *state.rglob("*")]:
        if path.is_symlink():
            raise UserError(f"{path} is a link, and what a client keeps has none. Name its folder: --state FOLDER.")


def _check_files(bundle: Path) -> None:
    for name in ("ca.crt", "key"):
        if not (bundle / name).is_file():
            raise UserError(f"{bundle}/{name} is missing. Copy the whole bundle from the server's operator again.")
    if (bundle / "key").stat().st_mode & 0o077:
        raise UserError(f"{bundle}/key may be read by others on this machine. Close it: chmod 600 {bundle}/key")


def _wait_for_server(
    address: str, authority: Path | None, experiment: str, wait: float, tell: Callable[[str], None]
) -> None:
    """Look at the server until it is there, for `wait` seconds."""
    begin, said = time.monotonic(), False
    while True:
        try:
            return look(address, authority, experiment)
        except CannotJoin:
            raise
        except UserError as error:
            if time.monotonic() - begin >= wait:
                raise UserError(
                    f"{error} for {wait:.0f} s. Check that the server runs, its address in client.toml, and firewalls."
                ) from None
            if not said:
                tell(f"{error}; trying again for {wait:.0f} s")
            said = True
            time.sleep(min(AGAIN_SECONDS, wait))
