"""I2PFL: prototypes that give far domains more weight, and class means that are pulled towards mixtures of classes.

Mitigating Domain Shift in Federated Learning via Intra- and Inter-Domain Prototypes
    Le et al., 2025. https://arxiv.org/abs/2501.08521
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from protofed.method import Batch, Client, Each, LocalData, Mean, Method, Model, Spec, Tree
from protofed.ops import random
from protofed.ops.checks import same_shapes
from protofed.ops.contrast import contrast_with
from protofed.ops.losses import cross_entropy
from protofed.ops.prototypes import class_sums, no_prototypes, one_each, per_client, refresh
from protofed.ops.sharing import Weighting, send, shared, take
from protofed.ops.trees import total


@dataclass(frozen=True)
class I2PFL(Method):
    """Average the models; contrast embeddings with prototypes in which clients far from the mean count more."""

    paper = "Le et al., 2025, arXiv 2501.08521"
    losses = (
        "CE(F(w; x), y) + inter * -log(e^(cos(f(x), P[y]) / t) / sum over classes of e^(cos(f(x), P[c]) / t))",
        "intra * mse(mean of a class in the batch, mean of its MixUp), averaged over the classes",
    )
    not_followed = (
        "the MixUp: each embedding is mixed with that of the next sample of another class in the shuffled batch, by a "
        "share that a client draws uniformly once a round; the paper's own draws are not known here",
        "the mixtures are targets: no gradient goes through them",
        "the authors released no code",
    )
    presets = {
        "paper": {"inter": 10.0, "intra": 1.0, "temperature": 0.07, "keep": 0.99},
        "official": {"inter": 10.0, "intra": 1.0, "temperature": 0.07, "keep": 0.99},
    }

    inter: Annotated[float, Ge(0)] = 10.0
    """Weight of the contrast with the prototypes: 10 for Digits and Office, 2 for PACS."""
    intra: Annotated[float, Ge(0)] = 1.0
    """Weight of the distance between class means and their MixUp."""
    temperature: Annotated[float, Gt(0)] = 0.07
    """The tau of the contrast, 0.02 to 0.07 by data set."""
    keep: Annotated[float, Ge(0), Lt(1)] = 0.99
    """How much of a prototype of the round before stays in it."""
    weighting: Weighting = "samples"
    """Models count by their number of samples, or all alike."""

    def check(self, specs: Sequence[Spec]) -> None:
        same_shapes("i2pfl", specs)

    def init_server(self, spec: Spec) -> Tree:
        return {"model": shared(spec), "prototypes": no_prototypes(spec.classes, spec.dim)}

    def init_client(self, spec: Spec) -> Client:
        return Client(spec.params, spec.buffers, {"share": torch.ones(())})

    def receive(self, model: Model, client: Client, data: LocalData, down: Tree) -> Client:
        drawn = random.uniform(data.key, 1)[..., 0].to(data.counts.dtype)
        return take(client, down["model"])._replace(memory={"share": drawn})

    def loss(self, model: Model, client: Client, batch: Batch, down: Tree) -> Tensor:
        z, logits = model(client, batch.x)
        prototypes: Mean = down["prototypes"]
        contrast = contrast_with(z, batch.y, one_each(prototypes), self.temperature)
        apart = distance_to_mixtures(z, batch, client.memory["share"], len(prototypes.weight))
        return batch.mean(cross_entropy(logits, batch.y) + self.inter * contrast) + self.intra * apart

    def upload(self, model: Model, client: Client, data: LocalData, down: Tree) -> tuple[Tree, Client]:
        own = total(class_sums(model.embed(client, b.x), b, len(data.counts)) for b in data.batches)
        return {"model": send(client, data, self.weighting), "prototypes": Each(per_client(own))}, client

    def aggregate(self, server: Tree, up: Tree, cohort: Tensor) -> Tree:
        old: Mean = server["prototypes"]
        new = by_distance(up["prototypes"].rows)
        moved = self.keep * old.value + (1 - self.keep) * new.value
        rows = torch.where((old.weight > 0)[:, None], moved, new.value)
        return {
            "model": up["model"].otherwise(server["model"]),
            "prototypes": refresh(old, Mean.of(rows, (new.weight > 0).to(rows.dtype))),
        }

    def prototypes(self, server: Tree) -> Mean:
        return one_each(server["prototypes"])

    def global_client(self, server: Tree) -> Client:
        return Client(server["model"]["params"], server["model"]["buffers"])


def by_distance(rows: Mean) -> Mean:
    """The mean (C, D) of the clients' prototypes (S, C, D), each by its squared distance to their plain mean."""
    there = (rows.weight > 0).to(rows.total.dtype)
    many = there.sum(0)
    plain = (rows.value * there[..., None]).sum(0) / many.clamp(min=1)[:, None]
    far = ((rows.value - plain) ** 2).sum(-1) * there
    whole = far.sum(0)
    weight = torch.where(whole > 0, far / torch.where(whole > 0, whole, 1), there / many.clamp(min=1))
    return Mean((weight[..., None] * rows.value).sum(0), (many > 0).to(there.dtype))


def distance_to_mixtures(z: Tensor, batch: Batch, share: Tensor, classes: int) -> Tensor:
    """How far the class means of a batch are from those of its embeddings mixed with others, averaged over the classes.

    Each embedding keeps `share` of itself, and takes the rest from the next sample of another class in the batch, which
    goes on with its first sample. In a batch of one class nothing is mixed.
    """
    size, real = len(batch.y), batch.mask > 0
    place = torch.arange(size, device=z.device)
    ahead = (place - place[:, None] - 1) % size
    other = (batch.y != batch.y[:, None]) & real
    partner = ahead.masked_fill(~other, size).argmin(1)
    mixed = torch.where(other.any(1)[:, None], share * z + (1 - share) * z[partner], z).detach()
    own, goal = class_sums(z, batch, classes), class_sums(mixed, batch, classes)
    held = (own.weight > 0).to(z.dtype)
    apart: Tensor = ((own.value - goal.value) ** 2).mean(1) * held
    return apart.sum() / held.sum().clamp(min=1)
