"""Training on the server, on the prototypes that single clients sent."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from protofed.method import Mean, Params
from protofed.ops import random

ServerLoss = Callable[[Params, Tensor, Tensor], Tensor]  # of parameters, vectors (B, D) and classes (B,): (B,)


class Vectors(NamedTuple):
    """Prototypes of all clients in one list; weight 0 where a client has none."""

    z: Tensor  # (N, D)
    y: Tensor  # (N,)
    weight: Tensor  # (N,)


def ordered_by_key(rows: Mean, cohort: Tensor, key: Tensor) -> Vectors:
    """The clients' prototypes (K, C, D) in an order that depends on the key and on who sent them, not on their rows.

    The missing ones come last, so that batches hold as many real ones as they can.
    """
    clients, classes = rows.weight.shape
    numbers = cohort.to(rows.weight.device)[:, None]
    words = random.bits(random.fold(key, numbers), classes).flatten()
    there = (rows.weight > 0).flatten()
    order = torch.argsort(words + (~there).to(words.dtype) * 2**33)
    y = torch.arange(classes, device=there.device).repeat(clients)
    return Vectors(rows.value.flatten(0, 1)[order], y[order], there[order].to(rows.weight.dtype))


def descend(
    params: Params, loss: ServerLoss, rows: Mean, cohort: Tensor, epochs: int, batch_size: int, lr: float, key: Tensor
) -> Params:
    """The parameters after some epochs of plain SGD on the clients' prototypes; batch_size 0 takes all at once."""
    for epoch in range(epochs):
        vectors = ordered_by_key(rows, cohort, random.fold(key, epoch))
        size = batch_size or len(vectors.y)
        for z, y, weight in zip(*(torch.split(part, size) for part in vectors), strict=True):
            params = _step(params, loss, Vectors(z, y, weight), lr)
    return params


def _step(params: Params, loss: ServerLoss, batch: Vectors, lr: float) -> Params:
    with torch.enable_grad():
        leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
        mean = (loss(leaves, batch.z, batch.y) * batch.weight).sum() / batch.weight.sum().clamp(min=1)
        slopes = torch.autograd.grad(mean, list(leaves.values()))
    return {name: value.detach() - lr * slope for (name, value), slope in zip(leaves.items(), slopes, strict=True)}


def linear_layer(name: str, inputs: int, outputs: int, generator: torch.Generator) -> Params:
    """A linear layer as torch initialises one: uniform up to 1 / sqrt(inputs)."""
    weight = 2 * torch.rand(outputs, inputs, generator=generator) - 1
    bias = 2 * torch.rand(outputs, generator=generator) - 1
    return {f"{name}.weight": weight / inputs**0.5, f"{name}.bias": bias / inputs**0.5}


def through(params: Params, name: str, z: Tensor) -> Tensor:
    """Vectors (B, D) after the linear layer of this name."""
    out: Tensor = torch.nn.functional.linear(z, params[f"{name}.weight"], params[f"{name}.bias"])
    return out
