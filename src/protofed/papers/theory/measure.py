"""The constants of one client's round: its local training is repeated, and measured at some points along the way."""

from collections.abc import Iterator, Sequence
from itertools import chain, islice, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from protofed import local
from protofed.engines.reference import ReferenceEngine
from protofed.method import Batch, Client, Method, Params, Phase, Tree
from protofed.models.functional import FunctionalModel
from protofed.ops import optim, random
from protofed.ops.optim import Optimizer
from protofed.ops.trees import under
from protofed.papers.theory import estimators
from protofed.papers.theory.bounds import Constants
from protofed.papers.theory.estimators import Noise, Objective
from protofed.papers.theory.theorems import Round, Theorem

STEPS = 100  # of a client's round that are repeated at most
POINTS = 10  # of them at which the gradient is measured
SAMPLES = 128  # of a client that stand for all its data,
AT_LEAST = 8  # or this many batches, if that is more
BATCHES = 16  # mini-batches whose gradients are measured at the first, middle and last point
INPUTS = 4  # samples whose embedding is differentiated


class Gradients(NamedTuple):
    """The measurements at one point of a client's way."""

    client: Client
    grads: Params  # of all samples


class RoundMeasurement(NamedTuple):
    """One client's round in numbers."""

    constants: Constants
    exchange: dict[str, float]
    change: float  # of the loss, from the beginning of this round to that of the next
    repeated: int  # steps
    samples: int  # that stand for its data


