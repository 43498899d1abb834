"""SP-FedCL: MP-FedCL with one prototype per class, the mean.

MP-FedCL: Multi-Prototype Federated Contrastive Learning for Edge Intelligence
    Qiao et al., 2023. https://arxiv.org/abs/2304.01950
"""

from dataclasses import dataclass

from torch import Tensor

from protofed.method import Batch, Mean
from protofed.methods.pool import PrototypePool
from protofed.ops.prototypes import class_sums, per_client


@dataclass(frozen=True)
class SPFedCL(PrototypePool):
    """Average the models; contrast embeddings with a pool of every client's class means."""

    @property
    def slots(self) -> int:
        return 1

    def cluster(self, z: Tensor, y: Tensor, mask: Tensor, classes: int, key: Tensor) -> Mean:
        means = per_client(class_sums(z, Batch(z, y, mask), classes))
        return Mean(means.total[:, None], means.weight[:, None])
