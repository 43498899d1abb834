"""What a federation on Flower costs on this machine: `python benchmarks/federation.py --clients 3 --rounds 5`.

Two federations of the same number of clients, one after the other, all on loopback. First Flower alone: SuperLink and
SuperNodes without TLS, an app that sends back what it gets, Flower's own `send_and_receive`. Then protofed's: TLS,
keys, doors, and FedProto on the digits, with 50-dimensional prototypes of ten classes. Rounds are medians after the
first.
"""

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

from protofed.flower.control import Control
from protofed.flower.installed import command, environment
from protofed.flower.processes import Child
from protofed.flower.proxy import free_port
from protofed.flower.server import status

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
    env = environment(home, NOOP_CLIENTS=str(clients), NOOP_ROUNDS=str(rounds), NOOP_OUT=str(out))
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
        control = Control(at, None)
        assert control.ready(lambda: children[0].alive), children[0].said()
        for number in range(clients):
            words = [command("flower-supernode"), "--insecure", "--superlink", at, "--port", str(free_port())]
            children.append(Child("supernode", words, environment(home / f"node{number}"), home / f"node{number}.log"))
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


def ours(home: Path, clients: int, rounds: int) -> dict[str, Any]:
    """A federation by the commands that operators use."""
    folder, server = home / "fed", home / "fed" / "server"
    run = [sys.executable, "-m", "protofed"]
    env = environment(home)
    words = ["federation", "init", str(folder), "--clients", str(clients), "--host", "127.0.0.1",
             "--port", str(free_port()), "--experiment", "demo", "--minimum", str(clients), "--deadline", "600",
             "model=mlp_digits", "model.dim=50",
             f"rounds={rounds}", "evaluate.own=0", "partition.ways=10", "partition.spread=0", "engine=reference",
             ]  # fmt: skip
    subprocess.run([*run, *words], env=env, check=True, stdout=subprocess.DEVNULL)
    begin = time.monotonic()
    processes = []
    with open(home / "log", "ab") as log:
        processes.append(subprocess.Popen([*run, "server", str(server)], env=env, stdout=log, stderr=log))
        for bundle in sorted((folder / "clients").iterdir()):
            words = [*run, "client", str(bundle), "--wait", "600"]
            processes.append(subprocess.Popen(words, env=env, stdout=log, stderr=log))
    joined = first = None
    lines = server / "run" / "rounds.jsonl"
    try:
        while processes[0].poll() is None:
            seen = [client["last_seen"] for client in status(server).get("clients", [])]
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
            "bytes_up": told[-1]["bytes_up"] / clients}  # fmt: skip


def main(
    clients: Annotated[int, typer.Option(help="In each federation.")] = 3,
    rounds: Annotated[int, typer.Option(help="In each federation.")] = 5,
    alone: Annotated[bool, typer.Option(help="Measure Flower alone, too.")] = True,
) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left behind
    home = Path(tempfile.mkdtemp())
    try:
        before = os.getloadavg()
        noop = flower_alone(home / "alone", clients, rounds) if alone else []
        found = ours(home / "ours", clients, rounds)
        print(
            f"{clients} clients, {rounds} rounds, load average before {before[0]:.1f}, after {os.getloadavg()[0]:.1f}"
        )
        if noop:
            print(f"Flower alone, no-op round:      {statistics.median(noop[1:]):6.2f} s (first {noop[0]:.2f})")
        seconds = found["seconds"]
        print(f"protofed's round:               {statistics.median(seconds[1:]):6.2f} s (first {seconds[0]:.2f})")
        print(f"from start to all joined:       {found['started']:6.1f} s")
        print(f"from last join to first round:  {found['first']:6.1f} s")
        print(f"a client's upload, 10 x 50:     {found['bytes_up']:6.0f} bytes")
    finally:
        shutil.rmtree(home)


if __name__ == "__main__":
    typer.run(main)