class ClientRound:
    """One client in one round, which is repeated."""

    def __init__(
        self, engine: ReferenceEngine, method: Method, theorem: Theorem, number: int, round: int, down: Tree
    ) -> None:
        self.engine, self.method, self.theorem, self.number, self.round = engine, method, theorem, number, round
        self.down, self.phase = down, method.phases()[0]
        self.model: FunctionalModel = engine.model(number)
        self.data = engine.federation.local(number, round)
        self.began = method.receive(self.model, engine.client(method, number), self.data, down)
        self.key = random.key(engine.seed, "theory", round, number).to(engine.federation.device)
        size = engine.federation.batch_size
        fitting = engine.needs.lanes_that_fit(number)
        self.batches = list(islice(self._epoch(0), min(max(AT_LEAST, SAMPLES // size), fitting)))
        self.whole = Batch(*map(torch.cat, zip(*self.batches, strict=True)))
        part = min(SAMPLES, max(size, fitting * size // 4))  # products with a Hessian keep more, and there are many
        self.part = Batch(*(tensor[:part] for tensor in self.whole))
        self.per_epoch = -(-engine.federation.used(number) // size)
        self.steps = self.per_epoch * self.phase.passes(engine.local_epochs)

    def _epoch(self, epoch: int) -> Iterator[Batch]:
        return self.engine.federation.epoch(self.number, self.round, epoch)

    def measured(self, ended: Client, next_down: Tree) -> RoundMeasurement:
        """All constants, at the points along the way and between them."""
        places = [self._place(client) for client in self._way()]
        noises = [self._noise(places[i]) for i in _spaced(len(places), 3)]
        following = self.method.receive(self.model, ended, self.data, next_down)
        step = effective(self.engine.optimizer, self.phase, self.round)
        round = Round(
            self.model, self.whole, self._loss, self.phase.trains, self.began, ended, following, self.down, next_down,
            self.steps, step,
        )  # fmt: skip
        squared = sum(estimators.length(place.grads) ** 2 for place in places) / len(places)
        variance = sum(noise.variance for noise in noises) / len(noises)
        constants = Constants(
            L1=self._smoothness(places),
            L2=self._stretch(places),
            G=max(noise.square**0.5 if self.theorem.squared else noise.norm for noise in noises),
            sigma2=max(noise.variance for noise in noises),
            grad_sq=max(squared - estimators.excess(variance, len(self.batches), self.per_epoch), 0.0),
            steps=self.steps,
        )
        change = self._value(following, next_down) - self._value(self.began, self.down)
        repeated = min(self.steps, STEPS)
        return RoundMeasurement(
            constants, self.theorem.exchange(self.method, round), change, repeated, len(self.whole.y)
        )

    def _way(self) -> list[Client]:
        """The client before its first and last step and some in between, as it trained."""
        many = min(self.steps, STEPS)
        chosen = _spaced(many, POINTS)
        client, optimizer = self.began, self.engine.optimizer
        moments = optim.first_moments(optimizer, under(client.params, self.phase.trains), self.phase.plain)
        rate = optimizer.rate(self.round) if self.phase.lr is None else self.phase.lr
        key = random.fold(self.data.key, -1)
        batches = chain.from_iterable(map(self._epoch, range(self.steps)))
        way = []
        for index, batch in enumerate(islice(batches, many)):
            if index in chosen:
                way.append(client)
            at = random.fold(key, index)
            client, moments, *_ = local.train_step(
                self.method, self.model, optimizer, self.phase, client, moments, batch, self.down, at, rate
            )
        return way

    def _place(self, client: Client) -> Gradients:
        params = under(client.params, self.phase.trains)
        return Gradients(client, estimators.slope(self._objective(client, self.whole, self.down), params)[1])

    def _noise(self, place: Gradients) -> Noise:
        params = self._trained(place)
        some = self.batches[:: -(-len(self.batches) // BATCHES)]
        parts = [
            estimators.slope(self._objective(place.client, batch, self.down, number), params)[1]
            for number, batch in enumerate(some, 1)
        ]
        return estimators.noise(parts, place.grads, len(self.batches), self.per_epoch)

    def _objective(self, client: Client, batch: Batch, down: Tree, draw: int = 0) -> Objective:
        """The training loss as a function of the trained parameters."""
        return lambda trained: self._loss(client._replace(params=client.params | trained), down, batch, draw)

    def _loss(self, client: Client, down: Tree, batch: Batch | None = None, draw: int = 0) -> Tensor:
        """The training loss, with weight decay; over all samples if no batch is given."""
        batch = self.whole if batch is None else batch
        decay = 0.0 if self.phase.plain else self.engine.optimizer.weight_decay
        model = self.model.training(client.buffers, random.fold(self.key, draw), batch.mask)
        loss = (self.phase.loss or self.method.loss)(model, client, batch, down)
        found = loss[0] if isinstance(loss, tuple) else loss
        if decay > 0:
            trained = under(client.params, self.phase.trains).values()
            found = found + decay / 2 * torch.stack([(p * p).sum() for p in trained]).sum()
        return found

    def _value(self, client: Client, down: Tree) -> float:
        with torch.no_grad():
            return float(self._loss(client, down))

    def _smoothness(self, places: Sequence[Gradients]) -> float:
        """The Hessian's largest eigenvalue at both ends of the way, and how gradients change between its points."""
        found = [
            estimators.curvature(
                self._objective(place.client, self.part, self.down),
                self._trained(place),
                random.fold(self.key, -1),
            )
            for place in _ends(places)
        ]
        for left, right in pairwise(places):
            moved = estimators.apart(self._trained(left), self._trained(right))
            found.append(_ratio(estimators.apart(left.grads, right.grads), moved))
        return max(found)

    def _stretch(self, places: Sequence[Gradients]) -> float:
        """The largest singular value of a sample's Jacobian at both ends, and how embeddings move between points."""
        some = self.whole.x[:: -(-len(self.whole.x) // INPUTS)]
        found = []
        for place in _ends(places):

            def embed(params: Params, x: Tensor, client: Client = place.client) -> Tensor:
                return self.theorem.embed(self.model, client._replace(params=client.params | params), x)

            body = under(self._trained(place), "body.")
            found.append(estimators.stretch(embed, body, some, random.fold(self.key, -2)))
        with torch.no_grad():
            z = [self.theorem.embed(self.model, place.client, self.whole.x) for place in places]
        for i in range(len(places) - 1):
            left, right = (under(self._trained(place), "body.") for place in places[i : i + 2])
            farthest = float(torch.linalg.vector_norm(z[i + 1] - z[i], dim=1).max())
            found.append(_ratio(farthest, estimators.apart(left, right)))
        return max(found)

    def _trained(self, place: Gradients) -> Params:
        return under(place.client.params, self.phase.trains)


def _ends(places: Sequence[Gradients]) -> Sequence[Gradients]:
    return places if len(places) == 1 else (places[0], places[-1])


def _spaced(many: int, most: int) -> list[int]:
    """The first and last of many numbers, and some evenly spaced ones in between."""
    return sorted({i * (many - 1) // (most - 1) for i in range(most)})


def _ratio(far: float, moved: float) -> float:
    return far / moved if moved > 0 else 0.0


def effective(optimizer: Optimizer, phase: Phase, round: int) -> float:
    """The step of plain SGD that goes equally far: momentum repeats each step in ever smaller parts, which add up."""
    rate = optimizer.rate(round) if phase.lr is None else phase.lr
    return rate / share(optimizer, phase)


def share(optimizer: Optimizer, phase: Phase) -> float:
    """The lr to set for a step that goes as far as this step of plain SGD."""
    return 1.0 if phase.plain else 1 - optimizer.momentum
