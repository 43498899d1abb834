"""CReFF: FedAvg whose head the server retrains, on synthetic features that match the gradients of the real ones.

Federated Learning on Heterogeneous and Long-Tailed Data via Classifier Re-Training with Federated Features
    Shang et al., IJCAI 2022. https://arxiv.org/abs/2204.13399
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from protofed.method import Batch, Client, LocalData, Method, Model, Spec, Tree
from protofed.ops import random
from protofed.ops.checks import same_shapes
from protofed.ops.losses import cross_entropy
from protofed.ops.matching import class_gradients, drawn, last_part, linear, linear_heads, match, retrain
from protofed.ops.prototypes import per_client
from protofed.ops.sharing import Weighting, send, shared, take
from protofed.ops.trees import total, under


@dataclass(frozen=True)
class CReFF(Method):
    """Average the models; retrain the head on features that the clients' class gradients shape."""

    paper = "Shang et al., IJCAI 2022, arXiv 2204.13399"
    losses = (
        "CE(F(w; x), y) on the clients",
        "sum over classes and rows of 1 - cos(gradient of the features, mean gradient of the clients), on the server",
        "CE(head(feature), class) on the server",
    )
    not_followed = (
        "the authors augment the images that gradients are taken of; here they are as they are",
        "the first retrained head is the model's own initial head, not one drawn apart",
    )
    presets = {
        "paper": {
            "feature_lr": 0.1,
            "head_batch": 32,
            "real": 32,
            "draws": 10,
            "bias": "keep",
            "weighting": "samples",
        },
        "official": {
            "feature_lr": 0.01,
            "head_batch": 64,
            "real": 64,
            "draws": 10,
            "bias": "drop",
            "weighting": "uniform",
        },
    }

    per_class: Annotated[int, Gt(0)] = 100
    """Synthetic features of each class (the authors and FedNH's code)."""
    steps: Annotated[int, Ge(0)] = 100
    """Gradient steps on the features in a round (the authors and FedNH's code)."""
    feature_lr: Annotated[float, Gt(0)] = 0.1
    """Step size for the features: 0.1 with the authors; 0.01 in FedNH's code, which finds 0.1 unstable."""
    head_epochs: Annotated[int, Ge(0)] = 300
    """Passes over all features to train a new head in a round (the authors and FedNH's code)."""
    head_lr: Annotated[float, Gt(0)] = 0.01
    """Step size for the new head (the authors and FedNH's code)."""
    head_batch: Annotated[int, Ge(0)] = 32
    """Features in one step for the new head, 0 for all: the clients' batch size, 32 with the authors, 64 in FedNH's."""
    real: Annotated[int, Ge(0)] = 0
    """Samples drawn of each class for its gradient: 32 with the authors, 64 in FedNH's code; 0 takes all, undrawn."""
    draws: Annotated[int, Gt(0)] = 1
    """Such draws, averaged: 10 with the authors and in FedNH's code."""
    bias: Literal["keep", "drop"] = "keep"
    """The new head has a bias if the model's has one; or it is trained with a bias that is then dropped (FedNH's)."""
    weighting: Weighting = "samples"
    """Clients count by their number of samples (the authors), or all alike (FedNH's code)."""

    def check(self, specs: Sequence[Spec]) -> None:
        same_shapes("creff", specs)
        linear_heads("creff", specs)

    def init_server(self, spec: Spec) -> Tree:
        features = torch.randn(spec.classes, self.per_class, spec.dim, generator=spec.generator())
        key = random.key(spec.seed, "creff")
        return {"model": shared(spec), "features": features, "head": under(spec.params, "head."), "key": key}

    def broadcast(self, server: Tree, cohort: Tensor) -> Tree:
        return {"model": server["model"], "head": server["head"]}

    def receive(self, model: Model, client: Client, data: LocalData, down: Tree) -> Client:
        client, head = take(client, down["model"]), linear(down["head"])
        batches = drawn(data.batches, self.real, self.draws, data.key) if self.real else data.batches
        gradients = total(class_gradients(head, model.embed(client, b.x), b) for b in batches)
        return client._replace(memory={"gradients": per_client(gradients)})  # the retrained head is not kept

    def loss(self, model: Model, client: Client, batch: Batch, down: Tree) -> Tensor:
        _, logits = model(client, batch.x)
        return batch.mean(cross_entropy(logits, batch.y))

    def upload(self, model: Model, client: Client, data: LocalData, down: Tree) -> tuple[Tree, Client]:
        up = {"model": send(client, data, self.weighting), "gradients": client.memory["gradients"]}
        return up, client._replace(memory={})

    def aggregate(self, server: Tree, up: Tree, cohort: Tensor) -> Tree:
        key, real, old = server["key"], up["gradients"], linear(server["head"])
        new = server | {"model": up["model"].otherwise(server["model"]), "key": random.fold(key, -1)}
        if not bool((real.weight > 0).any()):
            return new
        features = match(server["features"], old, real, self.steps, self.feature_lr)
        biased = "bias" in old or self.bias == "drop"
        head = retrain(features, biased, self.head_epochs, self.head_batch, self.head_lr, key)
        if self.bias == "drop":
            head["bias"] = torch.zeros_like(head["bias"])
        return new | {"features": features, "head": {name: head[last_part(name)] for name in server["head"]}}

    def global_client(self, server: Tree) -> Client:
        return Client(server["model"]["params"] | server["head"], server["model"]["buffers"])
