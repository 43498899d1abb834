"""Randomness as an argument: numbers computed from a key, the same on every engine and device, however clients are run.

A key is two 32-bit words in an int64 tensor (..., 2). Nothing here has state, so a run resumes exactly, and a client
draws the same numbers alone, stacked with others, or on another machine.
"""

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

WORD = 0xFFFFFFFF
STEP = 0x9E3779B9  # between the counters of two numbers
BLOCK = 2**15  # numbers that are drawn at a time, where only the smallest are kept


def words(*parts: int | str) -> tuple[int, int]:
    """Two words from a name for the draw, such as (seed, "dropout", round, client)."""
    named = tuple(part if isinstance(part, str) else int(part) for part in parts)  # numpy's 3 counts as 3
    digest = hashlib.blake2b(repr(named).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def key(*parts: int | str) -> Tensor:
    """The same as a key (2,)."""
    return torch.tensor(words(*parts))


def seed(*parts: int | str) -> int:
    """The same as one number, for libraries that take a seed."""
    low, high = words(*parts)
    return (high & 0x7FFFFFFF) << 32 | low


def _mix(word: Tensor) -> Tensor:
    """A bijection of 32-bit words that spreads every bit; both factors are below 2**31, so int64 never overflows."""
    word = (word ^ (word >> 16)) * 0x21F0AAAD & WORD
    word = (word ^ (word >> 15)) * 0x735A2D97 & WORD
    return word ^ (word >> 15)


def bits(key: Tensor, n: int) -> Tensor:
    """Words (..., n), uniform in 0 .. 2**32 - 1."""
    counter = torch.arange(n, device=key.device) * STEP & WORD
    return _mix(_mix(counter ^ key[..., :1]) ^ key[..., 1:])


def fold(key: Tensor, number: int | Tensor) -> Tensor:
    """A new key (..., 2) for this number; many numbers (n, 1) give n keys (n, 2)."""
    return _mix(_mix(key + number * STEP & WORD) ^ key.flip(-1))


def uniform(key: Tensor, n: int) -> Tensor:
    """Numbers (..., n) in [0, 1)."""
    return (bits(key, n) >> 8) * 2.0**-24


def at_least(key: Tensor, n: int, p: float) -> Tensor:
    """uniform(key, n) >= p (..., n), in half the memory."""
    counter = _small(torch.arange(n, device=key.device) * STEP & WORD)
    word = _mix_small(_mix_small(counter ^ _small(key[..., :1])) ^ _small(key[..., 1:]))
    return (word >> 8 & 0xFFFFFF) >= math.ceil(p * 2**24)


def _small(words: Tensor) -> Tensor:
    """Words as int32, the upper half of them negative."""
    return torch.where(words > 0x7FFFFFFF, words - (WORD + 1), words).to(torch.int32)


def _mix_small(word: Tensor) -> Tensor:
    """_mix in int32, whose products keep the lower 32 bits; bits shifted in are cleared."""
    word = (word ^ (word >> 16 & 0xFFFF)) * 0x21F0AAAD
    word = (word ^ (word >> 15 & 0x1FFFF)) * 0x735A2D97
    return word ^ (word >> 15 & 0x1FFFF)


def normal(key: Tensor, n: int) -> Tensor:
    """Standard normal numbers (..., n), by Box and Muller."""
    u = uniform(key, 2 * n)
    radius = torch.sqrt(-2 * torch.log1p(-u[..., :n]))
    return radius * torch.cos(2 * math.pi * u[..., n:])


def ranks(key: Tensor, label: Tensor, real: Tensor) -> Tensor:
    """The rank (..., N) of each real sample within its label, in a random order.

    Padding before or between the samples does not change their ranks; ranks of padding mean nothing.
    """
    number = (real.cumsum(0) - 1).clamp(min=0)
    group = torch.where(real, label, 2**30)  # padding sorts after every label
    order = torch.argsort((group << 32) + bits(key, len(label))[..., number], dim=-1, stable=True)
    return order.argsort(-1) - torch.searchsorted(group.sort().values, group)


def permutation(key: Tensor, n: int) -> Tensor:
    """The numbers 0 .. n-1 in random order (..., n)."""
    return torch.argsort(bits(key, n), dim=-1, stable=True)


def first_drawn(key: Tensor, n: int, k: int) -> Tensor:
    """The first k numbers of permutation(key, n), for one key (2,): without sorting or keeping all n."""
    if k > n // 4:
        return permutation(key, n)[:k]
    low, high = (np.uint32(word) for word in key.tolist())
    most = (k + 8 * math.sqrt(k) + 8) / n * 2**32  # nearly always above the k smallest
    places, values = [], []
    for start in range(0, n, BLOCK):
        counter = np.arange(start, min(n, start + BLOCK), dtype=np.uint32) * np.uint32(STEP)
        word = mix_words(mix_words(counter ^ low) ^ high)
        small = np.flatnonzero(word < most)
        places.append(small + start)
        values.append(word[small])
    place, value = np.concatenate(places), np.concatenate(values)
    if len(place) < k:
        return permutation(key, n)[:k]
    return torch.from_numpy(place[np.argsort(value, kind="stable")[:k]])


def mix_words(word: np.ndarray) -> np.ndarray:
    """_mix of 32-bit words (uint32), in place."""
    word ^= word >> 16
    word *= np.uint32(0x21F0AAAD)
    word ^= word >> 15
    word *= np.uint32(0x735A2D97)
    word ^= word >> 15
    return word
