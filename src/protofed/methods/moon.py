"""MOON: embeddings stay near those of the global model and away from those of the client's last one.

Model-Contrastive Federated Learning
    Li et al., CVPR 2021. https://arxiv.org/abs/2103.16257
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt
from torch import Tensor

from protofed.method import Batch, Client, LocalData, Mean, Method, Model, Params, Phase, Spec, Tree
from protofed.ops.checks import same_shapes
from protofed.ops.losses import cross_entropy
from protofed.ops.server_training import linear_layer, through
from protofed.ops.sharing import Weighting, send, shared, take, without

GLOBAL, LAST = "global.", "last."  # the two models that a client compares its own with, frozen
OWN_HEAD = ("head.",)


@dataclass(frozen=True)
class MOON(Method):
    """Average models; contrast each sample's embedding with the global model's and with the last local model's."""

    paper = "Li et al., CVPR 2021, arXiv 2103.16257"
    losses = (
        "CE(F(w; x), y) + mu * -log(e^(cos(z, z_global) / t) / (e^(cos(z, z_global) / t) + e^(cos(z, z_last) / t)))",
    )
    presets = {
        "paper": {"mu": 5.0, "temperature": 0.5, "projection": 256, "weighting": "samples"},
        "official": {"mu": 5.0, "temperature": 0.5, "projection": 256, "weighting": "samples"},
    }

    mu: Annotated[float, Ge(0)] = 5.0
    """Weight of the contrastive loss. The paper tunes it: 5 for CIFAR-10, 1 for CIFAR-100 and Tiny-ImageNet."""
    temperature: Annotated[float, Gt(0)] = 0.5
    """The tau of the contrastive loss."""
    projection: Annotated[int, Ge(0)] = 256
    """Width of the projection head, two layers between body and classifier; 0: none, the body's embedding is used."""
    weighting: Weighting = "samples"
    """Clients count by their number of samples (Alg. 1), or all alike."""

    def check(self, specs: Sequence[Spec]) -> None:
        same_shapes("moon", specs)

    def init_server(self, spec: Spec) -> Tree:
        return shared(self.init_client(spec), OWN_HEAD if self.projection else ())

    def init_client(self, spec: Spec) -> Client:
        if not self.projection:
            return Client(spec.params, spec.buffers)
        generator, width = spec.generator(), self.projection
        made = linear_layer("projection.first", spec.dim, spec.dim, generator)
        made |= linear_layer("projection.last", spec.dim, width, generator)
        made |= linear_layer("projection.output", width, spec.classes, generator)
        return Client(spec.params | made, spec.buffers)

    def receive(self, model: Model, client: Client, data: LocalData, down: Tree) -> Client:
        last = Client(_named(LAST, client.params), _named(LAST, client.buffers))
        client = take(client, down)
        return Client(
            client.params | last.params | _named(GLOBAL, client.params),
            client.buffers | last.buffers | _named(GLOBAL, client.buffers),
        )

    def phases(self) -> tuple[Phase, ...]:
        return (Phase(("body.", "projection.") if self.projection else ("body.", "head.")),)

    def loss(self, model: Model, client: Client, batch: Batch, down: Tree) -> Tensor:
        z = self._projected(model, client, batch.x)
        towards, away = (
            F.cosine_similarity(z, self._projected(model, client, batch.x, at).detach()) / self.temperature
            for at in (GLOBAL, LAST)
        )
        contrast = cross_entropy(torch.stack([towards, away], 1), torch.zeros_like(batch.y))
        return batch.mean(cross_entropy(self._logits(model, client, z), batch.y) + self.mu * contrast)

    def upload(self, model: Model, client: Client, data: LocalData, down: Tree) -> tuple[Mean, Client]:
        frozen = (GLOBAL, LAST)
        kept = client._replace(params=without(client.params, frozen), buffers=without(client.buffers, frozen))
        return send(kept, data, self.weighting, OWN_HEAD if self.projection else ()), kept

    def aggregate(self, server: Tree, up: Mean, cohort: Tensor) -> Tree:
        return up.otherwise(server)

    def predict(self, model: Model, client: Client, x: Tensor, down: Tree) -> dict[str, Tensor]:
        return {"head": self._logits(model, client, self._projected(model, client, x))}

    def embed(self, model: Model, client: Client, x: Tensor) -> Tensor:
        return self._projected(model, client, x)

    def global_client(self, server: Tree) -> Client:
        return Client(server["params"], server["buffers"])

    def _projected(self, model: Model, client: Client, x: Tensor, at: str = "") -> Tensor:
        z = model.embed(client, x, at)
        if not self.projection:
            return z
        return through(
            client.params, f"{at}projection.last", F.relu(through(client.params, f"{at}projection.first", z))
        )

    def _logits(self, model: Model, client: Client, z: Tensor) -> Tensor:
        return through(client.params, "projection.output", z) if self.projection else model.classify(client, z)


def _named(prefix: str, tensors: Params) -> Params:
    """The tensors of a network as those of a second one."""
    return {prefix + name: value for name, value in tensors.items()}
