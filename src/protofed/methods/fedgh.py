"""FedGH: bodies of any kind under one head, which the server trains on the clients' class means.

FedGH: Heterogeneous Federated Learning with Generalized Global Header
    Yi et al., ACM Multimedia 2023. https://arxiv.org/abs/2303.13137
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt
from torch import Tensor

from protofed.method import Batch, Client, Each, LocalData, Method, Model, Params, Spec, Tree
from protofed.ops import random
from protofed.ops.checks import same_width
from protofed.ops.losses import cross_entropy
from protofed.ops.matching import linear, linear_heads, logits
from protofed.ops.prototypes import class_sums, per_client
from protofed.ops.server_training import descend
from protofed.ops.sharing import take
from protofed.ops.trees import total, under


@dataclass(frozen=True)
class FedGH(Method):
    """Keep the bodies; train one head for all on the server, on every client's class means."""

    paper = "Yi et al., ACM Multimedia 2023, arXiv 2303.13137"
    losses = ("CE(F(w; x), y) on the clients", "CE(head(class mean), class) on the server")
    presets = {"paper": {"scored_by": "own"}, "official": {"scored_by": "newest"}}

    server_epochs: Annotated[int, Ge(0)] = 1
    """Passes of the server over the class means in a round."""
    server_lr: Annotated[float, Gt(0)] = 0.01
    """Their step size."""
    server_batch: Annotated[int, Ge(0)] = 10
    """Class means in one step, 0 for all: the clients' batch size in the authors' comparison."""
    scored_by: Literal["own", "newest"] = "own"
    """A client is scored with the head that it trained itself, or with the server's newest (HtFLlib's code, in which
    clients take the server's head before they are tested)."""

    def check(self, specs: Sequence[Spec]) -> None:
        same_width("fedgh", specs)
        linear_heads("fedgh", specs)

    def init_server(self, spec: Spec) -> Tree:
        return {"head": under(spec.params, "head."), "key": random.key(spec.seed, "fedgh")}

    def broadcast(self, server: Tree, cohort: Tensor) -> Tree:
        return {"head": server["head"]}

    def receive(self, model: Model, client: Client, data: LocalData, down: Tree) -> Client:
        return take(client, {"params": down["head"], "buffers": {}})

    def loss(self, model: Model, client: Client, batch: Batch, down: Tree) -> Tensor:
        return batch.mean(cross_entropy(model(client, batch.x)[1], batch.y))

    def upload(self, model: Model, client: Client, data: LocalData, down: Tree) -> tuple[Tree, Client]:
        own = total(class_sums(model.embed(client, b.x), b, len(data.counts)) for b in data.batches)
        return {"means": Each(per_client(own))}, client

    def aggregate(self, server: Tree, up: Tree, cohort: Tensor) -> Tree:
        def loss(head: Params, z: Tensor, y: Tensor) -> Tensor:
            return cross_entropy(logits(linear(head), z), y)

        steps = (self.server_epochs, self.server_batch, self.server_lr)
        head = descend(server["head"], loss, up["means"].rows, cohort, *steps, server["key"])
        return {"head": head, "key": random.fold(server["key"], -1)}

    def predict(self, model: Model, client: Client, x: Tensor, down: Tree) -> dict[str, Tensor]:
        if self.scored_by == "newest":
            client = take(client, {"params": down["head"], "buffers": {}})
        return {"head": model(client, x)[1]}
