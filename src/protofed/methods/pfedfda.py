"""pFedFDA: a common body under a Gaussian head, which each client mixes from everybody's statistics and its own.

Personalized Federated Learning via Feature Distribution Adaptation
    McLaughlin and Su, NeurIPS 2024. https://arxiv.org/abs/2411.00329
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from annotated_types import Ge, Le
from torch import Tensor

from protofed.method import Batch, Client, LocalData, Mean, Method, Model, Phase, Spec, Tree
from protofed.ops import random
from protofed.ops.checks import same_shapes
from protofed.ops.heads import FLOOR
from protofed.ops.losses import cross_entropy
from protofed.ops.prototypes import class_sums
from protofed.ops.sharing import send, shared, take, without
from protofed.ops.statistics import shrunk

HEAD = ("head.",)
EPS = 1e-4  # how far every covariance is moved towards a ball (the authors' code)
LEVEL = 1e-4  # mean losses that differ by less are level: rounding chooses nothing
FEWEST = 2  # a client's mean of a class counts with more samples than this (the authors' code)


class Gaussian(NamedTuple):
    """One mean for each class, and a covariance that they share."""

    means: Tensor  # (C, D)
    covariance: Tensor  # (D, D)


@dataclass(frozen=True)
class PFedFDA(Method):
    """Average bodies that are trained under everybody's Gaussian head; each client mixes a head of its own."""

    paper = "McLaughlin and Su, NeurIPS 2024, arXiv 2411.00329"
    losses = (
        "CE(W f(x) + b, y), W = S^-1 mean of the class, b = -mean' S^-1 mean / 2 + log share of the class",
        "the same on halves of a client's samples, over how much of mean and S is its own",
    )
    not_followed = (
        "the mixture is the best of a grid; the authors' code has 10 steps of L-BFGS from the middle",
        "a client's statistics come from a pass after training, the code's from all training steps of the round",
    )
    presets = {"paper": {"ball": 1e-4, "single": False}, "official": {"ball": 1.0, "single": False}}

    betas: tuple[Annotated[float, Ge(0), Le(1)], ...] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    """The shares of a client's own statistics to choose from; of level ones the first."""
    single: bool = False
    """One share for means and covariance, or one for each."""
    ball: Annotated[float, Ge(0)] = 1.0
    """Added to the variances of a client's own covariance (the authors' code). With the paper's 1e-4, training
    diverges where clients have few samples."""

    def check(self, specs: Sequence[Spec]) -> None:
        same_shapes("pfedfda", [spec._replace(params=without(spec.params, HEAD)) for spec in specs])

    def init_server(self, spec: Spec) -> Tree:
        means = torch.rand(spec.classes, spec.dim, generator=spec.generator())
        return {"body": shared(spec, HEAD), "gaussian": {"means": means, "covariance": torch.eye(spec.dim)}}

    def broadcast(self, server: Tree, cohort: Tensor) -> Tree:
        return server | {"head": discriminants(Gaussian(**server["gaussian"]))}

    def init_client(self, spec: Spec) -> Client:
        head = {"weight": torch.zeros(spec.classes, spec.dim), "bias": torch.zeros(spec.classes)}
        own = {"head": head, "ready": torch.zeros(()), "prior": torch.zeros(spec.classes)}
        return Client(spec.params, spec.buffers, own)

    def receive(self, model: Model, client: Client, data: LocalData, down: Tree) -> Client:
        share = data.counts / data.counts.sum().clamp(min=1) + FLOOR
        return take(client, down["body"])._replace(memory=client.memory | {"prior": (share / share.sum()).log()})

    def phases(self) -> tuple[Phase, ...]:
        return (Phase(("body.",)),)

    def loss(self, model: Model, client: Client, batch: Batch, down: Tree) -> Tensor:
        scores = _linear(down["head"], model.embed(client, batch.x)) + client.memory["prior"]
        return batch.mean(cross_entropy(scores, batch.y))

    def upload(self, model: Model, client: Client, data: LocalData, down: Tree) -> tuple[Tree, Client]:
        client, mixed = self.adapted(model, client, data, down)
        body = send(client, data, "samples", HEAD)
        return {"body": body, "gaussian": Mean.of(mixed._asdict(), body.weight)}, client

    def aggregate(self, server: Tree, up: Tree, cohort: Tensor) -> Tree:
        return {name: up[name].otherwise(server[name]) for name in server}

    def predict(self, model: Model, client: Client, x: Tensor, down: Tree) -> dict[str, Tensor]:
        """By its own head; a client that has none yet by everybody's."""
        z, ready = model.embed(client, x), client.memory["ready"] > 0
        return {"head": torch.where(ready, _linear(client.memory["head"], z), _linear(down["head"], z))}

    def last_receive(self, model: Model, client: Client, data: LocalData, down: Tree) -> Client:
        """The newest body, under a head that is mixed once more."""
        return self.adapted(model, self.receive(model, client, data, down), data, down)[0]

    def last_phases(self) -> tuple[Phase, ...]:
        return (Phase(HEAD, epochs=0),)

    def adapted(self, model: Model, client: Client, data: LocalData, down: Tree) -> tuple[Client, Gaussian]:
        """The client under the head that suits its samples best, and the Gaussian that the head is made of."""
        classes, everyone, prior = len(data.counts), Gaussian(**down["gaussian"]), client.memory["prior"]
        z = torch.cat([model.embed(client, b.x) for b in data.batches])
        batch = Batch(z, *(torch.cat([b[i] for b in data.batches]) for i in (1, 2)))
        own = estimated(batch, classes, everyone, self.ball)
        mixed = blended(own, everyone, *self.chosen(batch, classes, everyone, prior, data.key))
        head = discriminants(mixed)
        head["bias"] = head["bias"] + prior
        memory = client.memory | {"head": head, "ready": (data.counts.sum() > 0).to(prior.dtype)}
        return client._replace(memory=memory), mixed

    def chosen(
        self, batch: Batch, classes: int, everyone: Gaussian, prior: Tensor, key: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The shares for means and covariance under which each half of the samples is likeliest, given the other."""
        betas = torch.tensor(self.betas, dtype=batch.x.dtype, device=batch.x.device)
        counts = class_sums(batch.x, batch, classes).weight
        known = batch.mask * (counts >= 2)[batch.y]  # a single sample teaches nothing about its class
        half = random.ranks(random.fold(key, -2), batch.y, known > 0) % 2
        losses = []
        for number in range(2):
            own = estimated(batch._replace(mask=known * (half != number)), classes, everyone, self.ball)
            inverse = inverted(blended(own, everyone, betas[0], betas).covariance)  # one for each share
            held = known * (half == number)
            for beta in betas:
                means = blended(own, everyone, beta, beta).means
                head = by_inverse(means, inverse)
                scores = torch.einsum("mcd,nd->mnc", head["weight"], batch.x) + (head["bias"] + prior)[:, None]
                found = -scores.log_softmax(-1)[:, torch.arange(len(half), device=half.device), batch.y]
                losses.append((found * held).sum(-1) / held.sum().clamp(min=1))
        worth = torch.stack(losses).reshape(2, len(betas), len(betas)).sum(0)  # by share for means, and for covariance
        tried = worth.diagonal() if self.single else worth.flatten()
        place = (tried <= tried.min() + LEVEL).to(torch.int64).argmax()
        if self.single:
            return betas[place], betas[place]
        return betas[place // len(betas)], betas[place % len(betas)]


def estimated(batch: Batch, classes: int, everyone: Gaussian, ball: float) -> Gaussian:
    """The Gaussian of some embeddings; a class with hardly any has everybody's mean."""
    sums = class_sums(batch.x, batch, classes)
    means = torch.where((sums.weight > FEWEST)[:, None], sums.value, everyone.means)
    apart = (batch.x - means[batch.y]) * batch.mask[:, None]
    covariance = apart.T @ apart / (sums.weight.sum() - 1).clamp(min=1)
    return Gaussian(means, covariance + ball * torch.eye(len(covariance), dtype=apart.dtype, device=apart.device))


def blended(own: Gaussian, everyone: Gaussian, means: Tensor, covariance: Tensor) -> Gaussian:
    """By these shares a client's own; several shares (M,) give several covariances."""
    share = covariance[..., None, None]
    return Gaussian(
        means * own.means + (1 - means) * everyone.means,
        share * own.covariance + (1 - share) * everyone.covariance,
    )


def discriminants(gaussian: Gaussian) -> dict[str, Tensor]:
    """The linear head that a Gaussian makes, but for how likely its classes are beforehand."""
    return by_inverse(gaussian.means, inverted(gaussian.covariance))


def inverted(covariance: Tensor) -> Tensor:
    """The inverses (..., D, D), in double precision; zeros of a matrix that has none, such as one that is all zeros."""
    inverse, failed = torch.linalg.inv_ex(shrunk(covariance.double(), EPS))
    return torch.where((failed == 0)[..., None, None], inverse, torch.zeros_like(inverse))


def by_inverse(means: Tensor, inverse: Tensor) -> dict[str, Tensor]:
    """W = S^-1 mean and b = -mean' S^-1 mean / 2, for each of several S."""
    weight = means.double() @ inverse
    bias = -(weight * means).sum(-1) / 2
    return {"weight": weight.to(means.dtype), "bias": bias.to(means.dtype)}


def _linear(head: Tree, z: Tensor) -> Tensor:
    """Scores (B, C) of embeddings (B, D)."""
    return F.linear(z, head["weight"], head["bias"])
