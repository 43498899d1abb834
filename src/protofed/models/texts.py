"""WordLlama: texts as token ids -> the mean of 256 numbers for each token, which were trained on Llama's vocabulary.

WordLlama's vectors come with the package wordllama (MIT) and need no network around them. Token ids are those of its
own tokenizer (`token_ids` makes them), or those of a vocabulary of words, which are put together from their tokens.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from protofed.errors import UserError
from protofed.models.mlp import Shape
from protofed.models.pretrained import AdapterKind, BodyKind, Pretrained, Width, file_of, read_weights

TOKENS = 32_000
PADDING, UNKNOWN = 0, 1  # ids in a user's own vocabulary; words follow
INSTALL = "pip install wordllama"


class MeanOfTokens(nn.Module):
    """Ids (B, length) -> the mean of the vectors of all tokens behind them (B, 256), without padding (id 0)."""

    counts: Tensor

    def __init__(self, vocabulary: str) -> None:
        super().__init__()
        path = file_of("wordllama", "wordllama", "weights/l2_supercat_256.safetensors", INSTALL)
        vectors = read_weights(path, lambda file: load_file(file)["embedding.weight"].float(), INSTALL)
        counts = torch.ones(len(vectors))
        self.source = vocabulary
        if vocabulary:
            tokens = [[], [], *_tokens_of(read_vocabulary(vocabulary))]
            counts = torch.tensor([float(len(some)) for some in tokens])
            vectors = torch.stack([vectors[some].sum(0) for some in tokens])
        counts[PADDING] = 0
        self.vectors = nn.Parameter(vectors)
        self.register_buffer("counts", counts)

    def extra_repr(self) -> str:
        return f"{len(self.vectors)} ids"

    def __str__(self) -> str:
        return f"texts as {len(self.vectors):,} ids" + (f" of {Path(self.source).name}" if self.source else "")

    def forward(self, ids: Tensor) -> Tensor:
        many = self.counts[ids]
        some = self.vectors[ids] * (many > 0).unsqueeze(-1)
        mean: Tensor = some.sum(1) / many.sum(1, keepdim=True).clamp(min=1)
        return mean


def token_ids(texts: Sequence[str], length: int = 128) -> np.ndarray:
    """Texts as rows of `length` token ids (N, length) for `wordllama`, padded with 0 or cut."""
    rows = np.zeros((len(texts), length), np.int64)
    for row, some in zip(rows, _tokens_of(texts), strict=True):
        row[: len(some)] = some[:length]
    return rows


def _tokens_of(texts: Sequence[str]) -> list[list[int]]:
    path = file_of("wordllama", "wordllama", "tokenizers/l2_supercat_tokenizer_config.json", INSTALL)
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UserError(
            "wordllama needs the package tokenizers, which is not installed. Install it: pip install tokenizers"
        ) from None
    tokenizer = read_weights(path, lambda file: Tokenizer.from_file(str(file)), INSTALL)
    return [found.ids for found in tokenizer.encode_batch(list(texts), add_special_tokens=False)]


def read_vocabulary(source: str) -> list[str]:
    """The words for the ids from 2 on: the lines of a text file, or of an array `vocabulary` in an .npz."""
    path = Path(source)
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as data:
                found = data["vocabulary"]
            words = [str(w) for w in found] if found.dtype.kind == "U" else bytes(found).decode().split("\n")
        else:
            words = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"model.vocabulary = {source!r} cannot be read ({error}). Name a text file with one word a line, or an "
            ".npz with the array vocabulary."
        ) from None
    if not any(words):
        raise UserError(f"model.vocabulary = {source!r} has no words.")
    return words


class WordLlama(Pretrained):
    """WordLlama's word vectors: texts as token ids (0 is padding) -> the mean of 256 numbers.

    body: frozen: embeddings are computed once and cached; trained: the vectors are trained, too
    adapter: what is trained between encoder and head: none, linear, mlp (two layers), or lowrank (z + B A z)
    width: size of the embedding behind a linear or mlp adapter; the rank of a lowrank one
    vocabulary: a file of the words that ids from 2 on stand for (1 is an unknown word); empty: ids are WordLlama's own
    """

    embedding = 256
    takes_tokens = True

    def __init__(
        self,
        shape: Shape,
        classes: int,
        *,
        body: BodyKind = "frozen",
        adapter: AdapterKind = "none",
        width: Width = 64,
        vocabulary: str = "",
    ) -> None:
        super().__init__(MeanOfTokens(vocabulary), classes, body, adapter, width)

    @classmethod
    def unfit_data(cls, x: np.ndarray, shape: Shape, *, vocabulary: str = "", **fields: Any) -> str:
        if x.dtype.kind not in "iu" or x.dtype == np.uint8 or len(shape) != 1:
            return f"wordllama takes texts as rows of token ids, but samples are {x.dtype} of shape {shape}"
        known = 2 + len(read_vocabulary(vocabulary)) if vocabulary else TOKENS
        least, most = (int(x.min()), int(x.max())) if x.size else (0, 0)
        if least < 0 or most >= known:
            return (
                f"wordllama knows the ids 0 to {known - 1}, but they go from {least} to {most}. For ids of your own, "
                "set model.vocabulary"
            )
        return ""
