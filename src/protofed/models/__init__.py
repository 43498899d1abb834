"""Models: an nn.Module with a .body, a .head and a .dim, called as `Net(shape, classes, **fields)`."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from protofed.models.cnn import CnnCifar, CnnDigits, CnnDigitsDeep, CnnFedNh, CnnFemnist, CnnMnist
from protofed.models.mlp import MlpDigits, MlpMpFedCl, MlpSpiral, Net, chain
from protofed.models.resnet import ResNet18, ResNet18Gn


def variant(model: Callable[..., nn.Module], **fields: Any) -> Callable[..., nn.Module]:
    """The same model with other defaults; signature and docstring still tell its fields."""
    changed = partial(model, **fields)
    changed.__doc__ = model.__doc__
    return changed


MODELS: dict[str, Callable[..., nn.Module]] = {
    "cnn_cifar": CnnCifar,
    "cnn_digits": CnnDigits,
    "cnn_digits_8": variant(CnnDigits, channels=8),
    "cnn_digits_16": variant(CnnDigits, channels=16),
    "cnn_digits_24": variant(CnnDigits, channels=24),
    "cnn_digits_deep": CnnDigitsDeep,
    "cnn_fednh": CnnFedNh,
    "cnn_femnist": CnnFemnist,
    "cnn_femnist_18": variant(CnnFemnist, channels=18),
    "cnn_femnist_20": variant(CnnFemnist, channels=20),
    "cnn_femnist_22": variant(CnnFemnist, channels=22),
    "cnn_mnist": CnnMnist,
    "cnn_mnist_18": variant(CnnMnist, channels=18),
    "cnn_mnist_20": variant(CnnMnist, channels=20),
    "cnn_mnist_22": variant(CnnMnist, channels=22),
    "mlp_digits": MlpDigits,
    "mlp_mpfedcl": MlpMpFedCl,
    "mlp_spiral": MlpSpiral,
    "resnet18": ResNet18,
    "resnet18_gn": ResNet18Gn,
    "resnet18_s14": variant(ResNet18, stem_stride=1, pool_stride=4),
    "resnet18_s22": variant(ResNet18, stem_stride=2, pool_stride=2),
}

__all__ = ["MODELS", "Net", "chain", "variant"]
