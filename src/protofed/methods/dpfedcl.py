"""DP-FedCL: MP-FedCL with as many prototypes per class as DBSCAN finds. DP is for density, not differential privacy.

MP-FedCL: Multi-Prototype Federated Contrastive Learning for Edge Intelligence
    Qiao et al., 2023. https://arxiv.org/abs/2304.01950

The paper names DBSCAN and nothing else; how noise, radius and gaps in the pool are handled is our choice, given below.
"""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le
from torch import Tensor

from protofed.method import Mean
from protofed.methods.pool import PrototypePool
from protofed.ops.clustering import dbscan
from protofed.ops.pool import pad


@dataclass(frozen=True)
class DPFedCL(PrototypePool):
    """Average the models; contrast embeddings with a pool of clusters by density (DBSCAN). Not differential privacy."""

    stackable = False  # DBSCAN runs on the host, client by client

    eps: Annotated[float, Ge(0)] = 0.0
    """Radius of DBSCAN; 0 takes, class by class, the 0.9 quantile of the distances to the min_samples-th neighbour."""
    min_samples: Annotated[int, Ge(2)] = 5
    """Samples within the radius, itself included, that make a core point. Noise points count for no prototype; a class
    that is all noise, or has fewer samples than this, has its mean."""
    most: Annotated[int, Ge(1), Le(100)] = 8
    """Prototypes per class that are sent at most: those of the largest clusters. The loss averages over what there is;
    a class that a client lacks is padded with one class mean."""

    @property
    def slots(self) -> int:
        return self.most

    def cluster(self, z: Tensor, y: Tensor, mask: Tensor, classes: int, key: Tensor) -> Mean:
        return dbscan(z, y, mask, classes, self.most, self.eps, self.min_samples)

    def padded(self, pool: Mean, means: Mean) -> Mean:
        return pad(pool, means, whole=False)
