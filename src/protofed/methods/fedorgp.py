"""FedORGP: the server trains global prototypes that point in different directions.

FedORGP: Guiding Heterogeneous Federated Learning with Orthogonality Regularization on Global Prototypes
    Guo et al., 2025. https://arxiv.org/abs/2502.16119
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor

from protofed.method import Batch, Client, Mean, Model
from protofed.methods.generated import GeneratedPrototypes
from protofed.ops.losses import cross_entropy
from protofed.ops.prototypes import distance_to_own


@dataclass(frozen=True)
class FedORGP(GeneratedPrototypes):
    """Turn embeddings towards prototypes that the server trains to be orthogonal."""

    paper = "Guo et al., 2025, arXiv 2502.16119"
    losses = (
        "CE(F(w; x), y) + align * (1 - cos(f(x), P[y])) on the clients",
        "together * (1 - cos(p, P[y])) + orthogonal * mean over other classes of |cos(p, P[k])| on the server",
    )
    not_followed = (
        *GeneratedPrototypes.not_followed,
        "later code of the authors scales both terms of the server by a function of the cosines",
    )
    presets = {
        "paper": {"align": 100.0, "together": 1.0, "orthogonal": 10.0},
        "official": {"align": 100.0, "together": 1.0, "orthogonal": 10.0},
    }

    inference: Literal["head", "proto"] = "head"
    """Classify by the client's own classifier, or by the prototype with the largest cosine."""
    align: Annotated[float, Ge(0)] = 100.0
    """Weight of the clients' cosine to the prototype of their class (lambda_c; the paper's best)."""
    together: Annotated[float, Ge(0)] = 1.0
    """Weight of the server's cosine of each client's prototype to its class's (lambda_s; the paper's best)."""
    orthogonal: Annotated[float, Ge(0)] = 10.0
    """Weight of the cosines to other classes' prototypes (gamma; the paper's best)."""
    server_epochs: Annotated[int, Ge(0)] = 1
    """Passes of the server over the clients' prototypes in a round."""

    @property
    def epochs(self) -> int:
        return self.server_epochs

    def loss(self, model: Model, client: Client, batch: Batch, down: Mean) -> Tensor:
        z, logits = model(client, batch.x)
        turn = distance_to_own(z, batch.y, down, "cosine")
        return batch.mean(cross_entropy(logits, batch.y) + self.align * turn)

    def apart(self, made: Mean, rows: Mean, z: Tensor, y: Tensor) -> Tensor:
        cosines = F.normalize(z) @ F.normalize(made.total).T
        own = F.one_hot(y, len(made.weight)).to(z.dtype)
        others = (cosines.abs() * (1 - own)).sum(1) / (made.weight.sum() - 1).clamp(min=1)
        return self.together * (1 - (cosines * own).sum(1)) + self.orthogonal * others

    def predict(self, model: Model, client: Client, x: Tensor, down: Mean) -> dict[str, Tensor]:
        z, logits = model(client, x)
        cosines = F.normalize(z) @ F.normalize(down.value).T
        return {"head": logits, "proto": cosines.masked_fill(down.weight == 0, -float("inf"))}
