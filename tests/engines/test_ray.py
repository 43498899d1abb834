"""Simulations on Ray: real workers, on a cluster that is joined and on one that is started for the run."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from command import protofed
from torch.utils._pytree import tree_leaves

from protofed.config.experiment import Experiment
from protofed.data.sources import Data, load
from protofed.engines.ray import cluster, process
from protofed.engines.ray.engine import RayEngine
from protofed.engines.ray.worker import RayWorker
from protofed.errors import UserError
from protofed.runs.folder import RunFolder
from protofed.runs.loop import run
from protofed.runs.setup import prepare
from protofed.runs.watch import Watch

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("all_cores")]

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'protofed[ray]'")

SMALL = ("rounds=2", "clients=6", "model=mlp_digits", "local_epochs=1", "record.enabled=false", "engine.compile=never")
TWO = ("engine=ray", "engine.workers=2", "engine.threads=1")


def plan(*changes: str) -> Experiment:
    return Experiment.load("demo", *SMALL, *changes)


class Joined(NamedTuple):
    """A cluster that is none of ours."""

    address: str
    pid: int


@pytest.fixture(scope="module")
def joined() -> Iterator[Joined]:
    """A cluster of two cores that is none of ours, which every run here joins and leaves as it is."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = Path("/tmp") / f"pf-{os.getpid()}"  # a short path: there are sockets in it
    env = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": str(folder)}
    env["RAY_raylet_start_wait_time_s"] = "180"  # on a busy machine
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=2"]
    command += [f"--port={port}", "--include-dashboard=false", "--node-ip-address=127.0.0.1", f"--temp-dir={folder}"]
    command += ['--system-config={"worker_niceness": 0}']  # workers are not to wait for other tests
    head = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said = []
        for line in head.stdout or ():
            said.append(line)
            if "Ray runtime started" in line:
                break
        else:
            pytest.fail(f"ray start --head ended: {''.join(said)[-2000:]}")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
            patch.setenv("RAY_AUTH_MODE", "disabled")
            yield Joined(f"127.0.0.1:{port}", head.pid)
        assert head.poll() is None  # whoever joined it did not end it
    finally:
        ray.shutdown()  # of a run that failed
        for one in (head.pid, *family(head.pid)):  # asked to end, Ray takes its time
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        head.wait(30)
        subprocess.run(["rm", "-rf", str(folder)], check=True)


class Notes(Watch):
    """Keeps what is told, and does something after a round."""

    def __init__(self, after: int = -1, then: Any = None) -> None:
        self.notes: list[str] = []
        self.after, self.then = after, then

    def note(self, text: str) -> None:
        self.notes.append(text)

    def round(self, line: dict[str, Any]) -> None:
        if line["round"] == self.after:
            self.then()


def states(folder: Path) -> list[torch.Tensor]:
    """All that a run ends with: the server and every client."""
    state, _ = RunFolder(folder).restore()
    assert state is not None
    return tree_leaves((state.server, [state.clients[n] for n in state.clients]))


def numbers(folder: Path) -> list[dict[str, Any]]:
    """The lines of all rounds, without seconds."""
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith(("seconds", "parts"))} for line in lines]


def same(left: Path, right: Path) -> None:
    assert numbers(left) == numbers(right)
    assert (left / "clients.jsonl").read_text() == (right / "clients.jsonl").read_text()
    assert all(torch.equal(a, b) for a, b in zip(states(left), states(right), strict=True))


class InProcess:
    """Workers in this process, of whom the last does the first share, and so on: what they say and hear is real."""

    workers, threads, gpu = 2, 1, False

    def __init__(self, tell: Any) -> None:
        self.ray, self.losses = self, list[str]()
        self.put = lambda packed: packed

    def start(self, make: Any, data: str) -> str:
        self.there = [RayWorker() for _ in range(self.workers)]
        answers = [worker.start(make, self.threads, self.workers, None) for worker in self.there]
        assert {answer[2] for answer in answers} == {data}
        return answers[0][1]

    def spread(self, many: int, call: Any, take: Any) -> None:
        for job in range(many):
            place = (job + 1) % self.workers
            take(job, place, self.there[place].do(*call(job, place)))

    def use(self, compiled: bool) -> None:
        for worker in self.there:
            worker.use(compiled)

    def close(self) -> None: ...


CASES = {
    "two models": ('model=["mlp_digits", "cnn_digits_8"]', "participation=0.7"),
    "a global model": ("method=fednh", "evaluate.validation=0.2", "clients=7", "participation=0.6"),
    "a row for each client": ("method=fesem", "method.centres=2"),
    "last phases": ("method=fedbabu",),
    "not stackable": ("method=dpfedcl",),
    "classes that appear over time": ("method=fedbabu", "rounds=3", "incremental.tasks=3"),
    "a robust rule": ("method=fednh", "robust.rule=clip", "attack.kind=backdoor", "attack.share=0.34"),
}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_shares_give_the_bits_of_one_machine(changes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "Cluster", lambda *_: InProcess(_[-1]))
    run(plan("engine=ray", "engine.ordered=true", *changes), "spread")
    run(plan("engine=stacked", "engine.threads=2", "engine.ordered=true", *changes), "one")
    same(Path("one"), Path("spread"))


