"""`protofed server`: starts Flower, watches it, restarts what dies, and ends when the federation has."""

import contextlib
import fcntl
import ipaddress
import json
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from protofed.atomic import write_atomically
from protofed.errors import UserError
from protofed.federation.settings import FederationSettings, load_experiment, load_federation
from protofed.flower import serverapp
from protofed.flower.certificates import check_server, make_inner
from protofed.flower.control import Control, key_bytes
from protofed.flower.door import Door
from protofed.flower.installed import command, environment, need_flower
from protofed.flower.processes import Child, exists
from protofed.flower.proxy import free_port, listen

LOOK_SECONDS = 0.2
OFTEN, WITHIN_SECONDS = 5, 120.0  # restarts of a process that are too many, in how long
TRIES = 4  # of the ServerApp without a round between them
APP_SECONDS = 120.0  # until the ServerApp must have begun
SOON_DAYS = 30  # from when on a certificate's end is spoken of
INSECURE = (
    "--insecure: nothing is encrypted and nobody checked. Whoever reaches {address} can read what is sent, join "
    "and pretend to be any client. For trials on one machine only."
)


class Stopped(BaseException):
    """Somebody asked for the end."""


class Server:
    """A server's processes, and what is known of them."""

    def __init__(self, folder: Path, settings: FederationSettings, bind: str | None, insecure: bool,
                 tell: Callable[[str], None]) -> None:  # fmt: skip
        self.folder, self.settings, self.tell, self.insecure = folder.resolve(), settings, tell, insecure
        self.home = self.folder / "flower"
        self.home.mkdir(mode=0o700, exist_ok=True)
        self.address = f"{settings.federation.host}:{settings.federation.port}"
        self.bind = bind or _bind(settings.federation.host)
        self.superlink_at = f"127.0.0.1:{free_port()}"
        self.inner = None if insecure else make_inner(self.home)
        self.children: dict[str, Child] = {}
        self.ends: dict[str, deque[float]] = {}
        self.run_id = 0
        self.tries = 0
        self.reached: Any = None
        self.submitted = 0.0
        self._told = serverapp.told_file(self.folder)
        self._read = self._told.stat().st_size if self._told.exists() else 0

    def start(self) -> None:
        """Everything, in order; the public port last, when all behind it is there."""
        listener = listen(self.bind, self.settings.federation.port, "the server")
        limit = self.settings.rounds.max_bytes
        authority = self.inner[0] if self.inner else None
        keys = None if self.insecure else [key_bytes(one.public_key, one.name) for one in self.settings.clients]
        experiment = self.settings.federation.experiment
        self.door = Door(self.folder, listener, self.superlink_at, authority, experiment, limit, keys)
        self._start_superlink()
        self.control = Control(self.superlink_at, authority)
        self._wait_for_superlink()
        self._register()
        self._start_superexec()
        self.door.relay.start()
        self._submit()
        self.note()

    def look(self) -> bool:
        """One look at everything; True when the federation is finished."""
        self._pass_on()
        if self.door.look():
            self.tell("the renewed certificate is in use")
        if not self.children["superlink"].alive:
            self._again("superlink")
            self._start_superlink()
            self._wait_for_superlink()
            self.note()
        if not self.children["superexec"].alive:
            self._again("superexec")
            self._start_superexec()
            self.note()
        return self._look_at_app()

    def stop(self) -> None:
        """End all processes, the ServerApp first."""
        for name in ("superexec", "superlink"):
            if name in self.children:
                self.children[name].stop()
        if hasattr(self, "control"):
            self.control.close()
        if hasattr(self, "door"):
            self.door.relay.stop()
        self._pass_on()
        processes_file(self.folder).unlink(missing_ok=True)

    def note(self) -> None:
        """Who is who, for `protofed federation status`."""
        pids = {"server": os.getpid()} | {name: child.pid for name, child in self.children.items()}
        note = {"pids": pids, "listens": f"{self.bind}:{self.settings.federation.port}", "insecure": self.insecure,
                "superlink": self.superlink_at}  # fmt: skip
        write_atomically(processes_file(self.folder), json.dumps(note).encode())

    def _look_at_app(self) -> bool:
        state = _read_json(serverapp.state_file(self.folder))
        if state.get("run") != self.run_id:
            if time.monotonic() - self.submitted > APP_SECONDS:
                raise UserError(
                    f"Flower did not start the program in {APP_SECONDS:.0f} s; see {self._log('superexec')}."
                )
            return False
        if state.get("finished"):
            return True
        if "failed" in state:
            raise UserError(state["failed"])
        if exists(int(state["pid"])):
            return False
        reached = status(self.folder).get("round")
        self.tries = self.tries + 1 if reached == self.reached else 1
        self.reached = reached
        if self.tries >= TRIES:
            raise UserError(
                f"the federation's program ended {TRIES} times in round {reached} without getting on: "
                f"{_last(self.children['superexec'].said())}. See {self._log('superexec')}."
            )
        self.tell("the federation's program ended; going on from its last checkpoint")
        self.control.stop(self.run_id)
        self._submit()
        return False

    def _start_superlink(self) -> None:
        host, port = self.superlink_at.split(":")
        words = [command("flower-superlink"), "--host", host, "--port", port, "--isolation", "process",
                 "--disable-runtime-dependency-installation", "--database", str(self.home / "superlink.db"),
                 ]  # fmt: skip
        if self.inner:
            words += ["--ssl-ca-certfile", str(self.inner[0]), "--ssl-certfile", str(self.inner[1]),
                      "--ssl-keyfile", str(self.inner[2]), "--enable-supernode-auth"]  # fmt: skip
        else:
            words += ["--insecure"]
        self._start("superlink", words)

    def _wait_for_superlink(self) -> None:
        child = self.children["superlink"]
        if not self.control.ready(lambda: child.alive):
            raise UserError(f"Flower's SuperLink did not start: {_last(child.said())}. See {self._log('superlink')}.")

    def _start_superexec(self) -> None:
        words = [command("flower-superexec"), "--runtime-api-address", self.superlink_at]
        words += ["--root-certificates", str(self.inner[0])] if self.inner else ["--insecure"]
        self._start("superexec", words)

    def _start(self, name: str, words: list[str]) -> None:
        more = {serverapp.FOLDER: str(self.folder), serverapp.SUPERVISOR: str(os.getpid()), "FLWR_LOG_LEVEL": "WARNING"}
        self.children[name] = Child(name, words, environment(self.home, **more), self._log(name))

    def _register(self) -> None:
        members = self.settings.clients
        keys = {} if self.insecure else {member.number: member.public_key for member in members}
        names = {member.number: member.name for member in members}
        nodes = self.control.register(keys, names)
        write_atomically(serverapp.nodes_file(self.folder), json.dumps(nodes).encode())

    def _submit(self) -> None:
        serverapp.state_file(self.folder).unlink(missing_ok=True)
        self.run_id, self.submitted = self.control.start(), time.monotonic()

    def _again(self, name: str) -> None:
        """Say that a process is started again, or give it up."""
        ends = self.ends.setdefault(name, deque(maxlen=OFTEN))
        ends.append(time.monotonic())
        last = _last(self.children[name].said())
        if len(ends) == OFTEN and ends[-1] - ends[0] < WITHIN_SECONDS:
            raise UserError(f"Flower's {name} ended {OFTEN} times in two minutes: {last}. See {self._log(name)}.")
        self.tell(f"Flower's {name} ended; starting it again")
        self.children[name].stop()  # what is left of its group

    def _pass_on(self) -> None:
        """Tell what the federation told since we last looked."""
        if self._told.exists() and self._told.stat().st_size > self._read:
            with open(self._told, "rb") as file:
                file.seek(self._read)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read += len(whole)
            for line in whole.decode(errors="replace").splitlines():
                self.tell(line)

    def _log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"


