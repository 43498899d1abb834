"""FedTGP: the server trains global prototypes that stay apart by a margin.

FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning for Data and Model
Heterogeneity in Federated Learning
    Zhang et al., AAAI 2024. https://arxiv.org/abs/2401.03230
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt
from torch import Tensor

from protofed.method import Batch, Client, Mean, Model
from protofed.methods.generated import GeneratedPrototypes
from protofed.ops.losses import cross_entropy
from protofed.ops.prototypes import distance_to_own, nearest

NEVER = -1e9  # the score of a class that no client has held


@dataclass(frozen=True)
class FedTGP(GeneratedPrototypes):
    """Pull embeddings towards prototypes that the server trains to lie apart by an adaptive margin."""

    paper = "Zhang et al., AAAI 2024, arXiv 2401.03230"
    losses = (
        "CE(F(w; x), y) + lam * mse(f(x), P[y]) on the clients",
        "CE(-(|p - P| + margin at the own class), class) on the server",
    )
    presets = {
        "paper": {"lam": 1.0, "server_epochs": 100, "threshold": 100.0},
        "official": {"lam": 10.0, "server_epochs": 100, "threshold": 100.0},
    }

    inference: Literal["head", "proto"] = "proto"
    """Classify by the nearest prototype (the paper), or by the client's own classifier."""
    lam: Annotated[float, Ge(0)] = 1.0
    """Weight of the pull towards the prototypes. The authors' command line takes 10, their code's default is 1."""
    server_epochs: Annotated[int, Ge(0)] = 100
    """Passes of the server over the clients' prototypes in a round (the authors' command line)."""
    threshold: Annotated[float, Gt(0)] = 100.0
    """The tau that bounds the margin (the authors' code)."""

    @property
    def epochs(self) -> int:
        return self.server_epochs

    def loss(self, model: Model, client: Client, batch: Batch, down: Mean) -> Tensor:
        z, logits = model(client, batch.x)
        pull = distance_to_own(z, batch.y, down, "mse")
        return batch.mean(cross_entropy(logits, batch.y) + self.lam * pull)

    def apart(self, made: Mean, rows: Mean, z: Tensor, y: Tensor) -> Tensor:
        lengths = torch.cdist(z, made.total, compute_mode="donot_use_mm_for_euclid_dist")
        own = F.one_hot(y, len(made.weight)).to(z.dtype)
        scores = -(lengths + margin(rows, self.threshold) * own)
        return cross_entropy(scores.masked_fill(made.weight == 0, NEVER), y)

    def predict(self, model: Model, client: Client, x: Tensor, down: Mean) -> dict[str, Tensor]:
        z, logits = model(client, x)
        return {"head": logits, "proto": nearest(z, down)}


def margin(rows: Mean, threshold: float) -> Tensor:
    """How far each class's mean prototype is from the nearest other one, at most: no more than the threshold."""
    held = rows.weight.sum(0) > 0
    means = rows.total.sum(0) / rows.weight.sum(0).clamp(min=1)[:, None]
    lengths = torch.cdist(means, means, compute_mode="donot_use_mm_for_euclid_dist")
    pairs = held[:, None] & held & ~torch.eye(len(held), dtype=torch.bool, device=held.device)
    gaps = lengths.masked_fill(~pairs, torch.inf).amin(1)
    return gaps.masked_fill(~torch.isfinite(gaps), 0).amax().clamp(max=threshold)
