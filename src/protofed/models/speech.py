"""Resemblyzer's speaker encoder: sound at 16 kHz -> 256 numbers that tell voices apart.

Generalized End-to-End Loss for Speaker Verification (GE2E)
    Wan et al., ICASSP 2018. https://arxiv.org/abs/1710.10467
The weights come with the package Resemblyzer (Apache-2.0). Only its file of weights is read, so the packages that it
asks for are not needed. Silence is not cut out; all else is as in the package.
"""

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protofed.models.mlp import Shape
from protofed.models.pretrained import AdapterKind, BodyKind, Pretrained, Width, file_of, read_weights

RATE = 16_000  # samples a second
WINDOW, STEP, BANDS = 400, 160, 40  # of a spectrum: 25 ms every 10 ms, in mel bands
FRAMES = 160  # in a part of an utterance: 1.6 s
BETWEEN = 77  # frames from one part to the next: 1.3 parts a second
COVERED = 0.75  # of the last part that must be sound
LOUDNESS = -30.0  # dB of full scale, to which quieter sounds are raised
INSTALL = "pip install --no-deps resemblyzer"


def mel_bands(bins: int) -> Tensor:
    """Triangular filters (bins, BANDS) of equal area, on Slaney's mel scale: linear up to 1 kHz, logarithmic above."""
    step, knee = 200 / 3, 1000.0
    log_step = math.log(6.4) / 27

    def to_hertz(mel: np.ndarray) -> np.ndarray:
        first = knee / step
        above: np.ndarray = np.where(
            mel < first, mel * step, knee * np.exp(log_step * (np.maximum(mel, first) - first))
        )
        return above

    top = knee / step + math.log(RATE / 2 / knee) / log_step
    edges = to_hertz(np.linspace(0, top, BANDS + 2))
    hertz = np.linspace(0, RATE / 2, bins)[:, None]
    rising = (hertz - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - hertz) / (edges[2:] - edges[1:-1])
    filters = np.maximum(0, np.minimum(rising, falling)) * 2 / (edges[2:] - edges[:-2])
    return torch.from_numpy(filters.astype(np.float32))


def starts_of_parts(samples: int) -> list[int]:
    """The first frames of the parts of a sound of this length."""
    frames = math.ceil((samples + 1) / STEP)
    starts = list(range(0, max(1, frames - FRAMES + BETWEEN + 1), BETWEEN))
    covered = (samples - starts[-1] * STEP) / (FRAMES * STEP)
    return starts[:-1] if covered < COVERED and len(starts) > 1 else starts


class VoiceNet(nn.Module):
    """Sound (B, samples) from -1 to 1 -> embeddings (B, 256) of length 1."""

    window: Tensor
    bands: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(BANDS, 256, 3, batch_first=True)
        self.linear = nn.Linear(256, 256)
        path = file_of("resemblyzer", "resemblyzer", "pretrained.pt", INSTALL)

        def load(file: Any) -> None:
            kept = torch.load(file, map_location="cpu", weights_only=True)["model_state"]
            self.load_state_dict({name: value for name, value in kept.items() if name.startswith(("lstm.", "linear."))})

        read_weights(path, load, INSTALL)
        self.register_buffer("window", torch.hann_window(WINDOW))
        self.register_buffer("bands", mel_bands(WINDOW // 2 + 1))

    def __str__(self) -> str:
        return "sound at 16 kHz"

    def forward(self, x: Tensor) -> Tensor:
        power = x.square().mean(1, keepdim=True).clamp(min=1e-12)
        gain = 10 ** ((LOUDNESS - 10 * power.log10()) / 20)
        x = x * gain.clamp(min=1)
        starts = starts_of_parts(x.shape[1])
        x = F.pad(x, (0, max(0, (starts[-1] + FRAMES) * STEP - x.shape[1])))
        spectrum = torch.stft(x, WINDOW, STEP, window=self.window, pad_mode="constant", return_complex=True)
        mel = spectrum.abs().square().mT @ self.bands  # (B, frames, BANDS)
        parts = torch.stack([mel[:, start : start + FRAMES] for start in starts], 1)
        _, (hidden, _) = self.lstm(parts.flatten(0, 1))
        z = F.normalize(torch.relu(self.linear(hidden[-1])))
        return F.normalize(z.reshape(len(x), len(starts), -1).mean(1))


class Resemblyzer(Pretrained):
    """Resemblyzer's speaker encoder: sound at 16 kHz, as rows of numbers from -1 to 1 -> 256 numbers.

    body: frozen: embeddings are computed once and cached; trained: the encoder is trained, too
    adapter: what is trained between encoder and head: none, linear, mlp (two layers), or lowrank (z + B A z)
    width: size of the embedding behind a linear or mlp adapter; the rank of a lowrank one
    """

    embedding = 256

    def __init__(
        self,
        shape: Shape,
        classes: int,
        *,
        body: BodyKind = "frozen",
        adapter: AdapterKind = "none",
        width: Width = 64,
    ) -> None:
        super().__init__(VoiceNet(), classes, body, adapter, width)

    @classmethod
    def unfit_data(cls, x: np.ndarray, shape: Shape, **fields: Any) -> str:
        if len(shape) != 1:
            return f"resemblyzer takes sound as rows of numbers (16,000 a second), but samples have shape {shape}"
        least, most = (float(x.min()), float(x.max())) if x.size else (0.0, 0.0)
        if least < -1 or most > 1 or np.isnan(least):
            return f"resemblyzer takes sound from -1 to 1, but it goes from {least:g} to {most:g}. Divide by 32768?"
        return ""
