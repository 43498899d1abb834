"""FedProto's MNIST run on Flower's simulation and on protofed, in one run: `python benchmarks/against_flower.py`.

Needs `pip install 'protofed[flower,ray]'`. Everybody has the same data, partition, batches and initial weights; only
dropout draws other numbers. A round is local training, prototypes, aggregation, and every client's accuracy on its own
test set. Seconds are medians of the rounds after the first; the first is counted from the start, with data, actors and
all. Flower's actors wait while the others do one round each, so that a busy machine is so for all. Everything runs on
the CPU and on this machine alone.
"""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from plain_fedproto import Clients, images, loop, plan
from rich.console import Console
from rich.table import Table

from protofed.atomic import write_atomically
from protofed.engines.wire import encode
from protofed.metrics import own_numbers
from protofed.runs.cohort import draw_cohort
from protofed.runs.loop import next_server, uploads_of
from protofed.runs.setup import prepare, working

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else a warning
    "RAY_worker_niceness": "0",  # else actors yield to everything else on the machine
}
FLOWER, STACKED, REFERENCE = "Flower simulation, two actors", "protofed, stacked", "protofed, reference engine"
PLAIN, STRAIGHT = "plain PyTorch loop", "plain PyTorch loop, usual layout"  # the first with channels last


def flower(
    changes: tuple[str, ...], data_dir: Path | None, clients: int, rounds: int, after: Callable[[], None]
) -> float:
    """The plain client on Flower."""
    os.environ.update(QUIET)  # read when flwr and ray are imported
    try:
        from flower_fedproto import simulate
    except ImportError as error:
        raise SystemExit(f"{error}. Flower is not installed here: pip install 'protofed[flower]'") from None
    return simulate(changes, str(data_dir.resolve()) if data_dir else "", clients, rounds, after)


def plain(changes: tuple[str, ...], data_dir: Path | None, channels_last: bool) -> Iterator[float]:
    """The plain client without Flower, one thread: accuracy round by round."""
    torch.set_num_threads(1)
    yield from loop(Clients(plan("engine.name=reference", *changes), images(data_dir)[0], channels_last))


def protofed(changes: tuple[str, ...], data_dir: Path | None) -> Iterator[float]:
    """Rounds as `protofed bench` counts them: accuracy round by round."""
    experiment = plan(*changes)
    method = experiment.method
    engine = prepare(experiment, domains=images(data_dir)[0]).engine
    server, centres, uploads = method.init_server(engine.specs()[0]), (), uploads_of(experiment, engine)
    with working(experiment, engine):
        for round in count():
            cohort = draw_cohort(experiment, round)
            trained = engine.train(method, server, cohort, round)
            server, centres = next_server(experiment, server, trained, cohort, uploads, round, centres)
            engine.clients = {**engine.clients, **trained.clients}
            tallies = engine.evaluate(method, server, cohort, on="own", who="personal")
            encode(server)
            yield float(own_numbers(method, tallies)["accuracy_mean"])


def measure(changes: tuple[str, ...], data_dir: Path | None, clients: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds and accuracy of everybody, a round of each in turn."""
    others = {
        STACKED: protofed((*changes, "engine.name=stacked", "engine.compile=always"), data_dir),
        PLAIN: plain(changes, data_dir, True),
        STRAIGHT: plain(changes, data_dir, False),
        REFERENCE: protofed((*changes, "engine.name=reference", "engine.threads=1"), data_dir),
    }
    seconds: dict[str, list[float]] = {FLOWER: [], **{name: [] for name in others}}
    accuracy: dict[str, float] = {}
    start = time.perf_counter()

    def turn(name: str) -> None:
        nonlocal start
        end = time.perf_counter()
        seconds[name].append(end - start)
        start = end

    def after() -> None:
        turn(FLOWER)
        for name, one in others.items():
            accuracy[name] = next(one)
            turn(name)
        done = len(seconds[FLOWER])
        Console(stderr=True).print(f"round {done} of {rounds}", highlight=False)

    accuracy[FLOWER] = flower(changes, data_dir, clients, rounds, after)
    if accuracy[FLOWER] != accuracy[STRAIGHT]:
        raise SystemExit(f"Flower and the plain loop should learn the same, but their accuracies are {accuracy}")
    return {
        name: {
            "seconds": statistics.median(taken[1:]),
            "first": taken[0],
            "rounds": taken[1:],
            "accuracy": accuracy[name],
        }
        for name, taken in seconds.items()
    }


def main(
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of everybody; the first is not in the median.")] = 10,
    data_dir: Annotated[Path | None, typer.Option(help="Where mnist lies; else $PROTOFED_DATA, else ./data.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the numbers there.")] = None,
    clients: Annotated[int, typer.Option(min=1, help="Fewer for a trial.")] = 20,
) -> None:
    """Time FedProto's MNIST run on Flower and on protofed."""
    found = measure((f"clients={clients}",), data_dir, clients, rounds)
    numbers = {
        "clients": clients,
        "rounds": rounds,
        "note": images(data_dir)[1],
        "machine": f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("protofed", "torch", "flwr", "ray")},
        "ratio": found[FLOWER]["seconds"] / found[STACKED]["seconds"],
        "reference_over_plain": found[REFERENCE]["seconds"] / found[STRAIGHT]["seconds"],
        "runs": found,
    }
    if json_path:
        write_atomically(json_path, (json.dumps(numbers, indent=1) + "\n").encode())
    _show(numbers)


def _show(numbers: dict[str, Any]) -> None:
    console = Console(width=None if Console().is_terminal else 120)
    table = Table(title=f"FedProto, MNIST, {numbers['clients']} clients", title_justify="left")
    table.add_column("seconds a round")
    for name in ("median", "least to most", "start and first", f"accuracy after {numbers['rounds']}"):
        table.add_column(name, justify="right")
    for name, run in numbers["runs"].items():
        span = f"{min(run['rounds']):.3f} to {max(run['rounds']):.3f}"
        table.add_row(name, f"{run['seconds']:.3f}", span, f"{run['first']:.2f}", f"{run['accuracy']:.4f}")
    console.print(table)
    console.print(
        f"Flower takes {numbers['ratio']:.2f} times as long as protofed's stacked engine; "
        f"protofed's reference engine {numbers['reference_over_plain']:.2f} times as long as the plain loop "
        "in the same layout.",
        highlight=False,
    )
    versions = ", ".join(f"{name} {number}" for name, number in numbers["versions"].items())
    console.print(f"{numbers['machine']}; {versions}", highlight=False)
    if numbers["note"]:
        console.print(f"note: {numbers['note']}", highlight=False)


if __name__ == "__main__":
    typer.run(main)
