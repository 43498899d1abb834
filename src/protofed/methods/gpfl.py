"""GPFL: common class embeddings and a valve, which lets each client's model see embeddings in a common and an own way.

GPFL: Simultaneously Learning Global and Personalized Feature Information for Personalized Federated Learning
    Zhang et al., ICCV 2023. https://arxiv.org/abs/2308.10279
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor

from protofed.method import Batch, Client, LocalData, Mean, Method, Model, Params, Phase, Spec, Tree
from protofed.ops.checks import same_shapes
from protofed.ops.losses import cross_entropy
from protofed.ops.server_training import linear_layer, through
from protofed.ops.sharing import send, shared, take, without
from protofed.ops.trees import under

HEAD = ("head.",)
ADDED = ("classes.", "valve.")  # what is trained besides the model, with weight decay of its own
TABLE = "classes.table"


@dataclass(frozen=True)
class GPFL(Method):
    """Average bodies, class embeddings and valves; keep the heads, which see embeddings through the valve."""

    paper = "Zhang et al., ICCV 2023, arXiv 2308.10279"
    losses = (
        "CE(head(V(f(x), p)), y) + -log(e^cos(V(f(x), g), E[y]) / sum over classes of e^cos(V(f(x), g), E[c]))",
        "lam * |V(f(x), g) - E[y] as received|, g and p the means of E over classes and over the client's samples",
    )
    presets = {
        "paper": {"conditions": "received", "length": "sample"},
        "official": {"conditions": "trained", "length": "batch"},
    }

    lam: Annotated[float, Ge(0)] = 0.01
    """Weight of the distance to the received class embeddings."""
    mu: Annotated[float, Ge(0)] = 0.1
    """Weight decay of class embeddings and valve."""
    conditions: Literal["received", "trained"] = "received"
    """What opens the valve comes from the received class embeddings, or from those that the client trained last, and
    zeros in its first round (the authors' code)."""
    length: Literal["sample", "batch"] = "sample"
    """The distance is averaged over samples, or that of a whole batch as one vector (the authors' code)."""

    def check(self, specs: Sequence[Spec]) -> None:
        same_shapes("gpfl", [spec._replace(params=without(spec.params, HEAD)) for spec in specs])

    def init_server(self, spec: Spec) -> Tree:
        return shared(self.init_client(spec), HEAD)

    def init_client(self, spec: Spec) -> Client:
        generator, dim = spec.generator(), spec.dim
        made = {TABLE: torch.randn(spec.classes, dim, generator=generator)}
        for part in ("scale", "shift"):
            made |= linear_layer(f"valve.{part}", dim, dim, generator)
            made |= {f"valve.{part}.norm.weight": torch.ones(dim), f"valve.{part}.norm.bias": torch.zeros(dim)}
        closed = {"common": torch.zeros(dim), "own": torch.zeros(dim), "trained": torch.zeros(())}
        return Client(spec.params | made, spec.buffers, closed)

    def receive(self, model: Model, client: Client, data: LocalData, down: Tree) -> Client:
        share = data.counts / data.counts.sum().clamp(min=1)
        table = down["params"][TABLE]
        if self.conditions == "trained":
            table = client.params[TABLE] * client.memory["trained"]
        opened = {"common": table.mean(0), "own": share @ table}
        return take(client, down)._replace(memory=client.memory | opened)

    def phases(self) -> tuple[Phase, ...]:
        return (Phase(pull=self.decay),)

    def decay(self, client: Client, down: Tree) -> Params:
        added = {name: self.mu * value for name, value in under(client.params, ADDED).items()}
        return {name: added[name] if name in added else torch.zeros_like(p) for name, p in client.params.items()}

    def loss(self, model: Model, client: Client, batch: Batch, down: Tree) -> Tensor:
        z, table = model.embed(client, batch.x), client.params[TABLE]
        common = valve(client.params, z, client.memory["common"])
        logits = model.classify(client, valve(client.params, z, client.memory["own"]))
        angles = cross_entropy(F.normalize(common) @ F.normalize(table).T, batch.y)
        apart = common - down["params"][TABLE][batch.y]
        if self.length == "sample":
            far = batch.mean(_length(apart))
        else:
            far = _length((apart * batch.mask[:, None]).flatten())
        return batch.mean(cross_entropy(logits, batch.y) + angles) + self.lam * far

    def upload(self, model: Model, client: Client, data: LocalData, down: Tree) -> tuple[Mean, Client]:
        some = (data.counts.sum() > 0).to(data.counts.dtype)
        trained = torch.maximum(client.memory["trained"], some)
        return send(client, data, "samples", HEAD), client._replace(memory=client.memory | {"trained": trained})

    def aggregate(self, server: Tree, up: Mean, cohort: Tensor) -> Tree:
        return up.otherwise(server)

    def predict(self, model: Model, client: Client, x: Tensor, down: Tree) -> dict[str, Tensor]:
        return {"head": model.classify(client, valve(client.params, model.embed(client, x), client.memory["own"]))}


def valve(params: Params, z: Tensor, condition: Tensor) -> Tensor:
    """Embeddings (B, D) scaled and shifted by what two small networks make of a condition (D,)."""
    scale, shift = (
        F.layer_norm(
            F.relu(through(params, f"valve.{part}", condition)),
            condition.shape,
            params[f"valve.{part}.norm.weight"],
            params[f"valve.{part}.norm.bias"],
        )
        for part in ("scale", "shift")
    )
    return F.relu(z * (scale + 1) + shift)


def _length(apart: Tensor) -> Tensor:
    """The length of vectors (..., D), with slope 0 at 0."""
    square = (apart**2).sum(-1)
    some = square > 0
    return torch.where(some, torch.where(some, square, 1).sqrt(), 0)
