"""FedPer: a shared body, and a private head for each client.

Federated Learning with Personalization Layers
    Arivazhagan et al., 2019. https://arxiv.org/abs/1912.00818
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from protofed.errors import UserError
from protofed.method import Batch, Client, LocalData, Mean, Method, Model, Spec, Tree
from protofed.ops.checks import same_shapes
from protofed.ops.losses import cross_entropy
from protofed.ops.sharing import Weighting, send, shared, take, without


@dataclass(frozen=True)
class FedPer(Method):
    """Average the bodies; every client keeps its head."""

    paper = "Arivazhagan et al., 2019, arXiv 1912.00818"
    losses = ("CE(F(w; x), y)",)
    presets = {
        "paper": {"private": ("head.",), "weighting": "samples"},
        "official": {"private": ("head.",), "weighting": "uniform"},
    }

    private: tuple[str, ...] = ("head.",)
    """Prefixes that stay at home: the head (FedNH's code); FedProto's keeps body.fc1. of its CNNs too."""
    weighting: Weighting = "samples"
    """Clients count by their number of samples (the paper), or all alike (FedProto's and FedNH's code)."""

    def check(self, specs: Sequence[Spec]) -> None:
        if not without(specs[0].params, self.private):
            raise UserError(
                f"method.private = {list(self.private)} leaves nothing to share. Name fewer parts, or use project = 64 "
                "behind a frozen encoder."
            )
        same_shapes("fedper", [spec._replace(params=without(spec.params, self.private)) for spec in specs])

    def init_server(self, spec: Spec) -> Tree:
        return {"shared": shared(spec, self.private), "first": shared(spec)}

    def broadcast(self, server: Tree, cohort: Tensor) -> Tree:
        return server["shared"]

    def receive(self, model: Model, client: Client, data: LocalData, down: Tree) -> Client:
        return take(client, down)

    def loss(self, model: Model, client: Client, batch: Batch, down: Tree) -> Tensor:
        _, logits = model(client, batch.x)
        return batch.mean(cross_entropy(logits, batch.y))

    def upload(self, model: Model, client: Client, data: LocalData, down: Tree) -> tuple[Tree, Client]:
        return send(client, data, self.weighting, self.private), client

    def aggregate(self, server: Tree, up: Mean, cohort: Tensor) -> Tree:
        return server | {"shared": up.otherwise(server["shared"])}

    def global_client(self, server: Tree) -> Client:
        """The mean body with the initial head, as FedNH's code measures GM."""
        first = Client(server["first"]["params"], server["first"]["buffers"])
        return take(first, server["shared"])
