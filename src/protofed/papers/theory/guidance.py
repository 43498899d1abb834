"""A range for lr and lam (or rho) from a theorem, for `protofed explain`: measured on the first rounds, or on a run."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from protofed.config.experiment import Experiment
from protofed.config.sections import Attack, Robust
from protofed.engines.reference import ReferenceEngine
from protofed.engines.resources import torch_settings
from protofed.errors import UserError
from protofed.explain.explain import explainable
from protofed.papers.theory.bounds import Constants, Range
from protofed.papers.theory.measure import share
from protofed.papers.theory.rounds import Tell, as_lr, measure_round, measured_clients, why_not
from protofed.papers.theory.theorems import Measurement, theorem_of
from protofed.runs.cohort import draw_cohort
from protofed.runs.folder import RunFolder
from protofed.runs.setup import prepare
from protofed.runs.trust import experiment_of

ROUNDS = 2  # played: in the first there are no prototypes to be pulled to
LABEL = "guidance, not a guarantee: worst cases estimated from below on a few clients (docs/theory.md)"

Entry = dict[str, Any]


def guidance(
    experiment: Experiment, data_dir: Path | None = None, tell: Tell = lambda done, of: None
) -> dict[str, Any]:
    """What a convergence theorem suggests for lr and lam (or rho) in this experiment."""
    if lacking := why_not(experiment.method, experiment.optimizer):
        raise UserError(
            f"--theory cannot guide {experiment.method_name} here: {lacking}. Leave --theory and --run out."
        )
    experiment = replace(experiment, robust=Robust(), attack=Attack())  # theorems are about means
    experiment, note = explainable(experiment, data_dir)
    engine = prepare(experiment, data_dir).engine
    assert isinstance(engine, ReferenceEngine)
    with torch_settings(engine.in_turn, experiment.engine.threads, experiment.engine.precision):
        return _guide(experiment, engine, tell) | {"note": note}


def _guide(experiment: Experiment, engine: ReferenceEngine, tell: Tell) -> dict[str, Any]:
    """From the first rounds of a few clients, as if they were all clients."""
    method = experiment.method
    server = tree_map(lambda tensor: tensor.to(engine.federation.device), method.init_server(engine.specs()[0]))
    cohort = draw_cohort(experiment, 0)
    some = measured_clients(engine, cohort)
    if not some:
        raise UserError("no client of the first round has any data. Use another partition or participation.")
    ids, found = torch.tensor(some, device=engine.federation.device), []
    for round in range(ROUNDS):
        trained = engine.train(method, server, some, round)
        after = method.aggregate(server, trained.up, ids)

        def heard(done: int, of: int, before: int = round * len(some)) -> None:
            tell(before + done, ROUNDS * of)

        entry = measure_round(engine, method, (server, after), cohort, round, trained.clients, heard)
        found.append((round + 1, entry or {}))
        engine.clients.update(trained.clients)
        server = after
    return _told(experiment, found, f"the first {ROUNDS} rounds, played by {len(some)} clients")


def guidance_of_run(run: Path, trust: bool, tell: Callable[[str], None]) -> tuple[Experiment, dict[str, Any] | None]:
    """The experiment of a run, and what its measured rounds suggest, if there are any. `tell` hears which code of
    others is imported, if it is trusted."""
    folder = RunFolder(run)
    if not folder.exists:
        raise UserError(
            f"--run {run} is not a run: it has no experiment.toml. Name a folder that 'protofed run' wrote."
        )
    experiment = experiment_of(folder.experiment_dict(), run, trust, tell)
    lines = [line for line in folder.rounds() if line.get("theory")]
    try:
        found = [(line["round"], line["theory"]) for line in lines]
        return experiment, _told(experiment, found, f"{len(found)} rounds of {run}") if found else None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"--run {run}: what its rounds.jsonl says of the theory is damaged, or of another version "
            f"({type(error).__name__}: {error}). Leave --run out, and give --theory."
        ) from None


def _told(experiment: Experiment, found: Sequence[tuple[int, Entry]], source: str) -> dict[str, Any]:
    return {
        "which": found[-1][1]["which"],
        "label": LABEL,
        "source": source,
        "assumptions": _assumptions(found),
        "rounds": [{"round": number, **entry} for number, entry in found],
        "suggests": _suggests(experiment, [entry for _, entry in found]),
    }


def _assumptions(found: Sequence[tuple[int, Entry]]) -> str:
    """The bounds of the last round, and remarks on those of earlier rounds alone."""
    *before, (_, last) = found
    parts = [last["assumptions"]]
    for number, entry in before:
        other = [part for part in entry["assumptions"].split("; ") if part not in "; ".join(parts)]
        parts += [f"round {number}: {'; '.join(other)}"] * bool(other)
    return "; ".join(parts)


def _suggests(experiment: Experiment, entries: Sequence[Entry]) -> Range:
    """Values that satisfy the theorem in all of these rounds."""
    theorem = theorem_of(experiment.method)
    if theorem is None or not all(entry["suggests"] for entry in entries):
        return {}
    found = theorem.suggests([_measurement(entry) for entry in entries])
    return as_lr(found, share(experiment.optimizer, experiment.method.phases()[0]))


def _measurement(entry: Entry) -> Measurement:
    """The client of a round with the worst constants."""
    constants = {key: entry[key] for key in ("L1", "L2", "G", "sigma2", "grad_sq")}
    exchange: dict[str, float] = {key: entry[key] for key in ("pull", "averaging", "turning") if key in entry}
    return Constants(**constants, steps=min(entry["steps"])), exchange
