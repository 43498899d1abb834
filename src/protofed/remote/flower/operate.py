"""`protofed federation start|status|stop`: a server, and for trials its clients, in the background of this machine."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from protofed.errors import UserError
from protofed.remote.flower.certificates import days_left
from protofed.remote.flower.installed import flower_environment, need_flower
from protofed.remote.flower.processes import exists, private
from protofed.remote.flower.server import processes_file, read_json, read_status
from protofed.remote.protocol import one_line
from protofed.remote.server.asking import NO_ANSWER
from protofed.remote.server.audit import BrokenChain, Head, describe_entry, verify_log
from protofed.remote.server.audit import read_log as read_log
from protofed.remote.server.ledger import Ledger
from protofed.remote.server.orders import client_number, give_order, rounds_kept
from protofed.remote.server.status import last_head
from protofed.remote.settings import load_federation
from protofed.runs.folder import RunFolder

SHOWN = 8  # events in a status
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
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two who look do not take each other for it
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


def federation_report(folder: Path) -> dict[str, Any]:
    """All that is known of a federation here: its processes, its certificate, and its own status."""
    server = server_folder(folder)
    settings = load_federation(server)
    pid = running(server / "server.pid")
    processes = read_json(processes_file(server)) if pid else {}
    alive = {name: {"pid": one, "alive": exists(one)} for name, one in processes.get("pids", {}).items()}
    return {
        "name": settings.federation.name,
        "address": f"{settings.federation.host}:{settings.federation.port}",
        "running": pid is not None,
        "insecure": processes.get("insecure", False),
        "processes": alive,
        "certificate_days": round(days_left((server / "server.crt").read_bytes()), 1),
        "status": read_status(server),
    }


def events(own: dict[str, Any]) -> list[str]:
    """The last events of a status, a line each: who was put out, refused, clipped, or gave no answer."""
    lines = [f"put out: {one['name']} (by the {one['by']}): {one['reason']}" for one in own.get("put_out", [])]
    some = [*own.get("refused", []), *own.get("clipped", []), *own.get("missing", [])]
    return lines + [_event(one) for one in sorted(some, key=lambda event: event["time"])[-SHOWN:]]


def _event(one: dict[str, Any]) -> str:
    """What happened with a client, such as `round 6: no answer from north: its connection was lost`."""
    name, reason, state = one.get("name") or "an unknown client", one["reason"], one.get("state", "refused")
    when = f"round {one['round']}" if one["round"] else "before round 1"
    if state in ("refused", "clipped"):
        return f"{when}: {state} an answer of {name}: {reason}"
    if reason.startswith(NO_ANSWER):
        return f"{when}: {NO_ANSWER} from {name}{reason.removeprefix(NO_ANSWER)}"
    return f"{when}: {name}: {reason}"


def put_out(folder: Path, name: str, reason: str) -> str:
    """Order that a client is put out."""
    server, number = _member(folder, name)
    done = give_order(server, "ban", client=number, reason=one_line(reason))
    return f"{name} is put out" if done else f"{name} is put out as soon as the server reads this order"


def let_in(folder: Path, name: str) -> str:
    """Order that a client is let in again."""
    server, number = _member(folder, name)
    if number not in Ledger.of(server / "ledger.json").out:
        raise UserError(f"{name} is not put out. 'protofed federation status {folder}' says who is.")
    done = give_order(server, "unban", client=number)
    return f"{name} is let in again" if done else f"{name} is let in again as soon as the server reads this order"


def roll_back(folder: Path, round: int) -> str:
    """Order that the run goes on from the state after an earlier round."""
    server = server_folder(folder)
    kept = rounds_kept(RunFolder(server / "run"))
    if round not in kept:
        there = ", ".join(map(str, kept)) or "none"
        raise UserError(
            f"--round {round}: the state after that round is not kept. There are: {there} (rounds.keep in "
            "federation.toml says how many)."
        )
    done = give_order(server, "rollback", round=round)
    if done:
        return f"back to the state after round {round}; 'protofed federation start {folder}' goes on from there"
    return f"the server goes back to the state after round {round} as soon as the answers under way are in"


def verified(folder: Path, head: str | None) -> str:
    """That the audit log is whole; a UserError where it is not."""
    server = server_folder(folder)
    path = _log(server)
    told = last_head(server / "status.json")
    known: list[Head | str] = [*([head] if head else []), *([told] if told else [])]
    try:
        last, remarks = verify_log(path, *known)
    except BrokenChain as broken:
        raise UserError(f"{path} is not as it was written: {broken}") from None
    return "\n".join([*remarks, f"{path}: {last.number} entries, the chain is whole. Its head: {last.hash}"])


def log_lines(folder: Path, as_json: bool) -> Iterator[str]:
    """The audit log for people, or as it is."""
    for number, line, entry in read_log(_log(server_folder(folder))):
        if as_json:
            yield line.decode(errors="replace").rstrip("\n")
        elif entry is None:
            yield f"(line {number} was cut off by a crash)"
        else:
            yield describe_entry(entry)


def _log(server: Path) -> Path:
    path = server / "audit.jsonl"
    if not path.is_file():
        raise UserError(f"{path} is not there yet: the server writes it from its first start on.")
    return path


def _member(folder: Path, name: str) -> tuple[Path, int]:
    server = server_folder(folder)
    return server, client_number(load_federation(server), name)


def _spawn(words: list[str], log: Path) -> tuple[int, Path]:
    with private():
        log.parent.mkdir(parents=True, exist_ok=True)
        file = open(log, "ab")  # noqa: SIM115 - closed below
    with file:
        process = subprocess.Popen(
            [sys.executable, "-m", "protofed", *words], stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            start_new_session=True, env=flower_environment(log.parent.parent / "flower"),
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
