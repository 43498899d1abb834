"""Gaussian noise, from a key where a run must be repeatable, and from the operating system where it must be secret."""

import math
import secrets

import numpy as np
import torch
from torch import Tensor

from protofed.ops import random

WAYS = 4  # normal numbers that secret noise is the sum of
AT_ONCE = 2**20  # numbers drawn in one go
FARTHEST = 17.2  # no number of either source is farther from 0: sqrt(2 ln 2**53), and of secret noise twice that


def seeded(key: Tensor, many: int) -> Tensor:
    """Standard normal numbers (many,) in double precision that follow from a key (2,). Who knows the key knows them."""
    parts = [
        _box_muller(_fractions(random.bits(random.fold(key.cpu(), part), 4 * size)))
        for part, size in enumerate(_pieces(many))
    ]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def secret(many: int) -> Tensor:
    """Standard normal numbers (many,) in double precision from the operating system's cryptographic source.

    Each is a scaled sum of several, so that the gaps between floating-point numbers do not tell what it was added to
    (Holohan and Braghin, 2021).
    """
    parts = [
        torch.stack([_box_muller(_fractions(_random_words(4 * size))) for _ in range(WAYS)]).sum(0) / math.sqrt(WAYS)
        for size in _pieces(many)
    ]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def seeded_laplace(key: Tensor, many: int) -> Tensor:
    """Laplace numbers (many,) of scale 1 in double precision that follow from a key (2,)."""
    parts = []
    for part, size in enumerate(_pieces(many)):
        u = _fractions(random.bits(random.fold(key.cpu(), part), 4 * size))
        parts.append(torch.where(u[1] < 0.5, torch.log(u[0]), -torch.log(u[0])))
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def _pieces(many: int) -> list[int]:
    return [min(AT_ONCE, many - start) for start in range(0, many, AT_ONCE)]


def _random_words(many: int) -> Tensor:
    """Words (many,) in 0 .. 2**32 - 1."""
    return torch.from_numpy(np.frombuffer(secrets.token_bytes(4 * many), np.uint32).astype(np.int64))


def _fractions(words: Tensor) -> Tensor:
    """Numbers (2, N) in (0, 1) of 52 bits each, from words (4 N,)."""
    high, low = (words >> 6).to(torch.float64).reshape(2, 2, -1)
    fractions: Tensor = (high * 2.0**26 + low + 0.5) * 2.0**-52
    return fractions


def _box_muller(u: Tensor) -> Tensor:
    """Standard normal numbers (N,) of uniform ones (2, N)."""
    return torch.sqrt(-2 * torch.log(u[0])) * torch.cos(2 * math.pi * u[1])
