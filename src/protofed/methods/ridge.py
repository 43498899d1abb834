"""Ridge regression in one shot: regress one-hot labels on embeddings, over all samples of all clients.

Accelerating Heterogeneous Federated Learning with Closed-form Classifiers (Fed3R)
    Fanì et al., ICML 2024. https://arxiv.org/abs/2406.01116
AFL: A Single-Round Analytic Approach for Federated Learning with Pre-trained Models
    He et al., CVPR 2025. https://arxiv.org/abs/2405.16240
"""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge
from torch import Tensor

from protofed.method import Tree
from protofed.methods.oneshot import OneShot
from protofed.ops.heads import linear_scores, ridge_head
from protofed.ops.statistics import Second

FED3R = {"gamma": 0.01, "bias": True}
AFL = {"gamma": 0.0, "bias": False}


@dataclass(frozen=True)
class Ridge(OneShot):
    """Add up embeddings and their second moment, once; regress the labels in closed form."""

    paper = "Fanì et al., ICML 2024, arXiv 2406.01116 (Fed3R); He et al., CVPR 2025, arXiv 2405.16240 (AFL)"
    losses = ("|Z W - Y|^2 + gamma |W|^2 over all samples of all clients, solved in closed form",)
    not_followed = (
        "AFL merges solutions and inverses of single clients pair by pair; here sums are sent, which give the same",
        "Fed3R's random features and the fine-tuning that may follow are left out",
    )
    presets = {"paper": FED3R, "official": AFL, "fed3r": FED3R, "afl": AFL}
    name = "ridge"

    gamma: Annotated[float, Ge(0)] = 1.0
    """Weight of |W|^2: 0.01 in Fed3R's code. AFL's clients use 1 and its server takes it out again, which is 0: plain
    least squares, or the solution of least norm where there are fewer samples than dimensions."""
    bias: bool = False
    """Whether there is a bias, which is penalised like the other weights (Fed3R's code), or none (AFL's code)."""

    @property
    def second(self) -> Second:
        return "shared"

    def head(self, sums: Tree) -> dict[str, Tensor]:
        return ridge_head(sums, self.gamma, self.bias)

    def scores_of(self, head: Tree, z: Tensor) -> Tensor:
        return linear_scores(head, z)
