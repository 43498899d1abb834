"""What Ray needs of this process: a cluster that answers, a folder, a token, and its signals put back."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from protofed.errors import UserError

REACH = 5.0  # seconds to reach a cluster
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # how gRPC begins; its server answers in kind
TOKEN = secrets.token_hex(32)
SOCKETS = 40  # longest path of a temporary folder, in characters, in which Ray's socket names are valid


def check_reached(address: str) -> None:
    """Fail within seconds if the address has no Ray behind it: Ray itself would try for minutes."""
    if address == "auto":
        return
    remedy = "Start the cluster with `ray start --head`, correct the address, or unset it to start Ray here."
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise UserError(
            f"RAY_ADDRESS = {address!r} is not host:port. Use the address that `ray start --head` printed, such as "
            "10.0.0.1:6379, on a machine of that cluster; or unset it to start Ray here."
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=REACH) as there:
            there.sendall(HELLO)
            answer = there.recv(9) if os.environ.get("RAY_USE_TLS", "0") == "0" else HELLO[-9:]
    except (OSError, OverflowError) as error:
        raise UserError(f"RAY_ADDRESS = {address!r} cannot be reached ({error}). {remedy}") from None
    if answer[3:4] != HELLO[-6:-5]:
        raise UserError(f"RAY_ADDRESS = {address!r} is not a Ray cluster: something else answers there. {remedy}")


@contextlib.contextmanager
def ray_folder() -> Iterator[str]:
    """Where Ray keeps its files: RAY_TMPDIR if set, otherwise a folder that is removed with the run."""
    if os.environ.get("RAY_TMPDIR"):
        yield os.environ["RAY_TMPDIR"]
        return
    usual = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="protofed-ray-", dir=usual if len(usual) + 22 < SOCKETS else "/tmp")
    try:
        yield str(Path(folder).resolve())
    finally:
        for _ in range(50):  # its processes may still be writing
            shutil.rmtree(folder, ignore_errors=True)
            if not Path(folder).exists():
                break
            time.sleep(0.1)


@contextlib.contextmanager
def ray_token() -> Iterator[None]:
    """Only this process and its children may use its Ray. Without a token Ray would write one, readable by all, to the
    user's home. Ray keeps the first one that it sees, so all runs of a process share it."""
    before = {name: os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_MODE")}
    os.environ.setdefault("RAY_AUTH_TOKEN", TOKEN)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


@contextlib.contextmanager
def own_signals() -> Iterator[None]:
    """Ray replaces the SIGTERM handler; restore ours afterwards."""
    mine = threading.current_thread() is threading.main_thread()
    usual = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if mine:
            signal.signal(signal.SIGTERM, usual)
