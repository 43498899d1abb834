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

from protofed.config import schema
from protofed.config.experiment import Experiment
from protofed.config.sections import Robust
from protofed.engines.reference import ReferenceEngine
from protofed.engines.resources import torch_settings
from protofed.engines.wire import Size, encoded_size
from protofed.errors import UserError
from protofed.explain.messages import (
    ClientMessage,
    beside_uploads,
    cover,
    example_batch,
    learns,
    least_summed,
    message_summary,
    message_tensors,
    names_in,
    noise_promises,
    one_step,
    seen_words,
)
from protofed.joining import newcomer
from protofed.method import Client, Each, Method, Phase, Tree
from protofed.ops.trees import alone, deal, map_nodes, merge, under
from protofed.privacy.release import Layout
from protofed.runs.cohort import draw_cohort
from protofed.runs.noised import layout_of
from protofed.runs.setup import prepare

PRESETS = {
    "paper": "the method as its own authors describe it",
    "official": "what the code released with the four papers does: FedProto's and FedNH's own code; for baselines, the "
    "code of the one of those two papers that reports it; FedPR and MP-FedCL released none, so FedPCL's code base, on "
    "which they build",
}
COUNTED = (
    "Counted on this experiment's data after one training step. A run differs only where the number of rows depends on "
    "what is learnt, as with DBSCAN's clusters."
)
ALIKE, DEALT = "the same for all clients", "each client its own"  # what clients get of a download
ROUND, LAST = "every round", "after the last round"


class Played(NamedTuple):
    """The first round's uploads, the second round's downloads, and one client of each architecture after its round."""

    up: list[ClientMessage]
    down: list[ClientMessage]
    down_round: int
    clients: dict[str, Client]


def explain(
    experiment: Experiment, data_dir: Path | None = None, tell: Callable[[int, int], None] = lambda done, of: None
) -> dict[str, Any]:
    """Everything that can be said about the experiment's method; `tell` hears how many clients are done, and of how
    many."""
    experiment, note = explainable(experiment, data_dir)
    method, engine = experiment.method, prepare(experiment, data_dir).engine
    assert isinstance(engine, ReferenceEngine)
    if experiment.held_out_clients:
        newcomer.check_joinable(experiment, engine.specs()[0])
    with torch_settings(engine.in_turn, experiment.engine.threads, experiment.engine.precision):
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
        "up": {
            "round": 1,
            **message_summary(played.up, kept, seen_words(experiment), seen_words(experiment, each=True)),
        },
        "down": {"round": played.down_round, **message_summary(played.down, kept, ALIKE, DEALT)},
        "counted": COUNTED,
        "note": note,
        "private": _private(experiment, played),
        "choices": choices(method),
        "presets": PRESETS if method.presets else {},
    }


def explainable(experiment: Experiment, data_dir: Path | None) -> tuple[Experiment, str]:
    """The experiment for an engine that trains one client after another. If its method cannot serve several models, all
    clients get the first one, and a note says so."""
    experiment = replace(experiment, engine=replace(experiment.engine, name="reference"))
    if len(experiment.model) == 1:
        return experiment, ""
    try:
        prepare(experiment, data_dir)
    except UserError as error:
        one = replace(experiment, model=experiment.model[:1])
        return one, f"counted as if all clients had {one.model[0].label}, because {error}"
    return experiment, ""


# playing a round


