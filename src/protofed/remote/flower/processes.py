"""Flower's processes: started with a log, ended by their id with all that they started, and never left behind."""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TextIO

from protofed.errors import UserError

STOP_SECONDS = 8.0
LOOK_SECONDS = 0.5  # that somebody may hold a pid file who only looks at it
STUCK_SECONDS = 30.0  # without a sign of life, after which a process is ended
PRIVATE = 0o077  # what is written here is for this user alone
LOG_BYTES = 20_000_000  # a log that is larger is put aside, over the one before

# Run in the new process, before Flower's command takes its place: it is killed when the one who started it is gone,
# even if it is stopped. Who ends in good order ends its children first.
ENDS_WITH_ME = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class Stopped(BaseException):
    """Somebody asked for the end."""


class Child:
    """One of Flower's processes; start it from the main thread, with whose end it ends."""

    def __init__(self, name: str, words: list[str], environment: dict[str, str], log: Path) -> None:
        self.name, self.log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._from = 0
        self.put_log_aside()
        self._from = log.stat().st_size if log.exists() else 0
        with open(log, "ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", ENDS_WITH_ME, str(os.getpid()), *words],
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, umask=PRIVATE,
                start_new_session=True,  # Ctrl-C does not reach it, and it can be ended as a group
            )  # fmt: skip

    def put_log_aside(self) -> None:
        """Make room if the log is long. The process goes on writing into the same file, so its content is moved."""
        if self.log.exists() and self.log.stat().st_size > LOG_BYTES:
            shutil.copyfile(self.log, self.log.with_name(self.log.name + ".1"))
            os.truncate(self.log, 0)
            self._from = 0

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

    @property
    def killed(self) -> bool:
        """Whether a signal ended it, and no error of its own."""
        return (self.process.poll() or 0) < 0

    def stop(self, politely: bool = True) -> None:
        """End it and what it started: politely, then not."""
        if politely and self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGTERM)
            end = time.monotonic() + STOP_SECONDS
            while self.alive and time.monotonic() < end:
                time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # whatever is left of its group
        self.process.wait()


class Pulse:
    """How long a process has given no sign of life. A long pause between two looks counts little.

    So whoever was stopped itself, or slept with its machine, takes nobody for dead when it wakes up.
    """

    def __init__(self, sign: Callable[[], object]) -> None:
        self.sign = sign
        self.again()

    def again(self) -> None:
        """The process was just started."""
        self._last, self._looked, self._quiet = self.sign(), time.monotonic(), 0.0

    @property
    def quiet(self) -> float:
        """One look: for how many seconds the sign has been the same."""
        now, sign = time.monotonic(), self.sign()
        self._quiet = 0.0 if sign != self._last else self._quiet + min(now - self._looked, STUCK_SECONDS / 2)
        self._last, self._looked = sign, now
        return self._quiet


@contextlib.contextmanager
def private(*folders: Path) -> Iterator[None]:
    """What is written meanwhile is for this user alone; what older versions left in these folders is, too."""
    for path in (path for folder in folders if folder.is_dir() for path in [folder, *folder.rglob("*")]):
        if not path.is_symlink() and path.stat().st_mode & PRIVATE:
            path.chmod(path.stat().st_mode & ~PRIVATE)
    before = os.umask(PRIVATE)
    try:
        yield
    finally:
        os.umask(before)


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


def changed(path: Path) -> int:
    """When a file was last written or touched; 0 where there is none."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _taken(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Only one at a time; its process id is in the file, which nobody but it holds."""
    with open(path, "a+", encoding="ascii") as file:
        end = time.monotonic() + LOOK_SECONDS
        while not _taken(file):
            if time.monotonic() > end:
                file.seek(0)
                raise UserError(
                    f"{what} is already running (process {file.read().strip() or '?'}). "
                    "End it first, with Ctrl-C or 'protofed federation stop'."
                )
            time.sleep(0.02)
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
