"""What Python calls: `federate(models, clients)` with your own models and data, `run`, `join` and `load`."""

import hashlib
import inspect
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from protofed.config import schema
from protofed.config.experiment import Experiment
from protofed.config.files import SECTIONS
from protofed.config.registry import ModelChoice, find_method, is_method, preset_filled, whole_method
from protofed.config.sections import Scalars
from protofed.data import Data
from protofed.data.domain import Domain
from protofed.data.partition import OneDomain
from protofed.data.readers.own import Own, read_clients
from protofed.data.sources import load as load_data
from protofed.data.split import data_fingerprint
from protofed.errors import UserError, in_python
from protofed.federated import Federated
from protofed.importing import MEMORY, path_of
from protofed.joining.join import join as _join
from protofed.method import Method
from protofed.models.adapt import Adapt
from protofed.models.own import Handed, handed
from protofed.ops.optim import Optimizer
from protofed.probes import ALL, with_probes
from protofed.report.frames import load as _load
from protofed.runs import progress
from protofed.runs.folder import RunFolder, new_folder
from protofed.runs.loop import Interrupted
from protofed.runs.loop import run as _run
from protofed.runs.selection import Choose
from protofed.runs.setup import Prepared, prepare
from protofed.runs.watch import Watch

USUAL = 0.001  # adam's step size
FEW = 50  # steps of a client, below which training has hardly begun
RENAMED = {"local_epochs": "epochs", "model": "models"}  # keys of an experiment that are called otherwise here
OWN = ("model", "data", "partition", "clients", "method", "rounds", "seed")  # settings that are arguments here


join = in_python(_join)
load = in_python(_load)
run = in_python(with_probes(_run))


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
    selection: str | Choose = "random",
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> Federated:
    """Train your models on your clients' data with any method. Nothing that you pass in is changed.

    models: one module for all clients, a class or function that makes one, the name of one of protofed's models, or a
        list (or dict by name) with one per client
    clients: a list (or dict by name) with each client's data: (x, y), (x, y, x_test, y_test), a torch Dataset, a
        Hugging Face dataset, or {"train": ..., "test": ...}; labels of any one kind
    method: a name from `protofed list methods`, an import path, or an instance; its fields are further arguments
    test: test data for all clients, or a list with one per client; by default `test_fraction` is held back by class
    labels: all classes in order, in case the data does not show them all
    embedding, head: names of layers, if they are not found; embedding may be a function (module, x) -> (N, D)
    project: width of a linear projection, for models whose embeddings differ in width
    frozen: True trains only the classifier, on embeddings that are computed once; by default as requires_grad says
    optimizer: "adam", "sgd", or a dict of the keys of [optimizer]; lr is 0.001 with adam and 0.01 with sgd
    epochs: passes that a client makes over its data in a round
    out: folder of the run, by default a new one in runs/; `resume` continues a run that was stopped
    quiet: print no progress and no notes; without `out` also keep no folder: the run's is temporary and is deleted
        together with the result
    watch: receives progress and notes in place of the terminal
    selection: who takes part in a round: "random", "size", "power_of_choice", or your own function, which gets a
        `protofed.runs.selection.Turn` and returns numbers of clients
    settings: any other keys of an experiment, such as {"participation": 0.5, "engine": {"name": "reference"}}
    """
    watch = watch or (Watch() if quiet else progress.watch_rounds(Console(stderr=True), "federate"))
    _refuse_types(out, seed, watch, labels, settings)
    own, data = _data(clients, test, labels, test_fraction, seed, watch)
    how = Adapt(embedding, head, project, frozen)
    names = [domain.name for domain in own.domains]
    models = _in_order(models, names)
    choices, modules = _models(models, names, how)
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
        _refuse_slips(method, options)
        raise
    if not experiment.record.models:
        raise UserError("record.models = false keeps no models, and federate returns them. Leave it out.")
    rule = selection if isinstance(selection, str) else _handed_rule(selection)
    plan = replace(experiment, model=choices, data=data, partition=OneDomain())
    if rule != "random":
        plan = replace(plan, selection=replace(plan.selection, rule=rule))
    experiment = plan.checked()
    if not isinstance(method, str):
        experiment = replace(experiment, method=_method(method, options))
    name = f"federate-{experiment.method_name.rpartition(':')[2]}-seed{seed}"
    passing = Path(tempfile.mkdtemp(prefix="protofed-")) if quiet and out is None and not resume else None
    folder = RunFolder(passing / name if passing else Path(out) if out is not None else new_folder(name, resume))
    folder.check(experiment, resume)
    try:
        prepared = prepare(experiment, domains=own.domains, modules=modules, tell=watch.note, probes=ALL)
        notes = [*own.notes, *_about(modules, models), *prepared.notes, *_steps(experiment, prepared)]
        prepared = prepared._replace(notes=tuple(notes), choose=None if isinstance(selection, str) else selection)
        done = _run(experiment, folder.path, resume=resume, watch=watch, prepared=prepared, probes=ALL)
    except Interrupted as stop:
        raise Interrupted(f"{stop}. Go on with out={str(folder.path)!r}, resume=True.") from None
    except BaseException:
        if passing and not folder.exists:  # else the state of the last round is in it, and the error says where
            shutil.rmtree(passing, ignore_errors=True)
        raise
    result = Federated(experiment, prepared, RunFolder(done.folder), own.labels)
    if passing:
        weakref.finalize(result, shutil.rmtree, passing, ignore_errors=True)
    return result