def _play(experiment: Experiment, engine: ReferenceEngine, tell: Callable[[int, int], None]) -> Played:
    method, federation = experiment.method, engine.federation
    server = tree_map(lambda tensor: tensor.to(federation.device), method.init_server(engine.specs()[0]))
    cohort = draw_cohort(experiment, 0)
    ids = torch.tensor(cohort, device=federation.device)
    down = method.broadcast(server, ids)
    clients: dict[str, Client] = {}
    sent: list[ClientMessage] = []
    up: Tree = None
    layout = layout_of(experiment, engine, server) if experiment.privacy.noisy else None
    for row, number in enumerate(cohort):
        name = engine.architectures[number]
        batch = example_batch(federation, number, _last_epoch(experiment))
        update = one_step(experiment, engine, number, [batch], deal(down, row))
        clients.setdefault(name, update.client)
        shown = update.up if layout is None else layout.sent()
        size = _sent_size(experiment, shown, len(cohort), layout)
        sent.append(ClientMessage(list(message_tensors(shown, each=experiment.robust.singly)), size))
        up = alone(update.up) if row == 0 else merge(up, alone(update.up))
        tell(row + 1, len(cohort))
    if experiment.rounds > 1:
        server, cohort = method.aggregate(server, up, ids), draw_cohort(experiment, 1)
        down = method.broadcast(server, torch.tensor(cohort, device=federation.device))
    got = [
        ClientMessage(list(message_tensors(_dealt(down, row))), encoded_size(deal(down, row)))
        for row in range(len(cohort))
    ]
    return Played(sent, got, min(2, experiment.rounds), clients)


def _sent_size(experiment: Experiment, up: Tree, cohort: int, layout: Layout | None) -> Size:
    """An upload as it is sent: unchanged, or as masked numbers with keys and shares."""
    size = encoded_size(up)
    if not experiment.privacy.secure_sum:
        return size
    from protofed.privacy.simulated import sizes_of  # needs the packages of secure sums

    vector = up if layout is None else layout.masked()
    return size._replace(bytes=sum(sizes_of(experiment.privacy, vector, cohort, loss=layout is None)))


def _last_epoch(experiment: Experiment) -> int:
    """The epoch whose training steps are reported to `upload`."""
    epochs = [phase.passes(experiment.local_epochs) for phase in experiment.method.phases()]
    return max(epochs[-1] - 1, 0) if epochs else 0


def _dealt(down: Tree, row: int) -> Tree:
    """What a client gets, as `deal` gives it, but still marked as its own."""
    return map_nodes(lambda node: Each(deal(node, row)) if isinstance(node, Each) else node, down)


# what is trained, what is kept, what can be chosen


def _phase(experiment: Experiment, played: Played, phase: Phase, when: str) -> dict[str, Any]:
    rate = experiment.scheduled.rate(0 if when == ROUND else experiment.rounds)
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


def _private(experiment: Experiment, played: Played) -> dict[str, Any]:
    """What a client has and does not send."""
    method = experiment.method
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
        "server_learns": [*_learns(experiment, played), *_compared(experiment.robust)],
        "in_a_federation": beside_uploads(experiment.privacy),
    }


def _learns(experiment: Experiment, played: Played) -> list[str]:
    """What the server can tell from the uploads; with noise, what anybody can tell."""
    if not experiment.privacy.noisy:
        return list(learns(played.up, least_summed(experiment)))
    return noise_promises(experiment)


def _compared(rule: Robust) -> list[str]:
    """What the server sees of single clients because of a robust rule."""
    if rule.rule == "none":
        return []
    if rule.singly:
        return [
            f"robust.rule = {rule.rule!r} compares the uploads of single clients with each other, so the server sees "
            "every upload, and the uploads cannot be summed on the way"
        ]
    by = "robust.norm" if rule.norm else f"{rule.factor:g} times the median of these distances"
    return [
        f"robust.rule = {rule.rule!r} needs one number from each client (for prototypes: one per class): its distance "
        f"from the last aggregate, to bound it by {by}",
        "in the first round, and for a class that is new, there is no last aggregate: the server compares the uploads "
        "of single clients",
    ]


def _trained(method: Method, name: str) -> str:
    """The phases in which a parameter is trained."""
    for when, phases in ((ROUND, method.phases()), (LAST, method.last_phases())):
        if any(name.startswith(phase.trains) for phase in phases):
            return when
    return "never"


def choices(method: Method) -> list[dict[str, Any]]:
    """Every field: its value in this experiment, its default, its value in each preset, and what it means."""
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
