"""How fast it is: one workload on both engines, with the parts of a round and the distance to the fastest possible."""

import platform
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from protofed.config.experiment import Experiment
from protofed.data.domain import Domain
from protofed.data.sources import load
from protofed.engines import Engine
from protofed.engines.stacked.engine import StackedEngine
from protofed.errors import UserError, did_you_mean
from protofed.runs.cohort import draw_cohort
from protofed.runs.compiling import no_compiler
from protofed.runs.loop import next_server, uploads_of
from protofed.runs.measure import round_numbers
from protofed.runs.setup import prepare, working
from protofed.version import VERSION

CLASSES = 10
LONG = 20.0  # seconds after which it is enough
WARM = 4  # rounds before those that count: steps are traced, captured or compiled in them


class Workload(NamedTuple):
    """A setting to measure."""

    about: str
    experiment: str
    changes: str  # as on the command line
    shape: tuple[int, ...]  # of the images that stand in where the data set is not at hand


IMAGES = "images of the right shape stand in for the data set, which is not at hand or too small"
FEW = "partition=nway_kshot partition.ways={ways} partition.shots={shots} partition.spread=0"
WORKLOADS = {
    "fedproto-mnist": Workload(
        "FedProto's MNIST run: 20 clients, about 350 images each, batch 8", "fedproto/mnist_n3", "", (1, 28, 28)
    ),
    "fedproto-mnist-200": Workload(
        "the same with 200 clients",
        "fedproto/mnist_n3",
        "clients=200 partition.shots=70 partition.test_shots=10",
        (1, 28, 28),
    ),
    "fednh-cifar": Workload(
        "FedNH's CNN: 100 clients all in, batch 64, one epoch",
        "fednh/cifar10_dir03",
        "participation=1.0 local_epochs=1 partition=iid",
        (3, 32, 32),
    ),
    "fednh-round": Workload(
        "FedNH's setting: 100 clients, 10 a round, Dir(0.3), five epochs, crop and flip",
        "fednh/cifar10_dir03",
        "",
        (3, 32, 32),
    ),
    "resnet18-gn": Workload(
        "ResNet18 with GroupNorm: 10 clients of 256 images, 32x32, batch 64, FedAvg",
        "fednh/cifar10_dir03",
        "method=fedavg model=resnet18_gn clients=10 participation=1.0 local_epochs=1 drop_last=true data.augment=[] "
        "evaluate.own=0 evaluate.gm=0 " + FEW.format(ways=10, shots=26),
        (3, 32, 32),
    ),
    "pfl-cifar10": Workload(
        "pfl-research's benchmark: FedAvg, 1,000 clients of 50 images, 50 a round, batch 10, a CNN of 1.6 M parameters",
        "fednh/cifar10_dir03",
        "method=fedavg model=cnn_cifar clients=1000 participation=0.05 local_epochs=1 batch_size=10 data.augment=[] "
        "optimizer={lr=0.1} " + FEW.format(ways=10, shots=5),
        (3, 32, 32),
    ),
    "digits-100": Workload(
        "digits, 100 clients, a small CNN",
        "demo",
        "clients=100 partition.shots=1 model=cnn_digits local_epochs=1",
        (),
    ),
}


