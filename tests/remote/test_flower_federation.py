"""A real federation over loopback: Flower's SuperLink and SuperNodes with TLS and keys, killed and restarted."""

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import TOOLS
from command import protofed

import protofed as protofed_package
from protofed import run
from protofed.config.experiment import Experiment
from protofed.data.sources import load
from protofed.remote.shares import export_shares
from protofed.runs.folder import RunFolder

pytest.importorskip("flwr", reason="needs Flower: pip install 'protofed[flower]'")

from protofed.remote.flower import serverapp
from protofed.remote.flower.certificates import make_client_key, write_private
from protofed.remote.flower.processes import exists
from protofed.remote.flower.proxy import free_port
from protofed.remote.flower.server import processes_file, read_status

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("all_cores")]

MODELS = ("cnn_digits_8", "cnn_digits_16", "mlp_digits")
PLAN = ("rounds=6", "evaluate.own=0", "partition.shots=4", "engine=reference", "device=cpu")
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(protofed_package.__file__).parent.parent)}
PATIENCE = 180.0  # seconds, for a machine that does other things too


class Crew:
    """The processes of a test: started, killed and in the end all gone, by their ids."""

    def __init__(self, home: Path) -> None:
        self.home, self.running = home, {}  # type: ignore[var-annotated]

    def start(self, name: str, *words: str) -> None:
        with open(self.home / f"{name}.log", "ab") as log:
            self.running[name] = subprocess.Popen([sys.executable, *words], stdout=log, stderr=log, env=ENVIRONMENT)

    def kill(self, name: str) -> None:
        os.kill(self.running[name].pid, signal.SIGKILL)
        self.running.pop(name).wait()

    def ended(self, name: str) -> int:
        return int(self.running.pop(name).wait(PATIENCE))

    def log(self, name: str) -> str:
        return (self.home / f"{name}.log").read_text()


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Crew]:
    found = Crew(tmp_path)
    yield found
    for process in found.running.values():
        process.terminate()
    for process in found.running.values():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
        process.wait()


def until(what: Callable[[], Any], why: str, crew: Crew) -> None:
    end = time.monotonic() + PATIENCE
    while not what():
        for name, process in crew.running.items():
            assert process.poll() is None, f"{name} ended before {why}: {crew.log(name)}"
        assert time.monotonic() < end, f"waited in vain until {why}: {crew.log('server')}"
        time.sleep(0.02)


