"""What a federation on Flower costs on this machine: `python benchmarks/federation.py --clients 3 --rounds 5`.

Two federations of the same number of clients, one after the other, all on loopback. First Flower alone: SuperLink and
SuperNodes without TLS, an app that sends back what it gets, Flower's own `send_and_receive`. Then protofed's: TLS,
keys, doors, and FedProto on the digits, with 50-dimensional prototypes of ten classes. Rounds are medians after the
first. Memory is the proportional set size (PSS) of a client's processes, at its highest. CPU seconds are of all
processes after the first round, which says more than the clock where the machine has other work.
"""

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from protofed.remote.flower.control import SuperLinkControl
from protofed.remote.flower.installed import command, flower_environment
from protofed.remote.flower.processes import Child
from protofed.remote.flower.proxy import free_port
from protofed.remote.flower.server import read_status

FEWEST = 139  # samples of a class that the digits have, for all clients together
PSS_SECONDS = 3.0  # between two looks at the clients' memory
PYPROJECT = """
[project]
name = "noop"
version = "1.0.0"
license = "Apache-2.0"
[tool.flwr.app]
publisher = "benchmark"
[tool.flwr.app.components]
serverapp = "noop.server_app:app"
clientapp = "noop.client_app:app"
"""
CLIENT = """
from flwr.app import Message
from flwr.clientapp import ClientApp
app = ClientApp()
@app.train()
def train(message, context):
    return Message(message.content, reply_to=message)
"""
SERVER = """
import json, os, time
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()
@app.main()
def main(grid, context):
    clients, rounds, seconds = int(os.environ["NOOP_CLIENTS"]), int(os.environ["NOOP_ROUNDS"]), []
    while len(list(grid.get_node_ids())) < clients:
        time.sleep(0.1)
    content = RecordDict({"r": ArrayRecord({"a": Array("uint8", (3000,), "x", bytes(3000))})})
    for _ in range(rounds):
        begin = time.monotonic()
        messages = [Message(content, dst_node_id=n, message_type="train") for n in grid.get_node_ids()]
        got = list(grid.send_and_receive(messages, timeout=600))
        assert len(got) == clients and all(m.has_content() for m in got)
        seconds.append(time.monotonic() - begin)
    with open(os.environ["NOOP_OUT"], "w") as file:
        json.dump(seconds, file)
"""


def flower_alone(home: Path, clients: int, rounds: int) -> list[float]:
    """Seconds of rounds in which nothing is done."""
    app, out, at = home / "app", home / "rounds.json", f"127.0.0.1:{free_port()}"
    (app / "noop").mkdir(parents=True)
    (app / "pyproject.toml").write_text(PYPROJECT)
    for name, text in {"__init__": "", "client_app": CLIENT, "server_app": SERVER}.items():
        (app / "noop" / f"{name}.py").write_text(text)
    env = flower_environment(home, NOOP_CLIENTS=str(clients), NOOP_ROUNDS=str(rounds), NOOP_OUT=str(out))
    superlink = [
        "--insecure",
        "--host",
        "127.0.0.1",
        "--port",
        at.split(":")[1],
        "--disable-runtime-dependency-installation",
    ]
    children = [Child("superlink", [command("flower-superlink"), *superlink], env, home / "superlink.log")]
    try:
        control = SuperLinkControl(at, None)
        assert control.ready(lambda: children[0].alive), children[0].said()
        for number in range(clients):
            words = [command("flower-supernode"), "--insecure", "--superlink", at, "--port", str(free_port())]
            children.append(
                Child("supernode", words, flower_environment(home / f"node{number}"), home / f"node{number}.log")
            )
        (home / "config.toml").write_text(f'[superlink.here]\naddress = "{at}"\ninsecure = true\n')
        subprocess.run([command("flwr"), "run", str(app), "here"], env=env, check=True, capture_output=True)
        while not out.exists():
            assert all(child.alive for child in children)
            time.sleep(0.2)
        time.sleep(0.2)
        return [float(seconds) for seconds in json.loads(out.read_text())]
    finally:
        for child in reversed(children):
            child.stop()


