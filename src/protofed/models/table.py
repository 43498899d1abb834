"""A network for tables in which numbers may be missing."""

from math import prod

import torch
from torch import Tensor, nn

from protofed.models.mlp import Net, Shape, Size, chain


class WithMask(nn.Module):
    """Features (B, F), NaN if missing -> (B, 2F): 0 for the missing ones, followed by flags that say which are
    missing."""

    takes_missing = True

    def forward(self, x: Tensor) -> Tensor:
        missing = x.isnan()
        return torch.cat([x.masked_fill(missing, 0), missing.to(x.dtype)], -1)


class MlpTable(Net):
    """A small network for tables, which takes missing values (NaN): it sees 0, the mean, and that the value is missing.

    hidden: width of the hidden layer
    dim: size of the embedding
    """

    def __init__(self, shape: Shape, classes: int, *, hidden: Size = 32, dim: Size = 16) -> None:
        body = chain(
            flatten=nn.Flatten(),
            mask=WithMask(),
            fc1=nn.Linear(2 * prod(shape), hidden),
            relu1=nn.ReLU(),
            fc2=nn.Linear(hidden, dim),
            relu2=nn.ReLU(),
        )
        super().__init__(body, chain(fc=nn.Linear(dim, classes)), dim)
