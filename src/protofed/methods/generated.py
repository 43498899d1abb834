"""What FedTGP and FedORGP have in common: prototypes that come out of a small network on the server.

Each class has a trainable vector, which two linear layers turn into its prototype. The server trains both on the
prototypes that the clients sent.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt
from torch import Tensor

from protofed.method import Client, Each, LocalData, Mean, Method, Model, Params, Spec, Tree
from protofed.ops import random
from protofed.ops.checks import same_width
from protofed.ops.prototypes import class_sums, no_prototypes, one_each, per_client
from protofed.ops.server_training import descend, linear_layer, through
from protofed.ops.trees import total


@dataclass(frozen=True)
class GeneratedPrototypes(Method):
    """Clients send class means; the server trains a network that makes one prototype of each class from them."""

    scores = ("head", "proto")
    not_followed: ClassVar[tuple[str, ...]] = (
        "a class that no client has ever held gets no prototype; the authors' networks make one of it too",
    )

    server_lr: Annotated[float, Gt(0)] = 0.01
    """Step size of the server (the authors take the clients')."""
    server_batch: Annotated[int, Ge(0)] = 10
    """Prototypes of clients in one step, 0 for all: the clients' batch size in the authors' code."""

    @property
    @abstractmethod
    def epochs(self) -> int:
        """Passes of the server over the clients' prototypes in a round."""

    @abstractmethod
    def apart(self, made: Mean, rows: Mean, z: Tensor, y: Tensor) -> Tensor:
        """What the server minimises (B,), for clients' prototypes (B, D) and those that it makes."""

    def check(self, specs: Sequence[Spec]) -> None:
        same_width(type(self).__name__.lower(), specs)

    def init_server(self, spec: Spec) -> Tree:
        generator, dim = spec.generator(), spec.dim
        net = {"classes": torch.randn(spec.classes, dim, generator=generator)}
        net |= linear_layer("first", dim, dim, generator) | linear_layer("last", dim, dim, generator)
        name = type(self).__name__.lower()
        return {"net": net, "prototypes": no_prototypes(spec.classes, dim), "key": random.key(spec.seed, name)}

    def broadcast(self, server: Tree, cohort: Tensor) -> Mean:
        made: Mean = server["prototypes"]
        return made

    def upload(self, model: Model, client: Client, data: LocalData, down: Mean) -> tuple[Tree, Client]:
        own = total(class_sums(model.embed(client, b.x), b, len(data.counts)) for b in data.batches)
        return {"prototypes": Each(per_client(own))}, client

    def aggregate(self, server: Tree, up: Tree, cohort: Tensor) -> Tree:
        rows: Mean = up["prototypes"].rows
        known = torch.maximum(server["prototypes"].weight, (rows.weight > 0).any(0).to(rows.weight.dtype))

        def loss(net: Params, z: Tensor, y: Tensor) -> Tensor:
            return self.apart(Mean.of(generate(net), known), rows, z, y)

        steps = (self.epochs, self.server_batch, self.server_lr)
        net = descend(server["net"], loss, rows, cohort, *steps, server["key"])
        return {"net": net, "prototypes": Mean.of(generate(net), known), "key": random.fold(server["key"], -1)}

    def prototypes(self, server: Tree) -> Mean:
        return one_each(server["prototypes"])


def generate(net: Params) -> Tensor:
    """The prototypes (C, D) that the network makes."""
    return through(net, "last", F.relu(through(net, "first", net["classes"])))