def ours(home: Path, clients: int, rounds: int, secure: bool = False) -> dict[str, Any]:
    """A federation by the commands that operators use."""
    folder, server = home / "fed", home / "fed" / "server"
    run = [sys.executable, "-m", "protofed"]
    env = flower_environment(home)
    words = ["federation", "init", str(folder), "--clients", str(clients), "--host", "127.0.0.1",
             "--port", str(free_port()), "--experiment", "demo", "--minimum", str(clients), "--deadline", "600",
             "model=mlp_digits", "model.dim=50",
             f"rounds={rounds}", "evaluate.own=0", "partition.ways=10", "partition.spread=0", "engine=reference",
             f"partition.shots={max(1, min(3, FEWEST // clients))}",
             *(["privacy.secure_sum=true"] if secure else [])]  # fmt: skip
    subprocess.run([*run, *words], env=env, check=True, stdout=subprocess.DEVNULL)
    words = ["partition", str(server / "experiment.toml"), "--export", str(home / "data")]
    subprocess.run([*run, *words], env=env, check=True, stdout=subprocess.DEVNULL, cwd=home)
    begin = time.monotonic()
    processes = []
    with open(home / "log", "ab") as log:
        processes.append(subprocess.Popen([*run, "server", str(server)], env=env, stdout=log, stderr=log))
        for bundle in sorted((folder / "clients").iterdir()):
            words = [*run, "client", str(bundle), "--data", str(home / "data" / f"{bundle.name}.npz"), "--wait", "600"]
            processes.append(subprocess.Popen(words, env=env, stdout=log, stderr=log))
    joined = first = None
    lines = server / "run" / "rounds.jsonl"
    memory, looked = [0.0] * clients, time.monotonic()
    cpu: list[list[float]] = []
    try:
        while processes[0].poll() is None:
            if first is not None:
                cpu = [*cpu[:1], [sum(map(spent, family(process.pid))) for process in processes]]
            if time.monotonic() - looked > PSS_SECONDS:
                now = [pss(family(process.pid)) for process in processes[1:]]
                memory, looked = max(memory, now, key=sum), time.monotonic()
            seen = [client["last_seen"] for client in read_status(server).get("clients", [])]
            joined = joined or (time.monotonic() if seen and all(seen) else None)
            if first is None and lines.exists() and lines.stat().st_size:
                first = time.monotonic()
            time.sleep(0.05)
        codes = [process.wait(60) for process in processes]
        assert not any(codes), (home / "log").read_text()[-3000:]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
    told = [json.loads(line) for line in lines.read_text().splitlines()]
    assert joined is not None
    assert first is not None
    return {"started": joined - begin, "first": first - joined, "seconds": [line["seconds"] for line in told],
            "bytes_up": told[-1]["bytes_up"] / clients, "memory": memory,
            "bytes_down": told[-1]["bytes_down"] / clients,
            "cpu": [(last - begun) / (rounds - 1) for begun, last in zip(*cpu, strict=True)]}  # fmt: skip


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found = [pid]
    for one in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{one}/task").iterdir():
                found += [int(word) for word in (task / "children").read_text().split()]
    return found


def spent(pid: int) -> float:
    """CPU seconds of a process, and of its children that have ended."""
    with contextlib.suppress(OSError):
        ticks = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:15]
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return 0.0


def pss(pids: list[int]) -> float:
    """Megabytes that processes take, with what they share divided among all who share it."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            rolled = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += next((int(line.split()[1]) for line in rolled.splitlines() if line.startswith("Pss:")), 0)
    return total / 1000


def main(
    clients: Annotated[int, typer.Option(help="In each federation.")] = 3,
    rounds: Annotated[int, typer.Option(help="In each federation.")] = 5,
    alone: Annotated[bool, typer.Option(help="Measure Flower alone, too.")] = True,
    secure: Annotated[bool, typer.Option(help="With privacy.secure_sum.")] = False,
) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left behind
    home = Path(tempfile.mkdtemp())
    try:
        before = os.getloadavg()
        noop = flower_alone(home / "alone", clients, rounds) if alone else []
        found = ours(home / "ours", clients, rounds, secure)
        print(
            f"{clients} clients, {rounds} rounds, load average before {before[0]:.1f}, after {os.getloadavg()[0]:.1f}"
        )
        if noop:
            print(f"Flower alone, no-op round:      {statistics.median(noop[1:]):6.2f} s (first {noop[0]:.2f})")
        seconds = found["seconds"]
        print(f"protofed's round:               {statistics.median(seconds[1:]):6.2f} s (first {seconds[0]:.2f})")
        print(f"from start to all joined:       {found['started']:6.1f} s")
        print(f"from last join to first round:  {found['first']:6.1f} s")
        memory, cpu = found["memory"], found["cpu"]
        print(f"CPU of a round:                 {sum(cpu):6.2f} s ({cpu[0]:.2f} of them on the server)")
        print(f"memory of a client (PSS):       {statistics.median(memory):6.0f} MB (largest {max(memory):.0f})")
        print(f"memory of all clients (PSS):    {sum(memory) / 1000:6.2f} GB")
        print(f"a client's upload, 10 x 50:     {found['bytes_up']:6.0f} bytes (down {found['bytes_down']:.0f})")
    finally:
        shutil.rmtree(home)


if __name__ == "__main__":
    typer.run(main)
