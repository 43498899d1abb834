"""`protofed.join`: a client with its own data, or one that was held out, joins a run that is finished or still
running."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from protofed.config.experiment import Experiment
from protofed.config.registry import ModelChoice
from protofed.data.domain import Domain
from protofed.data.readers.labels import class_names_of
from protofed.data.readers.own import read_clients, read_part, split_parts
from protofed.data.scaling import Scaler, described_scaler
from protofed.data.sources import load
from protofed.data.split import Split
from protofed.errors import UserError, did_you_mean, option
from protofed.importing import MEMORY
from protofed.joining.newcomer import Joined, Newcomers, few_shots, held_back_clients, welcome
from protofed.method import Tree
from protofed.metrics import judged_by
from protofed.models.adapt import Adapt
from protofed.models.own import KEYS, Handed, handed, plain
from protofed.runs import saved as runs
from protofed.runs.cohort import held_out
from protofed.runs.saved import Saved
from protofed.runs.setup import prepare_split

NEWCOMER = "the newcomer"  # who hands its data in


class Joining(NamedTuple):
    """The result of joining: one record per seed, and what the user should be told."""

    method: str
    judged_by: str
    round: int
    class_names: list[str]
    records: list[dict[str, Any]]
    notes: list[str]
    newcomers: Newcomers  # of the last seed
    joined: Joined
    server: Tree  # of the run that was joined

    @property
    def model(self) -> nn.Module:
        """The newcomer's own model as plain PyTorch, in evaluation mode."""
        engine, client = self.newcomers.engine(), self.joined.client
        return plain(engine.module(0), client.params, client.buffers)

    def mean(self, key: str) -> float | None:
        """The mean over seeds."""
        known = [record[key] for record in self.records if record[key] is not None]
        return float(np.mean(known)) if known else None

    def __repr__(self) -> str:
        """One line, without samples or weights: it may end up in a log."""
        key = f"{self.judged_by}_own" if f"{self.judged_by}_own" in self.records[0] else self.judged_by
        accuracy, alone = self.mean(key), self.mean(key.replace(self.judged_by, "alone"))
        found = "no test data" if accuracy is None else f"accuracy {accuracy:.1%}"
        found += "" if accuracy is None or alone is None else f" ({alone:.1%} alone)"
        seeds = f"{len(self.records)} seed{'s' * (len(self.records) > 1)}"
        return f"<Joining: joined {self.method} after round {self.round}, {seeds}, {found}>"


def join(
    run: str | Path,
    *,
    data: Any = None,
    client: int | None = None,
    model: Any = None,
    steps: int | None = None,
    epochs: int | None = None,
    shots: int | None = None,
    lam: Sequence[float] | None = None,
    seeds: Sequence[int] = (0,),
    data_dir: str | Path | None = None,
    trust: bool = False,
    tell: Callable[[int, int], None] = lambda done, of: None,
    note: Callable[[str], None] = lambda text: None,
) -> Joining:
    """Fine-tune a newcomer on what a run has learnt, and measure it against training alone for as many steps.

    `data` is its own .npz (or any other source), or in Python whatever `federate` takes of a client; `client` one that
    the experiment held out. `model` is a name, an import path, or a module. Every seed draws other samples and another
    order; steps, shots and lam are by default as the experiment's [join] says. `trust` lets code run that the run's
    experiment names and that is not the user's own; `note` hears which, before it is imported.
    """
    if (data is None) == (client is None):
        raise UserError(
            f"join needs one of {option('data', 'FILE')} (a newcomer's own samples) and {option('client', 'N')} "
            "(one held out)."
        )
    if steps is not None and epochs is not None:
        raise UserError(f"{option('steps', steps)} and {option('epochs', epochs)} say the same. Give one of them.")
    found = runs.read_checkpoint(run, trust, note)
    where = Path(data_dir) if data_dir is not None else None
    changed = {"steps": steps, "shots": shots, "lam": None if lam is None else list(lam)}
    given: dict[str, Any] = {key: value for key, value in changed.items() if value is not None}
    plan = dataclasses.replace(found.experiment, join=dataclasses.replace(found.experiment.join, **given))
    plan = Experiment.from_dict(plan.to_dict())  # checks what was given
    notes = list(found.notes)
    if data is not None:
        domain, scale = _own(found, data, where, notes)
        choice = _choice(plan, model)
    else:
        assert client is not None
        domains, split = prepare_split(plan, where)
        _check_held_out(plan, client)
        choice = plan.model_of(client) if model is None else _choice(plan, model)
    records = []
    for done, seed in enumerate(seeds, 1):
        if data is not None:
            newcomers = _alone(plan, domain, scale, choice, seed)
        else:
            newcomers = held_back_clients(plan, domains, split, [client], seed)._replace(choices=[choice])  # type: ignore[list-item]
        if epochs is not None:
            size = math.ceil(len(newcomers.split.train[0]) / plan.batch_size)
            plan = dataclasses.replace(plan, join=dataclasses.replace(plan.join, steps=max(1, epochs * size)))
            newcomers = newcomers._replace(experiment=plan)
        (joined,) = newcomers.join(found.state.server)
        records.append({"seed": seed, "shots": plan.join.shots, **joined.record})
        tell(done, len(seeds))
    if welcome(plan.method, found.state.server)[1] is None:
        notes.append(f"{plan.method_name} has no prototypes after round {found.state.round}: by head only")
    names = [str(name) for name in newcomers.domains[0].class_names]
    judged = judged_by(plan.method)
    return Joining(
        plan.method_name, judged, found.state.round, names, records, notes, newcomers, joined, found.state.server
    )