def time_engines(
    name: str,
    *,
    rounds: int = 5,
    device: str = "auto",
    changes: tuple[str, ...] = (),
    data_dir: Path | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Seconds per round of the reference engine (one thread) and of the stacked engine, with their parts. The stacked
    engine is timed as it is and, once compiled, compiled; a long run gets the faster of the two.

    The stacked engine is timed as it is and compiled, after compiling; the faster of both is what a long run gets.
    """
    if name not in WORKLOADS:
        raise UserError(f"there is no workload {name!r}. {did_you_mean(name, WORKLOADS)}")
    work = WORKLOADS[name]
    plan = Experiment.load(work.experiment, *work.changes.split(), f"device={device}", *changes)
    domains, note = _domains(plan, work, data_dir)
    found: dict[str, Any] = {"workload": name, "about": work.about, "note": note, **_machine(plan)}
    ways = {"reference": ("engine.name=reference", "engine.threads=1"), "uncompiled": ("engine.compile=never",)}
    if no_compiler(plan.torch_device()) is None:
        ways["compiled"] = ("engine.compile=always",)
    for way, overrides in ways.items():
        tell(way)
        chosen = Experiment.load(work.experiment, *work.changes.split(), f"device={device}", *changes, *overrides)
        made = prepare(chosen, domains=domains).engine
        with working(chosen, made):
            parts = _rounds(chosen, made, rounds if way != "reference" else min(rounds, 3))
        found[f"{way}_s"] = parts.pop("round")
        found[f"{way}_first_s"] = parts.pop("first")
        found[f"{way}_parts"] = parts
        found["peak_mb"] = _peak_mb(chosen)
    best = min((way for way in ways if way != "reference"), key=lambda way: found[f"{way}_s"])
    found |= {"stacked_s": found[f"{best}_s"], "stacked_parts": found[f"{best}_parts"], "best": best}
    found["not_training"] = 1 - found["stacked_parts"]["train"] / sum(found["stacked_parts"].values())
    found["ratio"] = found["reference_s"] / found["stacked_s"]
    found["floor_s"] = _floor(plan, made)
    found["times_floor"] = found["stacked_s"] / found["floor_s"]
    return found


def _domains(plan: Experiment, work: Workload, data_dir: Path | None) -> tuple[list[Domain], str]:
    """The workload's data, or images of its shape."""
    try:
        domains = load(plan.data, data_dir)
        plan.partition(domains, plan.clients, plan.seed)
        return domains, ""
    except UserError:
        if not work.shape:
            raise
    rng = np.random.default_rng(0)
    y = np.arange(60_000) % CLASSES
    x = rng.integers(0, 256, (len(y), *work.shape), dtype=np.uint8)
    names = tuple(map(str, range(CLASSES)))
    return [Domain(str(plan.data.name), x, y, x[:10_000], y[:10_000], names)], IMAGES


def _machine(plan: Experiment) -> dict[str, Any]:
    device = plan.torch_device()
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    return {"device": where, "precision": plan.engine.precision, "torch": torch.__version__, "protofed": VERSION}


def _rounds(plan: Experiment, engine: Engine, rounds: int) -> dict[str, float]:
    """Medians over rounds after the warm-up: a round as a run does it, and its parts."""
    method, device = plan.method, plan.torch_device()
    server = method.init_server(engine.specs()[0])
    server = torch.utils._pytree.tree_map(lambda t: t.to(device), server)
    uploads, centres = uploads_of(plan, engine), ()
    whole: list[float] = []
    parts: list[dict[str, float]] = []
    warm = WARM if isinstance(engine, StackedEngine) else 1
    began = time.perf_counter()
    for round in range(rounds + warm):
        if len(whole) and time.perf_counter() - began > LONG:
            break
        engine.clock.take()
        cohort = draw_cohort(plan, round)
        marks = [_now(device)]
        trained = engine.train(method, server, cohort, round)
        marks.append(_now(device))
        server, centres = next_server(plan, server, trained, cohort, uploads, round, centres)
        engine.clients.update(trained.clients)
        marks.append(_now(device))
        round_numbers(plan, engine, server, cohort, round + 1)
        marks.append(_now(device))
        if not round:
            first = marks[-1] - marks[0]
        if round < warm:
            continue
        whole.append(marks[-1] - marks[0])
        seconds = dict(zip(("clients", "aggregate", "evaluate"), np.diff(marks).tolist(), strict=True))
        clock = {"train": 0.0, "upload": 0.0} | engine.clock.take()
        rest = seconds.pop("clients") - sum(clock.values())
        parts.append({**clock, **seconds, "rest": rest})
    return {"round": statistics.median(whole), "first": first} | {
        name: statistics.median(part[name] for part in parts) for name in parts[0]
    }


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _peak_mb(plan: Experiment) -> float:
    if plan.torch_device().type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _floor(plan: Experiment, engine: Engine) -> float:
    """The training's products at the speed of one large product: no engine can be faster than that."""
    device = plan.torch_device()
    samples = float(engine.counts(draw_cohort(plan, 0)).sum()) * plan.local_epochs
    spec = engine.specs()[0]
    module = plan.model[0].trained_part(_shape(engine), spec.classes).to(device)
    x = torch.zeros(2, *_shape(engine), device=device)
    with FlopCounterMode(display=False) as counter:
        module.head(module.body(x)).sum().backward()  # type: ignore[operator]
    flops: float = counter.get_total_flops() / 2 * samples
    a = torch.randn(2048, 2048, device=device)
    a @ a
    start = _now(device)
    for _ in range(5):
        a @ a
    return flops / (5 * 2 * 2048**3 / (_now(device) - start))


def _shape(engine: Engine) -> tuple[int, ...]:
    shape: tuple[int, ...] = engine.federation.shape(0)  # type: ignore[attr-defined]
    return shape
