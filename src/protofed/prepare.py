"""From an experiment to all that its run needs, checked: data, who has what, and an engine."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from protofed import newcomer
from protofed.builders import Builder, Shown, behind_frozen, builders_of
from protofed.data.domain import Domain
from protofed.data.federation import Federation
from protofed.data.sources import data_root, load
from protofed.data.split import Split
from protofed.engines import Engine, cluster
from protofed.engines.base import OnReference
from protofed.engines.ray import RayEngine
from protofed.engines.reference import ReferenceEngine
from protofed.engines.stacked import StackedEngine
from protofed.engines.worker import Made
from protofed.errors import UserError
from protofed.experiment import Experiment
from protofed.method import Client
from protofed.models.functional import fresh
from protofed.models.own import Handed, plain
from protofed.ops import random
from protofed.ops.trees import under
from protofed.theory.entry import why_not as why_no_theorem

SMALL = 200_000  # parameters, up to which training clients at once pays on a CPU


class Prepared(NamedTuple):
    """All that a run needs, checked."""

    domains: list[Domain]
    split: Split
    engine: Engine
    notes: tuple[str, ...]
    builders: tuple[Builder, ...] = ()  # per client: the name of its model, and how to build all of it
    modules: Sequence[Handed] | None = None  # per client, where a script handed them in
    data_here: bool = True  # else clients keep theirs to themselves, and nobody knows the partition

    @property
    def reference(self) -> ReferenceEngine:
        """One client after another on this machine, whatever the engine."""
        engine = self.engine.reference if isinstance(self.engine, OnReference) else self.engine
        assert isinstance(engine, ReferenceEngine)
        return engine

    def module(self, client: int) -> nn.Module:
        """A client's whole model as it was built, with a frozen body if it has one."""
        shape, classes = self.domains[int(self.split.domain[client])].shape, self.domains[0].classes
        return fresh(lambda: self.builders[client][1](shape, classes), self.engine.specs()[0].seed)

    def personal(self, client: int, state: Client) -> nn.Module:
        """A client's trained model as plain PyTorch, in its own class; of a method with a second one, the personal."""
        second = under(state.params, "personal.", strip=True)
        return plain(self.module(client), state.params | second, state.buffers)


def prepare_split(
    experiment: Experiment, data_dir: Path | None = None, domains: list[Domain] | None = None
) -> tuple[list[Domain], Split]:
    """Who has what in this experiment."""
    domains = domains or load(experiment.data, data_dir)
    if all(choice.known for choice in experiment.model):
        domains = [domain.as_numbers() for domain in domains]  # only models of the user's own take tokens
    split = experiment.partition(domains, experiment.clients, experiment.seed)
    return domains, split.hold_back(experiment.evaluate.validation, domains, experiment.seed)


def prepare(
    experiment: Experiment,
    data_dir: Path | None = None,
    domains: list[Domain] | None = None,
    cores: int | None = None,
    modules: Sequence[Handed] | None = None,
    tell: Callable[[str], None] = lambda text: None,
    shares: int = 0,
) -> Prepared:
    """Load (or take), split and build; whatever can be refused is refused here, before anything is written.

    `domains` and `modules` (one for each client) are taken in place of what the experiment names; `tell` hears how a
    frozen encoder gets on. `shares`: for one of so many workers of a Ray cluster; 0 for who gives them their work.
    """
    given = domains
    device = experiment.torch_device()
    domains, split = prepare_split(experiment, data_dir, domains)
    federation = federation_of(experiment, domains, split)
    builders = builders_of(experiment, federation, modules, [domains[int(d)].name for d in split.domain])
    trained = builders
    notes: tuple[str, ...] = ()
    if any(isinstance(build, Shown) for _, build in builders):
        trained, notes, embeddings = behind_frozen(experiment, federation, domains, split, builders, tell)
        if embeddings is not None:
            federation = federation_of(experiment, *embeddings, "none")
    reference = ReferenceEngine(
        federation,
        trained,
        experiment.optimizer,
        seed=experiment.seed,
        local_epochs=experiment.local_epochs,
        init="per_client" if modules and any(one.own_weights for one in modules) else experiment.method.init,
        precision=experiment.engine.precision,
    )
    experiment.method.check(reference.specs())
    check_phases(experiment, reference)
    _check_tests(experiment, federation, reference)
    if experiment.held_out_clients:
        newcomer.check(experiment, reference.specs()[0])
    lacking = why_no_theorem(experiment.method, experiment.optimizer) if experiment.evaluate.theory else None
    notes += (f"evaluate.theory = {experiment.evaluate.theory} is left out: {lacking}",) if lacking else ()
    if experiment.engine.name == "reference":
        return Prepared(domains, split, reference, notes, builders, modules)
    workers = experiment.engine.threads or cores or os.cpu_count() or 1
    alone = experiment.engine.name in ("auto", "ray") and device.type == "cpu" and _largest(reference) > SMALL
    stacked = StackedEngine(
        reference,
        chunk=1 if alone else experiment.engine.chunk,
        workers=workers,
        compiled=experiment.engine.compile == "always",
        ordered=experiment.engine.ordered,
        typical=draw_cohort(experiment, 0),
        shares=max(1, shares),
    )
    why_not = stacked.why_not(experiment.method)
    notes += (f"one client after another, not stacked: {why_not}",) if why_not else ()
    engine: Engine = stacked
    if experiment.engine.name == "ray" and not shares:
        engine = _ray(experiment, stacked, split, data_dir, given, modules, cores)
    return Prepared(domains, split, engine, notes, builders, modules)


