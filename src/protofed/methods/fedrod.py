"""FedROD: a generic head that treats all classes alike, plus a personal head that fits the client's own classes.

On Bridging Generic and Personalized Federated Learning for Image Classification
    Chen and Chao, ICLR 2022. https://arxiv.org/abs/2107.00778
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.method import Batch, Client, LocalData, Mean, Method, Model, Params, Phase, Spec, Tree
from protofed.ops.checks import same_shapes
from protofed.ops.losses import cross_entropy
from protofed.ops.sharing import Weighting, send, shared, take

OWN = "personal_head."
ABSENT = 1e-12  # the count of a class that a client does not have


@dataclass(frozen=True)
class FedROD(Method):
    """Average a model trained with balanced softmax; add a personal head on top of it."""

    paper = "Chen and Chao, ICLR 2022, arXiv 2107.00778"
    losses = ("CE(G(z) + log n_y/n, y), balanced softmax, for body and generic head", "CE(G(z) + P(z), y) for P alone")
    not_followed = ("in FedNH's code the linear personal head starts as a copy of the generic one; here at zero",)
    presets = {
        "paper": {"personal": "linear", "clip_personal": True, "weighting": "samples"},
        "official": {"personal": "hyper", "clip_personal": False, "weighting": "uniform"},
    }

    personal: Literal["linear", "hyper"] = "linear"
    """The personal head is a private linear layer, or is made by an averaged hypernetwork from the class shares; the
    paper has both, FedNH's code takes the second for its CNN."""
    plain: bool = True
    """Train the personal head without momentum and weight decay (FedNH's code)."""
    clip_personal: bool = True
    """optimizer.clip bounds the personal head's gradients too, or not (FedNH's code)."""
    weighting: Weighting = "uniform"
    """Clients count all alike (FedNH's code), or by their number of samples (the paper)."""

    def check(self, specs: Sequence[Spec]) -> None:
        same_shapes("fedrod", specs)

    def init_server(self, spec: Spec) -> Tree:
        return shared(self.init_client(spec), [OWN])

    def init_client(self, spec: Spec) -> Client:
        made = self._hyper(spec) if self.personal == "hyper" else {OWN + "weight": torch.zeros(spec.classes, spec.dim)}
        return Client(spec.params | made, spec.buffers, {"share": torch.zeros(spec.classes)})

    def _hyper(self, spec: Spec) -> Params:
        """Two layers, C -> D -> D * C, initialised as torch initialises linear layers."""

        def layer(rows: int, columns: int) -> Tensor:
            drawn: Tensor = (2 * torch.rand(rows, columns, generator=generator) - 1) / columns**0.5
            return drawn

        generator = spec.generator()
        wide = spec.dim * spec.classes
        return {
            "hyper.first.weight": layer(spec.dim, spec.classes),
            "hyper.first.bias": layer(spec.dim, 1).flatten() / spec.classes**0.5,
            "hyper.last.weight": layer(wide, spec.dim),
            "hyper.last.bias": layer(wide, 1).flatten() / spec.dim**0.5,
        }

    def receive(self, model: Model, client: Client, data: LocalData, down: Tree) -> Client:
        counts = torch.where(data.counts > 0, data.counts, ABSENT)
        return take(client, down)._replace(memory={"share": counts / counts.sum()})

    def phases(self) -> tuple[Phase, ...]:
        own = OWN if self.personal == "linear" else "hyper."
        return Phase(("body.", "head.")), Phase((own,), self.personal_loss, plain=self.plain, clip=self.clip_personal)

    def loss(self, model: Model, client: Client, batch: Batch, down: Tree) -> Tensor:
        _, logits = model(client, batch.x)
        return batch.mean(cross_entropy(logits + client.memory["share"].log(), batch.y))  # balanced softmax

    def personal_loss(self, model: Model, client: Client, batch: Batch, down: Tree) -> Tensor:
        z, logits = model(client, batch.x)
        both = logits.detach() + z.detach() @ self._personal_head(client).T
        return batch.mean(cross_entropy(both, batch.y))

    def _personal_head(self, client: Client) -> Tensor:
        """The personal head's weight (C, D)."""
        p = client.params
        if self.personal == "linear":
            return p[OWN + "weight"]
        hidden = F.relu(p["hyper.first.weight"] @ client.memory["share"] + p["hyper.first.bias"])
        made = p["hyper.last.weight"] @ hidden + p["hyper.last.bias"]
        return made.reshape(len(client.memory["share"]), -1)

    def upload(self, model: Model, client: Client, data: LocalData, down: Tree) -> tuple[Tree, Client]:
        return send(client, data, self.weighting, [OWN]), client

    def aggregate(self, server: Tree, up: Mean, cohort: Tensor) -> Tree:
        return up.otherwise(server)

    def predict(self, model: Model, client: Client, x: Tensor, down: Tree) -> dict[str, Tensor]:
        z, logits = model(client, x)
        if "share" not in client.memory:  # the global model: the generic head alone
            return {"head": logits}
        return {"head": logits + z @ self._personal_head(client).T}

    def global_client(self, server: Tree) -> Client:
        return Client(server["params"], server["buffers"])
