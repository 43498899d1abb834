"""Runs that take a second, what stops them, and what is left of them."""

import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from protofed import Experiment
from protofed.engines.wire import encode
from protofed.runs.folder import RunFolder
from protofed.runs.watch import Watch

# One thread: tests run side by side, where two are slower than one.
SMALL = ("clients=6", "rounds=3", "partition.shots=5", "partition.spread=1", "batch_size=4", "engine.threads=1")
CLOCK = ("seconds", "seconds_train", "parts")  # all that may differ between two equal runs


def small(*overrides: str) -> Experiment:
    return Experiment.load("demo", *SMALL, *overrides)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in CLOCK} for line in RunFolder(folder).rounds()]


def final_state(folder: Path) -> dict[str, str]:
    """Hashes of everything a run computed, to the bit."""
    state, remarks = RunFolder(folder).restore()
    assert state is not None
    assert not remarks
    parts = {f"client {number}": encode(client, whole=True) for number, client in state.clients.items()}
    parts["server"] = encode(state.server, whole=True)
    parts["clients.jsonl"] = (folder / "clients.jsonl").read_bytes()
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in parts.items()}
    summary = {k: v for k, v in json.loads((folder / "summary.json").read_text()).items() if k not in CLOCK}
    return hashes | {"summary": json.dumps(summary), "rounds": json.dumps(lines(folder))}


class Told(Watch):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


class StopAfter(Watch):
    def __init__(self, round: int, how: type[BaseException] = KeyboardInterrupt) -> None:
        self.last, self.how = round, how

    def round(self, line: dict[str, Any]) -> None:
        if line["round"] == self.last:
            raise self.how


def start(out: str, *overrides: str) -> "subprocess.Popen[str]":
    """A run in a process of its own that writes a checkpoint after every round."""
    code = (
        "import sys; from protofed import Experiment, run;"
        f"run(Experiment.load('demo', *sys.argv[1:]), {out!r}, resume=True, checkpoint_seconds=0)"
    )
    return subprocess.Popen([sys.executable, "-c", code, *SMALL, *overrides], text=True, stderr=subprocess.PIPE)


def wait_for(condition: Any, process: "subprocess.Popen[str]", seconds: float = 300) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until and process.poll() is None:
        if condition():
            return True
        time.sleep(0.002)
    return bool(condition())
