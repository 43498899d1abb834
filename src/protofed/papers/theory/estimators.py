"""Estimators of the constants that convergence theorems assume: each gives a lower estimate of a worst case.

An objective is a function of parameters; what is differentiated is found by plain autograd, whose graph is built once
and used for all products with it.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from protofed.method import Params
from protofed.ops import random

ITERATIONS = 20  # of Lanczos' method at most
CLOSE = 0.01  # relative growth of the estimate, below which it is done
TINY = 1e-6  # a product whose new part is smaller than this, relative to the estimate, adds nothing
NEAR = 1e-3  # step of a difference quotient, relative to the parameters' length

Objective = Callable[[Params], Tensor]  # a loss
Embedding = Callable[[Params, Tensor], Tensor]  # parameters, one input (1, ...) -> its embedding (1, D)


def length(params: Params) -> float:
    """The Euclidean norm of all tensors together."""
    return float(torch.linalg.vector_norm(_flat(list(params.values()))))


def apart(left: Params, right: Params) -> float:
    """The Euclidean distance between two sets of tensors with the same names."""
    return length({name: value - right[name] for name, value in left.items()})


def slope(objective: Objective, params: Params) -> tuple[float, Params]:
    """The objective and its gradient."""
    leaves = _leaves(params)
    with torch.enable_grad():
        value = objective(leaves)
    return float(value.detach()), dict(zip(leaves, _grad(value, leaves), strict=True))


def curvature(objective: Objective, params: Params, key: Tensor) -> float:
    """The largest absolute eigenvalue of the Hessian at this point, from below, by Lanczos' method. Its products are
    difference quotients where autograd cannot differentiate twice, for example at a norm of 0.

    Its products are difference quotients where autograd cannot differentiate twice, as at a norm of 0.
    """
    leaves = _leaves(params)
    with torch.enable_grad():
        grads = _grad(objective(leaves), leaves, again=True)
    bent = [grad for grad in grads if grad.requires_grad]  # the others are the same everywhere
    if not bent:
        return 0.0

    def product(vector: Tensor) -> Tensor:
        parts = dict(zip(map(id, grads), _like(vector, list(leaves.values())), strict=True))
        return _flat(_grad(bent, leaves, [parts[id(grad)] for grad in bent], keep=True))

    def quotient(vector: Tensor) -> Tensor:
        far = NEAR * max(length(params), 1.0)
        parts = dict(zip(params, _like(vector, list(params.values())), strict=True))
        sides = [{name: p + sign * far * parts[name] for name, p in params.items()} for sign in (1, -1)]
        high, low = (_flat(list(slope(objective, side)[1].values())) for side in sides)
        return (high - low) / (2 * far)

    start = random.normal(key, sum(p.numel() for p in leaves.values()))
    found = _largest(product, start)
    return found if math.isfinite(found) else _largest(quotient, start)


def stretch(embed: Embedding, params: Params, x: Tensor, key: Tensor) -> float:
    """The largest singular value of the embedding's Jacobian in the parameters, over inputs (N, ...), from below."""
    return max((_stretch(embed, params, one[None], random.fold(key, i)) for i, one in enumerate(x)), default=0.0)


def _stretch(embed: Embedding, params: Params, one: Tensor, key: Tensor) -> float:
    leaves = _leaves(params)
    with torch.enable_grad():
        z = embed(leaves, one).flatten()
        if not z.requires_grad:
            return 0.0
        weights = torch.zeros_like(z, requires_grad=True)
        pulled = _flat(_grad(z, leaves, [weights], again=True))  # J^T weights, linear in the weights

    def product(vector: Tensor) -> Tensor:
        back = _flat(_grad(z, leaves, [vector], keep=True))
        return torch.autograd.grad(pulled, weights, back, retain_graph=True)[0]  # J J^T vector

    found: float = _largest(product, random.normal(key, len(z))) ** 0.5
    return found


class Noise(NamedTuple):
    """Stochastic gradients at one point."""

    norm: float  # their mean norm
    square: float  # their mean squared norm
    variance: float  # their mean squared distance to the gradient of all of an epoch; infinite where it is unknown


def noise(batches: Sequence[Params], whole: Params, had: int, there: int) -> Noise:
    """The noise of mini-batch gradients around `whole`, the mean of `had` of an epoch's `there` batches."""
    norms = [length(grads) for grads in batches]
    distances = [apart(grads, whole) ** 2 for grads in batches]
    many = max(len(batches), 1)
    return Noise(sum(norms) / many, sum(n * n for n in norms) / many, _variance(sum(distances) / many, had, there))


def excess(variance: float, had: int, there: int) -> float:
    """By how much the squared gradient of `had` of `there` batches is too large on average; 0 where that is unknown."""
    return variance * (there - had) / (had * (there - 1)) if 1 < had < there else 0.0


def _variance(distance: float, had: int, there: int) -> float:
    """Unbiased, from the mean squared distance to the mean of `had` of `there`."""
    if had == there:
        return distance
    return distance * had / (had - 1) * (there - 1) / there if had > 1 else math.inf


def _largest(product: Callable[[Tensor], Tensor], start: Tensor) -> float:
    """The norm of a symmetric linear map, from below, by Lanczos' method: it grows from one product to the next."""
    vector, before, found = start / torch.linalg.vector_norm(start), torch.zeros_like(start), 0.0
    diagonal: list[float] = []  # of the map in the orthonormal basis that its powers of the start span,
    beside = [0.0]  # and the entries next to it, from the second on
    for _ in range(ITERATIONS):
        image = product(vector).to(start.dtype)
        diagonal.append(float(image @ vector))
        image = image - diagonal[-1] * vector - beside[-1] * before
        size = float(torch.linalg.vector_norm(image))
        if not math.isfinite(size):  # not smooth here
            return math.inf
        small = np.diag(diagonal) + np.diag(beside[1:], 1) + np.diag(beside[1:], -1)
        norm = float(np.abs(np.linalg.eigvalsh(small)).max())
        grown, found = norm - found, max(found, norm)
        if size <= TINY * found or grown <= CLOSE * found:
            break
        before, vector = vector, image / size
        beside.append(size)
    return found


def _leaves(params: Params) -> Params:
    return {name: p.detach().requires_grad_() for name, p in params.items()}


def _grad(
    value: Tensor | list[Tensor],
    leaves: Params,
    weights: list[Tensor] | None = None,
    again: bool = False,
    keep: bool = False,
) -> tuple[Tensor, ...]:
    """Gradients with respect to all leaves; zero for a leaf that does not occur."""
    if isinstance(value, Tensor) and not value.requires_grad:
        return tuple(torch.zeros_like(leaf) for leaf in leaves.values())
    return torch.autograd.grad(
        value,
        list(leaves.values()),
        weights,
        retain_graph=again or keep,
        create_graph=again,
        materialize_grads=True,
    )


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _like(vector: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """A flat vector in the shapes of these tensors."""
    parts = torch.split(vector, [tensor.numel() for tensor in tensors])
    return [part.reshape(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
