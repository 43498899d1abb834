"""FedProx: FedAvg with a pull towards the global model.

Federated Optimization in Heterogeneous Networks
    Li et al., MLSys 2020. https://arxiv.org/abs/1812.06127
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge
from torch import Tensor

from protofed.method import Batch, Client, LocalData, Mean, Method, Model, Spec, Tree
from protofed.ops.checks import same_shapes
from protofed.ops.losses import cross_entropy
from protofed.ops.sharing import Weighting, send, shared, take
from protofed.ops.trees import squared_distance


@dataclass(frozen=True)
class FedProx(Method):
    """Average the models; keep each near the global one while it trains."""

    paper = "Li et al., MLSys 2020, arXiv 1812.06127"
    losses = ("CE(F(w; x), y) + mu/2 |w - w_t|^2, Eq. 2",)
    presets = {
        "paper": {"mu": 0.01, "weighting": "samples"},
        "official": {"mu": 0.0, "weighting": "uniform"},
    }

    mu: Annotated[float, Ge(0)] = 0.01
    """Weight of the proximal term mu/2 * |w - w_t|^2; 0 is FedAvg, which FedProto's code amounts to: its term has no
    gradient. FedProto's and MP-FedCL's papers give none."""
    weighting: Weighting = "samples"
    """Clients count by their number of samples, or all alike."""

    def check(self, specs: Sequence[Spec]) -> None:
        same_shapes("fedprox", specs)

    def init_server(self, spec: Spec) -> Tree:
        return shared(spec)

    def receive(self, model: Model, client: Client, data: LocalData, down: Tree) -> Client:
        return take(client, down)

    def loss(self, model: Model, client: Client, batch: Batch, down: Tree) -> Tensor:
        _, logits = model(client, batch.x)
        supervised = batch.mean(cross_entropy(logits, batch.y))
        return supervised + self.mu / 2 * squared_distance(client.params, down["params"])

    def upload(self, model: Model, client: Client, data: LocalData, down: Tree) -> tuple[Tree, Client]:
        return send(client, data, self.weighting), client

    def aggregate(self, server: Tree, up: Mean, cohort: Tensor) -> Tree:
        return up.otherwise(server)

    def global_client(self, server: Tree) -> Client:
        return Client(server["params"], server["buffers"])
