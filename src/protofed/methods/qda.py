"""Quadratic discriminant analysis in one shot: a Gaussian for each class, over all samples of all clients.

The Gaussian-Head OFL Family: One-Shot Federated Learning from Client Global Statistics (GH-OFL)
    Turazza et al., ICLR 2026. https://arxiv.org/abs/2602.01186
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le
from torch import Tensor

from protofed.method import Spec, Tree
from protofed.methods.oneshot import OneShot, few_samples
from protofed.ops.heads import Prior, qda_head, qda_scores
from protofed.ops.statistics import Second


@dataclass(frozen=True)
class QDA(OneShot):
    """Add up embeddings and second moments by class, once; classify by the likeliest Gaussian."""

    paper = "Turazza et al., ICLR 2026, arXiv 2602.01186 (GH-QDA, GH-NB)"
    losses = ("nothing is minimised: log N(z; mean of the class, covariance of the class) + log share of the class",)
    presets = {
        "paper": {"covariance": "full", "shrinkage": 0.05},
        "official": {"covariance": "diagonal", "shrinkage": 0.0},
    }
    name = "qda"

    covariance: Literal["full", "diagonal"] = "full"
    """A covariance for each class (GH-QDA; D (D + 1) / 2 numbers for each class go up), or its diagonal alone (GH-NB,
    naive Bayes; D numbers)."""
    shrinkage: Annotated[float, Ge(0), Le(1)] = 0.05
    """How far each covariance is moved towards a ball: 0.05 in GH-OFL's code. A class with fewer samples than
    dimensions gets at least the oracle-approximating shrinkage."""
    prior: Prior = "counts"
    """How likely a class is beforehand: by its samples, or all alike."""

    @property
    def second(self) -> Second:
        return self.covariance

    def head(self, sums: Tree) -> dict[str, Tensor]:
        return qda_head(sums, self.shrinkage, self.prior)

    def remarks(self, spec: Spec, samples: int) -> Sequence[str]:
        return few_samples(spec, samples // spec.classes, self.shrinkage) if self.covariance == "full" else ()

    def scores_of(self, head: Tree, z: Tensor) -> Tensor:
        return qda_scores(head, z)
