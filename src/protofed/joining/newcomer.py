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
from protofed.config.experiment import Experiment
from protofed.config.registry import ModelChoice
from protofed.data.domain import Domain
from protofed.data.scaling import Scaler
from protofed.data.split import Split
from protofed.engines.reference import ReferenceEngine
from protofed.errors import UserError, option
from protofed.method import Client, Each, Mean, Method, Phase, Spec, Tree
from protofed.methods.local import Local
from protofed.metrics import Tally, add, judged_by, spread, tally
from protofed.models.own import Handed
from protofed.ops import random
from protofed.ops.prototypes import distances
from protofed.ops.trees import all_finite, is_node
from protofed.runs.builders import Builder, Shown

CHOOSE = 0.25  # of the shots are held back to choose by
AT_ONCE = 2**24  # numbers in the differences of samples and prototypes


class Joined(NamedTuple):
    """A newcomer's model and its results."""

    client: Client
    record: dict[str, Any]

    def __repr__(self) -> str:
        return f"<Joined: {self.record}>"  # without weights: it may end up in a log


def few_shots(rows: np.ndarray, y: np.ndarray, shots: int, *name: int | str) -> np.ndarray:
    """At most this many rows of each class, drawn by a key made of `name`; 0: all of them."""
    order = rows[random.permutation(random.key(*name), len(rows)).numpy()]
    parts = [order[y[order] == label][: shots or None] for label in np.unique(y[order])]
    return np.sort(np.concatenate([np.empty(0, np.int64), *parts]))


def pulled(method: Method, lam: float | None) -> Method:
    """The method with another weight of the pull towards its prototypes; None: its own weight."""
    if lam is None:
        return method
    if not hasattr(method, "lam"):
        raise UserError(f"join.lam = {lam:g} weighs a pull that {_name(method)} does not have. Leave it out.")
    changed: dict[str, Any] = {"lam": lam}
    return dataclasses.replace(method, **changed)


def welcome(method: Method, server: Tree) -> tuple[Tree, Mean | None]:
    """What a newcomer receives, and the prototypes in it, if there are any."""
    down = method.newcomer(server)
    if any(isinstance(node, Each) for node in tree_leaves(down, is_leaf=is_node)):
        raise UserError(
            f"{_name(method)} sends every client something of its own, which a newcomer has not yet. "
            "Use a method that sends the same to all, such as fedproto."
        )
    prototypes = method.prototypes(server)
    return down, prototypes if prototypes is not None and bool((prototypes.weight > 0).any()) else None


def check_joinable(experiment: Experiment, spec: Spec) -> None:
    """A UserError if nobody could join later."""
    for lam in experiment.join.lam:
        pulled(experiment.method, lam)
    welcome(experiment.method, experiment.method.init_server(spec))


def welcomed(method: Method, engine: ReferenceEngine, number: int, down: Tree) -> Client:
    """A newcomer at the start, with what it received."""
    start = engine.client(method, number)
    client = method.receive(engine.model(number), start, engine.federation.local(number, 0), down)
    for name, value in client.params.items():
        if name not in start.params or value.shape != start.params[name].shape:
            raise UserError(
                f"{_name(method)} shares its model, but {name} of {engine.architectures[number]} does not fit it. "
                f"Use {option('model')} with the run's own model, and inputs of the same shape."
            )
    return client


def fine_tune(method: Method, engine: ReferenceEngine, number: int, down: Tree, steps: int) -> Client:
    """Receive, then take this many steps of each phase. If a method has phases after the last round, these are used. A
    phase without epochs takes no step, because the method computes that part in closed form."""
    model, data, federation = engine.model(number), engine.federation.local(number, 0), engine.federation
    client = welcomed(method, engine, number, down)
    if not federation.used(number):
        return client
    if method.last_phases():
        client = method.last_receive(model, client, data, down)
    epochs = (federation.epoch(number, 0, epoch) for epoch in count())
    batches = list(islice(chain.from_iterable(epochs), steps))
    phases = [phase._replace(epochs=1) for phase in _trained(method)]
    lr = engine.optimizer.lr
    client, loss, _ = local.train(
        method, model, engine.optimizer, phases, client, lambda epoch: batches, down, data.key, lr, 1
    )
    if not bool(all_finite((loss, client.params))):
        raise UserError(
            f"the loss of newcomer {number} is no longer a number after {steps} steps at lr {lr:g}. "
            "Use a lower optimizer.lr or optimizer.clip in the experiment, or a lower lam."
        )
    return client


def _trained(method: Method) -> list[Phase]:
    """The phases in which a newcomer takes steps."""
    return [phase for phase in method.last_phases() or method.phases() if phase.epochs != 0]


