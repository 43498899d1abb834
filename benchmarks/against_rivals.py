"""fluke and BlazeFL against protofed, in one run: `python benchmarks/against_rivals.py fluke`.

The rival is installed into an environment of its own. Both have the same clients, samples and network, and take turns
round by round, so that a busy machine is so for both. A round is local training and aggregation, without evaluation.
Seconds are medians of the rounds after the warm-up. CPU seconds, of all processes, depend less on what else the machine
does. Everything runs on this machine's CPU.
"""

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from plain_fedproto import plan
from rich.console import Console
from rich.table import Table

from protofed.atomic import write_atomically
from protofed.config.experiment import Experiment
from protofed.data.domain import Domain
from protofed.runs.bench import WORKLOADS, _domains
from protofed.runs.cohort import draw_cohort
from protofed.runs.loop import next_server, uploads_of
from protofed.runs.setup import prepare, working

WARM = 4  # rounds in which our steps are traced and compiled


class Rival(NamedTuple):
    """A package, its script, and the case."""

    requirements: tuple[str, ...]
    script: str
    changes: tuple[str, ...]  # of FedProto's MNIST run
    about: str


RIVALS = {
    "fluke": Rival(
        ("fluke-fl==0.8.1", "torch>=2.8,<2.14"),
        "fluke_fedproto.py",
        (),
        "FedProto, MNIST, 20 clients, batch 8, one epoch",
    ),
    "blazefl": Rival(
        ("blazefl==2.0.3", "numpy", "tqdm"),
        "blazefl_fedavg.py",
        (
            *(
                "method=fedavg",
                "model=cnn_pfllib",
                "clients=20",
                "participation=1.0",
                "local_epochs=1",
                "batch_size=50",
            ),
            *("drop_last=false", "data.augment=[]", "optimizer={lr=0.1}", "partition=nway_kshot", "partition.ways=10"),
            *("partition.shots=50", "partition.spread=0"),
        ),
        "FedAvg, 3 x 32 x 32, 20 clients of 500 images, batch 50, one epoch, PFLlib's CNN (BlazeFL's own case has 100 "
        "clients and five epochs)",
    ),
}


def ours(experiment: Experiment, domains: list[Domain]) -> Generator[None]:
    """Round by round, compiled."""
    method, engine = experiment.method, prepare(experiment, domains=domains).engine
    server, round, centres, uploads = method.init_server(engine.specs()[0]), 0, (), uploads_of(experiment, engine)
    with working(experiment, engine):
        while True:
            cohort = draw_cohort(experiment, round)
            trained = engine.train(method, server, cohort, round)
            server, centres = next_server(experiment, server, trained, cohort, uploads, round, centres)
            engine.clients, round = {**engine.clients, **trained.clients}, round + 1
            yield


def samples(experiment: Experiment, domains: list[Domain], path: Path) -> None:
    """Every client's samples, for the rival."""
    data = prepare(experiment, domains=domains).engine.federation
    arrays: dict[str, Any] = {"clients": np.array(data.clients)}
    for client in range(data.clients):
        for part, (x, y) in {"train": data.train(client)[:2], "test": data.test(client)[:2]}.items():
            arrays |= {f"x_{part}_{client}": x.numpy(), f"y_{part}_{client}": y.numpy()}
    np.savez(path, **arrays)


def environment(folder: Path, requirements: tuple[str, ...], python: str) -> str:
    """The rival's interpreter, installed if it is not there."""
    if not (folder / ".ready").is_file():
        subprocess.run([python, "-m", "venv", folder], check=True)
        subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", *requirements], check=True)
        (folder / ".ready").touch()
    return str(folder / "bin" / "python")


@contextmanager
def process(words: list[str]) -> Iterator[subprocess.Popen[str]]:
    """The rival, waiting for its turn; ended with the block."""
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def turn(child: subprocess.Popen[str]) -> dict[str, float]:
    """A round of the rival."""
    assert child.stdin
    assert child.stdout
    child.stdin.write("\n")
    child.stdin.flush()
    line = child.stdout.readline()
    if not line:
        raise SystemExit(f"the rival ended with {child.wait()}, before its round was over")
    return json.loads(line)


def cpu() -> float:
    """Seconds that this process has used, and those it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def main(
    rival: Annotated[str, typer.Argument(help=f"One of {', '.join(RIVALS)}.")],
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count, of each.")] = 5,
    data_dir: Annotated[Path | None, typer.Option(help="Where mnist is; else $PROTOFED_DATA, else ./data.")] = None,
    venvs: Annotated[Path, typer.Option(help="Where rivals are installed.")] = Path("~/.cache/protofed/rivals"),
    python: Annotated[str, typer.Option(help="The rival's Python; BlazeFL needs 3.12 or newer.")] = sys.executable,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the numbers there.")] = None,
) -> None:
    """Time a rival and protofed."""
    if rival not in RIVALS:
        raise SystemExit(f"there is no rival {rival!r}; choose one of {', '.join(RIVALS)}")
    case = RIVALS[rival]
    interpreter = environment(venvs.expanduser().absolute() / rival, case.requirements, python)
    experiment = plan("engine.name=stacked", "engine.compile=always", *case.changes)
    shape = (3, 32, 32) if case.changes else (1, 28, 28)
    domains, note = _domains(experiment, WORKLOADS["fedproto-mnist"]._replace(shape=shape), data_dir)
    taken: dict[str, list[dict[str, float]]] = {rival: [], "protofed": []}
    with tempfile.TemporaryDirectory() as folder:
        samples(experiment, domains, Path(folder, "samples.npz"))
        words = [interpreter, str(Path(__file__).with_name(case.script)), str(Path(folder, "samples.npz"))]
        with process([*words, str(rounds + WARM)]) as child:
            mine = ours(experiment, domains)
            for _ in range(rounds + WARM):
                taken[rival].append(turn(child))
                start, used = time.perf_counter(), cpu()
                next(mine)
                taken["protofed"].append({"seconds": time.perf_counter() - start, "cpu": cpu() - used})
            mine.close()
    found = {
        name: {part: statistics.median(one[part] for one in some[WARM:]) for part in ("seconds", "cpu")}
        for name, some in taken.items()
    }
    numbers = {
        "rival": case.requirements[0],
        "about": case.about,
        "note": note,
        "machine": f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("protofed", "torch")},
        "rounds": rounds,
        "median": found,
        "ratio": {part: found[rival][part] / found["protofed"][part] for part in ("seconds", "cpu")},
    }
    if json_path:
        write_atomically(json_path, (json.dumps(numbers, indent=1) + "\n").encode())
    table = Table(title=f"{case.about}; {numbers['rival']}", title_justify="left")
    for name in ("", "seconds a round", "CPU seconds a round"):
        table.add_column(name, justify="right")
    for name, one in found.items():
        table.add_row(name, f"{one['seconds']:.3f}", f"{one['cpu']:.3f}")
    table.add_row("ratio", *(f"{numbers['ratio'][part]:.1f}" for part in ("seconds", "cpu")))
    Console().print(table)
    if note:
        Console().print(f"note: {note}", highlight=False)


if __name__ == "__main__":
    torch.set_num_threads(1)
    typer.run(main)
