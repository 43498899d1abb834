"""FedBABU: only the body learns in the federation, against a fixed random head; everyone fine-tunes at the end.

FedBABU: Towards Enhanced Representation for Federated Image Classification
    Oh et al., ICLR 2022. https://arxiv.org/abs/2106.06042
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge
from torch import Tensor

from protofed.method import Batch, Client, LocalData, Mean, Method, Model, Phase, Spec, Tree
from protofed.ops.checks import same_shapes
from protofed.ops.losses import cross_entropy
from protofed.ops.sharing import Weighting, send, shared, take


@dataclass(frozen=True)
class FedBABU(Method):
    """Average the bodies trained against one fixed head; fine-tune everything at the end."""

    paper = "Oh et al., ICLR 2022, arXiv 2106.06042"
    losses = ("CE(F(w; x), y), over the body only; over everything in the fine-tuning",)
    not_followed = ("the authors fine-tune the model of the best round, found on test data; here that of the last",)
    presets = {"paper": {"start": "global", "tune_lr": 0.001}, "official": {"start": "stale", "tune_lr": 0.0}}

    tune_epochs: Annotated[int, Ge(0)] = 5
    """Passes of fine-tuning, body and head, after the last round; 0: none."""
    tune_lr: Annotated[float, Ge(0)] = 0.0
    """Step size of the fine-tuning; 0: that of the last round (FedNH's code). The authors take 0.001."""
    start: Literal["global", "stale"] = "global"
    """Fine-tune from the global model (the authors), or from what a client last had (FedNH's code)."""
    weighting: Weighting = "uniform"
    """Clients count all alike (the authors' and FedNH's code), or by their number of samples."""

    def check(self, specs: Sequence[Spec]) -> None:
        same_shapes("fedbabu", specs)

    def init_server(self, spec: Spec) -> Tree:
        return shared(spec)

    def receive(self, model: Model, client: Client, data: LocalData, down: Tree) -> Client:
        return take(client, down)

    def phases(self) -> tuple[Phase, ...]:
        return (Phase(("body.",)),)

    def loss(self, model: Model, client: Client, batch: Batch, down: Tree) -> Tensor:
        _, logits = model(client, batch.x)
        return batch.mean(cross_entropy(logits, batch.y))

    def upload(self, model: Model, client: Client, data: LocalData, down: Tree) -> tuple[Tree, Client]:
        return send(client, data, self.weighting, ["head."]), client

    def aggregate(self, server: Tree, up: Mean, cohort: Tensor) -> Tree:
        body = up.otherwise(shared(self.global_client(server), ["head."]))
        return {part: server[part] | body[part] for part in server}

    def global_client(self, server: Tree) -> Client:
        return Client(server["params"], server["buffers"])

    def last_receive(self, model: Model, client: Client, data: LocalData, down: Tree) -> Client:
        return take(client, down) if self.start == "global" else client

    def last_phases(self) -> tuple[Phase, ...]:
        return (Phase(epochs=self.tune_epochs, lr=self.tune_lr or None),) if self.tune_epochs else ()
