"""Noise is normal, repeatable where it should be, and secret where it should be."""

import math

import pytest
import torch
from torch import Tensor

from protofed.ops import random
from protofed.privacy import noise
from protofed.privacy.noise import secret, seeded

MANY = 200_000


def drawn(how: str) -> Tensor:
    return secret(MANY) if how == "secret" else seeded(random.key(3, "test"), MANY)


@pytest.mark.parametrize("how", ["seeded", "secret"])
def test_noise_is_standard_normal(how: str) -> None:
    x = drawn(how)
    assert x.dtype == torch.float64
    assert abs(float(x.mean())) < 5 / math.sqrt(MANY)
    assert float(x.var()) == pytest.approx(1, abs=5 * math.sqrt(2 / MANY))
    assert float((x**4).mean()) == pytest.approx(3, abs=5 * math.sqrt(96 / MANY))
    ordered = x.sort().values  # Kolmogorov and Smirnov: the chance of more than 2.2 / sqrt(n) is 1 in 8,000
    normal = 0.5 * (1 + torch.erf(ordered / math.sqrt(2)))
    steps = torch.arange(MANY + 1, dtype=torch.float64) / MANY
    assert float((normal - steps[1:]).abs().max()) < 2.2 / math.sqrt(MANY)


@pytest.mark.parametrize("how", ["seeded", "secret"])
def test_neighbouring_numbers_are_independent(how: str) -> None:
    x = drawn(how)
    for gap in (1, 2, MANY // 2):
        assert abs(float((x[gap:] * x[:-gap]).mean())) < 5 / math.sqrt(MANY - gap)


def test_seeded_noise_follows_from_its_key_alone() -> None:
    one = seeded(random.key(1, "a"), 100)
    assert torch.equal(one, seeded(random.key(1, "a"), 100))
    assert not torch.isclose(one, seeded(random.key(1, "b"), 100)).any()


def test_secret_noise_never_comes_twice() -> None:
    assert not torch.isclose(secret(1000), secret(1000), rtol=0, atol=1e-12).any()


@pytest.mark.parametrize("how", ["seeded", "secret"])
def test_noise_in_several_pieces_repeats_none_of_them(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "AT_ONCE", 64)
    x = seeded(random.key(1), 150) if how == "seeded" else secret(150)
    assert len(x) == len(x.unique()) == 150


def test_no_numbers() -> None:
    assert len(seeded(random.key(1), 0)) == len(secret(0)) == 0


def test_the_extremes_of_the_source_are_finite() -> None:
    for word in (0, 2**32 - 1):
        x = noise._box_muller(noise._fractions(torch.full((4,), word)))
        assert torch.isfinite(x).all()
        assert float(x.abs().max()) < 9  # sqrt(2 ln 2**53)
