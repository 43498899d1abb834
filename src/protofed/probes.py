"""All that a run checks, measures and draws in addition to training: newcomers, convergence theorems and pictures."""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from protofed.config.experiment import Experiment
from protofed.data.domain import Domain
from protofed.data.split import Split
from protofed.engines import Engine, Trained
from protofed.joining import newcomer
from protofed.method import Spec
from protofed.papers.theory.rounds import measure_round, why_not
from protofed.runs.cohort import held_out
from protofed.runs.folder import RunFolder
from protofed.runs.probes import Probes

P = ParamSpec("P")
T = TypeVar("T")


class Pictures(Probes):
    """What a federation's server draws: it has no client's samples."""

    def pictures(self, folder: RunFolder, method: str, clients: Sequence[Mapping[str, Any]]) -> None:
        from protofed.report import pictures  # with Matplotlib, which takes its time

        pictures.draw_run(folder.rounds(), method, folder.file("accuracy.png"))
        pictures.draw_clients(clients, method, folder.file("clients.png"))


class AllProbes(Pictures):
    """Newcomers, the numbers of a theorem where evaluate.theory asks for them, and a picture of the partition."""

    def check(self, experiment: Experiment, spec: Spec) -> tuple[str, ...]:
        if experiment.held_out_clients:
            newcomer.check_joinable(experiment, spec)
        lacking = why_not(experiment.method, experiment.optimizer) if experiment.evaluate.theory else None
        return (f"evaluate.theory = {experiment.evaluate.theory} is left out: {lacking}",) if lacking else ()

    def partition(self, split: Split, domains: Sequence[Domain], file: Path) -> None:
        from protofed.report import pictures  # with Matplotlib, which takes its time

        pictures.draw_split(split, domains, file)

    def round(
        self,
        experiment: Experiment,
        engine: Engine,
        servers: tuple[Any, Any],
        cohort: Sequence[int],
        round: int,
        trained: Trained,
    ) -> dict[str, Any]:
        every = experiment.evaluate.theory
        if not every or (round + 1) % every or why_not(experiment.method, experiment.optimizer):
            return {}
        with engine.clock.part("theory"):
            return {"theory": measure_round(engine, experiment.method, servers, cohort, round, trained.clients)}

    def joined(
        self,
        experiment: Experiment,
        domains: Sequence[Domain],
        split: Split,
        modules: Sequence[Any] | None,
        server: Any,
        measured: Callable[[int], None],
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        numbers = held_out(experiment)
        if not numbers:
            return [], {}
        held = newcomer.held_back_clients(experiment, domains, split, numbers, modules=modules)
        joined = held.join(server, lambda done, of: measured(done))
        records = [{"client": number, **one.record} for number, one in zip(numbers, joined, strict=True)]
        return records, newcomer.join_summary(experiment, records)


ALL, PICTURES = AllProbes(), Pictures()


def with_probes(function: Callable[P, T]) -> Callable[P, T]:
    """The same function, with all probes as the default."""

    @functools.wraps(function)
    def probed(*args: P.args, **kwargs: P.kwargs) -> T:
        kwargs.setdefault("probes", ALL)
        return function(*args, **kwargs)

    return probed
