"""Resemblyzer: the numbers of its package, without the packages that it asks for, and what it refuses."""

from typing import Any

import numpy as np
import pytest
import torch

from protofed.errors import UserError
from protofed.models import MODELS
from protofed.models.speech import BANDS, VoiceNet, mel_bands, starts_of_parts


@pytest.fixture
def net() -> VoiceNet:
    try:
        return VoiceNet().eval()
    except UserError:
        pytest.skip("needs pip install --no-deps resemblyzer")


def test_mel_bands_are_triangles_of_equal_area() -> None:
    bands = mel_bands(20_001)
    hertz = 8000 / 20_000
    torch.testing.assert_close(bands.sum(0) * hertz, torch.ones(BANDS), rtol=1e-3, atol=1e-3)
    tops = bands.argmax(0) * hertz
    low = tops[tops < 950]
    torch.testing.assert_close(low.diff(), torch.full((len(low) - 1,), float(low.diff().mean())), rtol=0.02, atol=1.0)
    high = tops[tops > 1100].log().diff()
    torch.testing.assert_close(high, torch.full_like(high, float(high.mean())), rtol=0.02, atol=0.001)


@pytest.mark.parametrize(
    ("samples", "starts"), [(8000, [0]), (25_600, [0]), (30_000, [0]), (33_000, [0, 77]), (50_000, [0, 77, 154])]
)
def test_an_utterance_is_cut_into_parts_of_which_enough_is_sound(samples: int, starts: list[int]) -> None:
    assert starts_of_parts(samples) == starts


@torch.no_grad()
def test_it_computes_what_its_package_does(net: VoiceNet) -> None:
    """VoiceEncoder.embed_utterance of Resemblyzer 0.1.4 with librosa 0.11, of two tones raised to -30 dB."""
    t = np.arange(20_000) / 16_000
    wave = 0.02 * np.sin(2 * np.pi * 220 * t) + 0.01 * np.sin(2 * np.pi * 700 * t)
    z = net(torch.from_numpy(wave.astype(np.float32))[None])[0]
    assert float(z.norm()) == pytest.approx(1, abs=1e-5)
    torch.testing.assert_close(z[list(LARGEST)], torch.tensor(list(LARGEST.values())), rtol=1e-3, atol=1e-4)


LARGEST = {20: 0.239351, 251: 0.214906, 9: 0.204085, 247: 0.198782, 21: 0.185334, 13: 0.180498}  # places: numbers


@torch.no_grad()
def test_loud_and_quiet_sound_of_one_voice_are_alike(net: VoiceNet) -> None:
    x = 0.01 * torch.randn(2, 16_000, generator=torch.Generator().manual_seed(0))
    x[1] = x[0] / 10
    z = net(x)
    torch.testing.assert_close(z[0], z[1], rtol=1e-3, atol=1e-4)
    assert bool(net(torch.zeros(1, 8000)).isfinite().all())  # silence


@pytest.mark.parametrize(
    ("x", "why"),
    [
        (np.full((2, 9), 4000, np.float32), r"from -1 to 1, but it goes from 4000 to 4000. Divide by 32768?"),
        (np.zeros((2, 1, 32, 32), np.uint8), "sound as rows of numbers"),
    ],
)
def test_what_it_cannot_take(x: np.ndarray, why: str) -> None:
    kind: Any = MODELS["resemblyzer"]
    assert why in kind.unfit_data(x, x.shape[1:])
    assert not kind.unfit_data(np.zeros((2, 9), np.float32), (9,))
