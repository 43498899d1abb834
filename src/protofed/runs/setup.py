"""From an experiment to everything that its run needs, checked: data, partition and engine."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import nn

from protofed.config.experiment import Experiment
from protofed.data.domain import Domain, client_names
from protofed.data.sources import data_root, load
from protofed.data.split import Split
from protofed.engines import Engine
from protofed.engines.base import OnReference
from protofed.engines.ray import cluster
from protofed.engines.ray.engine import RayEngine
from protofed.engines.ray.worker import Made
from protofed.engines.reference import ReferenceEngine
from protofed.engines.resources import round_products, torch_settings
from protofed.engines.stacked.engine import StackedEngine
from protofed.errors import UserError
from protofed.importing import is_path
from protofed.method import Client
from protofed.models.functional import fresh
from protofed.models.own import Handed, plain
from protofed.ops.trees import under
from protofed.robust.poison import poison
from protofed.runs.budget import check_privacy
from protofed.runs.builders import Builder, behind_frozen, builders_of, may_be_frozen
from protofed.runs.checks import (
    check_computed,
    check_growing,
    check_lists,
    check_phases,
    check_tests,
    method_remarks,
)
from protofed.runs.cohort import draw_cohort
from protofed.runs.frozen import refuse_unfit
from protofed.runs.probes import NO_PROBES, Probes
from protofed.runs.releases import Releases
from protofed.runs.robustness import attackers_of, check_rule
from protofed.runs.selection import Choose, own_rule
from protofed.runs.stragglers import paces_of

MakeReleases = Callable[[Path, int, Callable[[str], None]], Releases]  # folder, rounds done, who hears of it
SMALL = 200_000  # parameters, up to which training clients at once pays on a CPU


class Prepared(NamedTuple):
    """Everything that a run needs, checked."""

    domains: list[Domain]
    split: Split
    engine: Engine
    notes: tuple[str, ...]
    builders: Sequence[Builder] = ()  # per client: the name of its model, and how to build all of it
    modules: Sequence[Handed] | None = None  # per client, where a script handed them in
    choose: Choose | None = None  # who takes part, where a script handed in a function for it
    data_here: bool = True  # otherwise clients keep their data to themselves, and nobody knows the partition
    releases: MakeReleases | None = None  # where noise is added elsewhere: what is noted of it here

    @property
    def reference(self) -> ReferenceEngine:
        """The reference engine, which runs clients one after another on this machine, whatever the run's engine."""
        engine = self.engine.reference if isinstance(self.engine, OnReference) else self.engine
        assert isinstance(engine, ReferenceEngine)
        return engine

    def module(self, client: int) -> nn.Module:
        """A client's whole model as it was built, with a frozen body if it has one."""
        shape, classes = self.domains[int(self.split.domain[client])].shape, self.domains[0].classes
        return fresh(lambda: self.builders[client][1](shape, classes), self.engine.specs()[0].seed)

    def personal(self, client: int, state: Client) -> nn.Module:
        """A client's trained model as plain PyTorch, in its own class; with a second model, the personal one."""
        second = under(state.params, "personal.", strip=True)
        return plain(self.module(client), state.params | second, state.buffers)


def names_of_clients(prepared: Prepared) -> Sequence[str]:
    """The names of the clients."""
    domains, split = prepared.domains, prepared.split
    return client_names(domains, split.domain) if domains[0].computed is None else prepared.reference.federation.names


def prepare_split(
    experiment: Experiment, data_dir: Path | None = None, domains: list[Domain] | None = None
) -> tuple[list[Domain], Split]:
    """The partition of this experiment."""
    domains = domains or load(experiment.data, data_dir)
    if not any(choice.takes_tokens for choice in experiment.model):
        domains = [domain.as_numbers() for domain in domains]
    check_lists(experiment, domains)
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
    probes: Probes = NO_PROBES,
) -> Prepared:
    """Load (or take), split and build; whatever can be refused is refused here, before anything is written.

    `domains` and `modules` (one for each client) are taken in place of what the experiment names; `tell` hears how a
    frozen encoder gets on. `shares`: for one of so many workers of a Ray cluster; 0 for who gives them their work.
    `probes` may refuse the experiment, too.
    """
    given = domains
    device = experiment.torch_device()
    if is_path(experiment.selection.rule):
        own_rule(experiment.selection.rule)
    domains, split = prepare_split(experiment, data_dir, domains)
    check_computed(experiment, domains)
    refuse_unfit(experiment.model if modules is None else (), domains)
    federation = experiment.federation(domains, split)
    names = [domains[int(d)].name for d in split.domain] if modules else ()
    builders = builders_of(experiment, federation, modules, names)
    trained = builders
    notes: tuple[str, ...] = ()
    if any(may_be_frozen(builders[client][1]) for client in federation.examples):
        trained, notes, embeddings = behind_frozen(experiment, federation, domains, split, builders, tell)
        if experiment.attack.kind == "backdoor":
            raise UserError(
                "attack.kind = 'backdoor' has no place behind a frozen encoder. Use a model that is trained."
            )
        if embeddings is not None:
            federation = experiment.federation(*embeddings, normalize="none")
    if experiment.skew.on:
        from protofed.data.skew import check_skew, skewed  # few experiments have one

        check_skew(experiment.skew, federation, trained is not builders, experiment.held_out_clients)
        skewed(federation, experiment.skew)
    poison(federation, experiment.attack, attackers_of(experiment, federation.sizes))
    if experiment.incremental.on:
        from protofed.data.incremental import GrowingFederation  # few experiments have one

        check_growing(experiment)
        federation = GrowingFederation(federation, experiment.incremental, experiment.rounds)
    reference = ReferenceEngine(
        federation,
        trained,
        experiment.scheduled,
        seed=experiment.seed,
        local_epochs=experiment.local_epochs,
        init="per_client" if modules and any(one.own_weights for one in modules) else experiment.method.init,
        precision=experiment.engine.precision,
        by_client=experiment.by_client and experiment.engine.name == "reference",
        paces=paces_of(experiment),
    )
    experiment.method.check(reference.specs())
    check_phases(experiment, reference)
    check_rule(experiment, reference)
    check_tests(experiment, federation, reference)
    notes += check_privacy(experiment, reference, domains)
    notes += (*method_remarks(experiment, reference), *probes.check(experiment, reference.specs()[0]))
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
        by_client=experiment.by_client,
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
    """The same experiment on a worker's machine; relative paths refer to where the run was started."""
    if folder.is_dir():
        os.chdir(folder)
    plan = replace(experiment, engine=replace(experiment.engine, threads=workers))
    prepared = prepare(plan, data_dir, domains, modules=modules, shares=shares)
    assert isinstance(prepared.engine, StackedEngine)
    round_products(plan.engine.precision != "fp32")
    return Made(prepared.engine, plan.method, _data(prepared.split))


def _data(split: Split) -> str:
    """What has to be the same on all machines."""
    return f"{split.hash} {split.fingerprint}"


def _largest(engine: Engine) -> int:
    """The parameters of the largest model."""
    return max(sum(p.numel() for p in spec.params.values()) for spec in engine.specs())


@contextlib.contextmanager
def working(experiment: Experiment, engine: Engine, tell: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """Torch set up for training and, if clients are spread over Ray, a cluster."""
    with torch_settings(engine.in_turn, experiment.engine.threads, experiment.engine.precision):
        if not isinstance(engine, RayEngine):
            yield
            return
        try:
            engine.start(tell)
            yield
        finally:
            engine.close()
