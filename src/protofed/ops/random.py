"""Randomness as an argument: numbers computed from a key, the same on every engine, device and grouping of clients.

A key is two 32-bit words in an int64 tensor (..., 2). Nothing here has a state, so that a run resumes exactly, and a
client draws the same numbers alone, stacked with others, or on another machine.
"""

import hashlib
import math

import torch
from torch import Tensor

WORD = 0xFFFFFFFF


def words(*parts: int | str) -> tuple[int, int]:
    """Two words from what names the occasion, such as (seed, "dropout", round, client)."""
    named = tuple(part if isinstance(part, str) else int(part) for part in parts)  # numpy's 3 is 3
    digest = hashlib.blake2b(repr(named).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def key(*parts: int | str) -> Tensor:
    """The same as a key (2,)."""
    return torch.tensor(words(*parts))


def seed(*parts: int | str) -> int:
    """The same as one number, for libraries that want a seed."""
    low, high = words(*parts)
    return (high & 0x7FFFFFFF) << 32 | low


def _mix(word: Tensor) -> Tensor:
    """A bijection of 32-bit words that spreads every bit; both factors are below 2**31, so int64 never overflows."""
    word = (word ^ (word >> 16)) * 0x21F0AAAD & WORD
    word = (word ^ (word >> 15)) * 0x735A2D97 & WORD
    return word ^ (word >> 15)


def bits(key: Tensor, n: int) -> Tensor:
    """Words (..., n), uniform in 0 .. 2**32 - 1."""
    counter = torch.arange(n, device=key.device) * 0x9E3779B9 & WORD
    return _mix(_mix(counter ^ key[..., :1]) ^ key[..., 1:])


def fold(key: Tensor, number: int | Tensor) -> Tensor:
    """A new key (..., 2) for the number-th occasion under this key; for many numbers (n, 1) as many keys (n, 2)."""
    return _mix(_mix(key + number * 0x9E3779B9 & WORD) ^ key.flip(-1))


def uniform(key: Tensor, n: int) -> Tensor:
    """Numbers (..., n) in [0, 1)."""
    return (bits(key, n) >> 8) * 2.0**-24


def at_least(key: Tensor, n: int, p: float) -> Tensor:
    """uniform(key, n) >= p (..., n), in half the memory."""
    counter = _small(torch.arange(n, device=key.device) * 0x9E3779B9 & WORD)
    word = _mix_small(_mix_small(counter ^ _small(key[..., :1])) ^ _small(key[..., 1:]))
    return (word >> 8 & 0xFFFFFF) >= math.ceil(p * 2**24)


def _small(words: Tensor) -> Tensor:
    """Words as int32, the upper half of them negative."""
    return torch.where(words > 0x7FFFFFFF, words - (WORD + 1), words).to(torch.int32)


def _mix_small(word: Tensor) -> Tensor:
    """_mix in int32, whose products keep the lower 32 bits; shifted in bits are cleared."""
    word = (word ^ (word >> 16 & 0xFFFF)) * 0x21F0AAAD
    word = (word ^ (word >> 15 & 0x1FFFF)) * 0x735A2D97
    return word ^ (word >> 15 & 0x1FFFF)


def normal(key: Tensor, n: int) -> Tensor:
    """Standard normal numbers (..., n), by Box and Muller."""
    u = uniform(key, 2 * n)
    radius = torch.sqrt(-2 * torch.log1p(-u[..., :n]))
    return radius * torch.cos(2 * math.pi * u[..., n:])


def ranks(key: Tensor, label: Tensor, real: Tensor) -> Tensor:
    """The place (..., N) of each real sample among those of its label, in a random order.

    Padding before or between the samples changes no sample's place; the places of padding mean nothing.
    """
    number = (real.cumsum(0) - 1).clamp(min=0)
    group = torch.where(real, label, 2**30)  # padding sorts behind every label
    order = torch.argsort((group << 32) + bits(key, len(label))[..., number], dim=-1, stable=True)
    return order.argsort(-1) - torch.searchsorted(group.sort().values, group)


def permutation(key: Tensor, n: int) -> Tensor:
    """The numbers 0 .. n-1 in random order (..., n)."""
    return torch.argsort(bits(key, n), dim=-1, stable=True)
