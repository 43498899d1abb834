"""One client of N, and a server without data, as engines: the same lines as in a simulation."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from protofed.config.experiment import Experiment
from protofed.config.registry import ModelChoice
from protofed.data.domain import Domain
from protofed.data.scaling import Scaler
from protofed.data.sources import load, load_own
from protofed.data.split import Split
from protofed.engines.reference import ReferenceEngine
from protofed.errors import UserError
from protofed.method import Spec
from protofed.remote.settings import Task

NONE = np.zeros(0, np.int64)


def one_client(experiment: Experiment, number: int, domain: Domain, choice: ModelChoice) -> ReferenceEngine:
    """An engine that holds one client of N, with all of this data (see `embedded_here`); the others have none."""
    split = empty_split(experiment.clients)
    train, test = list(split.train), list(split.test)
    train[number], test[number] = np.arange(len(domain.y_train)), np.arange(len(domain.y_test))
    split = replace(split, train=tuple(train), test=tuple(test))
    split = split.hold_back(experiment.evaluate.validation, [domain], experiment.seed)
    return _engine(experiment, [domain], split, [choice] * experiment.clients)


def no_client(
    experiment: Experiment, domain: Domain, tell: Callable[[str], None] = lambda text: None
) -> ReferenceEngine:
    """An engine without any client's data: for its models, and for the server's own test samples."""
    choices = [experiment.model_of(client) for client in range(experiment.clients)]
    seen = {choice.label if choice.frozen else "": choice for choice in choices}
    domains = [embedded_here(experiment, choice, domain, tell) for choice in seen.values()]
    owned = [list(seen).index(choice.label if choice.frozen else "") for choice in choices]
    return _engine(experiment, domains, replace(empty_split(experiment.clients), domain=np.array(owned)), choices)


def embedded_here(experiment: Experiment, choice: ModelChoice, domain: Domain, tell: Callable[[str], None]) -> Domain:
    """This data as a client's model sees it: behind a frozen encoder its embeddings."""
    if not choice.pretrained:
        return domain
    from protofed.runs.frozen import embedded_domain, refuse_unfit  # few federations have one

    refuse_unfit([choice], [domain])
    if not choice.frozen:
        return domain
    if experiment.data.augment:
        raise UserError(
            f"data.augment = {experiment.data.augment!r} changes inputs, but {choice.name} is frozen and "
            "sees them once. Use data.augment = [], or model.body = 'trained'."
        )
    return embedded_domain(choice, domain, experiment.torch_device(), tell)


def initial_spec(engine: ReferenceEngine, choice: ModelChoice, shape: tuple[int, ...]) -> Spec:
    """The common initial state of what is trained of a model, for samples of this shape."""
    shape = (choice.encoder_width,) if choice.frozen else shape
    return engine.spec_of(choice.trained_part if choice.frozen else choice, shape, choice.label)


def empty_split(clients: int) -> Split:
    return Split(np.zeros(clients, np.int64), (NONE,) * clients, (NONE,) * clients)


def _engine(
    experiment: Experiment, domains: Sequence[Domain], split: Split, choices: Sequence[ModelChoice]
) -> ReferenceEngine:
    experiment.privacy.refuse_federation()
    return ReferenceEngine(
        experiment.federation(domains, split, normalize="none" if all(c.pretrained for c in choices) else None),
        [(choice.label, choice.trained_part if choice.frozen else choice) for choice in choices],
        experiment.scheduled,
        seed=experiment.seed,
        local_epochs=experiment.local_epochs,
        init=experiment.method.init,
        precision=experiment.engine.precision,
    )


def choose_model(name: str | None, experiment: Experiment, number: int) -> ModelChoice:
    """A shipped model by its name, with the experiment's fields where it is one of its models."""
    if name is None:
        return experiment.model_of(number)
    listed = [choice for choice in experiment.model if choice.name == name]
    return listed[0] if listed else Experiment.from_dict({"model": {"name": name}}).model[0]


def task_of(experiment: Experiment, data_dir: Path | None = None) -> Task:
    """The task of an experiment whose data is here: its first domain's shape, and the classes."""
    domain = load(experiment.data, data_dir)[0]
    return Task(domain.shape, domain.class_names)


def server_domain(folder: Path, experiment: Experiment, task: Task) -> Domain:
    """The server's test samples (test.npz in its folder) where it has some, else nothing in the task's shape."""
    path = folder / "test.npz"
    shape = task.shape
    empty = np.zeros((0, *shape), np.float32)
    if not path.is_file():
        return Domain("federation", empty, NONE, empty, NONE, task.classes)
    domain = load_own(str(path), experiment.data, task.classes)
    if domain.shape != shape:
        raise UserError(f"{path} has samples of shape {domain.shape}, the task has {shape}. Give others, or none.")
    return replace(domain, name="federation", x_train=domain.x_train[:0], y_train=domain.y_train[:0])


def client_domain(
    source: str | None, experiment: Experiment, number: int, task: Task, data_dir: Path | None = None
) -> Domain:
    """A client's data: its own, or where none is named its share of the experiment's."""
    if source is not None:
        return load_own(source, experiment.data, task.classes, data_dir)
    domains = load(experiment.data, data_dir)
    return share_of(experiment, domains, experiment.partition(domains, experiment.clients, experiment.seed), number)


def share_of(experiment: Experiment, domains: Sequence[Domain], split: Split, number: int) -> Domain:
    """What one client has in a simulation, normalised as there."""
    whole = domains[int(split.domain[number])]
    scaler = Scaler.of(whole, experiment.normalize)
    scale = (scaler.mean, scaler.std) if experiment.normalize == "auto" and not scaler.whole else None
    return Domain(whole.name, *split.arrays(domains, number), whole.class_names, scale=scale)
