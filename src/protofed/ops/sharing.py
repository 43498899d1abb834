"""Sharing models: which part is sent, what a client takes from it, and how much each client counts."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from protofed.method import Client, LocalData, Mean, Params, Spec, Tree
from protofed.ops.trees import floating

Weighting = Literal["samples", "uniform"]  # clients count by their number of samples, or all alike


def without(tensors: Params, private: Sequence[str]) -> Params:
    """The parameters whose names do not start with a private prefix."""
    return {name: value for name, value in tensors.items() if not name.startswith(tuple(private))}


def shared(of: Client | Spec, private: Sequence[str] = ()) -> Tree:
    """The shared part of a model, {"params": ..., "buffers": ...}: all but the private prefixes; BatchNorm's
    statistics are included."""
    return {"params": without(of.params, private), "buffers": floating(without(of.buffers, private))}


def take(client: Client, model: Tree) -> Client:
    """The client with the shared model in place of its own copy."""
    return client._replace(params=client.params | model["params"], buffers=client.buffers | model["buffers"])


def weight(data: LocalData, weighting: Weighting) -> Tensor:
    """How much a client counts; 0 for a client without data."""
    n = data.counts.sum()
    return n if weighting == "samples" else (n > 0).to(n.dtype)


def send(client: Client, data: LocalData, weighting: Weighting, private: Sequence[str] = ()) -> Mean:
    """A client's shared model with its weight, ready to be averaged over clients."""
    return Mean.of(shared(client, private), weight(data, weighting))