def run_server(folder: Path, *, bind: str | None, insecure: bool, tell: Callable[[str], None]) -> bool:
    """Serve a folder until its federation is finished (True) or somebody ends it (False)."""
    need_flower()
    settings = load_federation(folder)
    load_experiment(folder, settings.federation.experiment)
    if not settings.clients:
        raise UserError(f"{folder}/federation.toml names no [[clients]]. Set it up with 'protofed federation init'.")
    address = f"{settings.federation.host}:{settings.federation.port}"
    if insecure:
        tell(INSECURE.format(address=address))
    elif (left := check_server(folder)) < SOON_DAYS:
        tell(f"the server's certificate ends in {left:.0f} days: 'protofed federation renew {folder}' makes a new one")
    with locked(folder / "server.pid", f"a server of {folder}"), stoppable():
        server = Server(folder, settings, bind, insecure, tell)
        try:
            server.start()
            names = ", ".join(member.name for member in settings.clients)
            tell(f"serving {settings.federation.name} at {address} for {names}")
            while not server.look():
                time.sleep(LOOK_SECONDS)
            server.door.farewell()
        except Stopped:
            return False
        finally:
            server.stop()
    return True


@contextlib.contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Only one at a time; its process id is in the file, which nobody but it holds."""
    with open(path, "a+", encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(
                f"{what} is already running (process {file.read().strip() or '?'}). "
                "End it first, with Ctrl-C or 'protofed federation stop'."
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield
        file.truncate(0)


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM ends as Ctrl-C does, in good order, and a second one does not disturb that."""

    def stop(number: int, frame: FrameType | None) -> None:
        for kind in (signal.SIGTERM, signal.SIGINT):
            signal.signal(kind, signal.SIG_IGN)
        raise Stopped

    before = {kind: signal.signal(kind, stop) for kind in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def status(folder: Path) -> dict[str, Any]:
    """status.json of a server's folder; empty where there is none yet."""
    return _read_json(folder / "status.json")


def processes_file(folder: Path) -> Path:
    """Who is who while a server runs."""
    return folder / "flower" / "processes.json"


def _bind(host: str) -> str:
    """Loopback stays on loopback; else all addresses of this machine."""
    try:
        return host if ipaddress.ip_address(host).is_loopback else "0.0.0.0"
    except ValueError:
        return "127.0.0.1" if host == "localhost" else "0.0.0.0"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError):
        return {}


def _last(lines: list[str]) -> str:
    """The last line that says something."""
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
