"""The numbers of a run, round by round, to TensorBoard, Weights & Biases or MLflow, without slowing it down."""

import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from protofed.errors import UserError, did_you_mean
from protofed.runs.watch import Watch, Watches
from protofed.tracking import TRACK
from protofed.tracking.sinks import SINKS
from protofed.tracking.sinks.child import LONGEST

HERE = str(Path(__file__).parent.parent)
# A bare package in place of the whole one: the process starts without PyTorch, which alone takes seconds.
BESIDE = """
import sys, types
sys.modules["protofed"] = bare = types.ModuleType("protofed")
bare.__path__ = [sys.argv.pop(1)]
from protofed.tracking.sinks.child import main
main()
"""
LAST_SECONDS = 20.0  # that a sink may be idle when the run is over, before it is given up


def track(*names: str, say: Callable[[str], None] | None = None) -> Watch:
    """A watch that reports to these sinks; one that fails is mentioned once, by `say` or as a logged warning."""
    return Tracker(chosen_sinks(names), say or logging.getLogger("protofed").warning)


def tracked(watch: Watch, names: Sequence[str] | None = None) -> Watch:
    """A watch together with these sinks, or those in $PROTOFED_TRACK; their messages become notes."""
    sinks = chosen_sinks([os.environ.get(TRACK, "")] if names is None else names)
    return Watches(watch, Tracker(sinks, watch.note)) if sinks else watch


def chosen_sinks(names: Iterable[str]) -> list[str]:
    """The named sinks, each once; names may be joined by commas. A UserError if a sink is unknown, or its package is
    missing."""
    found = list(dict.fromkeys(word for name in names for word in name.replace(",", " ").split()))
    for name in found:
        if name not in SINKS:
            raise UserError(f"--track {name!r}: there is no such sink. {did_you_mean(name, SINKS)}")
        missing = [package for package in SINKS[name].needs if not _installed(package)]
        if missing:
            raise UserError(f"--track {name}: {' and '.join(missing)} missing; pip install 'protofed[track]'.")
    return found


def _installed(package: str) -> bool:
    """Whether it can be imported; a mere folder with that name, such as wandb's own output, is not a package."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


class Tracker(Watch):
    """Starts a process that reads the run's folder and reports to the sinks; serves one run after another."""

    def __init__(self, names: list[str], say: Callable[[str], None]) -> None:
        self.names, self.say = names, say
        self.process: subprocess.Popen[bytes] | None = None

    def opened(self, folder: Path) -> None:
        if not self.names:
            return
        command = [sys.executable, "-c", BESIDE, HERE, str(folder), str(LAST_SECONDS), *self.names]
        try:
            (folder / "track").mkdir(exist_ok=True)
            with open(folder / "track" / "log.txt", "ab") as log:
                self.process = subprocess.Popen(
                    command,
                    bufsize=0,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                )  # a session of its own: Ctrl-C is for the run, whose end it sees when its stdin closes
        except OSError as error:
            self._without(f"{', '.join(self.names)} cannot be started ({error.strerror or error})")
        else:
            self.log = folder / "track" / "log.txt"
            assert self.process.stdout is not None
            os.set_blocking(self.process.stdout.fileno(), False)

    def round(self, line: dict[str, Any]) -> None:
        self._listen()

    def end(self) -> None:
        if self.process is None:
            return
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(LONGEST + LAST_SECONDS)  # it knows its time
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._listen()

    def _listen(self) -> None:
        """Pass on the process's messages without waiting for it."""
        if self.process is None:
            return
        assert self.process.stdout is not None
        for reason in (self.process.stdout.read() or b"").decode(errors="replace").splitlines():
            self._without(reason)
        if self.process.poll() is not None:
            if self.process.returncode:
                self._without(f"{', '.join(self.names)} ended too early, see {self.log}")
            self.process.stdout.close()
            self.process = None

    def _without(self, reason: str) -> None:
        self.say(f"{reason}; the run continues without it, and its folder has every number")