def _ray(
    experiment: Experiment,
    stacked: StackedEngine,
    split: Split,
    data_dir: Path | None,
    domains: list[Domain] | None,
    modules: Sequence[Handed] | None,
    cores: int | None,
) -> RayEngine:
    """An engine whose clients are spread over a Ray cluster, which is joined when it starts."""
    cluster.check_installed()
    choice = experiment.engine
    if experiment.device.startswith("cuda:"):
        raise UserError(f"device = {experiment.device!r}, but Ray deals out the GPUs. Use device = 'cuda' or 'auto'.")
    root = data_root(data_dir).resolve()
    make = partial(_worker, experiment, root if root.is_dir() else None, domains, modules, Path.cwd())
    most = len(draw_cohort(experiment, 0))
    here = cores or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()) or 1
    join = partial(cluster.Cluster, experiment.device != "cpu", choice.workers, choice.threads, most, here)
    return RayEngine(stacked, experiment.method, make, _data(split), join)


def _worker(
    experiment: Experiment,
    data_dir: Path | None,
    domains: list[Domain] | None,
    modules: Sequence[Handed] | None,
    folder: Path,
    workers: int,
    shares: int,
) -> Made:
    """The same experiment on the machine of a worker; relative paths mean what they mean where the run was started."""
    if folder.is_dir():
        os.chdir(folder)
    plan = replace(experiment, engine=replace(experiment.engine, threads=workers))
    prepared = prepare(plan, data_dir, domains, modules=modules, shares=shares)
    assert isinstance(prepared.engine, StackedEngine)
    _round_products(plan.engine.precision != "fp32")
    return Made(prepared.engine, plan.method, _data(prepared.split))


def _data(split: Split) -> str:
    """What must be the same on all machines."""
    return f"{split.hash} {split.fingerprint}"


def federation_of(
    experiment: Experiment, domains: list[Domain], split: Split, normalize: str | None = None
) -> Federation:
    """Everybody's samples, normalised as the experiment says or otherwise."""
    return Federation(
        domains,
        split,
        seed=experiment.seed,
        batch_size=experiment.batch_size,
        drop_last=experiment.drop_last,
        normalize=normalize or experiment.data.normalize,
        augmentations=experiment.data.augment,
        device=experiment.torch_device(),
    )


def _largest(engine: Engine) -> int:
    """Parameters of the largest model."""
    return max(sum(p.numel() for p in spec.params.values()) for spec in engine.specs())


def check_phases(experiment: Experiment, engine: ReferenceEngine) -> None:
    """Whatever a method trains, every model must have."""
    method = experiment.method
    for spec in engine.specs():
        names = method.init_client(spec).params
        for prefix in {p for phase in (*method.phases(), *method.last_phases()) for p in phase.trains}:
            if not under(names, prefix):
                has = ", ".join(sorted({name.split(".")[0] for name in names}))
                raise UserError(
                    f"method.name = {experiment.method_name!r} trains {prefix}*, but {spec.architecture} has {has}. "
                    "Use another model or method"
                    + (", or project = 64 behind a frozen encoder." if prefix == "body." else ".")
                )


def _check_tests(experiment: Experiment, federation: Federation, engine: ReferenceEngine) -> None:
    """The global model can only be measured where there is something to measure it on."""
    server = experiment.method.init_server(engine.specs()[0])
    tests = sum(len(federation.global_test(domain).y) for domain in range(len(federation.shapes)))
    if experiment.evaluate.gm and not tests and experiment.method.global_client(server) is not None:
        raise UserError(
            f"evaluate.gm = {experiment.evaluate.gm} measures the global model of {experiment.method_name} on the test "
            f"part of {experiment.data.name!r}, which is empty. Use evaluate.gm = 0, or data with a test part."
        )


def held_out(experiment: Experiment) -> list[int]:
    """The clients that take part in no round and join after the last, drawn by the seed."""
    order = random.permutation(random.key(experiment.seed, "held out"), experiment.clients)
    return sorted(order[: experiment.held_out_clients].tolist())


def taking_part(experiment: Experiment) -> Sequence[int]:
    """All other clients."""
    if not experiment.held_out_clients:
        return range(experiment.clients)
    return sorted(set(range(experiment.clients)) - set(held_out(experiment)))


def draw_cohort(experiment: Experiment, round: int) -> list[int]:
    """The clients of a round, from seed and round alone, so that every method meets the same ones."""
    there = taking_part(experiment)
    size = max(1, int(experiment.participation * len(there) + 1e-9))
    if size == len(there):
        return list(there)
    order = random.permutation(random.key(experiment.seed, "cohort", round), len(there))
    return sorted(there[i] for i in order[:size].tolist())


@contextlib.contextmanager
def threads(experiment: Experiment, engine: Engine, tell: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """Clients are spread over threads, not the work of one of them, or over Ray, which begins and ends with it;
    products are rounded only where that was asked for."""
    before = torch.get_num_threads()
    torch.set_num_threads((isinstance(engine, ReferenceEngine) and experiment.engine.threads) or 1)
    torch.set_flush_denormal(True)  # numbers too small to matter are zero: they are ten times slower
    tf32 = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    _round_products(experiment.engine.precision != "fp32")
    try:
        if isinstance(engine, RayEngine):
            engine.start(tell)
        yield
    finally:
        if isinstance(engine, RayEngine):
            engine.close()
        torch.set_num_threads(before)
        torch.set_flush_denormal(False)
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = tf32


def _round_products(allowed: bool) -> None:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = allowed
