"""A client that joins later: it takes what the server broadcasts, fine-tunes on a few samples, and is measured against
training alone for as many steps."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import chain, count, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from protofed import local
from protofed.data.domain import Domain
from protofed.data.federation import Federation
from protofed.data.scaling import Scaler
from protofed.data.split import Split
from protofed.engines.reference import ReferenceEngine
from protofed.errors import UserError
from protofed.experiment import Experiment, ModelChoice
from protofed.method import Client, Each, Mean, Method, Tree
from protofed.methods.local import Local
from protofed.metrics import Tally, add, spread, tally
from protofed.ops import random
from protofed.ops.prototypes import distances
from protofed.ops.trees import all_finite, is_node

AT_ONCE = 2**24  # numbers in the differences of samples and prototypes


class Joined(NamedTuple):
    """A newcomer's model and how it fares."""

    client: Client
    record: dict[str, Any]


def few(rows: np.ndarray, y: np.ndarray, shots: int, *name: int | str) -> np.ndarray:
    """At most so many of the rows of each class, drawn by what names the occasion; 0: all of them."""
    order = rows[random.permutation(random.key(*name), len(rows)).numpy()]
    parts = [order[y[order] == label][: shots or None] for label in np.unique(y[order])]
    return np.sort(np.concatenate([np.empty(0, np.int64), *parts]))


def engine_of(
    experiment: Experiment,
    domains: Sequence[Domain],
    split: Split,
    choices: Sequence[ModelChoice],
    scales: Sequence[Scaler] = (),
) -> ReferenceEngine:
    """Those who join, with the first weights of this experiment: the common ones, or new ones of their own."""
    init = experiment.method.init
    seed = experiment.seed if init == "common" else random.seed(experiment.seed, "newcomers")
    federation = Federation(
        domains,
        split,
        seed=seed,
        batch_size=experiment.batch_size,
        drop_last=experiment.drop_last,
        normalize=experiment.data.normalize,
        augmentations=experiment.data.augment,
        device=experiment.torch_device(),
        scales=scales,
    )
    builders = [(choice.label, choice) for choice in choices]
    return ReferenceEngine(federation, builders, experiment.optimizer, seed=seed, local_epochs=1, init=init)


def held_back(
    experiment: Experiment, domains: Sequence[Domain], split: Split, numbers: Sequence[int]
) -> ReferenceEngine:
    """The clients that an experiment holds out, each with a few of its training samples."""
    trains = [
        few(split.train[i], domains[split.domain[i]].y_train, experiment.join.shots, experiment.seed, "shots", i)
        for i in numbers
    ]
    some = Split(split.domain[list(numbers)], tuple(trains), tuple(split.test[i] for i in numbers))
    return engine_of(experiment, domains, some, [experiment.model_of(i) for i in numbers])


def pulled(method: Method, lam: float) -> Method:
    """The method with another weight of the pull towards its prototypes; 0: its own."""
    if not lam:
        return method
    if not hasattr(method, "lam"):
        raise UserError(f"join.lam = {lam} is the weight of a pull that {_name(method)} does not have. Leave it at 0.")
    return dataclasses.replace(method, **{"lam": lam})


def welcome(method: Method, server: Tree) -> tuple[Tree, Mean | None]:
    """What a newcomer is sent, and the prototypes in it, if there are any."""
    down = method.broadcast(server, torch.zeros(1, dtype=torch.int64))
    if any(isinstance(node, Each) for node in tree_leaves(down, is_leaf=is_node)):
        raise UserError(
            f"{_name(method)} sends every client something of its own, which a newcomer has not yet. "
            "Use a method that sends the same to all, such as fedproto."
        )
    prototypes = method.prototypes(server)
    return down, prototypes if prototypes is not None and bool((prototypes.weight > 0).any()) else None


def fine_tune(method: Method, engine: ReferenceEngine, number: int, down: Tree, steps: int) -> Client:
    """Receive, then so many steps of each phase; after the last round's, where a method has such."""
    model, data, federation = engine.model(number), engine.federation.local(number, 0), engine.federation
    start = engine.client(method, number)
    client = method.receive(model, start, data, down)
    for name, value in client.params.items():
        if name not in start.params or value.shape != start.params[name].shape:
            raise UserError(
                f"{_name(method)} shares its model, but {name} of {engine.architectures[number]} does not fit it. "
                "Use --model with the run's own model, and inputs of the same shape."
            )
    if not federation.used(number):
        return client
    epochs = (federation.epoch(number, 0, epoch) for epoch in count())
    batches = list(islice(chain.from_iterable(epochs), steps))
    phases = [phase._replace(epochs=1) for phase in method.last_phases() or method.phases()]
    lr = engine.optimizer.rate(0)
    client, loss, _ = local.train(
        method, model, engine.optimizer, phases, client, lambda epoch: batches, down, data.key, lr, 1
    )
    if not bool(all_finite((loss, client.params))):
        raise UserError(
            f"the loss of newcomer {number} is no longer a number after {steps} steps at lr {lr:g}. "
            "Use a lower optimizer.lr or optimizer.clip in the experiment, or a lower lam."
        )
    return client


