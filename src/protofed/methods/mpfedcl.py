"""MP-FedCL: several prototypes per class from every client, by k-means, and a contrastive loss against all of them.

MP-FedCL: Multi-Prototype Federated Contrastive Learning for Edge Intelligence
    Qiao et al., 2023. https://arxiv.org/abs/2304.01950
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le
from torch import Tensor

from protofed.errors import UserError
from protofed.method import Mean, Spec
from protofed.methods.pool import PrototypePool
from protofed.ops.checks import same_shapes
from protofed.ops.clustering import kmeans


@dataclass(frozen=True)
class MPFedCL(PrototypePool):
    """Average the models; contrast embeddings with a pool of every client's k-means prototypes."""

    clusters: Annotated[int, Ge(1), Le(100)] = 2
    """Prototypes per class (the paper's K): 2 for MNIST, 4 for Digit-5 and Office, 3 for DomainNet."""
    steps: Annotated[int, Ge(1), Le(1000)] = 20
    """Steps of k-means, started from random samples (Section IV-A); it has converged long before."""

    @property
    def slots(self) -> int:
        return self.clusters

    def check(self, specs: Sequence[Spec]) -> None:
        same_shapes("mpfedcl", specs)
        largest = max(spec.largest for spec in specs)
        if 0 < largest < self.clusters:
            raise UserError(
                f"method.clusters = {self.clusters}, but no client has more than {largest} samples of one class, so no "
                f"class could be clustered. Use method.clusters = {largest} or fewer."
            )

    def cluster(self, z: Tensor, y: Tensor, mask: Tensor, classes: int, key: Tensor) -> Mean:
        return kmeans(z, y, mask, classes, self.clusters, key, self.steps)
