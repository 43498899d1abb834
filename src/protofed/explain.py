"""What a method does with an experiment: what is trained, what is sent, what stays private, and which choices it has.

The numbers are counted, not derived: the first round is played on the real data with the contract's own functions, only
with one training step instead of an epoch, since no message's size depends on how long a client has trained.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from protofed import schema
from protofed.data.federation import Federation
from protofed.engines.reference import ReferenceEngine
from protofed.engines.wire import measure
from protofed.errors import UserError
from protofed.experiment import Experiment
from protofed.local import local_update
from protofed.messages import Message, cover, learns, leaves, names_in, summary
from protofed.method import Batch, Client, Each, Method, Phase, Tree
from protofed.ops.trees import alone, deal, map_nodes, merge, under
from protofed.prepare import draw_cohort, prepare, threads
from protofed.theory.guidance import guide, refuse

PRESETS = {
    "paper": "the method as its own authors describe it",
    "official": "what the code released with the four papers does: FedProto's and FedNH's own code; for baselines, the "
    "code of the one of those two papers that reports it; FedPR and MP-FedCL released none, so FedPCL's code base, on "
    "which they stand",
}
COUNTED = (
    "Counted on this experiment's data after one training step. A run differs only where the number of rows depends on "
    "what is learnt, as with DBSCAN's clusters."
)
SUMMED, ALONE = "summed over clients", "client by client"  # what the server sees of an upload
ALIKE, DEALT = "the same for all clients", "each client its own"  # what clients get of a download
ROUND, LAST = "every round", "after the last round"


class Played(NamedTuple):
    """The first round's uploads, the second round's downloads, and one client of each architecture after its round."""

    up: list[Message]
    down: list[Message]
    down_round: int
    clients: dict[str, Client]


def explain(
    experiment: Experiment, data_dir: Path | None = None, tell: Callable[[int, int], None] = lambda done, of: None
) -> dict[str, Any]:
    """Everything there is to say about the experiment's method; `tell` hears how many clients of how many are done."""
    experiment, note = _fitting(_alone(experiment), data_dir)
    method, engine = experiment.method, prepare(experiment, data_dir).engine
    assert isinstance(engine, ReferenceEngine)
    with threads(experiment, engine):
        played = _play(experiment, engine, tell)
    kept = {name for client in played.clients.values() for name in client.params}
    return {
        "method": experiment.method_name,
        "about": (inspect.getdoc(type(method)) or "").split("\n")[0],
        "paper": method.paper,
        "losses": list(method.losses),
        "not_followed": list(method.not_followed),
        "phases": [
            _phase(experiment, played, phase, when)
            for when, phases in ((ROUND, method.phases()), (LAST, method.last_phases()))
            for phase in phases
        ],
        "up": {"round": 1, **summary(played.up, kept, SUMMED, ALONE)},
        "down": {"round": played.down_round, **summary(played.down, kept, ALIKE, DEALT)},
        "counted": COUNTED,
        "note": note,
        "private": _private(method, played),
        "choices": choices(method),
        "presets": PRESETS,
    }


def guidance(
    experiment: Experiment, data_dir: Path | None = None, tell: Callable[[int, int], None] = lambda done, of: None
) -> dict[str, Any]:
    """What a convergence theorem suggests for lr and lam (or rho) in this experiment."""
    refuse(experiment)
    experiment, note = _fitting(_alone(experiment), data_dir)
    engine = prepare(experiment, data_dir).engine
    assert isinstance(engine, ReferenceEngine)
    with threads(experiment, engine):
        return guide(experiment, engine, tell) | {"note": note}


def _alone(experiment: Experiment) -> Experiment:
    """The same, one client after another."""
    return replace(experiment, engine=replace(experiment.engine, name="reference"))


def _fitting(experiment: Experiment, data_dir: Path | None) -> tuple[Experiment, str]:
    """The experiment, or where its method cannot serve several models, the same with the first of them for all."""
    if len(experiment.model) == 1:
        return experiment, ""
    try:
        prepare(experiment, data_dir)
    except UserError as error:
        one = replace(experiment, model=experiment.model[:1])
        return one, f"counted with {one.model[0].label} for all clients, because {error}"
    return experiment, ""


# playing a round


