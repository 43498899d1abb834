"""FPL: averaged models whose embeddings are contrasted with clusters of the clients' prototypes.

Rethinking Federated Learning with Domain Shift: A Prototype View
    Huang et al., CVPR 2023.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from protofed.method import Batch, Client, Each, LocalData, Mean, Method, Model, Spec, Tree
from protofed.ops.checks import same_shapes
from protofed.ops.contrast import centres, contrast_with
from protofed.ops.finch import clusters_of
from protofed.ops.losses import cross_entropy
from protofed.ops.prototypes import class_sums, distance_to_own, no_prototypes, per_client
from protofed.ops.sharing import Weighting, send, shared, take


@dataclass(frozen=True)
class FPL(Method):
    """Average the models; pull embeddings towards cluster prototypes of their class, one for each kind of domain."""

    paper = "Huang et al., CVPR 2023"
    losses = (
        "CE(F(w; x), y) + contrast * -log(sum over own clusters of e^(cos / t) / sum over all clusters of e^(cos / t))",
        "pull * mse(f(x), mean of the own class's clusters)",
    )
    presets = {
        "paper": {"temperature": 0.02, "weighting": "samples"},
        "official": {"temperature": 0.02, "weighting": "samples"},
    }

    contrast: Annotated[float, Ge(0)] = 1.0
    """Weight of the contrast with cluster prototypes (the authors' code)."""
    pull: Annotated[float, Ge(0)] = 1.0
    """Weight of the distance to the mean of the class's cluster prototypes (the authors' code)."""
    temperature: Annotated[float, Gt(0)] = 0.02
    """The tau of the contrast."""
    weighting: Weighting = "samples"
    """Clients count by their number of samples, or all alike."""

    def check(self, specs: Sequence[Spec]) -> None:
        same_shapes("fpl", specs)

    def init_server(self, spec: Spec) -> Tree:
        none = Mean(torch.zeros(spec.classes, 1, spec.dim), torch.zeros(spec.classes, 1))
        return {"model": shared(spec), "clusters": none}

    def receive(self, model: Model, client: Client, data: LocalData, down: Tree) -> Client:
        return take(client, down["model"])

    def loss(self, model: Model, client: Client, batch: Batch, down: Tree) -> tuple[Tensor, Tree]:
        z, logits = model(client, batch.x)
        clusters: Mean = down["clusters"]
        near = self.contrast * contrast_with(z, batch.y, clusters, self.temperature)
        near = near + self.pull * distance_to_own(z, batch.y, centres(clusters), "mse")
        return batch.mean(cross_entropy(logits, batch.y) + near), class_sums(z, batch, len(clusters.weight))

    def upload(self, model: Model, client: Client, data: LocalData, down: Tree) -> tuple[Tree, Client]:
        own = data.seen or no_prototypes(len(data.counts), down["clusters"].total.shape[-1])
        return {"model": send(client, data, self.weighting), "prototypes": Each(per_client(own))}, client

    def aggregate(self, server: Tree, up: Tree, cohort: Tensor) -> Tree:
        new = clusters_of(up["prototypes"].rows, cohort)
        return {"model": up["model"].otherwise(server["model"]), "clusters": new}

    def prototypes(self, server: Tree) -> Mean:
        clusters: Mean = server["clusters"]
        return clusters

    def global_client(self, server: Tree) -> Client:
        return Client(server["model"]["params"], server["model"]["buffers"])
