"""Local: every client trains alone, and nothing is sent. The baseline that federation has to beat."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from protofed.method import Batch, Client, LocalData, Method, Model, Spec, Tree
from protofed.ops.losses import cross_entropy


@dataclass(frozen=True)
class Local(Method):
    """Every client trains alone."""

    paper = "The lower bound of every comparison"
    losses = ("CE(F(w; x), y)",)
    not_followed = ("FedNH's code trains Local for a tenth of the rounds, its step size starting again",)
    presets = {"paper": {"init": "per_client"}, "official": {"init": "common"}}

    init: Literal["common", "per_client"] = "per_client"
    """Initial weights: each client its own, or the same for all of one architecture (FedNH's code)."""

    def init_server(self, spec: Spec) -> Tree:
        return {}

    def loss(self, model: Model, client: Client, batch: Batch, down: Tree) -> Tensor:
        _, logits = model(client, batch.x)
        return batch.mean(cross_entropy(logits, batch.y))

    def upload(self, model: Model, client: Client, data: LocalData, down: Tree) -> tuple[Tree, Client]:
        return {}, client

    def aggregate(self, server: Tree, up: Tree, cohort: Tensor) -> Tree:
        return server
