"""FedRep: first the head on the received body, then the body; only the body is shared.

Exploiting Shared Representations for Personalized Federated Learning
    Collins et al., ICML 2021. https://arxiv.org/abs/2102.07078
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge
from torch import Tensor

from protofed.method import Batch, Client, LocalData, Mean, Method, Model, Phase, Spec, Tree
from protofed.ops.checks import same_shapes
from protofed.ops.losses import cross_entropy
from protofed.ops.sharing import Weighting, send, shared, take, without

HEAD = ("head.",)


@dataclass(frozen=True)
class FedRep(Method):
    """Train the head with the body fixed, then the body with the head fixed; average the bodies."""

    paper = "Collins et al., ICML 2021, arXiv 2102.07078"
    losses = ("CE(F(w; x), y), over the head and then over the body, Alg. 1",)
    presets = {"paper": {"last_head_epochs": 10}, "official": {"last_head_epochs": 0}}

    head_epochs: Annotated[int, Ge(1)] = 10
    """Passes that train the head, before local_epochs that train the body."""
    last_head_epochs: Annotated[int, Ge(0)] = 10
    """Passes that train every client's head after the last round (the authors' code); 0: none (FedNH's code)."""
    weighting: Weighting = "uniform"
    """Clients count all alike (the authors' code), or by their number of samples."""

    def check(self, specs: Sequence[Spec]) -> None:
        same_shapes("fedrep", [spec._replace(params=without(spec.params, HEAD)) for spec in specs])

    def init_server(self, spec: Spec) -> Tree:
        return {"shared": shared(spec, HEAD), "first": shared(spec)}

    def broadcast(self, server: Tree, cohort: Tensor) -> Tree:
        return server["shared"]

    def receive(self, model: Model, client: Client, data: LocalData, down: Tree) -> Client:
        return take(client, down)

    def phases(self) -> tuple[Phase, ...]:
        return Phase(HEAD, epochs=self.head_epochs), Phase(("body.",))

    def loss(self, model: Model, client: Client, batch: Batch, down: Tree) -> Tensor:
        _, logits = model(client, batch.x)
        return batch.mean(cross_entropy(logits, batch.y))

    def upload(self, model: Model, client: Client, data: LocalData, down: Tree) -> tuple[Tree, Client]:
        return send(client, data, self.weighting, HEAD), client

    def aggregate(self, server: Tree, up: Mean, cohort: Tensor) -> Tree:
        return server | {"shared": up.otherwise(server["shared"])}

    def global_client(self, server: Tree) -> Client:
        """The mean body with the initial head, as FedNH's code measures GM."""
        first = Client(server["first"]["params"], server["first"]["buffers"])
        return take(first, server["shared"])

    def last_phases(self) -> tuple[Phase, ...]:
        return (Phase(HEAD, epochs=self.last_head_epochs),) if self.last_head_epochs else ()