@torch.no_grad()
def right_answers(
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
    for x, y in zip(torch.split(samples.x, size), torch.split(samples.y, size), strict=True):
        scores = {"head": method.predict(model, client, x, down)["head"]}
        if prototypes is not None:
            scores["proto"] = -distances(method.embed(model, client, x), prototypes)
        tallies.append(tally(scores, y, data.counts[number] > 0))
    return reduce(add, tallies)


def join_one(method: Method, engine: ReferenceEngine, number: int, server: Tree, steps: int) -> Joined:
    """One newcomer with what it receives, and alone."""
    down, prototypes = welcome(method, server)
    if prototypes is not None and prototypes.total.shape[-1] != (dim := engine.specs()[0].dim):
        raise UserError(
            f"the prototypes have {prototypes.total.shape[-1]} numbers, but embeddings by "
            f"{engine.architectures[number]} {dim}. Name a model of that width with {option('model')}."
        )
    client = fine_tune(method, engine, number, down, steps)
    alone_method = Local(init=method.init)
    taken = steps * max(1, len(_trained(method)))  # alone also where the method takes none
    alone = fine_tune(alone_method, engine, number, {}, taken)
    start = right_answers(method, engine, number, welcomed(method, engine, number, down), down, None, "own")
    own = right_answers(method, engine, number, client, down, prototypes, "own")
    by_itself = right_answers(alone_method, engine, number, alone, {}, None, "own")
    counts = engine.federation.counts[number]
    unseen = None
    if prototypes is not None:
        known = (counts == 0) & (prototypes.weight > 0).any(1)
        everywhere = right_answers(method, engine, number, client, down, prototypes, "global")
        unseen = everywhere["proto"].accuracy(known.double())
    record = {
        "architecture": engine.architectures[number],
        "classes": [c for c, n in enumerate(counts.tolist()) if n > 0],
        "train": int(counts.sum()),
        "test": int(own["head"].samples.sum()),
        "steps": taken,
        **{kind: own[kind].accuracy() if kind in own else None for kind in ("head", "head_own", "proto", "proto_own")},
        "start": start["head"].accuracy(),
        "start_own": start["head_own"].accuracy(),
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
    draw: int = 0  # another one takes their samples in another order

    def __repr__(self) -> str:
        names = ", ".join(self.domains[number].name for number in self.split.domain.tolist())
        return f"<Newcomers: {names}>"  # without samples: it may end up in a log

    def engine(self, share: float = 0.0) -> ReferenceEngine:
        """For their training, of which a share may be held back, with the first weights of this experiment: the common
        ones, or new ones of their own."""
        plan = self.experiment
        split = self.split.hold_back(share, self.domains, random.seed(plan.seed, "choose", self.draw))
        handed = [choice for choice in self.choices if isinstance(choice, Handed)]
        init = "per_client" if any(one.own_weights for one in handed) else plan.method.init
        own = random.seed(plan.seed, "newcomers", self.draw)
        seed = plan.seed if init == "common" else own
        federation = plan.federation(self.domains, split, seed=own, scales=self.scales)
        builders: list[Builder] = []
        for number, choice in enumerate(self.choices):
            shown = Shown(choice.build if isinstance(choice, Handed) else choice, federation, number)
            builders.append((choice.label, choice if isinstance(choice, ModelChoice) and choice.known else shown))
        return ReferenceEngine(federation, builders, plan.scheduled, seed=seed, local_epochs=1, init=init)

    def join(self, server: Tree, tell: Callable[[int, int], None] = lambda done, of: None) -> list[Joined]:
        """All newcomers, as the experiment's [join] says."""
        engine, found = self.engine(), []
        for number in range(self.split.clients):
            lam = self._lam(number, server)
            joined = join_one(pulled(self.experiment.method, lam), engine, number, server, self.experiment.join.steps)
            domain = self.domains[self.split.domain[number]].name
            found.append(joined._replace(record={"domain": domain, **joined.record, "lam": lam}))
            tell(number + 1, self.split.clients)
        return found

    def _lam(self, number: int, server: Tree) -> float | None:
        """The weight of the pull: the only one, or the one that is best on held-back shots."""
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
            found = right_answers(kind, engine, number, client, down, prototypes, "validation").get(judged_by(method))
            return (found and found.accuracy()) or 0.0

        return max(lams, key=right)


def held_back_clients(
    experiment: Experiment,
    domains: Sequence[Domain],
    split: Split,
    numbers: Sequence[int],
    draw: int = 0,
    modules: Sequence[Handed] | None = None,
) -> Newcomers:
    """Clients of an experiment, each with a few of its training samples, and with its module if one was given."""
    trains = [
        few_shots(
            split.train[i], domains[split.domain[i]].y_train, experiment.join.shots, experiment.seed, "shots", draw, i
        )
        for i in numbers
    ]
    some = Split(split.domain[list(numbers)], tuple(trains), tuple(split.test[i] for i in numbers))
    choices = [modules[i] if modules else experiment.model_of(i) for i in numbers]
    return Newcomers(experiment, domains, some, choices, draw=draw)


def join_summary(experiment: Experiment, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over newcomers, among the classes that the method is judged by, with the settings."""
    suffix = "_own" if experiment.method.candidates == "own" else ""
    kinds = {"head": f"head{suffix}", "proto": f"proto{suffix}", "start": f"start{suffix}"}
    kinds |= {"alone": f"alone{suffix}", "unseen": "unseen"}
    means = {f"held_out_{name}_mean": spread([r[key] for r in records]).mean for name, key in kinds.items()}
    settings = {"clients": len(records), **dataclasses.asdict(experiment.join)}
    return means | {f"held_out_{name}": value for name, value in settings.items()}


def _name(method: Method) -> str:
    return type(method).__name__.lower()
