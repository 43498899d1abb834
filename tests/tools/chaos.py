"""A federation on machines of its own, a plan of faults from a seed, and what has to be true after each of them."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from command import protofed
from namespaces import Machines
from torch.utils._pytree import tree_leaves

import protofed as package
from protofed.config.experiment import Experiment
from protofed.engines import nobody
from protofed.remote.client.state import StateFolder
from protofed.remote.server.audit import read_log as read_log
from protofed.runs.folder import RunFolder

ADDRESSES = {
    "server": "10.77.0.1",
    "north": "10.77.0.2",
    "south": "10.77.0.3",
    "west": "10.77.0.4",
    "east": "10.77.0.5",
}
PORT = 8443
AGAIN_SECONDS = 1.0  # after which a service manager starts what ended by an error
BACK_SECONDS = 60.0  # in which every client has to be back
STUCK_SECONDS = 300.0  # after which a federation is stuck for good
PATIENCE = 240.0
CLOSE = 1e-4  # sums of different machines differ in their last digits
SECURE = ("privacy.secure_sum=true", "privacy.threshold=2")  # of three clients, two are enough for a sum


class Fault(NamedTuple):
    """What is done to whom, and for how many seconds."""

    what: str  # kill, stop or cut
    who: str  # server, serverapp, superlink, or a client's name
    seconds: float


class Happened(NamedTuple):
    """A fault, and what came of it."""

    fault: Fault
    round: int
    back: float  # seconds from its end until the last client was back; infinite where it never was
    together: bool  # with another fault at the same time


def plan(seed: int, count: int, clients: list[str], longest: float) -> list[Fault]:
    """So many faults, most of them short: a tenth lasts up to `longest` seconds."""
    dice = random.Random(seed)
    faults = []
    for _ in range(count):
        what = dice.choice(["kill", "stop", "cut"])
        inside = ["server", "serverapp", "superlink"]
        who = dice.choice([*clients, "server"] if what == "cut" else [*clients, *inside])
        seconds = dice.uniform(5, 12) if dice.random() < 0.9 else dice.uniform(min(20, longest), longest)
        faults.append(Fault(what, who, 0.0 if what == "kill" else round(min(seconds, longest), 1)))
    return faults


class Federation:
    """One server and its clients, each on a machine of its own; who ends by an error is started again."""

    def __init__(self, home: Path, names: list[str], rounds: int, minimum: int, *plan: str) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.names, self.home = names, home
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(package.__file__).parent.parent),
        }  # fmt: skip
        self.machines = Machines(home, {name: ADDRESSES[name] for name in ("server", *names)}, environment)
        self.folder = self.machines.folders["server"] / "fed"
        self.server = self.folder / "server"
        done = protofed(
            "federation", "init", str(self.folder), "--clients", ",".join(names), "--host", ADDRESSES["server"],
            "--port", str(PORT), "--experiment", "demo", "--minimum", str(minimum), "--deadline", "90",
            f"clients={len(names)}", f"rounds={rounds}", "evaluate.own=0", "partition.shots=4", "engine=reference",
            "device=cpu", "record.enabled=false", *plan,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.remarks: list[str] = []
        self._again: dict[str, float] = {}
        for name in ("server", *names):
            self._start(name)

    def close(self) -> None:
        self.machines.close()
        for process in self.running.values():
            process.wait()

    def log(self, name: str) -> Path:
        return self.home / f"{name}.log"

    def _start(self, name: str) -> None:
        words = f"server {self.server}" if name == "server" else f"client {self.folder}/clients/{name} --wait 300"
        self.running[name] = self.machines.start(name, f"exec python -m protofed {words}", self.log(name))

    def look(self) -> None:
        """What a service manager does: `Restart=on-failure`."""
        for name, process in list(self.running.items()):
            code = process.poll()
            if code is None:
                continue
            del self.running[name]
            if code >= 0:
                self.remarks.append(f"{name} ended with {code}: {_last_line(self.log(name))}")
            self._again[name] = time.monotonic() + AGAIN_SECONDS
        for name, when in list(self._again.items()):
            if time.monotonic() >= when:
                del self._again[name]
                self._start(name)

    def status(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads((self.server / "status.json").read_bytes()))
        return {}

    def seen(self) -> dict[str, float]:
        """When each client last answered."""
        return {client["name"]: client["last_seen"] or 0.0 for client in self.status().get("clients", [])}

    def until(self, what: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not what():
            if time.monotonic() > end:
                return False
            self.look()
            time.sleep(0.05)
        return True

    def pid(self, who: str) -> int | None:
        """The process of a role now, if there is one."""
        if who in self.running:
            return self.running[who].pid
        with contextlib.suppress(OSError, ValueError, KeyError):
            pid = int(json.loads((self.server / "flower" / "processes.json").read_bytes())["pids"][who])
            if pid in self.machines.processes():
                return pid
        return None

    def wait_for(self, who: str) -> int | None:
        """Its process, as soon as there is one."""
        self.until(lambda: self.pid(who) is not None, PATIENCE)
        return self.pid(who)

    def do(self, faults: Sequence[Fault]) -> float:
        """Some faults at the same time, each to its end; when the last one ended."""
        ends = [(fault.seconds, self._begin(fault)) for fault in faults]
        passed = 0.0
        for seconds, end in sorted(ends, key=lambda one: one[0]):
            self.until(lambda: False, seconds - passed)
            passed = seconds
            end()
        return time.time()

    def _begin(self, fault: Fault) -> Callable[[], None]:
        """Do it; what is called ends it."""
        if fault.what == "cut":  # the machine's cable is pulled
            self.machines.cable(fault.who, "down")
            return lambda: self.machines.cable(fault.who, "up")
        pid = self.wait_for(fault.who)
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.kill(pid, signal.SIGKILL if fault.what == "kill" else signal.SIGSTOP)  # type: ignore[arg-type]
        return lambda: self._wake(pid)

    def _wake(self, pid: int | None) -> None:
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.kill(pid, signal.SIGCONT)  # type: ignore[arg-type]

    def back(self, since: float) -> float:
        """Seconds until every client has answered again; infinite where it does not come to that."""
        there = self.until(lambda: bool(self.seen()) and min(self.seen().values()) > since, STUCK_SECONDS)
        return time.time() - since if there else float("inf")

    def suffer(self, faults: Sequence[Fault], seed: int, most: int) -> Iterator[Happened]:
        """All faults, one to `most` at the same time; after that, everybody has to be back."""
        dice, left = random.Random(seed), list(faults)
        assert self.until(lambda: bool(self.seen()) and min(self.seen().values()) > 0, PATIENCE), self.log("server")
        while left:
            now = [left.pop(0)]
            many = dice.randint(1, most)
            while left and len(now) < many and left[0].who not in {fault.who for fault in now}:
                now.append(left.pop(0))
            self.until(lambda: False, dice.uniform(0, 3))
            round = self.status().get("round", 0)
            back = self.back(self.do(now))
            yield from (Happened(fault, round, back, len(now) > 1) for fault in now)

    def stop(self) -> None:
        """End all in good order, wherever it is."""
        for name in ("server", *self.names):
            if name in self.running:
                self.running[name].terminate()
        for process in self.running.values():
            process.wait(60)


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else ""


# the same without any fault


def merged(server: Path, names: list[str]) -> dict[int, list[int]]:
    """Whose uploads each round was made of: of nobody's, if its secure sum could not be opened."""
    found: dict[int, list[int]] = {}
    for _, _, entry in read_log(server / "audit.jsonl"):
        if entry is not None and entry["event"] == "merged":
            found[entry["round"]] = sorted(names.index(name) for name in entry["clients"])
        elif entry is not None and entry["event"] == "left out":
            found[entry["round"]] = []
    return found


