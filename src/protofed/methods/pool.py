"""What MP-, SP- and DP-FedCL have in common: a pool of all clients' prototypes to contrast embeddings with.

MP-FedCL: Multi-Prototype Federated Contrastive Learning for Edge Intelligence
    Qiao et al., 2023. https://arxiv.org/abs/2304.01950
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from annotated_types import Gt
from torch import Tensor

from protofed.method import Batch, Client, Each, LocalData, Mean, Method, Model, Spec, Tree
from protofed.ops.checks import same_shapes
from protofed.ops.losses import cross_entropy
from protofed.ops.pool import by_class, class_means, contrast, nearest_of_pool, no_pool, pad
from protofed.ops.prototypes import no_prototypes
from protofed.ops.sharing import Weighting, send, shared, take


@dataclass(frozen=True)
class PrototypePool(Method):
    """Average the models; pull embeddings towards all clients' prototypes of their class, away from the others."""

    paper = "Qiao et al., 2023, arXiv 2304.01950"
    losses = ("CE(F(w; x), y), Eq. 3", "contrast of f(x) with the padded pool, Eqs. 10, 11; their sum is Eq. 12")
    scores = ("head", "proto")
    not_followed = (
        "P(y) of Eq. 11 is the sample's own class; the text's 'labels distinct from y' would pull to the wrong ones",
        "where not all clients take part, the pool is that of the round's; a class they lack keeps its mean",
    )
    presets = {"paper": {"unit": False, "weighting": "samples"}, "official": {"unit": True, "weighting": "uniform"}}

    inference: Literal["head", "proto"] = "proto"
    """Classify by the nearest prototype of the pool (Alg. 2), or by the classifier."""
    temperature: Annotated[float, Gt(0)] = 0.07
    """The tau of Eq. 11."""
    unit: bool = True
    """Embeddings and prototypes are brought to length 1, without which Eq. 11 saturates early at tau = 0.07 (FedPCL's
    code), or stay as they are (the paper's text)."""
    weighting: Weighting = "samples"
    """Models count by their number of samples (Alg. 1, l. 9), or all alike (FedPCL's code)."""

    @property
    @abstractmethod
    def slots(self) -> int:
        """The most prototypes that a client can have per class."""

    @abstractmethod
    def cluster(self, z: Tensor, y: Tensor, mask: Tensor, classes: int, key: Tensor) -> Mean:
        """Eq. 7: prototypes (C, K, D) of embeddings (N, D)."""

    def padded(self, pool: Mean, means: Mean) -> Mean:
        """Eq. 10: the pool without gaps."""
        return pad(pool, means, whole=True)

    def check(self, specs: Sequence[Spec]) -> None:
        same_shapes(type(self).__name__.lower(), specs)

    def init_server(self, spec: Spec) -> Tree:
        pool = no_pool(spec.classes, self.slots, spec.dim)
        return {"model": shared(spec), "pool": pool, "means": no_prototypes(spec.classes, spec.dim)}

    def receive(self, model: Model, client: Client, data: LocalData, down: Tree) -> Client:
        return take(client, down["model"])

    def represent(self, z: Tensor) -> Tensor:
        return F.normalize(z) if self.unit else z

    def loss(self, model: Model, client: Client, batch: Batch, down: Tree) -> Tensor:
        z, logits = model(client, batch.x)
        pool = self.padded(down["pool"], down["means"])
        pull = contrast(self.represent(z), batch.y, pool, down["means"], self.temperature)  # Eq. 11
        return batch.mean(cross_entropy(logits, batch.y) + pull)  # Eq. 12

    def upload(self, model: Model, client: Client, data: LocalData, down: Tree) -> tuple[Tree, Client]:
        z = torch.cat([self.represent(model.embed(client, batch.x)) for batch in data.batches])  # Eq. 6
        y, mask = (torch.cat([part[i] for part in data.batches]) for i in (1, 2))
        own = self.cluster(z, y, mask, len(data.counts), data.key)
        return {"model": send(client, data, self.weighting), "prototypes": Each(own)}, client

    def aggregate(self, server: Tree, up: Tree, cohort: Tensor) -> Tree:
        pool = up["prototypes"].rows  # Eq. 8
        means = class_means(pool, server["means"])  # Eq. 9
        return {"model": up["model"].otherwise(server["model"]), "pool": pool, "means": means}

    def predict(self, model: Model, client: Client, x: Tensor, down: Tree) -> dict[str, Tensor]:
        z, logits = model(client, x)
        return {"head": logits, "proto": nearest_of_pool(self.represent(z), down["pool"], down["means"])}

    def embed(self, model: Model, client: Client, x: Tensor) -> Tensor:
        return self.represent(model.embed(client, x))

    def prototypes(self, server: Tree) -> Mean:
        return by_class(server["pool"], server["means"])

    def global_client(self, server: Tree) -> Client:
        return Client(server["model"]["params"], server["model"]["buffers"])
