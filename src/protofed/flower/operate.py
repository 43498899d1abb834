"""`protofed federation start|status|stop`: a server, and for trials its clients, in the background of this machine."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from protofed.errors import UserError
from protofed.federation.settings import load_federation
from protofed.flower.certificates import days_left
from protofed.flower.installed import environment, need_flower
from protofed.flower.processes import exists
from protofed.flower.server import processes_file, status

START_SECONDS, STOP_SECONDS = 90.0, 40.0


def server_folder(folder: Path) -> Path:
    """Either the federation's folder or the server's in it."""
    if (folder / "federation.toml").is_file():
        return folder
    if (folder / "server" / "federation.toml").is_file():
        return folder / "server"
    raise UserError(f"there is no federation in {folder}. Make one with 'protofed federation init {folder} ...'.")


def running(pid_file: Path) -> int | None:
    """The process that holds a pid file, or None."""
    try:
        with open(pid_file, "a+", encoding="ascii") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                return int(file.read().strip() or 0) or None
    except (FileNotFoundError, ValueError):
        pass
    return None


def start(
    folder: Path, *, insecure: bool, clients: Path | None, models: Sequence[str], tell: Callable[[str], None]
) -> None:
    """Start the server in the background, and with `clients` (a folder of NAME.npz) all clients too."""
    need_flower()
    server = server_folder(folder)
    if pid := running(server / "server.pid"):
        raise UserError(f"the server of {folder} is already running (process {pid}).")
    settings = load_federation(server)
    data = _data_of([member.name for member in settings.clients], clients) if clients else {}
    more = ["--insecure"] if insecure else []
    pid, log = _spawn(["server", str(server), *more], server / "logs" / "server.log")
    end = time.monotonic() + START_SECONDS
    while not (processes_file(server).exists() and running(server / "server.pid") == pid):
        if not exists(pid) or time.monotonic() > end:
            raise UserError(f"the server did not start: {_why(log)} (all of it: {log}).")
        time.sleep(0.1)
    tell(f"the server runs (process {pid}, log {log})")
    for number, (name, path) in enumerate(data.items()):
        bundle = server.parent / "clients" / name
        words = ["client", str(bundle), "--data", str(path), *more]
        words += ["--model", models[number % len(models)]] if models else []
        pid, log = _spawn(words, bundle / "state" / "logs" / "client.log")
        tell(f"{name} runs (process {pid}, log {log})")


def stop(folder: Path, tell: Callable[[str], None]) -> None:
    """End the server, and clients that `start` started here, by their process ids."""
    server = server_folder(folder)
    found = {"the server": running(server / "server.pid")}
    for bundle in sorted((server.parent / "clients").glob("*")):
        found[bundle.name] = running(bundle / "state" / "client.pid")
    alive = {name: pid for name, pid in found.items() if pid}
    if not alive:
        tell("nothing was running")
    for pid in alive.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + STOP_SECONDS
    for name, pid in alive.items():
        while exists(pid):
            if time.monotonic() > end:
                raise UserError(f"{name} (process {pid}) did not end in {STOP_SECONDS:.0f} s. Look at its log.")
            time.sleep(0.1)
        tell(f"{name} has ended (process {pid})")


def report(folder: Path) -> dict[str, Any]:
    """All that is known of a federation here: its processes, its certificate, and its own status."""
    server = server_folder(folder)
    settings = load_federation(server)
    pid = running(server / "server.pid")
    try:
        processes = json.loads(processes_file(server).read_bytes()) if pid else {}
    except (OSError, ValueError):
        processes = {}
    alive = {name: {"pid": one, "alive": exists(one)} for name, one in processes.get("pids", {}).items()}
    return {
        "name": settings.federation.name,
        "address": f"{settings.federation.host}:{settings.federation.port}",
        "running": pid is not None,
        "insecure": processes.get("insecure", False),
        "processes": alive,
        "certificate_days": round(days_left((server / "server.crt").read_bytes()), 1),
        "status": status(server),
    }


def _spawn(words: list[str], log: Path) -> tuple[int, Path]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "protofed", *words], stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            start_new_session=True, env=environment(log.parent.parent / "flower"),
        )  # fmt: skip
    return process.pid, log


def _data_of(names: list[str], folder: Path) -> dict[str, Path]:
    paths = {name: folder / f"{name}.npz" for name in names}
    missing = [path for path in paths.values() if not path.is_file()]
    if missing:
        raise UserError(f"--with-clients: {missing[0]} is missing. Put one .npz for every client there, by its name.")
    return paths


def _why(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ") if lines else "it said nothing"