def _refuse_types(out: Any, seed: Any, watch: Any, labels: Any, settings: Any) -> None:
    """Check the types of arguments that are used before the experiment is checked."""
    if not isinstance(watch, Watch):
        raise UserError(f"watch is {type(watch).__name__}. Give a protofed.runs.watch.Watch, or leave it out.")
    if isinstance(labels, str):
        raise UserError(f"labels = {labels!r} is text. Give a list of all classes, such as labels=['a', 'b', 'c'].")
    if settings is not None and not isinstance(settings, Mapping):
        raise UserError(f"settings is {type(settings).__name__}. Give a dict, such as {{'participation': 0.5}}.")
    if out is not None and not isinstance(out, str | Path):
        raise UserError(f"out is {type(out).__name__}. Give the path of a folder.")
    if not isinstance(seed, int) or seed < 0:
        raise UserError(f"seed = {seed!r} should be a whole number of at least 0.")


def _data(
    clients: Any, test: Any, labels: Sequence[Any] | None, fraction: float, seed: int, watch: Watch
) -> tuple[Own, Data]:
    if not isinstance(fraction, int | float) or not 0 <= fraction < 1:
        raise UserError(f"test_fraction = {fraction!r} should be at least 0 and less than 1.")
    if isinstance(clients, str):
        data = Data(name=clients, normalize="none", test_fraction=fraction)
        domains = load_data(data, None)
        return Own(domains, list(domains[0].class_names), []), data
    own = read_clients(clients, test, labels, test_fraction=fraction, seed=seed, tell=watch.note)
    total = hashlib.sha256(data_fingerprint(own.domains).encode())
    total.update(repr((own.domains[0].class_names, [domain.name for domain in own.domains])).encode())
    return own, Data(name=f"{MEMORY}{total.hexdigest()[:16]}", normalize="none")


def _in_order(models: Any, names: Sequence[str]) -> Any:
    """The models in the order of the clients, if they are given by the clients' names."""
    if not isinstance(models, Mapping):
        return models
    given = {str(name): model for name, model in models.items()}
    if odd := set(given) ^ set(names):
        missing = ", ".join(sorted(odd))
        raise UserError(f"models and clients do not have the same names: {missing} is in one of them only.")
    return [given[name] for name in names]


def _models(models: Any, names: Sequence[str], how: Adapt) -> tuple[tuple[ModelChoice, ...], list[Handed] | None]:
    """The models as an experiment's file names them, and how to build those in memory."""
    options = {key: value for key, value in vars(how).items() if value != Adapt.__dataclass_fields__[key].default}
    if callable(how.embedding):
        options["embedding"] = f"{MEMORY}{path_of(how.embedding) or how.embedding.__name__}"
    listed = [models] if isinstance(models, str) else models
    if isinstance(listed, list | tuple) and listed and all(isinstance(model, str) for model in listed):
        raw = {"clients": len(names), "model": [{"name": model, **options} for model in listed]}
        return Experiment.from_dict(raw).model, None
    modules = handed(models, len(names), how, names)
    paths = [one.name for one in modules]
    kept = paths[:1] if len(set(paths)) == 1 else paths
    return tuple(ModelChoice(name, options) for name in kept), modules


