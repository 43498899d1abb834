"""Ditto: a global model as in FedAvg, plus a personal one that stays near it.

Ditto: Fair and Robust Federated Learning Through Personalization
    Li et al., ICML 2021. https://arxiv.org/abs/2012.04221
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge
from torch import Tensor

from protofed.method import Batch, Client, LocalData, Mean, Method, Model, Params, Phase, Spec, Tree
from protofed.ops.checks import same_shapes
from protofed.ops.losses import cross_entropy
from protofed.ops.sharing import Weighting, send, shared, take, without
from protofed.ops.trees import squared_distance, under

OWN = "personal."


@dataclass(frozen=True)
class Ditto(Method):
    """Average copies of the global model; keep a personal model v near it by lam/2 * |v - w|^2."""

    paper = "Li et al., ICML 2021, arXiv 2012.04221"
    losses = (
        "CE(F(w; x), y) for the global copy",
        "CE(F(v; x), y) + lam/2 |v - anchor|^2 for the personal model, Eq. 2",
    )
    presets = {
        "paper": {"lam": 1.0, "anchor": "received", "clip": "whole"},
        "official": {"lam": 0.75, "anchor": "trained", "clip": "loss"},
    }

    lam: Annotated[float, Ge(0)] = 1.0
    """Pull of the personal model towards the anchor; 0 trains it alone. FedNH's code takes 0.75."""
    anchor: Literal["received", "trained"] = "received"
    """The pull is towards the global model as received (the authors), or as trained here this round (FedNH's code)."""
    personal_epochs: Annotated[int, Ge(0)] = 0
    """Passes that train the personal model; 0: local_epochs."""
    plain: bool = True
    """Train the personal model without momentum and weight decay (the authors' and FedNH's code)."""
    clip: Literal["whole", "loss"] = "whole"
    """optimizer.clip bounds the personal model's whole gradient, or that of the cross-entropy alone, to which the pull
    is added afterwards (FedNH's code)."""
    weighting: Weighting = "uniform"
    """Clients count all alike (the authors' and FedNH's code), or by their number of samples."""

    def check(self, specs: Sequence[Spec]) -> None:
        same_shapes("ditto", specs)

    def init_server(self, spec: Spec) -> Tree:
        return shared(spec)

    def init_client(self, spec: Spec) -> Client:
        def twice(tensors: Params) -> Params:
            return tensors | {OWN + name: value for name, value in tensors.items()}

        return Client(twice(spec.params), twice(spec.buffers))

    def receive(self, model: Model, client: Client, data: LocalData, down: Tree) -> Client:
        return take(client, down)

    def phases(self) -> tuple[Phase, ...]:
        copy = Phase(("body.", "head."))
        own = Phase((OWN,), self.personal_loss, self.personal_epochs or None, plain=self.plain)
        if self.clip == "loss":
            own = own._replace(loss=self.own_loss, pull=self.pull)
        return (copy, own)  # with the received anchor the order does not matter: neither sees the other

    def loss(self, model: Model, client: Client, batch: Batch, down: Tree) -> Tensor:
        _, logits = model(client, batch.x)
        return batch.mean(cross_entropy(logits, batch.y))

    def own_loss(self, model: Model, client: Client, batch: Batch, down: Tree) -> Tensor:
        _, logits = model(client, batch.x, at=OWN)
        return batch.mean(cross_entropy(logits, batch.y))

    def personal_loss(self, model: Model, client: Client, batch: Batch, down: Tree) -> Tensor:
        distance = squared_distance(under(client.params, OWN, strip=True), self._anchor(client, down))
        return self.own_loss(model, client, batch, down) + self.lam / 2 * distance

    def pull(self, client: Client, down: Tree) -> Params:
        """The gradient of lam/2 |v - anchor|^2."""
        anchor = self._anchor(client, down)
        return {OWN + name: self.lam * (client.params[OWN + name] - w) for name, w in anchor.items()}

    def _anchor(self, client: Client, down: Tree) -> Params:
        return down["params"] if self.anchor == "received" else without(client.params, [OWN])

    def upload(self, model: Model, client: Client, data: LocalData, down: Tree) -> tuple[Tree, Client]:
        return send(client, data, self.weighting, [OWN]), client

    def aggregate(self, server: Tree, up: Mean, cohort: Tensor) -> Tree:
        return up.otherwise(server)

    def predict(self, model: Model, client: Client, x: Tensor, down: Tree) -> dict[str, Tensor]:
        return {"head": model(client, x, at=_at(client))[1]}

    def embed(self, model: Model, client: Client, x: Tensor) -> Tensor:
        return model.embed(client, x, at=_at(client))

    def global_client(self, server: Tree) -> Client:
        return Client(server["params"], server["buffers"])


def _at(client: Client) -> str:
    """The prefix of the network that a client is judged by: the global model has only one."""
    return OWN if any(name.startswith(OWN) for name in client.params) else ""