def descendants(home: Path) -> list[int]:
    """Processes whose command or environment names the test's folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(home).encode() in (path / "cmdline").read_bytes() + (path / "environ").read_bytes():
                found.append(int(path.name))
    return [pid for pid in found if pid != os.getpid() and exists(pid)]


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_a_federation_equals_the_simulation_whatever_is_killed(crew: Crew, tmp_path: Path) -> None:
    home, server = tmp_path / "fed", tmp_path / "fed" / "server"
    port = str(free_port())
    done = protofed("federation", "init", str(home), "--clients", "3", "--host", "127.0.0.1", "--port", port,
                    "--experiment", "demo", "--minimum", "3", "--deadline", "90", *PLAN)  # fmt: skip
    assert done.returncode == 0, done.stderr
    plan = Experiment.load(server / "experiment.toml")
    export_shares(plan, load(plan.data, None), tmp_path / "data")
    shutil.copy(tmp_path / "data" / "test.npz", server / "test.npz")

    def client(number: int) -> None:
        bundle, data = home / "clients" / f"client-{number:03d}", tmp_path / "data" / f"client-{number:03d}.npz"
        words = ["-m", "protofed", "client", str(bundle), "--data", str(data), "--model", MODELS[number]]
        if number == 2:
            words = [str(TOOLS / "flower_rogue.py"), str(bundle), str(data), MODELS[2]]
        crew.start(f"client {number}", *words)

    begun = 1

    def in_the_next_round() -> None:
        nonlocal begun
        now: dict[str, Any] = {}

        def training() -> bool:
            now.update(read_status(server))
            return bool(now and now["round"] > begun and now["clients"][0]["state"] == "training")

        until(training, f"clients train after round {begun}", crew)
        begun = now["round"]

    crew.start("server", "-m", "protofed", "server", str(server))
    for number in range(3):
        client(number)
    until(lambda: read_status(server).get("round") == 1, "the first round begins", crew)
    _only_clients_are_let_in(f"https://127.0.0.1:{port}", server / "ca.crt")
    _nothing_is_for_others(home, tmp_path)
    stranger = _stranger(home, tmp_path)

    in_the_next_round()
    assert any("NaN" in refused["reason"] for refused in read_status(server)["refused"])  # the rogue's
    crew.kill("client 0")
    client(0)

    in_the_next_round()
    os.kill(json.loads(serverapp.state_file(server).read_bytes())["pid"], signal.SIGKILL)

    in_the_next_round()
    os.kill(json.loads(processes_file(server).read_bytes())["pids"]["superlink"], signal.SIGKILL)

    in_the_next_round()
    pids = json.loads(processes_file(server).read_bytes())["pids"].values()
    crew.kill("server")
    until(lambda: not any(map(exists, pids)), "what the server had started is gone", crew)
    crew.start("server", "-m", "protofed", "server", str(server))

    err = stranger.communicate(timeout=PATIENCE)[1]
    assert stranger.returncode == 2
    assert "does not know the key of this bundle" in err
    assert len(err.splitlines()) == 1
    assert crew.ended("server") == 0, crew.log("server")
    for number in range(3):
        assert crew.ended(f"client {number}") == 0, crew.log(f"client {number}")
        assert "joined" in crew.log(f"client {number}")
    until(lambda: not descendants(tmp_path), "all processes are gone", crew)
    assert "prototypes" in crew.log("client 1").split("joined")[0]  # what it will send is said before
    _equal(server / "run", plan, tmp_path / "simulated")
    done = protofed("federation", "status", str(home), "--json")
    assert json.loads(done.stdout)["status"]["phase"] == "finished"
    assert (server / "server.key").stat().st_mode & 0o077 == 0


def _only_clients_are_let_in(base: str, authority: Path) -> None:
    """Control is on the SuperLink's port alone, which listens on loopback; the public one does not know its routes."""
    context = ssl.create_default_context(cafile=authority)
    with urllib.request.urlopen(f"{base}/protofed", context=context) as answer:
        assert set(json.load(answer)) == {"protofed", "flwr", "experiment"}
    for route in ("/v1/control/list-nodes", "/v1/control/start-run", "/v1/control/register-node", "/docs",
                  "/v1/runtime/get-nodes", "/v1/fleet/register-node", "/v1/fleet/get-fab",
                  "/v1/fleet/../control/start-run"):  # fmt: skip
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(base + route, b"", method="POST"), context=context)
        assert refused.value.code == 404, route


def _nothing_is_for_others(home: Path, tmp_path: Path) -> None:
    """Other users of the machine see no token among the processes' arguments, and can open no file."""
    with contextlib.closing(sqlite3.connect(home / "server" / "flower" / "superlink.db")) as database:
        tokens = [row[0] for row in database.execute("SELECT token FROM task WHERE token IS NOT NULL")]
    assert tokens
    listed = subprocess.run(["ps", "-eww", "-o", "args"], capture_output=True, text=True, check=True).stdout
    assert str(home / "server") in listed
    assert not [token for token in tokens if token in listed]
    made = [path for part in ("flower", "logs", "run") for path in (home / "server" / part).rglob("*")]
    assert {"superlink.db", "superlink.db-wal", "superlink.log", "serverapp.log", "told.log"} <= {p.name for p in made}
    assert not [path for path in made if path.stat().st_mode & 0o077]


def _stranger(home: Path, tmp_path: Path) -> subprocess.Popen[str]:
    """A client with a key that the server does not know."""
    bundle = tmp_path / "stranger"
    shutil.copytree(home / "clients" / "client-000", bundle, ignore=shutil.ignore_patterns("state"))
    write_private(bundle / "key", make_client_key().key)
    words = [sys.executable, "-m", "protofed", "client", str(bundle)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)


def _equal(run_folder: Path, plan: Experiment, out: Path) -> None:
    """The server's state after every round that is kept, and the clients' numbers."""
    simulated = run(plan, out)
    ours = [json.loads(line) for line in (run_folder / "rounds.jsonl").read_text().splitlines()]
    for mine, theirs in zip(ours, simulated.rounds, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert (mine["bytes_up"], mine["bytes_down"]) == (theirs["bytes_up"], theirs["bytes_down"])
    assert ours[-1]["accuracy_mean"] == pytest.approx(simulated.rounds[-1]["accuracy_mean"], abs=1e-6)
    states = [RunFolder(folder).restore()[0].server for folder in (run_folder, out)]  # type: ignore[union-attr]
    flat = [torch.utils._pytree.tree_leaves(state) for state in states]
    for one, other in zip(*flat, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