def _refuse_slips(method: Any, options: Mapping[str, Any]) -> None:
    """Refuse an argument that is not a field of the method: a misspelt argument of `federate`, or a key of the
    experiment."""
    known = [p.name for p in inspect.signature(federate).parameters.values() if p.kind is not p.VAR_KEYWORD]
    fields = schema.fields(find_method(method)) if is_method(str(method)) else options
    for key, value in options.items():
        if key in fields:
            continue
        what = f"federate has no argument {key!r}."
        for name in known:
            if key != name and (key.rstrip("s") == name.rstrip("s") or RENAMED.get(key) == name):
                raise UserError(f"{what} Did you mean {name!r}?")
        if key in schema.fields(Scalars) or key in SECTIONS:
            raise UserError(f"{what} Give it in settings, as in settings={{{key!r}: {value!r}}}.")
        if key in schema.fields(Optimizer):
            raise UserError(f"{what} Give it in optimizer, as in optimizer={{'name': 'sgd', {key!r}: {value!r}}}.")


def _steps(experiment: Experiment, prepared: Prepared) -> list[str]:
    """A note if clients take too few steps to learn much."""
    data, passes = prepared.reference.federation, experiment.rounds * experiment.local_epochs
    steps = sorted(passes * -(-data.used(client) // experiment.batch_size) for client in range(data.clients))
    middle = steps[len(steps) // 2]
    if middle >= FEW or experiment.optimizer.lr > USUAL:
        return []
    return [
        f"a client takes {middle} training steps in all, which is few: more rounds or epochs, or a larger lr, help."
    ]


def _handed_rule(function: Any) -> str:
    """The name of a function that chooses clients, as an experiment's file has it."""
    if not callable(function):
        raise UserError(f"selection is {type(function).__name__}. Give the name of a rule, or a function.")
    path = path_of(function)
    return path if path and not path.startswith("__main__") else f"{MEMORY}{getattr(function, '__name__', 'choose')}"


def _method(method: Any, options: Mapping[str, Any]) -> Method:
    if isinstance(method, type) and issubclass(method, Method):
        kind = whole_method(method)
        return kind(**schema.check_section("method", kind, preset_filled(options, kind)))
    if not isinstance(method, Method):
        raise UserError(f"method is {type(method).__name__}. Give the name of a method, or an instance of one.")
    if options:
        raise UserError(
            f"{next(iter(options))} is given together with an instance of a method. Give it to the instance."
        )
    return method


def _optimizer(optimizer: Any, lr: float | None) -> dict[str, Any]:
    if isinstance(optimizer, Optimizer):
        keys: dict[str, Any] = vars(optimizer)
    elif not isinstance(optimizer, str | Mapping):
        what = getattr(optimizer, "__name__", type(optimizer).__name__)
        raise UserError(
            f"optimizer is {what}. Give 'adam', 'sgd', or a dict such as {{'name': 'sgd', 'momentum': 0.9}}."
        )
    else:
        keys = {"name": optimizer} if isinstance(optimizer, str) else dict(optimizer)
    usual = {} if "lr" in keys or keys.get("name", "sgd") != "adam" else {"lr": USUAL}
    return usual | keys | ({} if lr is None else {"lr": lr})


def _evaluate(domains: Sequence[Domain], given: Mapping[str, Any]) -> dict[str, Any]:
    """Measure a global model on all test data, if there is any."""
    return ({} if any(len(domain.y_test) for domain in domains) else {"gm": 0}) | dict(given)


def _about(modules: Sequence[Handed] | None, models: Any) -> list[str]:
    """Notes on what happens to the modules, if a user might not expect it."""
    notes = []
    if modules and any(one.own_weights for one in modules):
        notes.append("every client starts from the weights of its own module; one module for all gives common ones.")
    given = [models] if isinstance(models, nn.Module) else models if isinstance(models, list | tuple) else []
    if any(isinstance(model, nn.Module) and not model.training for model in given):
        notes.append("a module is in evaluation mode; clients train it in training mode anyway.")
    return notes
