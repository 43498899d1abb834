"""The convolutional networks of FedProto and FedNH, and small ones for the 8x8 digits and for sounds."""

from torch import Tensor, nn

from protofed.errors import UserError
from protofed.models.mlp import Net, Shape, Size, chain


def image_shape(model: str, shape: Shape, least: int, instead: str) -> tuple[int, int, int]:
    """(channels, height, width), or a UserError if the model needs images, or larger ones."""
    if len(shape) != 3:
        raise UserError(
            f"{model} takes images (channels, height, width), but the inputs have shape {tuple(shape)}. "
            "Use mlp_digits or mlp_mpfedcl, which take any shape."
        )
    channels, height, width = shape
    if min(height, width) < least:
        raise UserError(
            f"{model} needs images of at least {least}x{least}, but the inputs have shape {tuple(shape)} "
            f"(channels, height, width). Use {instead}, or set data.size to {least} or more."
        )
    return channels, height, width


def pooled_side(side: int, kernel: int) -> int:
    """The side after an unpadded convolution and a 2x2 pooling."""
    return (side - kernel + 1) // 2


def _fedproto(shape: tuple[int, int, int], kernel: int, channels: int) -> nn.Sequential:
    """FedProto's body: two convolutions and one layer, to a 50-d embedding after a ReLU and before the dropout."""
    colours, height, width = shape
    flat = channels * pooled_side(pooled_side(height, kernel), 5) * pooled_side(pooled_side(width, kernel), 5)
    return chain(
        conv1=nn.Conv2d(colours, 10, kernel),
        pool1=nn.MaxPool2d(2),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(10, channels, 5),
        dropout=nn.Dropout2d(0.5),
        pool2=nn.MaxPool2d(2),
        relu2=nn.ReLU(),
        flatten=nn.Flatten(),
        fc1=nn.Linear(flat, 50),
        relu3=nn.ReLU(),
    )


class CnnMnist(Net):
    """FedProto's CNN for MNIST: convolutions 5x5 and 5x5, a 50-d embedding after a ReLU.

    channels: output channels of the second convolution
    """

    def __init__(self, shape: Shape, classes: int, *, channels: Size = 20) -> None:
        body = _fedproto(image_shape("cnn_mnist", shape, 16, "cnn_digits"), 5, channels)
        super().__init__(body, chain(dropout=nn.Dropout(0.5), fc=nn.Linear(50, classes)), 50)


class CnnFemnist(Net):
    """FedProto's CNN for FEMNIST (128x128 there): convolutions 3x3 and 5x5, a 50-d embedding after a ReLU.

    channels: output channels of the second convolution
    """

    def __init__(self, shape: Shape, classes: int, *, channels: Size = 20) -> None:
        body = _fedproto(image_shape("cnn_femnist", shape, 14, "cnn_digits"), 3, channels)
        super().__init__(body, chain(dropout=nn.Dropout(0.5), fc=nn.Linear(50, classes)), 50)


class CnnFedNh(Net):
    """FedNH's CNN for CIFAR (Listing 1): a 192-d embedding after a ReLU, and a bias-free head."""

    def __init__(self, shape: Shape, classes: int) -> None:
        colours, height, width = image_shape("cnn_fednh", shape, 16, "cnn_digits")
        body = chain(
            conv1=nn.Conv2d(colours, 64, 5),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(64, 64, 5),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(64 * pooled_side(pooled_side(height, 5), 5) * pooled_side(pooled_side(width, 5), 5), 384),
            relu3=nn.ReLU(),
            fc2=nn.Linear(384, 192),
            relu4=nn.ReLU(),
        )
        super().__init__(body, chain(fc=nn.Linear(192, classes, bias=False)), 192)


class CnnCifar(Net):
    """The CNN of 1.6 million parameters that simulators are compared by on CIFAR-10: convolutions 3x3 and 3x3, one
    pooling, a 128-d embedding after a ReLU."""

    def __init__(self, shape: Shape, classes: int) -> None:
        colours, height, width = image_shape("cnn_cifar", shape, 8, "cnn_digits")
        body = chain(
            conv1=nn.Conv2d(colours, 32, 3),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(32, 64, 3),
            relu2=nn.ReLU(),
            pool=nn.MaxPool2d(2),
            dropout=nn.Dropout(0.25),
            flatten=nn.Flatten(),
            fc1=nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128),
            relu3=nn.ReLU(),
        )
        super().__init__(body, chain(dropout=nn.Dropout(0.5), fc=nn.Linear(128, classes)), 128)


