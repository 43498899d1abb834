"""WordLlama: ids of its own tokenizer and of one's own vocabulary, and what it refuses."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protofed.errors import UserError
from protofed.models import MODELS
from protofed.models.texts import MeanOfTokens, read_vocabulary, token_ids

TEXTS = ["the quick brown fox jumps", "graphics worldly hello unbelievable"]
# embed(TEXTS) of wordllama 0.4.0, the first numbers of each
EMBEDDED = torch.tensor([[0.0793544, -0.1131941, 0.2009713, 0.1971523], [0.1971645, -0.2186203, 0.2119293, -0.1832428]])


@pytest.fixture
def installed() -> None:
    pytest.importorskip("tokenizers", reason="needs pip install 'protofed[encoders]'")
    try:
        MeanOfTokens("")
    except UserError:
        pytest.skip("needs pip install 'protofed[encoders]'")


@pytest.mark.usefixtures("installed")
def test_it_computes_what_its_package_does() -> None:
    ids = token_ids(TEXTS, 16)
    assert ids.shape == (2, 16)
    z = MeanOfTokens("")(torch.from_numpy(ids))
    torch.testing.assert_close(z[:, :4], EMBEDDED, rtol=1e-4, atol=1e-5)
    cut = token_ids(TEXTS, 2)
    assert np.array_equal(cut, ids[:, :2])


@pytest.mark.usefixtures("installed")
def test_words_of_a_vocabulary_are_put_together_from_their_tokens(tmp_path: Path) -> None:
    words = sorted({word for text in TEXTS for word in text.split()})
    (tmp_path / "words.txt").write_text("\n".join(words))
    net = MeanOfTokens(str(tmp_path / "words.txt"))
    rows = [[2 + words.index(word) for word in text.split()] for text in TEXTS]
    ids = torch.tensor([row + [0] * (6 - len(row)) for row in rows])
    torch.testing.assert_close(net(ids)[:, :4], EMBEDDED, rtol=1e-4, atol=1e-5)
    ids[:, -1] = 1  # a word that is not known counts for nothing
    torch.testing.assert_close(net(ids)[:, :4], EMBEDDED, rtol=1e-4, atol=1e-5)
    assert torch.equal(net(torch.zeros(1, 3, dtype=torch.int64)), torch.zeros(1, 256))  # a text without words


@pytest.mark.usefixtures("installed")
def test_it_can_be_trained(tmp_path: Path) -> None:
    made: Any = MODELS["wordllama"]((4,), 3, body="trained")
    _, logits = made(torch.tensor([[5, 6, 0, 0]]))
    logits.square().sum().backward()
    touched = made.body.net.vectors.grad.abs().sum(1).nonzero().flatten().tolist()
    assert touched == [5, 6]


def test_a_vocabulary_is_lines_or_an_array(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    np.savez(tmp_path / "b.npz", vocabulary=np.array(["one", "two"]))
    np.savez(tmp_path / "c.npz", vocabulary=np.frombuffer(b"one\ntwo", np.uint8))
    assert [read_vocabulary(str(path)) for path in sorted(tmp_path.iterdir())] == [["one", "two"]] * 3
    (tmp_path / "empty.txt").write_text("")
    np.savez(tmp_path / "other.npz", words=np.array(["one"]))
    for name, why in {
        "nowhere.txt": "cannot be read",
        "empty.txt": "has no words",
        "other.npz": "cannot be read",
    }.items():
        with pytest.raises(UserError, match=why):
            read_vocabulary(str(tmp_path / name))


@pytest.mark.parametrize(
    ("x", "why"),
    [
        (np.zeros((2, 5), np.float32), "rows of token ids, but samples are float32"),
        (np.full((2, 5), 32_000), "knows the ids 0 to 31999, but they go from 32000"),
        (np.full((2, 5), -1), "knows the ids 0 to 31999, but they go from -1"),
    ],
)
def test_what_it_cannot_take(x: np.ndarray, why: str) -> None:
    kind: Any = MODELS["wordllama"]
    assert why in kind.unfit_data(x, x.shape[1:])
    assert not kind.unfit_data(np.ones((2, 5), np.int64), (5,))
