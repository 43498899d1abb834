"""What a model is (a body and a head), and the fully connected ones."""

from collections import OrderedDict
from math import prod
from typing import Annotated

from annotated_types import Ge, Le
from torch import Tensor, nn

Shape = tuple[int, ...]
Size = Annotated[int, Ge(1), Le(65_536)]


class Net(nn.Module):
    """A body, inputs -> embeddings (B, dim), and a head, embeddings -> logits (B, classes)."""

    def __init__(self, body: nn.Module, head: nn.Module, dim: int) -> None:
        super().__init__()
        self.body = body
        self.head = head
        self.dim = dim

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings (B, dim) and logits (B, classes)."""
        z = self.body(x)
        return z, self.head(z)


def chain(**layers: nn.Module) -> nn.Sequential:
    """The layers one after another; their names become parameter names."""
    return nn.Sequential(OrderedDict(layers))


class MlpMpFedCl(Net):
    """MP-FedCL's network for MNIST: encoder 784-512-512, then 256 (the embedding, after a ReLU), then the classes.

    hidden: width of the encoder's two layers
    dim: size of the embedding
    output_relu: a ReLU on the logits, as the paper's Table III lists it
    """

    def __init__(
        self, shape: Shape, classes: int, *, hidden: Size = 512, dim: Size = 256, output_relu: bool = False
    ) -> None:
        body = chain(
            flatten=nn.Flatten(),
            fc1=nn.Linear(prod(shape), hidden),
            relu1=nn.ReLU(),
            fc2=nn.Linear(hidden, hidden),
            relu2=nn.ReLU(),
            fc3=nn.Linear(hidden, dim),
            relu3=nn.ReLU(),
        )
        head = chain(fc=nn.Linear(dim, classes))
        if output_relu:
            head.add_module("relu", nn.ReLU())
        super().__init__(body, head, dim)


class MlpSpiral(Net):
    """FedNH's 5-layer network for the spirals: four layers to a latent point, and a bias-free head.

    The latent has no ReLU, so that the six classes can spread over the whole plane; without a bias a class is a
    direction from the origin, which is how the paper's figure draws its prototypes.

    width: width of the three hidden layers (the paper does not give it)
    dim: size of the embedding
    """

    def __init__(self, shape: Shape, classes: int, *, width: Size = 64, dim: Size = 2) -> None:
        body = chain(
            flatten=nn.Flatten(),
            fc1=nn.Linear(prod(shape), width),
            relu1=nn.ReLU(),
            fc2=nn.Linear(width, width),
            relu2=nn.ReLU(),
            fc3=nn.Linear(width, width),
            relu3=nn.ReLU(),
            fc4=nn.Linear(width, dim),
        )
        super().__init__(body, chain(fc=nn.Linear(dim, classes, bias=False)), dim)


class MlpDigits(Net):
    """A small network for the 8x8 digits, without convolutions.

    hidden: width of the hidden layer
    dim: size of the embedding
    """

    def __init__(self, shape: Shape, classes: int, *, hidden: Size = 64, dim: Size = 32) -> None:
        body = chain(
            flatten=nn.Flatten(),
            fc1=nn.Linear(prod(shape), hidden),
            relu1=nn.ReLU(),
            fc2=nn.Linear(hidden, dim),
            relu2=nn.ReLU(),
        )
        super().__init__(body, chain(fc=nn.Linear(dim, classes)), dim)
