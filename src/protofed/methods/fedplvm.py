"""FedPLVM: averaged models whose embeddings are contrasted with clusters of the clients' clusters.

Taming Cross-Domain Representation Variance in Federated Prototype Learning with Heterogeneous Data Domains
    Wang et al., NeurIPS 2024. https://arxiv.org/abs/2403.09048
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from protofed.method import Batch, Client, Each, LocalData, Mean, Method, Model, Spec, Tree
from protofed.ops.checks import same_shapes
from protofed.ops.contrast import centres, contrast_with
from protofed.ops.finch import clusters_of, clusters_of_samples
from protofed.ops.losses import cross_entropy
from protofed.ops.prototypes import distance_to_own
from protofed.ops.sharing import Weighting, send, shared, take


@dataclass(frozen=True)
class FedPLVM(Method):
    """Average the models; clients send clusters of their embeddings, and the server clusters these once more."""

    paper = "Wang et al., NeurIPS 2024, arXiv 2403.09048"
    losses = (
        "CE(F(w; x), y) + lam * -log(sum over own clusters of e^(cos^alpha / t) / sum over all of e^(cos^alpha / t))",
        "lam * 2 * (1 - cos(f(x), mean of the own class's clusters))^2",
    )
    not_followed = (
        "a cosine below 0.001 counts as 0.001: the authors' code has NaN where one is negative, which ReLU hides",
        "a client sends no more than the `most` largest clusters of a class",
    )
    stackable: ClassVar[bool] = False  # clusters are made on the host, one client at a time
    presets = {"paper": {"weighting": "samples"}, "official": {"weighting": "uniform"}}

    lam: Annotated[float, Ge(0)] = 100.0
    """Weight of both terms with prototypes (the authors' code)."""
    alpha: Annotated[float, Gt(0), Le(1)] = 0.25
    """Power of the cosines: below 1 it brings near ones together and spreads far ones."""
    temperature: Annotated[float, Gt(0)] = 0.07
    """The tau of the contrast."""
    most: Annotated[int, Ge(1)] = 10
    """Clusters of a class that a client sends at most."""
    weighting: Weighting = "samples"
    """Clients count by their number of samples, or all alike (the code where classes are balanced)."""

    def check(self, specs: Sequence[Spec]) -> None:
        same_shapes("fedplvm", specs)

    def init_server(self, spec: Spec) -> Tree:
        none = Mean(torch.zeros(spec.classes, 1, spec.dim), torch.zeros(spec.classes, 1))
        return {"model": shared(spec), "clusters": none}

    def receive(self, model: Model, client: Client, data: LocalData, down: Tree) -> Client:
        return take(client, down["model"])

    def loss(self, model: Model, client: Client, batch: Batch, down: Tree) -> Tensor:
        z, logits = model(client, batch.x)
        clusters: Mean = down["clusters"]
        near = contrast_with(z, batch.y, clusters, self.temperature, self.alpha)
        near = near + 2 * distance_to_own(z, batch.y, centres(clusters), "cosine") ** 2
        return batch.mean(cross_entropy(logits, batch.y) + self.lam * near)

    def upload(self, model: Model, client: Client, data: LocalData, down: Tree) -> tuple[Tree, Client]:
        z = torch.cat([model.embed(client, batch.x) for batch in data.batches])
        y, mask = torch.cat([b.y for b in data.batches]), torch.cat([b.mask for b in data.batches])
        own = clusters_of_samples(z, y, mask, len(data.counts), self.most)
        return {"model": send(client, data, self.weighting), "clusters": Each(own)}, client

    def aggregate(self, server: Tree, up: Tree, cohort: Tensor) -> Tree:
        new = clusters_of(up["clusters"].rows, cohort)
        return {"model": up["model"].otherwise(server["model"]), "clusters": new}

    def prototypes(self, server: Tree) -> Mean:
        clusters: Mean = server["clusters"]
        return clusters

    def global_client(self, server: Tree) -> Client:
        return Client(server["model"]["params"], server["model"]["buffers"])
