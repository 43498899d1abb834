"""The methods with a theorem, and what it needs from a round in addition to the constants of local training."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.method import Batch, Client, Mean, Method, Model, Params, Tree
from protofed.methods.fednh import FedNH
from protofed.methods.fedproto import FedProto
from protofed.ops.distances import DISTANCES
from protofed.ops.prototypes import class_sums
from protofed.ops.trees import under
from protofed.papers.theory import bounds
from protofed.papers.theory.bounds import Constants, LossBounds, Range
from protofed.papers.theory.estimators import apart, length, slope

Measurement = tuple[Constants, Mapping[str, float]]  # constants of training, and of the exchange


class Round(NamedTuple):
    """One client's round: where it began and ended, and where the next one begins."""

    model: Model
    samples: Batch  # the client's data, or much of it
    loss: Callable[[Client, Tree], Tensor]  # that is trained, of these samples, with weight decay
    trains: tuple[str, ...]  # prefixes of what is trained
    began: Client
    ended: Client
    next: Client
    down: Tree
    next_down: Tree
    steps: int
    step: float  # size


class Theorem(Protocol):
    """The theorem of one paper."""

    which: str
    squared: bool  # whether G bounds E|g|^2 or E|g|

    def embed(self, model: Model, client: Client, x: Tensor) -> Tensor:
        """The function f of the paper."""

    def exchange(self, method: Any, round: Round) -> dict[str, float]:
        """What the step from one round to the next costs, in constants."""

    def verdict(self, method: Any, constants: Constants, step: float, exchange: Mapping[str, float]) -> LossBounds:
        """The theorem's bounds."""

    def suggests(self, several: Sequence[Measurement]) -> Range:
        """Values that satisfy the theorem for all of these."""

    def chosen(self, method: Any) -> dict[str, float]:
        """What can be chosen besides the step size."""

    def uncovered(self, before: Any, after: Any) -> list[str]:
        """What the theorem does not cover of the server's step."""


class OfFedProto:
    which = "FedProto theorem 1 and corollary 1"
    squared = False

    def embed(self, model: Model, client: Client, x: Tensor) -> Tensor:
        return model.embed(client, x)

    def exchange(self, method: FedProto, round: Round) -> dict[str, float]:
        """How fast the distance to a prototype grows as that moves: 1 for the norm, which lemma 2 takes for granted."""
        before = _pull(method, round.model.embed(round.began, round.samples.x), round.samples, round.down)
        after = _pull(method, round.model.embed(round.ended, round.samples.x), round.samples, round.next_down)
        return {"pull": max(before, after)}

    def verdict(self, method: FedProto, constants: Constants, step: float, exchange: Mapping[str, float]) -> LossBounds:
        return bounds.fedproto(constants, step, method.lam, **exchange)

    def suggests(self, several: Sequence[Measurement]) -> Range:
        return bounds.fedproto_range([(constants, exchange["pull"]) for constants, exchange in several])

    def chosen(self, method: FedProto) -> dict[str, float]:
        return {"lam": method.lam}

    def uncovered(self, before: Mean, after: Mean) -> list[str]:
        return ["first prototypes"] if bool(((after.weight > 0) & (before.weight == 0)).any()) else []


class OfFedNH:
    which = "FedNH theorem 2, corrected"
    squared = True

    def embed(self, model: Model, client: Client, x: Tensor) -> Tensor:
        return F.normalize(model.embed(client, x))

    def exchange(self, method: FedNH, round: Round) -> dict[str, float]:
        """What turning the prototypes and then averaging the bodies costs (Eq. 9): distance times the loss's slope."""
        moved = apart(under(round.next.params, round.trains), under(round.ended.params, round.trains))
        body = max(_body_slope(round, client) for client in (round.ended, round.next))
        turned = float(torch.linalg.vector_norm(round.next_down["prototypes"] - round.down["prototypes"]))
        steep = max(_prototype_slope(round, down) for down in (round.down, round.next_down))
        return {"averaging": body * moved / (round.steps * round.step), "turning": steep * turned / (1 - method.rho)}

    def verdict(self, method: FedNH, constants: Constants, step: float, exchange: Mapping[str, float]) -> LossBounds:
        return bounds.fednh(constants, step, method.rho, **exchange)

    def suggests(self, several: Sequence[Measurement]) -> Range:
        return bounds.fednh_range([(c, exchange["averaging"], exchange["turning"]) for c, exchange in several])

    def chosen(self, method: FedNH) -> dict[str, float]:
        return {"rho": method.rho}

    def uncovered(self, before: Tree, after: Tree) -> list[str]:
        return []


THEOREMS: dict[type[Method], Theorem] = {FedProto: OfFedProto(), FedNH: OfFedNH()}


def theorem_of(method: Method) -> Theorem | None:
    return next((theorem for kind, theorem in THEOREMS.items() if isinstance(method, kind)), None)


def _pull(method: FedProto, z: Tensor, batch: Batch, prototypes: Mean) -> float:
    """The length of the pull's gradient in the prototypes, class by class or sample by sample, at weight lam = 1."""
    if method.pull == "prototype":
        own = class_sums(z, batch, len(prototypes.weight))
        counted = ((own.weight > 0) & (prototypes.weight > 0)).to(z.dtype)
        return float((_lengths(method, own.value, prototypes.value) * counted).sum())
    there = (prototypes.weight > 0)[batch.y].to(z.dtype)
    return float(batch.mean(_lengths(method, z, prototypes.value[batch.y]) * there))


def _lengths(method: FedProto, z: Tensor, prototypes: Tensor) -> Tensor:
    """|gradient| (N,) of the distance of each row to its prototype, in the prototype."""
    targets = prototypes.detach().requires_grad_()
    with torch.enable_grad():
        distance = DISTANCES[method.distance](z.detach(), targets).sum()
    lengths: Tensor = torch.linalg.vector_norm(torch.autograd.grad(distance, targets)[0], dim=1)
    return lengths


def _body_slope(round: Round, client: Client) -> float:
    """|gradient| of the loss in what is trained, with the new prototypes."""

    def objective(trained: Params) -> Tensor:
        return round.loss(client._replace(params=client.params | trained), round.next_down)

    return length(slope(objective, under(client.params, round.trains))[1])


def _prototype_slope(round: Round, down: Tree) -> float:
    """|gradient| of the loss in the prototypes, with the client's trained body."""

    def objective(head: Params) -> Tensor:
        return round.loss(round.ended, down | head)

    return length(slope(objective, {"prototypes": down["prototypes"]})[1])
