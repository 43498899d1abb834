"""Secure sums over Flower's SuperLink with real processes: a client is killed, and the server's side is searched."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from command import protofed
from torch.utils._pytree import tree_leaves

import protofed as protofed_package
from protofed.config.experiment import Experiment
from protofed.data.sources import load
from protofed.engines.wire import decode
from protofed.remote.protocol import unpack_message
from protofed.remote.shares import export_shares

pytest.importorskip("flwr", reason="needs Flower: pip install 'protofed[flower]'")

from protofed.remote.flower.proxy import free_port
from protofed.remote.flower.server import processes_file, read_status

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("all_cores"),
    pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="reads memory in /proc"),
]
CLIENTS, KILLED = 4, 3
PLAN = (
    "clients=4", "rounds=3", "method=fedavg", "model=mlp_digits", "partition.shots=4", "partition.spread=1",
    "local_epochs=1", "engine=reference", "device=cpu", "record.enabled=false",
)  # fmt: skip
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(protofed_package.__file__).parent.parent)}
PATIENCE = 240.0


class Federation:
    """Its processes, which all end with the test."""

    def __init__(self, home: Path, *overrides: str) -> None:
        self.home, self.fed, self.server = home, home / "fed", home / "fed" / "server"
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        done = protofed("federation", "init", str(self.fed), "--clients", str(CLIENTS), "--host", "127.0.0.1", "--port",
                        str(free_port()), "--experiment", "demo", "--minimum", "3", "--deadline", "90",
                        "--wait", str(PATIENCE), *PLAN, *overrides)  # fmt: skip
        assert done.returncode == 0, done.stderr
        plan = Experiment.load(self.server / "experiment.toml")
        export_shares(plan, load(plan.data, None), home / "data")
        self.start("server", "server", str(self.server))
        for number in range(CLIENTS):
            self.client(number)

    def start(self, name: str, *words: str) -> None:
        with open(self.home / f"{name}.log", "ab") as log:
            command = [sys.executable, "-m", "protofed", *words]
            self.running[name] = subprocess.Popen(command, stdout=log, stderr=log, env=ENVIRONMENT)

    def client(self, number: int) -> None:
        bundle, data = self.fed / "clients" / f"client-{number:03d}", self.home / "data" / f"client-{number:03d}.npz"
        self.start(f"client {number}", "client", str(bundle), "--data", str(data), "--model", "mlp_digits")

    def until(self, what: Callable[[], bool], why: str) -> None:
        end = time.monotonic() + PATIENCE
        while not what():
            assert self.running["server"].poll() is None, (self.home / "server.log").read_text()
            assert time.monotonic() < end, f"waited in vain until {why}: {(self.home / 'server.log').read_text()}"
            time.sleep(0.02)

    def stop(self) -> None:
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
            process.wait()

    def memory(self) -> bytes:
        """All that the server's processes have in memory."""
        pids = json.loads(processes_file(self.server).read_bytes())["pids"].values()
        return b"".join(memory_of(pid) for pid in {self.running["server"].pid, *pids})

    def files(self) -> bytes:
        """All that the server has written: the SuperLink's database, logs, checkpoints, the audit log."""
        return b"".join(path.read_bytes() for path in self.server.rglob("*") if path.is_file())


def memory_of(pid: int) -> bytes:
    found = []
    with contextlib.suppress(OSError), open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            parts = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", line)
            if parts:
                first, last = (int(part, 16) for part in parts.groups())
                with contextlib.suppress(OSError, OverflowError, ValueError):
                    memory.seek(first)
                    found.append(memory.read(last - first))
    return b"".join(found)


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    made = Federation(tmp_path, "privacy.secure_sum=true", "privacy.threshold=3")
    yield made
    made.stop()


def pieces(home: Path, rounds: int) -> list[bytes]:
    """Parts of single clients' uploads, as these keep them on their own disks."""
    found = []
    for path in sorted(home.glob(f"fed/clients/*/state/*/round-{rounds:06d}/answer.bin")):
        up = decode(unpack_message(path.read_bytes()).body)
        flat = torch.cat([leaf.flatten() for leaf in tree_leaves(up)]).numpy()
        places = [at for at in range(0, len(flat) - 2, 211) if np.abs(flat[at : at + 2]).min() > 1e-3]
        found += [flat[at : at + 2].tobytes() for at in places[:8]]
    return found


def test_a_killed_client_costs_no_round_and_nothing_of_a_single_client_is_left_at_the_server(
    federation: Federation, tmp_path: Path
) -> None:
    server = federation.server
    federation.until(lambda: read_status(server).get("round") == 2, "round 2 begins")
    os.kill(federation.running[f"client {KILLED}"].pid, signal.SIGKILL)
    federation.running.pop(f"client {KILLED}").wait()
    federation.client(KILLED)
    federation.until(lambda: read_status(server).get("round") == 3, "round 3 begins")
    sought = [piece for round in (1, 2) for piece in pieces(tmp_path, round)]
    held = federation.memory()
    assert len(held) > 100_000_000
    assert len(sought) > 40
    assert not [piece for piece in sought if piece in held]
    assert federation.running.pop("server").wait(PATIENCE) == 0, (tmp_path / "server.log").read_text()
    lines = [json.loads(line) for line in (server / "run" / "rounds.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    assert all(line["clients"] >= 3 for line in lines)
    assert lines[0]["clients"] == CLIENTS
    sought = [piece for round in (1, 2, 3) for piece in pieces(tmp_path, round)]
    written = federation.files()
    assert b"SQLite format 3" in written
    assert not [piece for piece in sought if piece in written]
    said = (tmp_path / "client 0.log").read_text()
    assert "only in the sum over at least 3 clients" in said
    assert "gave shares to open the sum" in said
