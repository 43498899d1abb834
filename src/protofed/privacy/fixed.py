"""Trees of Means as vectors of whole numbers modulo 2^bits, whose sum is exact, and back."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from protofed.method import Each, Mean, Tree
from protofed.privacy.fault import SpoiltSum, SumFault

Whole = NDArray[np.unsignedinteger]
FINEST = 50  # bits of one client's number at most: float64 holds all of them
CHECKS = 4  # numbers at the end of a vector that are 1 for every client, so that their sum shows a wrong mask


class Opened(NamedTuple):
    """A sum, and how many numbers the clients had to cut at the ends of the grid."""

    up: Tree
    cut: int


class Grid(NamedTuple):
    """How numbers become whole numbers: each client uses so few bits that the sum over `clients` fits in `bits`."""

    bits: int
    range: float  # values from -range to range
    clients: int  # at most
    caps: tuple[float, ...]  # for each Mean of the tree: the largest weight that a client may have

    @property
    def room(self) -> int:
        """Bits of one client's number."""
        return min(FINEST, self.bits - max(1, (self.clients - 1).bit_length()))

    @property
    def kind(self) -> np.dtype[np.unsignedinteger]:
        return np.dtype(np.uint32 if self.bits <= 32 else np.uint64)

    def weight_step(self, cap: float) -> float:
        """The distance of two weights on the grid, a power of two: whole weights are exact if it is at most 1."""
        return _power(cap / (2**self.room - 1))

    def total_step(self, cap: float) -> float:
        """The distance of two totals on the grid, a power of two."""
        return _power(self.range * cap / (2 ** (self.room - 1) - 1))

    def encode(self, up: Tree) -> Whole:
        """One client's tree of Means as a vector: rounded to the nearest step (halves to the even one), cut at the
        ends of the grid; then how many numbers were cut, and the checks."""
        parts: list[NDArray[np.float64]] = []
        cut = 0
        for mean, cap in zip(self._means(up), self.caps, strict=True):
            weight, lost = _rounded(mean.weight, self.weight_step(cap), 0, 2**self.room - 1)
            parts.append(weight)
            cut += lost
            edge = 2 ** (self.room - 1) - 1
            for leaf in tree_leaves(mean.total):
                total, lost = _rounded(leaf, self.total_step(cap), -edge, edge)
                parts.append(total)
                cut += lost
        parts.append(np.array([min(cut, 2**self.room - 1), *[1] * CHECKS], np.float64))
        whole = np.concatenate(parts).astype(np.int64).astype(np.uint64)
        return self.reduced(whole.astype(self.kind))

    def reduced(self, vector: Whole) -> Whole:
        """The same modulo 2^bits."""
        if self.bits < 8 * vector.dtype.itemsize:
            vector &= vector.dtype.type(2**self.bits - 1)
        return vector

    def size(self, form: Tree) -> int:
        """How many numbers a tree of this form has as a vector."""
        numbers: int = sum(m.weight.numel() + sum(x.numel() for x in tree_leaves(m.total)) for m in self._means(form))
        return numbers + 1 + CHECKS

    def decode(self, vector: Whole, form: Tree, clients: int) -> Opened:
        """The sum over so many clients as a tree of this form; a SpoiltSum if it cannot be one."""
        if bool((vector[-CHECKS:] != clients).any()):
            raise SpoiltSum("the sum does not open: a client masked with other numbers than it shared")
        means, shape = tree_flatten(form, is_leaf=lambda node: isinstance(node, Mean))
        made, at = [], 0
        for mean, cap in zip(means, self.caps, strict=True):
            many = mean.weight.numel()
            weight = vector[at : at + many].astype(np.float64) * self.weight_step(cap)
            at += many
            if bool((weight > clients * cap).any()):
                raise SpoiltSum(f"the sum has a weight of {weight.max():g}, more than {clients} clients can have")
            leaves, inner = tree_flatten(mean.total)
            totals = []
            for leaf in leaves:
                total = self._signed(vector[at : at + leaf.numel()]) * self.total_step(cap)
                at += leaf.numel()
                if bool((np.abs(total) > clients * self.range * cap * 2).any()):
                    raise SpoiltSum("the sum has a number beyond privacy.range times its clients: one of them lied")
                totals.append(_tensor(total, leaf))
            made.append(Mean(tree_unflatten(totals, inner), _tensor(weight, mean.weight)))
        return Opened(tree_unflatten(made, shape), int(vector[at]))

    def pack(self, vector: Whole) -> bytes:
        """A vector as bytes, so many bits for each number."""
        wide = vector.astype(vector.dtype.newbyteorder("<"), copy=False)
        return wide.view(np.uint8).reshape(len(vector), -1)[:, : self.bits // 8].tobytes()

    def unpack(self, packed: bytes, size: int) -> Whole:
        """A vector of so many numbers; a SumFault if the bytes are not that many."""
        if len(packed) != size * self.bits // 8:
            raise SumFault(f"its masked upload has {len(packed):,} bytes, where {size * self.bits // 8:,} are expected")
        wide = np.zeros((size, self.kind.itemsize), np.uint8)
        wide[:, : self.bits // 8] = np.frombuffer(packed, np.uint8).reshape(size, -1)
        return wide.reshape(-1).view(self.kind.newbyteorder("<")).astype(self.kind)

    def _means(self, tree: Tree) -> list[Mean]:
        return means_of(tree)

    def _signed(self, part: Whole) -> NDArray[np.float64]:
        wide = part.astype(np.uint64) << np.uint64(64 - self.bits)
        signed: NDArray[np.float64] = (wide.view(np.int64) >> np.int64(64 - self.bits)).astype(np.float64)
        return signed


def means_of(tree: Tree) -> list[Mean]:
    """All Means of a tree that has nothing else."""
    found = tree_flatten(tree, is_leaf=lambda node: isinstance(node, Mean | Each))[0]
    if not all(isinstance(node, Mean) for node in found):
        raise SumFault("the upload has something that cannot be summed")
    return found


def caps_of(forms: Sequence[Mean], samples: int) -> tuple[float, ...]:
    """The largest weight of each Mean: 1 if a client counts once at most, otherwise its number of samples."""
    return tuple(1.0 if float(form.weight.max()) <= 1 else float(max(1, samples)) for form in forms)


def _power(step: float) -> float:
    """The smallest power of two that is not smaller."""
    part, exponent = math.frexp(step)
    return math.ldexp(1.0, exponent - 1 if part == 0.5 else exponent)


def _rounded(tensor: Tensor, step: float, least: int, most: int) -> tuple[NDArray[np.float64], int]:
    """A tensor as whole numbers of steps, and how many of them were cut."""
    x = np.rint(tensor.detach().to("cpu", torch.float64).numpy().reshape(-1) / step)
    kept = np.clip(x, least, most)
    return kept, int((kept != x).sum())


def _tensor(values: NDArray[np.float64], like: Tensor) -> Tensor:
    return torch.from_numpy(values.copy()).reshape(like.shape).to(like.device, like.dtype)
