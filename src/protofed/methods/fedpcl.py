"""FedPCL: a private projection on top of a frozen encoder, trained by contrast with all clients' prototypes.

Federated Learning from Pre-Trained Models: A Contrastive Learning Approach
    Tan et al., NeurIPS 2022. https://arxiv.org/abs/2209.10083
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt
from torch import Tensor

from protofed.method import Batch, Client, Each, LocalData, Mean, Method, Model, Phase, Spec, Tree
from protofed.ops.pool import class_means, contrast, no_pool, pad
from protofed.ops.prototypes import as_downloaded, class_sums, downloaded, nearest, no_prototypes, one_each, per_client
from protofed.ops.server_training import linear_layer, through
from protofed.ops.trees import total


@dataclass(frozen=True)
class FedPCL(Method):
    """Keep the encoders frozen; train a private projection by contrast with the prototypes of all clients."""

    paper = "Tan et al., NeurIPS 2022, arXiv 2209.10083"
    losses = (
        "-log(e^(v . P[y] / t) / sum over classes of e^(v . P[c] / t)), P the clients' mean, Eq. 6",
        "the same with each client's own prototypes, averaged over the clients, Eq. 7",
    )
    scores = ("head", "proto")
    not_followed = (
        "the released code turns the contrast round: each prototype against the samples of a batch, in two views",
        "a class that a client lacks gets the mean of all clients in its set, as in the code",
    )
    presets = {
        "paper": {"inference": "proto", "whole": True, "over_clients": "mean", "judged_by": "mean"},
        "official": {"inference": "proto", "whole": False, "over_clients": "sum", "judged_by": "own"},
    }

    inference: Literal["head", "proto"] = "proto"
    """Classify by the nearest prototype, or by the softmax that the loss has over the mean prototypes."""
    temperature: Annotated[float, Gt(0)] = 0.07
    """The tau of both contrasts."""
    projection: Annotated[int, Ge(1)] = 256
    """Width of the projection: one layer, ReLU, and length 1."""
    whole: bool = True
    """The loss has a contrast with the mean prototypes (the paper), or only those with each client's (the code)."""
    over_clients: Literal["mean", "sum"] = "mean"
    """The contrasts with single clients' prototypes are averaged (the paper), or added (the code)."""
    judged_by: Literal["mean", "own"] = "own"
    """The nearest of the clients' mean prototypes, or of the client's own (the code)."""

    def remarks(self, spec: Spec, samples: int) -> Sequence[str]:
        if not any(name.startswith("body.") for name in spec.params):
            return ()
        return (
            f"fedpcl trains a projection only: the body of {spec.architecture} keeps the weights it starts with. Use a "
            "pretrained encoder with model.frozen = true, or data that are embeddings",
        )

    def init_server(self, spec: Spec) -> Tree:
        return {
            "pool": no_pool(spec.classes, 1, self.projection),
            "means": no_prototypes(spec.classes, self.projection),
        }

    def init_client(self, spec: Spec) -> Client:
        made = linear_layer("projection", spec.dim, self.projection, spec.generator())
        none = no_prototypes(spec.classes, self.projection)
        return Client(spec.params | made, spec.buffers, {"prototypes": downloaded(none)})

    def phases(self) -> tuple[Phase, ...]:
        return (Phase(("projection.",)),)

    def loss(self, model: Model, client: Client, batch: Batch, down: Tree) -> Tensor:
        v, (pool, means) = self.embed(model, client, batch.x), (down["pool"], down["means"])
        near = contrast(v, batch.y, pad(pool, means, whole=True), means, self.temperature)
        if self.over_clients == "sum":
            near = near * (pool.weight > 0).flatten(1).any(1).sum()
        if self.whole:
            alone = Mean(means.value[None, :, None], (means.weight > 0).to(v.dtype)[None, :, None])
            near = near + contrast(v, batch.y, alone, means, self.temperature)
        return batch.mean(near)

    def upload(self, model: Model, client: Client, data: LocalData, down: Tree) -> tuple[Tree, Client]:
        sums = total(class_sums(self.embed(model, client, b.x), b, len(data.counts)) for b in data.batches)
        own = per_client(sums)
        sent = Mean(own.total[:, None], own.weight[:, None])
        return {"prototypes": Each(sent)}, client._replace(memory={"prototypes": downloaded(own)})

    def aggregate(self, server: Tree, up: Tree, cohort: Tensor) -> Tree:
        pool = up["prototypes"].rows
        return {"pool": pool, "means": class_means(pool, server["means"])}

    def predict(self, model: Model, client: Client, x: Tensor, down: Tree) -> dict[str, Tensor]:
        v, means = self.embed(model, client, x), down["means"]
        head = (v @ means.value.T / self.temperature).masked_fill(means.weight == 0, -torch.inf)
        return {"head": head, "proto": nearest(v, self._scored_with(client, means))}

    def _scored_with(self, client: Client, means: Mean) -> Mean:
        if self.judged_by == "mean":
            return means
        own = client.memory["prototypes"]
        return as_downloaded(own, means._replace(weight=means.weight * ~own["known"].any()))  # one without takes them

    def embed(self, model: Model, client: Client, x: Tensor) -> Tensor:
        return F.normalize(F.relu(through(client.params, "projection", model.embed(client, x))))

    def prototypes(self, server: Tree) -> Mean:
        return one_each(server["means"])

    def prototypes_of(self, client: Client, server: Tree) -> Mean:
        return one_each(self._scored_with(client, server["means"]))