@torch.no_grad()
def measure(
    method: Method, engine: ReferenceEngine, number: int, client: Client, down: Tree, prototypes: Mean | None, on: str
) -> Tally:
    """Right answers by "head", and by "proto" where there are prototypes, on its "own" or the "global" test set."""
    model, data = engine.model(number), engine.federation
    samples = data.test(number) if on == "own" else data.global_test(data.domain(number))
    size = engine.together(number)
    if prototypes is not None:
        size = max(1, min(size, AT_ONCE // prototypes.total.numel()))
    tallies = []
    for x, y in zip(samples.x.split(size), samples.y.split(size), strict=True):
        scores = {"head": method.predict(model, client, x, down)["head"]}
        if prototypes is not None:
            scores["proto"] = -distances(method.embed(model, client, x), prototypes)
        tallies.append(tally(scores, y, data.counts[number] > 0))
    return reduce(add, tallies)


def join_one(method: Method, engine: ReferenceEngine, number: int, server: Tree, steps: int) -> Joined:
    """One newcomer with what it is sent, and alone."""
    down, prototypes = welcome(method, server)
    if prototypes is not None and prototypes.total.shape[-1] != (dim := engine.specs()[0].dim):
        raise UserError(
            f"the prototypes have {prototypes.total.shape[-1]} numbers, but embeddings by "
            f"{engine.architectures[number]} {dim}. Use a --model of that width."
        )
    client = fine_tune(method, engine, number, down, steps)
    alone_method = Local(init=method.init)
    taken = steps * len(method.last_phases() or method.phases())
    alone = fine_tune(alone_method, engine, number, {}, taken)
    own = measure(method, engine, number, client, down, prototypes, "own")
    by_itself = measure(alone_method, engine, number, alone, {}, None, "own")
    counts = engine.federation.counts[number]
    unseen = None
    if prototypes is not None:
        known = (counts == 0) & (prototypes.weight > 0).any(1)
        everywhere = measure(method, engine, number, client, down, prototypes, "global")
        unseen = everywhere["proto"].accuracy(known.double())
    record = {
        "architecture": engine.architectures[number],
        "classes": [c for c, n in enumerate(counts.tolist()) if n > 0],
        "train": int(counts.sum()),
        "test": int(own["head"].samples.sum()),
        "steps": taken,
        **{kind: own[kind].accuracy() if kind in own else None for kind in ("head", "head_own", "proto", "proto_own")},
        "alone": by_itself["head"].accuracy(),
        "alone_own": by_itself["head_own"].accuracy(),
        "unseen": unseen,
    }
    return Joined(client, record)


def join_held_out(
    experiment: Experiment,
    domains: Sequence[Domain],
    split: Split,
    numbers: Sequence[int],
    server: Tree,
    tell: Callable[[int, int], None] = lambda done, of: None,
) -> list[dict[str, Any]]:
    """One record for each of these clients, as [join] of the experiment says."""
    engine, method, records = held_back(experiment, domains, split, numbers), method_of(experiment), []
    for row, number in enumerate(numbers):
        made = join_one(method, engine, row, server, experiment.join.steps).record
        records.append({"client": number, "domain": domains[split.domain[number]].name, **made})
        tell(row + 1, len(numbers))
    return records


def method_of(experiment: Experiment) -> Method:
    """The experiment's method as newcomers follow it."""
    return pulled(experiment.method, experiment.join.lam)


def summary(experiment: Experiment, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over newcomers, among the candidates that the method is judged among, with the settings."""
    suffix = "_own" if experiment.method.candidates == "own" else ""
    kinds = {"head": f"head{suffix}", "proto": f"proto{suffix}", "alone": f"alone{suffix}", "unseen": "unseen"}
    means = {f"held_out_{name}_mean": spread([r[key] for r in records]).mean for name, key in kinds.items()}
    settings = {"clients": len(records), "steps": experiment.join.steps, "shots": experiment.join.shots}
    return means | {f"held_out_{name}": value for name, value in settings.items()} | {"held_out_lam": experiment.join.lam}


def _name(method: Method) -> str:
    return type(method).__name__.lower()
