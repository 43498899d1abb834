"""`protofed server`: starts Flower, watches it, restarts what dies, and ends when the federation has."""

import ipaddress
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from protofed.atomic import write_atomically
from protofed.errors import UserError
from protofed.remote.flower import serverapp
from protofed.remote.flower.certificates import check_server, make_inner
from protofed.remote.flower.control import Probe, SuperLinkAway, SuperLinkControl, key_bytes
from protofed.remote.flower.door import Door
from protofed.remote.flower.installed import command, flower_environment, need_flower
from protofed.remote.flower.processes import STUCK_SECONDS, Child, Pulse, Stopped, changed, locked, private, stoppable
from protofed.remote.flower.proxy import free_port, listen
from protofed.remote.settings import FederationSettings, load_experiment, load_federation

LOOK_SECONDS = 0.2
WHO = {"superlink": "Flower's SuperLink", "serverapp": "the federation's program"}
OFTEN, WITHIN_SECONDS = 5, 120.0  # restarts of a process that are too many, in how long
TRIES = 4  # of a ServerApp that ends by an error of its own, without a round between them
SOON_DAYS = 30  # from when on a certificate's end is spoken of
INSECURE = (
    "--insecure: nothing is encrypted and nobody checked. Whoever reaches {address} can read what is sent, join "
    "and pretend to be any client. For trials on one machine only."
)


