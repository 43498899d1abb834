"""Class means in one shot: classify by the mean embedding of each class, over all samples of all clients.

The nearest class mean is as old as pattern recognition. As the prototypes of a pretrained encoder:

Prototypical Networks for Few-shot Learning
    Snell et al., NeurIPS 2017. https://arxiv.org/abs/1703.05175
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from protofed.method import Mean, Tree
from protofed.methods.oneshot import OneShot
from protofed.ops.heads import cosine_head, linear_scores, nearest_mean_head
from protofed.ops.prototypes import one_each
from protofed.ops.statistics import Second


@dataclass(frozen=True)
class ClassMeans(OneShot):
    """Add up embeddings by class, once; classify by the nearest class mean."""

    paper = "Snell et al., NeurIPS 2017, arXiv 1703.05175"
    losses = ("nothing is minimised: a class's prototype is the mean embedding of all its samples, Eq. 1",)
    not_followed = ("the paper trains the encoder in episodes; here it is given",)
    presets = {"paper": {"distance": "euclidean"}, "official": {"distance": "cosine"}}
    name = "classmeans"

    distance: Literal["euclidean", "cosine"] = "euclidean"
    """By which distance a class mean is the nearest: the Euclidean one (the paper), or the cosine."""

    @property
    def second(self) -> Second:
        return "none"

    def head(self, sums: Tree) -> dict[str, Tensor]:
        return nearest_mean_head(sums) if self.distance == "euclidean" else cosine_head(sums)

    def scores_of(self, head: Tree, z: Tensor) -> Tensor:
        return linear_scores(head, z)

    def prototypes(self, server: Tree) -> Mean:
        means = server["sums"]["means"]
        return one_each(Mean(means.total.float(), means.weight.float()))