class CnnPflLib(Net):
    """The CNN that PFLlib takes for images: convolutions 5x5 and 5x5, each pooled, a 512-d embedding after a ReLU."""

    def __init__(self, shape: Shape, classes: int) -> None:
        colours, height, width = image_shape("cnn_pfllib", shape, 16, "cnn_digits")
        flat = 64 * pooled_side(pooled_side(height, 5), 5) * pooled_side(pooled_side(width, 5), 5)
        body = chain(
            conv1=nn.Conv2d(colours, 32, 5),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(32, 64, 5),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(flat, 512),
            relu3=nn.ReLU(),
        )
        super().__init__(body, chain(fc=nn.Linear(512, classes)), 512)


class CnnDigits(Net):
    """A small CNN for the 8x8 digits: two padded convolutions, each pooled.

    channels: output channels of both convolutions
    dim: size of the embedding
    """

    def __init__(self, shape: Shape, classes: int, *, channels: Size = 16, dim: Size = 32) -> None:
        colours, height, width = image_shape("cnn_digits", shape, 4, "mlp_digits")
        body = chain(
            conv1=nn.Conv2d(colours, channels, 3, padding=1),
            pool1=nn.MaxPool2d(2),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(channels, channels, 3, padding=1),
            pool2=nn.MaxPool2d(2),
            relu2=nn.ReLU(),
            flatten=nn.Flatten(),
            fc1=nn.Linear(channels * (height // 4) * (width // 4), dim),
            relu3=nn.ReLU(),
        )
        super().__init__(body, chain(fc=nn.Linear(dim, classes)), dim)


class CnnDigitsDeep(Net):
    """A deeper small CNN for the 8x8 digits: three padded convolutions, the last two pooled.

    channels: output channels of the first two convolutions; the third has twice as many
    dim: size of the embedding
    """

    def __init__(self, shape: Shape, classes: int, *, channels: Size = 16, dim: Size = 32) -> None:
        colours, height, width = image_shape("cnn_digits_deep", shape, 4, "mlp_digits")
        body = chain(
            conv1=nn.Conv2d(colours, channels, 3, padding=1),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(channels, channels, 3, padding=1),
            pool2=nn.MaxPool2d(2),
            relu2=nn.ReLU(),
            conv3=nn.Conv2d(channels, 2 * channels, 3, padding=1),
            pool3=nn.MaxPool2d(2),
            relu3=nn.ReLU(),
            flatten=nn.Flatten(),
            fc1=nn.Linear(2 * channels * (height // 4) * (width // 4), dim),
            relu4=nn.ReLU(),
        )
        super().__init__(body, chain(fc=nn.Linear(dim, classes)), dim)


class MeanOfColumns(nn.Module):
    """Maps (B, D, bands, time) -> (B, D * bands): the mean over time."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(-1).flatten(1)


class CnnAudio(Net):
    """A small CNN for log-mel pictures (bands, time): three padded convolutions, the first two pooled, and the mean
    over time, so that it matters little when something is said.

    channels: output channels of the first convolution; the others have twice as many
    dim: size of the embedding
    """

    def __init__(self, shape: Shape, classes: int, *, channels: Size = 16, dim: Size = 64) -> None:
        colours, height, _ = image_shape("cnn_audio", shape, 4, "mlp_digits")
        body = chain(
            conv1=nn.Conv2d(colours, channels, 3, padding=1),
            pool1=nn.MaxPool2d(2),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(channels, 2 * channels, 3, padding=1),
            pool2=nn.MaxPool2d(2),
            relu2=nn.ReLU(),
            conv3=nn.Conv2d(2 * channels, 2 * channels, 3, padding=1),
            relu3=nn.ReLU(),
            mean=MeanOfColumns(),
            fc1=nn.Linear(2 * channels * (height // 4), dim),
            relu4=nn.ReLU(),
        )
        super().__init__(body, chain(fc=nn.Linear(dim, classes)), dim)
