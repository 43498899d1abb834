"""A network for texts as token ids."""

from typing import Annotated

from annotated_types import Ge, Le
from torch import Tensor, nn

from protofed.models.mlp import Net, Shape, Size, chain

Words = Annotated[int, Ge(1), Le(10_000_000)]


class MeanOfWords(nn.Module):
    """Token ids (B, length) -> the mean of their vectors (B, width), without padding (id 0)."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.vectors = nn.Embedding(words, width)

    def forward(self, tokens: Tensor) -> Tensor:
        real = (tokens != 0).unsqueeze(-1).to(self.vectors.weight.dtype)
        mean: Tensor = (self.vectors(tokens) * real).sum(1) / real.sum(1).clamp(min=1)
        return mean


class BagOfWords(Net):
    """A network for texts as token ids (0 is padding): the mean of learnt word vectors, and one layer.

    words: number of token ids
    width: size of a word's vector
    dim: size of the embedding
    """

    takes_tokens = True

    def __init__(self, shape: Shape, classes: int, *, words: Words = 10_002, width: Size = 32, dim: Size = 64) -> None:
        body = chain(mean=MeanOfWords(words, width), fc1=nn.Linear(width, dim), relu1=nn.ReLU())
        super().__init__(body, chain(fc=nn.Linear(dim, classes)), dim)
        self.words = words