def _play(experiment: Experiment, engine: ReferenceEngine, tell: Callable[[int, int], None]) -> Played:
    method, federation = experiment.method, engine.federation
    server = tree_map(lambda tensor: tensor.to(federation.device), method.init_server(engine.specs()[0]))
    cohort = draw_cohort(experiment, 0)
    ids = torch.tensor(cohort, device=federation.device)
    down = method.broadcast(server, ids)
    clients: dict[str, Client] = {}
    sent: list[Message] = []
    up: Tree = None
    for row, number in enumerate(cohort):
        name = engine.architectures[number]
        batch = few(federation, number, _last_epoch(experiment))
        update = local_update(
            method,
            engine.model(number),
            experiment.optimizer,
            engine.client(method, number),
            federation.local(number, 0),
            lambda epoch, batch=batch: [batch],  # type: ignore[misc]
            deal(down, row),
            experiment.optimizer.rate(0),
            local_epochs=1,
        )
        clients.setdefault(name, update.client)
        sent.append(Message(list(leaves(update.up)), measure(update.up)))
        up = alone(update.up) if row == 0 else merge(up, alone(update.up))
        tell(row + 1, len(cohort))
    if experiment.rounds > 1:
        server, cohort = method.aggregate(server, up, ids), draw_cohort(experiment, 1)
        down = method.broadcast(server, torch.tensor(cohort, device=federation.device))
    got = [Message(list(leaves(_dealt(down, row))), measure(deal(down, row))) for row in range(len(cohort))]
    return Played(sent, got, min(2, experiment.rounds), clients)


def _last_epoch(experiment: Experiment) -> int:
    """The epoch whose training steps `upload` hears of."""
    epochs = [phase.passes(experiment.local_epochs) for phase in experiment.method.phases()]
    return max(epochs[-1] - 1, 0) if epochs else 0


def few(federation: Federation, number: int, epoch: int) -> Batch:
    """A sample of every class that the client trains on in this epoch; two of a single class, for BatchNorm."""
    whole = Batch(*map(torch.cat, zip(*federation.epoch(number, 0, epoch), strict=True)))
    first = [int((whole.y == label).nonzero()[0]) for label in whole.y.unique()]
    rows = first if len(first) > 1 else list(range(min(2, len(whole.y))))
    return Batch(whole.x[rows], whole.y[rows], whole.mask[rows])


def _dealt(down: Tree, row: int) -> Tree:
    """What a client gets, as `deal` gives it, but still marked as its own."""
    return map_nodes(lambda node: Each(deal(node, row)) if isinstance(node, Each) else node, down)


# what is trained, what is kept, what can be chosen


def _phase(experiment: Experiment, played: Played, phase: Phase, when: str) -> dict[str, Any]:
    rate = experiment.optimizer.rate(0 if when == ROUND else experiment.rounds)
    return {
        "when": when,
        "trains": [f"{prefix}*" if prefix.endswith(".") else prefix or "everything" for prefix in phase.trains],
        "numbers": {name: _count(under(client.params, phase.trains)) for name, client in played.clients.items()},
        "epochs": phase.passes(experiment.local_epochs),
        "lr": rate if phase.lr is None else phase.lr,
        "lr_from": "experiment" if phase.lr is None else "method",
        "loss": getattr(phase.loss, "__name__", None),
        "plain": phase.plain,
    }


def _count(tree: Tree) -> int:
    return sum(leaf.numel() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _private(method: Method, played: Played) -> dict[str, Any]:
    """What a client has and does not send."""
    sent, got = names_in(played.up), names_in(played.down)
    found: dict[str, dict[str, dict[str, Any]]] = {"params": {}, "buffers": {}, "memory": {}}
    for kind, entries in found.items():
        for architecture, client in played.clients.items():
            kept = getattr(client, kind)
            for name, value in (kept if isinstance(kept, dict) else {kind: kept}).items():
                if name in sent or not (numbers := _count(value)):
                    continue
                entry = entries.setdefault(name.split(".")[0], {"parts": [], "numbers": {}})
                entry["parts"] = list(dict.fromkeys([*entry["parts"], *cover([name], sent)]))
                entry["numbers"][architecture] = entry["numbers"].get(architecture, 0) + numbers
                if kind == "params":
                    entry |= {"trained": _trained(method, name), "from_server": name in got}
    return {
        **{kind: list(entries.values()) for kind, entries in found.items()},
        "data": "every training and test sample, and its label",
        "server_learns": list(learns(played.up)),
    }


def _trained(method: Method, name: str) -> str:
    """When a parameter is trained."""
    for when, phases in ((ROUND, method.phases()), (LAST, method.last_phases())):
        if any(name.startswith(phase.trains) for phase in phases):
            return when
    return "never"


def choices(method: Method) -> list[dict[str, Any]]:
    """Every field: its value in force, its default, what the presets give it, and what it means."""
    kind = type(method)
    about = schema.docs(kind)
    return [
        {
            "key": key,
            "value": getattr(method, key),
            "default": default,
            **{reading: kind.presets.get(reading, {}).get(key, default) for reading in PRESETS},
            "about": about.get(key, ""),
        }
        for key, (_, default) in schema.fields(kind).items()
    ]
