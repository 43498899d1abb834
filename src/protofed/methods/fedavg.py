"""FedAvg: train the global model on every client, average the results.

Communication-Efficient Learning of Deep Networks from Decentralized Data
    McMahan et al., AISTATS 2017. https://arxiv.org/abs/1602.05629
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from protofed.method import Batch, Client, LocalData, Mean, Method, Model, Spec, Tree
from protofed.ops.checks import same_shapes
from protofed.ops.losses import cross_entropy
from protofed.ops.sharing import Weighting, send, shared, take


@dataclass(frozen=True)
class FedAvg(Method):
    """Average the models."""

    paper = "McMahan et al., AISTATS 2017, arXiv 1602.05629"
    losses = ("CE(F(w; x), y)",)
    presets = {"paper": {"weighting": "samples"}, "official": {"weighting": "uniform"}}

    weighting: Weighting = "samples"
    """Clients count by their number of samples (the paper), or all alike (FedProto's and FedNH's code)."""

    def check(self, specs: Sequence[Spec]) -> None:
        same_shapes("fedavg", specs)

    def init_server(self, spec: Spec) -> Tree:
        return shared(spec)

    def receive(self, model: Model, client: Client, data: LocalData, down: Tree) -> Client:
        return take(client, down)

    def loss(self, model: Model, client: Client, batch: Batch, down: Tree) -> Tensor:
        _, logits = model(client, batch.x)
        return batch.mean(cross_entropy(logits, batch.y))

    def upload(self, model: Model, client: Client, data: LocalData, down: Tree) -> tuple[Tree, Client]:
        return send(client, data, self.weighting), client

    def aggregate(self, server: Tree, up: Mean, cohort: Tensor) -> Tree:
        return up.otherwise(server)

    def global_client(self, server: Tree) -> Client:
        return Client(server["params"], server["buffers"])