def _check_held_out(plan: Experiment, client: int) -> None:
    there = held_out(plan)
    if client not in there:
        who = f"It holds out {', '.join(map(str, there))}." if there else "It holds out nobody (held_out_clients = 0)."
        raise UserError(f"{option('client', client)} was not held out of this run, so it cannot join it. {who}")


def _choice(plan: Experiment, model: Any) -> ModelChoice | Handed:
    """The named model, a given module, or the run's own (the first if it has several)."""
    if model is not None and not isinstance(model, str):
        options = {key: value for key, value in plan.model[0].options.items() if key in KEYS}
        if str(options.get("embedding", "")).startswith(MEMORY):
            raise UserError(
                "the run's embedding is a function in memory. Give a model by import path, such as mynets:small."
            )
        return handed(model, 1, Adapt(**options))[0]
    return plan.model[0] if model is None else Experiment.from_dict({**plan.to_dict(), "model": model}).model[0]


def _alone(plan: Experiment, domain: Domain, scale: Scaler, choice: ModelChoice | Handed, seed: int) -> Newcomers:
    """A newcomer with a few of its samples; it is tested on the classes that it trains on."""
    train = few_shots(np.arange(len(domain.y_train)), domain.y_train, plan.join.shots, plan.seed, "shots", seed)
    test = np.flatnonzero(np.isin(domain.y_test, domain.y_train[train]))
    split = Split(np.zeros(1, np.int64), (train,), (test,))
    return Newcomers(plan, [domain], split, [choice], [scale], seed)


def _handed(data: Any, names: list[str], plan: Experiment) -> Domain:
    """The client that a script gives; its labels are matched by their names in the run's files."""
    parts = [read_part(part, NEWCOMER, lambda text: None) for part in split_parts(data) if part is not None]
    arrays = tuple(item for part in parts for item in (part.x, class_names_of(part.y)))
    own = read_clients({NEWCOMER: arrays}, labels=names, test_fraction=plan.data.test_fraction, seed=plan.seed)
    return own.domains[0]


def _own(found: Saved, data: Any, data_dir: Path | None, notes: list[str]) -> tuple[Domain, Scaler]:
    """The newcomer's samples with the run's classes and scaling."""
    told = runs.inputs_of_run(found, data_dir)
    names = [str(c) for c in told["class_names"]]
    name = str(data) if isinstance(data, str | Path) else NEWCOMER
    if isinstance(data, str | Path):
        (domain,) = load(dataclasses.replace(found.experiment.data, name=name, ids=""), data_dir)
    else:
        domain = _handed(data, names, found.experiment)
    unknown = [label for label in domain.class_names if label not in names]
    if unknown:
        raise UserError(
            f"{name} has a class {unknown[0]!r} that the run does not know. {did_you_mean(unknown[0], names)} "
            "Name classes as the run's inputs.json does."
        )
    number = np.array([names.index(label) for label in domain.class_names])
    y_train, y_test = number[domain.y_train], number[domain.y_test]
    domain = dataclasses.replace(domain, y_train=y_train, y_test=y_test, class_names=tuple(names), ids={})
    alike = [one for one in told["domains"] if tuple(one["shape"]) == domain.shape]
    if not alike:
        notes.append(f"samples of shape {domain.shape} are new to the run: scaled by their own mean and deviation")
        return domain, Scaler.of(domain, found.experiment.normalize)
    if str(domain.x_train.dtype) != alike[0]["dtype"]:
        raise UserError(
            f"{name} has samples of type {domain.x_train.dtype}, but the run's are {alike[0]['dtype']} from "
            f"{alike[0]['range'][0]:g} to {alike[0]['range'][1]:g}. Save them so."
        )
    return domain, described_scaler(alike[0])
