"""Flower's processes: started with a log, ended by their id with all that they started, and never left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

STOP_SECONDS = 8.0
LOG_BYTES = 20_000_000  # a log that is larger when a process starts is put aside, over the one before

# Run in the new process, before Flower's command takes its place: it gets SIGTERM when the one who started it is gone.
ENDS_WITH_ME = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class Child:
    """One of Flower's processes; start it from the main thread, with whose end it ends."""

    def __init__(self, name: str, words: list[str], environment: dict[str, str], log: Path) -> None:
        self.name, self.log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        if log.exists() and log.stat().st_size > LOG_BYTES:
            log.replace(log.with_name(log.name + ".1"))
        self._from = log.stat().st_size if log.exists() else 0
        with open(log, "ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", ENDS_WITH_ME, str(os.getpid()), *words],
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment,
                start_new_session=True,  # Ctrl-C does not reach it, and it can be ended as a group
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def said(self, lines: int = 40) -> list[str]:
        """The last lines of its log since it was started."""
        with open(self.log, "rb") as file:
            file.seek(self._from)
            return file.read().decode(errors="replace").splitlines()[-lines:]

    def stop(self) -> None:
        """End it and what it started: politely, then not."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGTERM)
            end = time.monotonic() + STOP_SECONDS
            while self.alive and time.monotonic() < end:
                time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # whatever is left of its group
        self.process.wait()


def exists(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return True
