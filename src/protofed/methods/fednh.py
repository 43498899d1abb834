"""FedNH: a fixed head of well separated unit prototypes, slowly turned towards the classes' mean embeddings.

Tackling Data Heterogeneity in Federated Learning with Class Prototypes
    Dai et al., AAAI 2023. https://arxiv.org/abs/2212.02758
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from annotated_types import Gt, Lt
from torch import Tensor

from protofed.method import Batch, Client, LocalData, Mean, Method, Model, Phase, Spec, Tree
from protofed.ops.checks import same_shapes
from protofed.ops.losses import cross_entropy
from protofed.ops.prototypes import ScoredBy, as_downloaded, class_sums, downloaded, no_prototypes, one_each, per_client
from protofed.ops.sharing import Weighting, send, shared, take, without
from protofed.ops.sphere import orthogonal, separated
from protofed.ops.trees import total

HEAD = ("head.",)  # the model's own head is not used: the prototypes are the head


@dataclass(frozen=True)
class FedNH(Method):
    """Average bodies trained against unit prototypes; the server turns the prototypes towards the class means."""

    paper = "Dai et al., AAAI 2023, arXiv 2212.02758"
    losses = ("CE(s * f(x)/|f(x)| W^T, y) with W fixed, Eq. 2",)
    not_followed = ("FedNH's code takes prototypes of augmented images; here of the images as they are",)
    presets = {
        "paper": {
            "start": "separated",
            "scale": 30.0,
            "train_scale": True,
            "alpha": "uniform",
            "scored_by": "downloaded",
        },
        "official": {
            "start": "orthogonal",
            "scale": 1.0,
            "train_scale": True,
            "alpha": "counts",
            "scored_by": "downloaded",
        },
    }

    rho: Annotated[float, Gt(0), Lt(1)] = 0.9
    """Smoothing of the prototypes, Eq. 4: near 1 they hardly change."""
    scale: Annotated[float, Gt(0)] = 20.0
    """The s of Eq. 2 at the start. FedNH's code: 1 for its CNN, 20 for its ResNet; the paper's text: 30."""
    train_scale: bool = True
    """Train s with the body and average it (the experiments), or keep it fixed."""
    start: Literal["separated", "orthogonal"] = "separated"
    """Initial prototypes: problem (1) of the paper solved, or orthogonal rows (the paper's code; classes <= width)."""
    alpha: Literal["counts", "uniform"] = "counts"
    """Eq. 4: unit class means weighted by sample counts (the paper's code), or plain means with weight 1/|S|."""
    weighting: Weighting = "uniform"
    """Bodies count all alike (the paper), or by their number of samples."""
    scored_by: ScoredBy = "downloaded"
    """A client's own model is scored with the prototypes it last downloaded (Alg. 1, l. 12; the paper's code), or with
    the server's newest. The global model is always scored with the newest."""

    def check(self, specs: Sequence[Spec]) -> None:
        same_shapes("fednh", [spec._replace(params=without(spec.params, HEAD)) for spec in specs])

    def init_server(self, spec: Spec) -> Tree:
        make = separated if self.start == "separated" else orthogonal
        return {"body": shared(self.init_client(spec), HEAD), "prototypes": make(spec.classes, spec.dim, spec.seed)}

    def init_client(self, spec: Spec) -> Client:
        none = downloaded(no_prototypes(spec.classes, spec.dim))  # before its first round
        params = spec.params | {"scale": torch.tensor(self.scale)}
        return Client(params, spec.buffers, none if self.scored_by == "downloaded" else {})

    def receive(self, model: Model, client: Client, data: LocalData, down: Tree) -> Client:
        client = take(client, down["body"])
        kept = downloaded(_all(down["prototypes"])) if self.scored_by == "downloaded" else {}
        return client._replace(memory=kept)

    def phases(self) -> tuple[Phase, ...]:
        return (Phase(("body.", "scale") if self.train_scale else ("body.",)),)

    def loss(self, model: Model, client: Client, batch: Batch, down: Tree) -> Tensor:
        z = F.normalize(model.embed(client, batch.x))
        return batch.mean(cross_entropy(client.params["scale"] * z @ down["prototypes"].T, batch.y))  # Eq. 2

    def upload(self, model: Model, client: Client, data: LocalData, down: Tree) -> tuple[Tree, Client]:
        classes = len(data.counts)
        own = total(class_sums(F.normalize(model.embed(client, b.x)), b, classes) for b in data.batches)  # Eq. 3
        if self.alpha == "counts":
            prototypes = Mean.of(F.normalize(own.value), own.weight)
        else:
            prototypes = per_client(own)
        return {"body": send(client, data, self.weighting, HEAD), "prototypes": prototypes}, client

    def aggregate(self, server: Tree, up: Tree, cohort: Tensor) -> Tree:
        new = up["prototypes"]
        mean = F.normalize(new.value) if self.alpha == "counts" else new.total / len(cohort)
        turned = F.normalize(self.rho * server["prototypes"] + (1 - self.rho) * mean)  # Eq. 4
        kept = torch.where((new.weight > 0)[:, None], turned, server["prototypes"])
        return {"body": up["body"].otherwise(server["body"]), "prototypes": kept}

    def predict(self, model: Model, client: Client, x: Tensor, down: Tree) -> dict[str, Tensor]:
        rows = self._scored_with(client, down).value
        return {"head": self.embed(model, client, x) @ rows.T}  # the scale does not change the order

    def _scored_with(self, client: Client, down: Tree) -> Mean:
        newest = _all(down["prototypes"])
        if "downloaded" in client.memory:  # the global model has no memory
            return as_downloaded(client.memory, newest)
        return newest

    def embed(self, model: Model, client: Client, x: Tensor) -> Tensor:
        return F.normalize(model.embed(client, x))

    def prototypes(self, server: Tree) -> Mean:
        return one_each(_all(server["prototypes"]))

    def prototypes_of(self, client: Client, server: Tree) -> Mean:
        return one_each(self._scored_with(client, server))

    def global_client(self, server: Tree) -> Client:
        return Client(server["body"]["params"], server["body"]["buffers"])


def _all(rows: Tensor) -> Mean:
    """Prototypes (C, D) of which every class has one."""
    return Mean(rows, rows.new_ones(len(rows)))
