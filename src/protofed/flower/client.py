"""`protofed client`: a worker with the data, and Flower's SuperNode that carries its answers to the server."""

import contextlib
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from protofed.atomic import write_atomically
from protofed.errors import UserError
from protofed.federation.settings import experiment_hash, load_client, load_experiment
from protofed.federation.worker import make_worker
from protofed.flower.certificates import make_inner
from protofed.flower.control import leave
from protofed.flower.gate import Gate, Refused, look
from protofed.flower.installed import command, environment, need_flower
from protofed.flower.line import Line
from protofed.flower.processes import Child
from protofed.flower.proxy import free_port, listen
from protofed.flower.server import Stopped, locked, stoppable

LOOK_SECONDS = 0.2
HEARD_SECONDS = 3.0  # for the server to hear that its refusal was heard
AGAIN_SECONDS = 1.0  # between two looks at a server that is not there yet
LONGEST_PAUSE = 30.0  # before SuperNode is started again
STEADY_SECONDS = 60.0  # after which its pauses begin anew
INSECURE = (
    "--insecure: nothing is encrypted, and the server is not checked. Whoever is on the way to {address} can read and "
    "change what is sent, and whoever answers there can have this machine train. For trials on one machine only."
)


class Worker(Protocol):
    """What a client needs of its worker."""

    refusal: str | None

    def answer(self, request: bytes) -> bytes: ...
    def describe(self) -> str: ...
    def close(self) -> None: ...


class Node:
    """A client's processes."""

    def __init__(
        self, bundle: Path, state: Path, server: str, worker: Worker, insecure: bool, tell: Callable[[str], None]
    ) -> None:
        self.home = state / "flower"
        self.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.bundle, self.server, self.tell = bundle, server, tell
        self.log, self.remembered = state / "logs" / "supernode.log", self.home / "node"
        self.inner = None if insecure else make_inner(self.home)
        listener = listen("127.0.0.1", 0, "the client's gate")
        self.port = listener.getsockname()[1]
        authority = None if insecure else bundle / "ca.crt"
        self.gate = Gate(server, authority, listener, self.inner[1:] if self.inner else None, tell)
        self.worker, self.line = worker, Line(state, worker.answer)
        self.child: Child | None = None
        self.pause, self.started, self.joined = 1.0, 0.0, False

    def start(self) -> None:
        """SuperNode, which asks the gate for work and starts a ClientApp for every message."""
        words = [command("flower-supernode"), "--superlink", f"127.0.0.1:{self.port}", "--port", str(free_port()),
                 "--node-config", f'worker="{self.line.path}"']  # fmt: skip
        if self.inner:
            key = self.bundle / "key"
            words += ["--root-certificates", str(self.inner[0]), "--auth-supernode-private-key", str(key)]
            if self.remembered.exists():
                leave(self.server, self.bundle / "ca.crt", key, int(self.remembered.read_text()))
        else:
            words += ["--insecure"]
        self.started = time.monotonic()
        self.child = Child("supernode", words, environment(self.home), self.log)

    def look(self) -> bool:
        """One look; True when the federation is finished, a UserError where there is no point in going on."""
        if self.gate.refused:
            raise UserError(self.gate.refused)
        if self.worker.refusal:
            time.sleep(HEARD_SECONDS)
            raise UserError(f"the server refuses this client: {self.worker.refusal}")
        if self.gate.finished:
            return True
        if self.gate.joined and not self.joined:
            self.joined = True
            write_atomically(self.remembered, str(self.gate.node).encode())
            self.tell("joined; the worker answers when the server asks")
        if self.child is not None and not self.child.alive:
            self.tell(f"Flower's SuperNode ended; starting it again in {self.pause:.0f} s (see {self.log})")
            self.child.stop()
            time.sleep(self.pause)
            steady = time.monotonic() - self.started > STEADY_SECONDS
            self.pause = 1.0 if steady else min(2 * self.pause, LONGEST_PAUSE)
            self.start()
        return False

    def stop(self) -> None:
        if self.child is not None:
            self.child.stop()
        self.gate.relay.stop()
        self.line.close()


def run_client(
    bundle: Path, *, data: str | None, model: str | None, min_count: int, state: Path | None, dry_run: bool,
    insecure: bool, wait: float, tell: Callable[[str], None],
) -> bool:  # fmt: skip
    """Take part until the federation is finished (True) or somebody ends it (False)."""
    need_flower()
    settings, _ = load_client(bundle)
    if not re.fullmatch(r"\S+:\d{1,5}", settings.server):
        raise UserError(
            f"{bundle}/client.toml: server = {settings.server!r} is no host:port. Ask the server's operator."
        )
    state = (state or bundle / "state").resolve()
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    if insecure:
        tell(INSECURE.format(address=settings.server))
    else:
        _check_files(bundle)
    worker = make_worker(bundle, data=data, model=model, state=state, min_count=min_count, tell=tell)
    with contextlib.closing(worker):
        tell(worker.describe())
        return dry_run or _take_part(bundle, state, settings.server, worker, insecure, wait, tell)


def _take_part(
    bundle: Path, state: Path, server: str, worker: Worker, insecure: bool, wait: float, tell: Callable[[str], None]
) -> bool:
    with locked(state / "client.pid", f"a client with the state {state}"), stoppable():
        node = None
        try:
            authority = None if insecure else bundle / "ca.crt"
            _wait_for_server(server, authority, experiment_hash(load_experiment(bundle)), wait, tell)
            node = Node(bundle, state, server, worker, insecure, tell)
            node.gate.relay.start()
            node.start()
            while not node.look():
                time.sleep(LOOK_SECONDS)
        except Stopped:
            return False
        finally:
            if node is not None:
                node.stop()
    return True


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
        except Refused:
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
