"""Models: an nn.Module with a .body, a .head and a .dim, called as `Net(shape, classes, **fields)`.

The file of a model is imported when it is looked up.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from protofed.importing import Catalogue

if TYPE_CHECKING:
    from torch import nn

    from protofed.models.cnn import CnnAudio as CnnAudio
    from protofed.models.cnn import CnnCifar as CnnCifar
    from protofed.models.cnn import CnnDigits as CnnDigits
    from protofed.models.cnn import CnnDigitsDeep as CnnDigitsDeep
    from protofed.models.cnn import CnnFedNh as CnnFedNh
    from protofed.models.cnn import CnnFemnist as CnnFemnist
    from protofed.models.cnn import CnnMnist as CnnMnist
    from protofed.models.efficientnet import EfficientNetLite0 as EfficientNetLite0
    from protofed.models.efficientnet import EfficientNetLite1 as EfficientNetLite1
    from protofed.models.efficientnet import EfficientNetLite2 as EfficientNetLite2
    from protofed.models.mlp import MlpDigits as MlpDigits
    from protofed.models.mlp import MlpMpFedCl as MlpMpFedCl
    from protofed.models.mlp import MlpSpiral as MlpSpiral
    from protofed.models.mlp import Net as Net
    from protofed.models.mlp import chain as chain
    from protofed.models.resnet import ResNet18 as ResNet18
    from protofed.models.resnet import ResNet18Gn as ResNet18Gn
    from protofed.models.series import CnnSeries as CnnSeries
    from protofed.models.speech import Resemblyzer as Resemblyzer
    from protofed.models.table import MlpTable as MlpTable
    from protofed.models.table import WithMask as WithMask
    from protofed.models.texts import WordLlama as WordLlama
    from protofed.models.words import BagOfWords as BagOfWords

# What a model has in place of its class's defaults.
FIELDS: dict[str, dict[str, Any]] = {
    "cnn_digits_8": {"channels": 8},
    "cnn_digits_16": {"channels": 16},
    "cnn_digits_24": {"channels": 24},
    "cnn_femnist_18": {"channels": 18},
    "cnn_femnist_20": {"channels": 20},
    "cnn_femnist_22": {"channels": 22},
    "cnn_mnist_18": {"channels": 18},
    "cnn_mnist_20": {"channels": 20},
    "cnn_mnist_22": {"channels": 22},
    "resnet18_s14": {"stem_stride": 1, "pool_stride": 4},
    "resnet18_s22": {"stem_stride": 2, "pool_stride": 2},
}


class ModelCatalogue(Catalogue["Callable[..., nn.Module]"]):
    """Models by name; signature and docstring of one with other defaults still tell its fields."""

    def __getitem__(self, name: str) -> "Callable[..., nn.Module]":
        model = super().__getitem__(name)
        if name not in FIELDS:
            return model
        changed = partial(model, **FIELDS[name])
        changed.__doc__ = model.__doc__
        return changed


MODELS = ModelCatalogue(
    {
        "bag_of_words": "protofed.models.words:BagOfWords",
        "cnn_audio": "protofed.models.cnn:CnnAudio",
        "cnn_cifar": "protofed.models.cnn:CnnCifar",
        "cnn_digits": "protofed.models.cnn:CnnDigits",
        "cnn_digits_8": "protofed.models.cnn:CnnDigits",
        "cnn_digits_16": "protofed.models.cnn:CnnDigits",
        "cnn_digits_24": "protofed.models.cnn:CnnDigits",
        "cnn_digits_deep": "protofed.models.cnn:CnnDigitsDeep",
        "cnn_fednh": "protofed.models.cnn:CnnFedNh",
        "cnn_femnist": "protofed.models.cnn:CnnFemnist",
        "cnn_femnist_18": "protofed.models.cnn:CnnFemnist",
        "cnn_femnist_20": "protofed.models.cnn:CnnFemnist",
        "cnn_femnist_22": "protofed.models.cnn:CnnFemnist",
        "cnn_pfllib": "protofed.models.cnn:CnnPflLib",
        "cnn_mnist": "protofed.models.cnn:CnnMnist",
        "cnn_mnist_18": "protofed.models.cnn:CnnMnist",
        "cnn_mnist_20": "protofed.models.cnn:CnnMnist",
        "cnn_mnist_22": "protofed.models.cnn:CnnMnist",
        "cnn_series": "protofed.models.series:CnnSeries",
        "efficientnet_lite0": "protofed.models.efficientnet:EfficientNetLite0",
        "efficientnet_lite1": "protofed.models.efficientnet:EfficientNetLite1",
        "efficientnet_lite2": "protofed.models.efficientnet:EfficientNetLite2",
        "mlp_digits": "protofed.models.mlp:MlpDigits",
        "mlp_mpfedcl": "protofed.models.mlp:MlpMpFedCl",
        "mlp_spiral": "protofed.models.mlp:MlpSpiral",
        "mlp_table": "protofed.models.table:MlpTable",
        "resemblyzer": "protofed.models.speech:Resemblyzer",
        "resnet18": "protofed.models.resnet:ResNet18",
        "resnet18_gn": "protofed.models.resnet:ResNet18Gn",
        "resnet18_s14": "protofed.models.resnet:ResNet18",
        "resnet18_s22": "protofed.models.resnet:ResNet18",
        "wordllama": "protofed.models.texts:WordLlama",
    }
)


def __getattr__(name: str) -> Any:
    """`from protofed.models import ResNet18` imports that model's file; so do the parts of which models are made."""
    if name in ("Net", "chain"):
        from protofed.models import mlp

        return getattr(mlp, name)
    if name == "WithMask":
        from protofed.models.table import WithMask

        return WithMask
    return MODELS.defined(name)
