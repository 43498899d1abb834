"""ResNet18 as FedProto runs it (BatchNorm, torchvision's names) and as FedNH runs it (GroupNorm)."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from protofed.errors import UserError
from protofed.models.cnn import image_shape
from protofed.models.mlp import Net, Shape, Size, chain

Norm = Callable[[int], nn.Module]


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut: maps (B, inputs, H, W) -> (B, outputs, H / stride, W / stride)."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm, shortcut_norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = norm(outputs)
        self.relu = nn.ReLU()
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), shortcut_norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Non-negative maps (B, outputs, H / stride, W / stride)."""
        h = self.relu(self.bn1(self.conv1(x)))
        out: Tensor = self.relu(self.bn2(self.conv2(h)) + self.downsample(x))
        return out


def _layers(norm: Norm, shortcut_norm: Norm) -> dict[str, nn.Module]:
    """Everything after the stem: eight blocks in four layers, and the average over the image (B, 512)."""
    layers: dict[str, nn.Module] = {}
    inputs = 64
    for index, outputs in enumerate((64, 128, 256, 512), start=1):
        layers[f"layer{index}"] = nn.Sequential(
            Block(inputs, outputs, 1 if index == 1 else 2, norm, shortcut_norm),
            Block(outputs, outputs, 1, norm, shortcut_norm),
        )
        inputs = outputs
    return {**layers, "avgpool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}


class ResNet18(Net):
    """FedProto's ResNet18 for CIFAR: torchvision's layout and names below `body.`, a 512-d non-negative embedding.

    stem_stride: stride of the 7x7 convolution
    pool_stride: stride of the max-pooling behind it
    weights: file (.pth or .safetensors) with torchvision's resnet18; all but conv1, bn1 and fc is taken from it
    """

    def __init__(
        self, shape: Shape, classes: int, *, stem_stride: Size = 2, pool_stride: Size = 2, weights: str = ""
    ) -> None:
        colours, _, _ = image_shape("resnet18", shape, 1, "mlp_digits")
        body = chain(
            conv1=nn.Conv2d(colours, 64, 7, stem_stride, padding=3, bias=False),
            bn1=nn.BatchNorm2d(64),
            relu=nn.ReLU(),
            maxpool=nn.MaxPool2d(3, pool_stride, padding=1),
            **_layers(nn.BatchNorm2d, nn.BatchNorm2d),
        )
        for module in body.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if weights:
            _load(body, weights)
        super().__init__(body, chain(fc=nn.Linear(512, classes)), 512)


class ResNet18Gn(Net):
    """FedNH's ResNet18 for TinyImageNet: GroupNorm of 2 groups, a 3x3 stem without pooling, and a bias-free head.

    block_norm: GroupNorm inside the blocks too; FedNH's own runs have it only in the stem and the shortcuts
    """

    def __init__(self, shape: Shape, classes: int, *, block_norm: bool = True) -> None:
        colours, _, _ = image_shape("resnet18_gn", shape, 1, "mlp_digits")
        # The paper does not say how it initialises: the convolutions keep PyTorch's own initial weights.
        body = chain(
            conv1=nn.Conv2d(colours, 64, 3, padding=1, bias=False),
            bn1=_group_norm(64),
            relu=nn.ReLU(),
            **_layers(_group_norm if block_norm else nn.Identity, _group_norm),
        )
        super().__init__(body, chain(fc=nn.Linear(512, classes, bias=False)), 512)


def _group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(2, channels)


def _load(body: nn.Module, weights: str) -> None:
    """Take everything but conv1 and bn1 from a file with torchvision's resnet18."""
    saved = _read(weights)
    taken = {}
    for name, own in body.state_dict().items():
        if name.startswith(("conv1.", "bn1.")) or name.endswith(".num_batches_tracked"):
            continue  # the counter is absent from older files, and unused where the momentum is fixed
        given = saved.get(name)
        if not isinstance(given, Tensor) or given.shape != own.shape:
            got = f"has shape {tuple(given.shape)}" if isinstance(given, Tensor) else "is not in it"
            raise UserError(
                f"model.weights: {weights} does not hold torchvision's resnet18: {name} {got}, "
                f"but {tuple(own.shape)} is needed. Give a state dict of torchvision's resnet18."
            )
        taken[name] = given
    body.load_state_dict(taken, strict=False)


def _read(weights: str) -> dict[str, Tensor]:
    path = Path(weights).expanduser()
    if not path.is_file():
        raise UserError(f"model.weights: there is no file {weights}. Give a .pth or .safetensors file of resnet18.")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file fails in many ways
        raise UserError(
            f"model.weights: {weights} cannot be read as saved tensors. Give a .pth or .safetensors file of resnet18."
        ) from error
    return saved if isinstance(saved, dict) else {}
