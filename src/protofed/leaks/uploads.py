"""The uploads of a run, computed again from its last checkpoint, and what the server sees of them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from protofed.data.batches import Samples
from protofed.engines.reference import ReferenceEngine
from protofed.errors import UserError
from protofed.method import Batch, Client, Each, LocalData, Mean, Tree
from protofed.ops.trees import alone, deal, is_node, merge
from protofed.runs.cohort import draw_cohort
from protofed.runs.saved import Saved

AGAIN = "what the last uploads were made of is not kept: attacked are those that the clients would send next"


class SentPrototypes(NamedTuple):
    """Prototypes (C, K, D), up to K per class; the weight (C, K) is 0 where there is none."""

    value: Tensor
    weight: Tensor

    def of_class(self, label: int) -> Tensor:
        """Those of one class (N, D)."""
        return self.value[label][self.weight[label] > 0]


class Clients(NamedTuple):
    """A run's last cohort: what each client sent, and its model when it did."""

    numbers: list[int]
    uploads: dict[int, Tree]
    models: dict[int, Client]
    server: Tree  # whose broadcast the uploads follow
    kept: bool  # whether they were made of saved states; else one more round was trained
    notes: list[str]


def recomputed(saved: Saved, engine: ReferenceEngine) -> Clients:
    """The uploads of the clients of a run's last round, by the method's own `upload`."""
    experiment, state = saved.experiment, saved.state
    if state.round == 0:
        raise UserError(f"{saved.folder.path} has finished no round, so nothing was sent. Go on with the run first.")
    if not len(state.clients):
        raise UserError(
            f"{saved.folder.path} has no client's model: in a real federation these stay with the clients. Attack a "
            "simulation of the same experiment."
        )
    if experiment.incremental.on:
        raise UserError(
            f"{saved.folder.path}: what its clients train on changed from task to task ([incremental]), and an attack "
            "is measured on one set of samples. Attack a run without that section."
        )
    engine.clients = state.clients
    samples = engine.samples(range(experiment.clients))
    numbers = [n for n in draw_cohort(experiment, state.round - 1) if n in engine.clients and samples[n]]
    if not numbers:
        raise UserError(f"{saved.folder.path}: no client of the last round has samples. There is nothing to attack.")
    first = numbers[0]
    for server in (state.server, _initial(saved, engine)):
        if not _lacks_memory(saved, engine, first, server):
            sent = _prototypes(saved, engine, upload_again(saved, engine, first, server))
            if bool((sent.weight > 0).any()):
                ups = {number: upload_again(saved, engine, number, server) for number in numbers}
                models = {number: engine.client(experiment.method, number) for number in numbers}
                return Clients(numbers, ups, models, server, True, list(saved.notes))
    return _next_round(saved, engine, numbers)


def _initial(saved: Saved, engine: ReferenceEngine) -> Tree:
    """The server before round one: a method whose clients send once has them send again."""
    made = saved.experiment.method.init_server(engine.specs()[0])
    return tree_map(lambda tensor: tensor.to(engine.federation.device), made)


def _lacks_memory(saved: Saved, engine: ReferenceEngine, number: int, server: Tree) -> bool:
    """Whether an upload needs something that a client notes in a round and forgets when it has sent it."""
    method, client = saved.experiment.method, engine.client(saved.experiment.method, number)
    down = _down(saved, engine, number, server)
    ready = method.receive(engine.model(number), client, engine.federation.local(number, saved.state.round - 1), down)
    return isinstance(ready.memory, dict) and bool(ready.memory.keys() - client.memory.keys())


def _down(saved: Saved, engine: ReferenceEngine, number: int, server: Tree) -> Tree:
    ids = torch.tensor([number], device=engine.federation.device)
    return deal(saved.experiment.method.broadcast(server, ids), 0)


def upload_again(
    saved: Saved, engine: ReferenceEngine, number: int, server: Tree, samples: Samples | None = None
) -> Tree:
    """What a client with its saved model sends; `samples`: what it would send if it had these alone."""
    data = engine.federation.local(number, saved.state.round - 1)
    if samples is not None:
        counts = torch.bincount(samples.y, minlength=len(data.counts)).to(data.counts)
        data = LocalData([Batch(*samples, torch.ones(len(samples.y), device=counts.device))], counts, data.key)
    method = saved.experiment.method
    client, down = engine.client(method, number), _down(saved, engine, number, server)
    with torch.no_grad():
        return method.upload(engine.model(number), client, data, down)[0]


def _next_round(saved: Saved, engine: ReferenceEngine, numbers: Sequence[int]) -> Clients:
    """Train one more round, and keep nothing of it but the uploads and models."""
    experiment, state = saved.experiment, saved.state
    ups: dict[int, Tree] = {}
    models: dict[int, Client] = {}
    for number in numbers:
        update = engine.update(experiment.method, number, _down(saved, engine, number, state.server), state.round)
        _prototypes(saved, engine, update.up)
        ups[number], models[number] = update.up, update.client
    return Clients(list(numbers), ups, models, state.server, False, [*saved.notes, AGAIN])


def _prototypes(saved: Saved, engine: ReferenceEngine, up: Tree) -> SentPrototypes:
    sent = prototypes_of(up, engine)
    if sent is None:
        raise UserError(
            f"clients of {saved.experiment.method_name} send no prototypes, which this command attacks. What models "
            "and gradients tell is not measured. Use a run of a method with prototypes, such as fedproto or fednh."
        )
    return sent


def prototypes_of(up: Tree, engine: ReferenceEngine) -> SentPrototypes | None:
    """The class means of embeddings in an upload; None if it has none."""
    classes, dim = engine.federation.classes, engine.specs()[0].dim
    for mean in means_in(up):
        if mean.weight.ndim in (1, 2) and len(mean.weight) == classes:
            for leaf in tree_leaves(mean.total):
                if leaf.shape == (*mean.weight.shape, dim):
                    value = leaf / mean.weight.clamp(min=1e-12)[..., None]
                    there = mean.weight if mean.weight.ndim == 2 else mean.weight[:, None]
                    return SentPrototypes(value.reshape(*there.shape, dim), there)
    return None


def means_in(up: Tree) -> list[Mean]:
    """All Means of an upload, whether they are sent to be sum_of or singly."""
    found = []
    for node in tree_flatten(up, is_leaf=is_node)[0]:
        inner = tree_flatten(node.rows, is_leaf=is_node)[0] if isinstance(node, Each) else [node]
        found += [one for one in inner if isinstance(one, Mean)]
    return found


def sends_body(up: Tree, parts: Sequence[str] = ("body.",)) -> bool:
    """Whether the weights that make embeddings are in an upload."""
    names: list[Any] = []
    for node in tree_flatten(up, is_leaf=is_node)[0]:
        tree = node.rows if isinstance(node, Each) else node.total if isinstance(node, Mean) else {}
        tree = tree.total if isinstance(tree, Mean) else tree
        inner = tree.get("params", tree) if isinstance(tree, dict) else {}
        names += list(inner) if isinstance(inner, dict) else []
    return any(str(name).startswith(tuple(parts)) for name in names)


def sum_of(uploads: Sequence[Tree]) -> Tree:
    """The uploads of several clients as the server gets them: Means added, Eaches lined up."""
    total = alone(uploads[0])
    for up in uploads[1:]:
        total = merge(total, alone(up))
    return total