def trained(federation: Federation) -> dict[int, set[int]]:
    """Who trained in each round, merged or not: it is what a client's own state is made of."""
    found: dict[int, set[int]] = {}
    for number, name in enumerate(federation.names):
        for line in federation.log(name).read_text(errors="replace").splitlines():
            head, _, rest = line.partition(": trained")
            if rest and head.rpartition("round ")[2].isdigit():
                found.setdefault(int(head.rpartition("round ")[2]), set()).add(number)
    return found


def simulated(federation: Federation, rounds: int, out: Path) -> Path:
    """The simulation in which the same clients train and are merged, round by round."""
    from protofed import run
    from protofed.runs.setup import prepare

    experiment = replace(Experiment.load(federation.server / "experiment.toml"), rounds=rounds)
    prepared = prepare(experiment)
    engine, mine = prepared.engine, merged(federation.server, federation.names)
    whole, all_trained = engine.train, trained(federation)

    def train(method: Any, server: Any, cohort: Any, round: int) -> Any:
        late = sorted(all_trained.get(round + 1, set()) - set(mine[round + 1]))
        aside = whole(method, server, late, round).clients if late else {}
        if not mine[round + 1]:
            return nobody(())._replace(clients=aside, answered=())
        got = whole(method, server, mine[round + 1], round)
        return got._replace(clients={**got.clients, **aside}, answered=tuple(mine[round + 1]))

    engine.train = train  # type: ignore[method-assign]
    return run(experiment, out, prepared=prepared).folder


class Compared(NamedTuple):
    """The federation's end beside the simulation's."""

    rounds: int
    partial: int  # rounds in which not everybody was merged
    lost: list[str]  # clients whose own state is not what the simulation says
    furthest: float  # the largest difference of a number of the server's state, relative to the largest number


def compared(federation: Federation, out: Path) -> Compared:
    """What the federation came to, and what it would have come to without any fault."""
    mine = merged(federation.server, federation.names)
    together, _ = RunFolder(federation.server / "run").restore()
    assert together is not None
    alone, _ = RunFolder(simulated(federation, together.round, out)).restore()
    assert alone is not None
    run = json.loads((federation.server / "run.json").read_bytes())["run"]
    lost = []
    for number, name in enumerate(federation.names):
        with contextlib.closing(
            StateFolder(federation.folder / "clients" / name / "state", federation.remarks.append)
        ) as folder:
            kept = folder.at(run, together.round)
            if kept is None or furthest(kept.client.params, alone.clients[number].params) > CLOSE:
                lost.append(name)
    partial = sum(len(mine[round]) < len(federation.names) for round in range(1, together.round + 1))
    return Compared(together.round, partial, lost, furthest(together.server, alone.server))


def furthest(one: Any, other: Any) -> float:
    """The largest difference between two trees, relative to the largest number."""
    left, right = ([leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)] for tree in (one, other))
    assert [leaf.shape for leaf in left] == [leaf.shape for leaf in right]
    most = max(float(leaf.abs().max()) for leaf in left if leaf.numel())
    return max(float((a - b).abs().max()) for a, b in zip(left, right, strict=True) if a.numel()) / most