class ServerProcesses:
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
        self.run_id = self.tries = 0
        self.reached: Any = None
        self.probe = Probe(self.superlink_at, self.inner[0] if self.inner else None)
        self.pulses = {
            "superlink": Pulse(lambda: self.probe.answers),
            "serverapp": Pulse(lambda: changed(self.folder / serverapp.BEAT)),
        }
        self._registered = False
        self._told = self.folder / serverapp.TOLD
        self._read = self._told.stat().st_size if self._told.exists() else 0

    def start(self) -> None:
        """Take the port, and start the SuperLink; the first looks do the rest."""
        listener = listen(self.bind, self.settings.federation.port, "the server")
        limit = self.settings.rounds.max_bytes
        authority = self.inner[0] if self.inner else None
        keys = None if self.insecure else [key_bytes(one.public_key, one.name) for one in self.settings.clients]
        experiment = self.settings.federation.experiment
        self.door = Door(self.folder, listener, self.superlink_at, authority, experiment, limit, keys)
        self.control = SuperLinkControl(self.superlink_at, authority)
        self._start_app()
        self._start_superlink()
        self.probe.start()

    def look(self) -> bool:
        """One look at everything; True when the federation is finished."""
        self._pass_on()
        for child in self.children.values():
            child.put_log_aside()  # whoever may call the SuperLink can have it write as much as they like
        if self.door.look():
            self.tell("the renewed certificate is in use")
        try:
            if self._ended("superlink"):
                self._start_superlink()
            return self._look_at_app()
        except SuperLinkAway:  # it has ended or is stuck: the next looks see that
            return False

    def stop(self) -> None:
        """End all processes, the ServerApp first."""
        for name in ("serverapp", "superlink"):
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
        if not self._registered:
            self._register()
            self.door.relay.start()  # not before: a client whose key is not known would give up
            self._registered = True
        if not self.run_id:
            self.run_id = self.door.run = self.control.start()
            submitted = {"run": self.run_id, "pid": self.children["serverapp"].pid}
            write_atomically(self.folder / serverapp.SUBMITTED, json.dumps(submitted).encode())
        app, state = self.children["serverapp"], read_json(serverapp.state_file(self.folder))
        if state.get("run") == self.run_id and state.get("finished"):
            return True
        if state.get("run") == self.run_id and "failed" in state:
            raise UserError(state["failed"])
        if not self._ended("serverapp"):
            return False
        reached = read_status(self.folder).get("round")
        fault = not app.killed and app.process.returncode != serverapp.AGAIN
        self.tries = self.tries + fault if reached == self.reached else int(fault)
        self.reached = reached
        if self.tries >= TRIES:
            raise UserError(
                f"the federation's program ended {TRIES} times in round {reached} without getting on: "
                f"{_last(app.said())}. See {self._log('serverapp')}."
            )
        self._start_app()
        return False

    def _ended(self, name: str) -> bool:
        """Whether a process has ended, or gave no sign of life for so long that it was ended now."""
        child, quiet = self.children[name], self.pulses[name].quiet
        if child.alive and quiet < STUCK_SECONDS:
            return False
        if child.alive:
            self.tell(f"{WHO[name]} has not answered for {quiet:.0f} s; it is ended and started again")
            child.stop(politely=False)
            return True
        self.tell(f"{WHO[name]} ended; starting it again")
        child.stop()  # what is left of its group
        if not child.killed and name == "superlink":
            self._give_up_if_often(child)
        return True

    def _give_up_if_often(self, child: Child) -> None:
        ends = self.ends.setdefault(child.name, deque(maxlen=OFTEN))
        ends.append(time.monotonic())
        if len(ends) == OFTEN and ends[-1] - ends[0] < WITHIN_SECONDS:
            raise UserError(
                f"{WHO[child.name]} ended {OFTEN} times in two minutes: {_last(child.said())}. "
                f"See {self._log(child.name)}."
            )

    def _start_superlink(self) -> None:
        """Start it, and wait until it answers; one that was stopped or killed meanwhile is started again."""
        host, port = self.superlink_at.split(":")
        words = [command("flower-superlink"), "--host", host, "--port", port, "--isolation", "process",
                 "--disable-runtime-dependency-installation", "--database", str(self.home / "superlink.db"),
                 ]  # fmt: skip
        if self.inner:
            words += ["--ssl-ca-certfile", str(self.inner[0]), "--ssl-certfile", str(self.inner[1]),
                      "--ssl-keyfile", str(self.inner[2]), "--enable-supernode-auth"]  # fmt: skip
        else:
            words += ["--insecure"]
        for _ in range(OFTEN):
            self._start("superlink", words)
            child = self.children["superlink"]
            if self.control.ready(lambda child=child: child.alive):  # type: ignore[misc]
                self.pulses["superlink"].again()
                return
            child.stop(politely=False)
        raise UserError(f"Flower's SuperLink did not start: {_last(child.said())}. See {self._log('superlink')}.")

    def _start_app(self) -> None:
        """Start the ServerApp, which claims the next run that is submitted: its imports take as long as the rest."""
        serverapp.state_file(self.folder).unlink(missing_ok=True)
        authority = str(self.inner[0]) if self.inner else ""
        self._start(
            "serverapp", [sys.executable, "-m", serverapp.__name__, str(self.folder), self.superlink_at, authority]
        )
        self.pulses["serverapp"].again()
        self.run_id = 0

    def _start(self, name: str, words: list[str]) -> None:
        more = {"FLWR_LOG_LEVEL": "WARNING"}
        self.children[name] = Child(name, words, flower_environment(self.home, **more), self._log(name))
        self.note()

    def _register(self) -> None:
        members = self.settings.clients
        keys = {} if self.insecure else {member.number: member.public_key for member in members}
        names = {member.number: member.name for member in members}
        nodes = self.control.register(keys, names)
        write_atomically(self.folder / serverapp.NODES, json.dumps(nodes).encode())

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
    spaces = [folder / name for name in ("flower", "logs", "run")]
    with private(*spaces), locked(folder / "server.pid", f"a server of {folder}"), stoppable():
        server = ServerProcesses(folder, settings, bind, insecure, tell)
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


def read_status(folder: Path) -> dict[str, Any]:
    """status.json of a server's folder; empty where there is none yet."""
    return read_json(folder / "status.json")


def processes_file(folder: Path) -> Path:
    """Who is who while a server runs."""
    return folder / "flower" / "processes.json"


def _bind(host: str) -> str:
    """Loopback stays on loopback; else all addresses of this machine."""
    try:
        return host if ipaddress.ip_address(host).is_loopback else "0.0.0.0"
    except ValueError:
        return "127.0.0.1" if host == "localhost" else "0.0.0.0"


def read_json(path: Path) -> dict[str, Any]:
    """A table that may not be there, or not be readable; then an empty one."""
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def _last(lines: list[str]) -> str:
    """The last line that says something."""
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
