"""A network for series of measurements."""

from torch import Tensor, nn

from protofed.errors import UserError
from protofed.models.mlp import Net, Shape, Size, chain


class ChannelsFirst(nn.Module):
    """Series (B, time, channels), or (B, 1, time, channels) -> maps (B, channels, time, 1)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1, -2).transpose(-1, -2).unsqueeze(-1)


class MeanOverTime(nn.Module):
    """Maps (B, D, time, 1) -> (B, D)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((-2, -1))


class CnnSeries(Net):
    """A CNN along time, for series such as those of a watch: three convolutions of stride 2, and the mean over time.

    channels: output channels of the first two convolutions; the third has twice as many
    dim: size of the embedding
    """

    def __init__(self, shape: Shape, classes: int, *, channels: Size = 32, dim: Size = 64) -> None:
        if len(shape) != 2 and (len(shape) != 3 or shape[0] != 1):
            raise UserError(
                f"cnn_series takes series (time, channels), but the inputs have shape {tuple(shape)}. "
                "Use mlp_digits or mlp_mpfedcl, which take any shape."
            )
        body = chain(
            series=ChannelsFirst(),
            conv1=nn.Conv2d(shape[-1], channels, (5, 1), (2, 1), (2, 0)),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(channels, channels, (5, 1), (2, 1), (2, 0)),
            relu2=nn.ReLU(),
            conv3=nn.Conv2d(channels, 2 * channels, (5, 1), (2, 1), (2, 0)),
            relu3=nn.ReLU(),
            mean=MeanOverTime(),
            fc1=nn.Linear(2 * channels, dim),
            relu4=nn.ReLU(),
        )
        super().__init__(body, chain(fc=nn.Linear(dim, classes)), dim)
