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
from protofed.builders import Builder, Shown
from protofed.data.domain import Domain
from protofed.data.federation import Federation
from protofed.data.scaling import Scaler
from protofed.data.split import Split
from protofed.engines.reference import ReferenceEngine
from protofed.errors import UserError
from protofed.experiment import Experiment
from protofed.method import Client, Each, Mean, Method, Spec, Tree
from protofed.methods.local import Local
from protofed.metrics import Tally, add, judged_by, spread, tally
from protofed.models.own import Handed
from protofed.ops import random
from protofed.ops.prototypes import distances
from protofed.ops.trees import all_finite, is_node
from protofed.sections import ModelChoice

CHOOSE = 0.25  # of the shots are held back to choose by
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
    choices: Sequence[ModelChoice | Handed],
    scales: Sequence[Scaler] = (),
    draw: int = 0,
) -> ReferenceEngine:
    """Those who join, with the first weights of this experiment: the common ones, or new ones of their own.

    Another `draw` takes their samples in another order.
    """
    handed = [choice for choice in choices if isinstance(choice, Handed)]
    init = "per_client" if any(one.own_weights for one in handed) else experiment.method.init
    own = random.seed(experiment.seed, "newcomers", draw)
    seed = experiment.seed if init == "common" else own
    federation = Federation(
        domains,
        split,
        seed=own,
        batch_size=experiment.batch_size,
        drop_last=experiment.drop_last,
        normalize=experiment.data.normalize,
        augmentations=experiment.data.augment,
        device=experiment.torch_device(),
        scales=scales,
    )
    builders: list[Builder] = []
    for number, choice in enumerate(choices):
        shown = Shown(choice.build if isinstance(choice, Handed) else choice, federation, number)
        builders.append((choice.label, choice if isinstance(choice, ModelChoice) and choice.known else shown))
    return ReferenceEngine(federation, builders, experiment.optimizer, seed=seed, local_epochs=1, init=init)


def pulled(method: Method, lam: float | None) -> Method:
    """The method with another weight of the pull towards its prototypes; None: its own."""
    if lam is None:
        return method
    if not hasattr(method, "lam"):
        raise UserError(f"join.lam = {lam:g} weighs a pull that {_name(method)} does not have. Leave it out.")
    changed: dict[str, Any] = {"lam": lam}
    return dataclasses.replace(method, **changed)


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


def check(experiment: Experiment, spec: Spec) -> None:
    """A UserError where nobody could join later."""
    for lam in experiment.join.lam:
        pulled(experiment.method, lam)
    welcome(experiment.method, experiment.method.init_server(spec))


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
    """Right answers by "head", and by "proto" where there are prototypes, on its "own" or the "global" test set
    or its "validation" samples."""
    model, data = engine.model(number), engine.federation
    samples = data.global_test(data.domain(number)) if on == "global" else data.test(number, on)
    size = engine.needs.together(number)
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


class Newcomers(NamedTuple):
    """Who joins, with which samples and models."""

    experiment: Experiment
    domains: Sequence[Domain]
    split: Split
    choices: Sequence[ModelChoice | Handed]
    scales: Sequence[Scaler] = ()
    draw: int = 0

    def engine(self, share: float = 0.0) -> ReferenceEngine:
        """For their training; a share of it may be held back."""
        split = self.split.hold_back(share, self.domains, random.seed(self.experiment.seed, "choose", self.draw))
        return engine_of(self.experiment, self.domains, split, self.choices, self.scales, self.draw)

    def join(self, server: Tree, tell: Callable[[int, int], None] = lambda done, of: None) -> list[Joined]:
        """All of them, as [join] of the experiment says."""
        engine, found = self.engine(), []
        for number in range(self.split.clients):
            lam = self._lam(number, server)
            joined = join_one(pulled(self.experiment.method, lam), engine, number, server, self.experiment.join.steps)
            domain = self.domains[self.split.domain[number]].name
            found.append(joined._replace(record={"domain": domain, **joined.record, "lam": lam}))
            tell(number + 1, self.split.clients)
        return found

    def _lam(self, number: int, server: Tree) -> float | None:
        """The weight of the pull: the only one there is, or the one that is best on shots that were held back."""
        lams, method, steps = self.experiment.join.lam, self.experiment.method, self.experiment.join.steps
        if len(lams) < 2:
            return lams[0] if lams else None
        engine = self.engine(CHOOSE)
        if not len(engine.federation.test(number, "validation").y):
            return lams[0]
        down, prototypes = welcome(method, server)

        def right(lam: float) -> float:
            kind = pulled(method, lam)
            client = fine_tune(kind, engine, number, down, steps)
            found = measure(kind, engine, number, client, down, prototypes, "validation").get(judged_by(method))
            return (found and found.accuracy()) or 0.0

        return max(lams, key=right)


def held_back(
    experiment: Experiment,
    domains: Sequence[Domain],
    split: Split,
    numbers: Sequence[int],
    draw: int = 0,
    modules: Sequence[Handed] | None = None,
) -> Newcomers:
    """Clients of an experiment, each with a few of its training samples, and its module where one was handed in."""
    trains = [
        few(split.train[i], domains[split.domain[i]].y_train, experiment.join.shots, experiment.seed, "shots", draw, i)
        for i in numbers
    ]
    some = Split(split.domain[list(numbers)], tuple(trains), tuple(split.test[i] for i in numbers))
    choices = [modules[i] if modules else experiment.model_of(i) for i in numbers]
    return Newcomers(experiment, domains, some, choices, draw=draw)


def summary(experiment: Experiment, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over newcomers, among the candidates that the method is judged among, with the settings."""
    suffix = "_own" if experiment.method.candidates == "own" else ""
    kinds = {"head": f"head{suffix}", "proto": f"proto{suffix}", "alone": f"alone{suffix}", "unseen": "unseen"}
    means = {f"held_out_{name}_mean": spread([r[key] for r in records]).mean for name, key in kinds.items()}
    settings = {"clients": len(records), **dataclasses.asdict(experiment.join)}
    return means | {f"held_out_{name}": value for name, value in settings.items()}


def _name(method: Method) -> str:
    return type(method).__name__.lower()
