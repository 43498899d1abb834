"""One call for one's own models and data: `federate(models, clients)`."""

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from protofed import progress
from protofed.data.domain import Domain
from protofed.data.own import Own, read_clients
from protofed.data.partition import OneDomain
from protofed.data.sources import Data, load
from protofed.data.split import fingerprint
from protofed.errors import UserError, in_python
from protofed.experiment import Experiment
from protofed.federated import Federated
from protofed.folder import RunFolder, new_folder
from protofed.importing import MEMORY, path_of
from protofed.method import Method
from protofed.models.adapt import Adapt
from protofed.models.own import Handed, handed
from protofed.ops.optim import Optimizer
from protofed.prepare import Prepared, prepare
from protofed.results import Watch
from protofed.run import run
from protofed.sections import ModelChoice

USUAL = 0.001  # adam's step size
FEW = 50  # steps of a client, below which training has hardly begun
OWN = ("model", "data", "partition", "clients", "method", "rounds", "seed")  # settings that are arguments here


@in_python
def federate(
    models: Any,
    clients: Any,
    method: str | Method | type[Method] = "fedproto",
    rounds: int = 20,
    *,
    test: Any = None,
    test_fraction: float = 0.2,
    labels: Sequence[Any] | None = None,
    embedding: Any = "",
    head: str = "",
    project: int = 0,
    frozen: bool | None = None,
    optimizer: str | Mapping[str, Any] | Optimizer = "adam",
    lr: float | None = None,
    batch_size: int = 32,
    epochs: int = 1,
    seed: int = 0,
    device: str = "auto",
    out: str | Path | None = None,
    resume: bool = False,
    quiet: bool = False,
    watch: Watch | None = None,
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> Federated:
    """Train your models on your clients' data with any method; nothing that is given is changed.

    models: a module for all clients, a class or function that makes one, the name of one of protofed's, or a list (or
        dict by name) with one for each client
    clients: a list (or dict by name) with each client's data: (x, y), (x, y, x_test, y_test), a torch Dataset, a
        Hugging Face dataset, or {"train": ..., "test": ...}; labels of any one kind
    method: one of `protofed list methods`, an import path, or an instance; its fields are given as further arguments
    test: test data, one for all or a list with one for each client; else `test_fraction` is held back, class by class
    labels: all classes in their order, where the data does not show them all
    embedding, head: names of layers, where they are not found; embedding may be a function (module, x) -> (N, D)
    project: width of a linear projection, for models whose embeddings differ in width
    frozen: True trains only the classifier, on embeddings that are computed once; by itself as requires_grad says
    optimizer: "adam", "sgd", or a dict of the keys of [optimizer]; lr is 0.001 with adam and 0.01 with sgd
    epochs: passes over its data that a client trains in a round
    out: folder of the run, by default a new one in runs/; `resume` goes on with one that was stopped
    quiet: say nothing of progress and notes; `watch` takes them in place of the terminal
    settings: any other keys of an experiment, such as {"participation": 0.5, "engine": {"name": "reference"}}
    """
    watch = watch or (Watch() if quiet else progress.watch(Console(stderr=True), "federate"))
    own, data = _data(clients, test, labels, test_fraction, seed, watch)
    how = Adapt(embedding, head, project, frozen)
    models = _in_order(models, [domain.name for domain in own.domains])
    choices, modules = _models(models, len(own.domains), how)
    raw = dict(settings or {})
    for key in OWN:
        if key in raw:
            raise UserError(f"settings has {key!r}, which is an argument of federate itself. Give it there.")
    try:
        experiment = Experiment.from_dict(
            {
                "rounds": rounds, "clients": len(own.domains), "seed": seed, "batch_size": batch_size,
                "local_epochs": epochs, "device": device, **raw,
                "optimizer": _optimizer(optimizer, lr), "evaluate": _evaluate(own.domains, raw.get("evaluate", {})),
                "method": {"name": method, **options} if isinstance(method, str) else "fedproto",
            }
        )  # fmt: skip
    except UserError:
        _refuse_slips(options)
        raise
    if not experiment.record.models:
        raise UserError("record.models = false keeps no models, and federate returns them. Leave it out.")
    experiment = replace(experiment, model=choices, data=data, partition=OneDomain())
    if not isinstance(method, str):
        experiment = replace(experiment, method=_method(method, options))
    name = f"federate-{experiment.method_name.rpartition(':')[2]}-seed{seed}"
    folder = RunFolder(Path(out) if out is not None else new_folder(name, resume))
    folder.check(experiment, resume)
    prepared = prepare(experiment, domains=own.domains, modules=modules, tell=watch.note)
    notes = [*own.notes, *_about(modules, models), *prepared.notes, *_steps(experiment, prepared)]
    done = run(experiment, folder.path, resume=resume, watch=watch, prepared=prepared._replace(notes=tuple(notes)))
    return Federated(experiment, prepared, RunFolder(done.folder), own.labels)


def _data(
    clients: Any, test: Any, labels: Sequence[Any] | None, fraction: float, seed: int, watch: Watch
) -> tuple[Own, Data]:
    if not isinstance(fraction, int | float) or not 0 <= fraction < 1:
        raise UserError(f"test_fraction = {fraction!r} should be at least 0 and less than 1.")
    if isinstance(clients, str):
        data = Data(name=clients, normalize="none", test_fraction=fraction)
        domains = load(data, None)
        return Own(domains, list(domains[0].class_names), []), data
    own = read_clients(clients, test, labels, test_fraction=fraction, seed=seed, tell=watch.note)
    total = hashlib.sha256(fingerprint(own.domains).encode())
    total.update(repr((own.domains[0].class_names, [domain.name for domain in own.domains])).encode())
    return own, Data(name=f"{MEMORY}{total.hexdigest()[:16]}", normalize="none")


def _in_order(models: Any, names: Sequence[str]) -> Any:
    """Models that are given by the clients' names, in the order of the clients."""
    if not isinstance(models, Mapping):
        return models
    given = {str(name): model for name, model in models.items()}
    if odd := set(given) ^ set(names):
        missing = ", ".join(sorted(odd))
        raise UserError(f"models and clients do not have the same names: {missing} is in one of them only.")
    return [given[name] for name in names]


def _models(models: Any, clients: int, how: Adapt) -> tuple[tuple[ModelChoice, ...], list[Handed] | None]:
    """The models as the experiment's file names them, and how to build those that are in memory."""
    options = {key: value for key, value in vars(how).items() if value != Adapt.__dataclass_fields__[key].default}
    if callable(how.embedding):
        options["embedding"] = f"{MEMORY}{path_of(how.embedding) or how.embedding.__name__}"
    listed = [models] if isinstance(models, str) else models
    if isinstance(listed, list | tuple) and listed and all(isinstance(model, str) for model in listed):
        raw = {"clients": clients, "model": [{"name": model, **options} for model in listed]}
        return Experiment.from_dict(raw).model, None
    modules = handed(models, clients, how)
    names = [one.name for one in modules]
    kept = names[:1] if len(set(names)) == 1 else names
    return tuple(ModelChoice(name, options) for name in kept), modules


def _refuse_slips(options: Mapping[str, Any]) -> None:
    """An argument of federate that is misspelt would pass for a field of the method."""
    known = [p.name for p in inspect.signature(federate).parameters.values() if p.kind is not p.VAR_KEYWORD]
    for key in options:
        for name in known:
            if key != name and key.rstrip("s") == name.rstrip("s"):
                raise UserError(f"federate has no argument {key!r}. Did you mean {name!r}?")


def _steps(experiment: Experiment, prepared: Prepared) -> list[str]:
    """Whether clients take so few steps that nothing can be expected of it."""
    data, passes = prepared.reference.federation, experiment.rounds * experiment.local_epochs
    steps = sorted(passes * -(-data.used(client) // experiment.batch_size) for client in range(data.clients))
    middle = steps[len(steps) // 2]
    if middle >= FEW or experiment.optimizer.lr > USUAL:
        return []
    return [
        f"a client takes {middle} training steps in all, which is few: more rounds or epochs, or a larger lr, help."
    ]


def _method(method: Any, options: Mapping[str, Any]) -> Method:
    if isinstance(method, type) and issubclass(method, Method):
        return method(**options)
    if not isinstance(method, Method):
        raise UserError(f"method is {type(method).__name__}. Give the name of a method, or an instance of one.")
    if options:
        raise UserError(f"{next(iter(options))} is given beside an instance of a method. Give it to the instance.")
    return method


def _optimizer(optimizer: Any, lr: float | None) -> dict[str, Any]:
    if isinstance(optimizer, Optimizer):
        keys: dict[str, Any] = vars(optimizer)
    else:
        keys = {"name": optimizer} if isinstance(optimizer, str) else dict(optimizer)
    usual = {} if "lr" in keys or keys.get("name", "sgd") != "adam" else {"lr": USUAL}
    return usual | keys | ({} if lr is None else {"lr": lr})


def _evaluate(domains: Sequence[Domain], given: Mapping[str, Any]) -> dict[str, Any]:
    """A global model is measured on all test data, if there is any."""
    return ({} if any(len(domain.y_test) for domain in domains) else {"gm": 0}) | dict(given)


def _about(modules: Sequence[Handed] | None, models: Any) -> list[str]:
    """What is done with the modules that one might not expect."""
    notes = []
    if modules and any(one.own_weights for one in modules):
        notes.append("every client starts from the weights of its own module; one module for all gives common ones.")
    given = [models] if isinstance(models, nn.Module) else models if isinstance(models, list | tuple) else []
    if any(isinstance(model, nn.Module) and not model.training for model in given):
        notes.append("a module is in evaluation mode; clients train it in training mode all the same.")
    return notes