@pytest.mark.usefixtures("traced")
def test_workers_find_out_whether_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "Cluster", lambda *_: InProcess(_[-1]))
    always = plan("engine=ray", "engine.compile=always")
    engine = prepare(always).engine
    assert isinstance(engine, RayEngine)
    engine.start(lambda text: None)
    assert all(worker.made.engine.compiled for worker in engine.cluster.there)  # type: ignore[attr-defined]
    engine.use(compiled=False)
    assert not any(worker.made.engine.compiled for worker in engine.cluster.there)  # type: ignore[attr-defined]
    assert engine.trial(always.method, always.method.init_server(engine.specs()[0]), [0, 1, 2, 3]) > 0


def family(pid: int) -> list[int]:
    """A process's descendants."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def alive(pid: int) -> bool:
    """Whether a process is there and has not ended: one that nobody has waited for yet is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def workers(pid: int) -> list[int]:
    """Processes of protofed's workers on somebody's Ray."""
    found = []
    for child in family(pid):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{child}/cmdline").read_bytes().startswith(b"ray::RayWorker"):
                found.append(child)
    return found


LONG = ("rounds=30", "engine.ordered=true", "evaluate.own=10")


def test_a_lost_worker_an_interrupt_and_one_machine_give_the_same(joined: Joined, tmp_path: Path) -> None:
    """Killed in a round: done again by another. Ctrl-C on a Ray of its own: nothing is left, and another goes on."""
    run(plan("engine=stacked", "engine.threads=2", *LONG), "one")

    def kill() -> None:
        """A worker gets its share of the next round, and dies over it."""
        first = workers(joined.pid)[0]
        os.kill(first, signal.SIGSTOP)
        threading.Timer(0.5, os.kill, (first, signal.SIGKILL)).start()

    watch = Notes(2, kill)
    run(plan(*TWO, *LONG), "lost", watch=watch)
    assert watch.notes[:2] == [f"joining the Ray cluster at {joined.address}", "2 workers, each with 1 core"]
    (lost,) = [note for note in watch.notes if "lost" in note]
    assert lost.endswith("its clients are done again by another")
    one, spread = numbers(Path("one")), numbers(Path("lost"))
    same(Path("one"), Path("lost"))
    assert len(one) == len(spread) == 30
    assert not ray.is_initialized()
    deadline = time.monotonic() + 10
    while workers(joined.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert workers(joined.pid) == []

    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {"TMPDIR": "/tmp"}
    words = ["run", "demo", *SMALL, *TWO, *LONG, "--out", "stopped"]
    mine = subprocess.Popen(
        [sys.executable, "-m", "protofed", *words], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    lines = Path("stopped/rounds.jsonl")
    while mine.poll() is None and not (lines.is_file() and len(lines.read_text().splitlines()) > 1):
        time.sleep(0.01)
    children = family(mine.pid)
    assert mine.poll() is None, mine.communicate()[0]
    os.killpg(mine.pid, signal.SIGINT)  # as a terminal does: to all of them
    said, _ = mine.communicate(timeout=300)
    assert mine.returncode == 130, said
    assert "Go on with" in said
    assert "Traceback" not in said
    assert len(children) > 4
    deadline = time.monotonic() + 10  # Ray's own processes end a moment after the run
    while (left := [child for child in children if alive(child)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
    assert len(numbers(Path("stopped"))) < 30
    done = protofed(*words, "--resume")
    assert done.returncode == 0, done.stderr
    same(Path("one"), Path("stopped"))


def test_what_a_cluster_cannot_do_is_said_in_a_line(joined: Joined, monkeypatch: pytest.MonkeyPatch) -> None:
    done = protofed("run", "demo", *SMALL, "engine=ray", "engine.workers=2", "engine.threads=2")
    assert done.stderr.strip() == (
        "error: engine.workers = 2 of engine.threads = 2 asks for more than Ray has: 2 cores on 1 machine. "
        "Use engine.workers = 1 at most, or fewer threads."
    )
    assert not Path("runs").exists()
    digits = load(Data(name="digits"), None)[0]
    arrays = {"x_train": digits.x_train, "y_train": digits.y_train, "x_test": digits.x_test, "y_test": digits.y_test}
    np.savez("mine.npz", **arrays)
    other = plan(*TWO, "engine.workers=1", "data=mine.npz")
    engine = prepare(other).engine
    np.savez("mine.npz", **arrays | {"x_train": arrays["x_train"][..., ::-1]})
    with pytest.raises(UserError, match=r"the data on .* differs from the data here.*Copy the same files"):
        engine.start(lambda text: None)  # type: ignore[attr-defined]
    monkeypatch.setattr(cluster, "VERSION", "0.0.0")
    with pytest.raises(UserError, match=r"of the Ray cluster has protofed .*, but this machine has 0\.0\.0\. Install"):
        run(plan(*TWO), "other")
    assert not ray.is_initialized()


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    for address, reason in (("127.0.0.1:1", "cannot be reached"), ("ray://there:1", "is not host:port")):
        monkeypatch.setenv("RAY_ADDRESS", address)
        done = protofed("run", "demo", *SMALL, *TWO)
        assert done.returncode == 2
        assert done.stderr.startswith(f"error: RAY_ADDRESS = '{address}' {reason}")
    assert time.monotonic() - began < 10
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "answer, reason", [(b"HTTP/1.1 400 Bad Request", "is not a Ray cluster"), (b"", r"cannot be reached \(timed out\)")]
)
def test_an_address_where_something_else_is(answer: bytes, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "REACH", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{other.getsockname()[1]}")
        answering = threading.Thread(target=lambda: other.accept()[0].sendall(answer) if answer else None)
        answering.start()
        with pytest.raises(UserError, match=reason):
            run(plan(*TWO), "nowhere")
        answering.join()


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs Ray, which is not installed. Run: pip install 'protofed\[ray\]'"):
        prepare(plan(*TWO))
