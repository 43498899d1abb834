"""Models that travel: which part is shared, what a client takes of it, and how much it counts."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from protofed.method import Client, LocalData, Mean, Params, Spec, Tree
from protofed.ops.trees import floating

Weighting = Literal["samples", "uniform"]  # clients count by their number of samples, or all alike


def without(tensors: Params, private: Sequence[str]) -> Params:
    """All but those whose name starts with one of the private prefixes."""
    return {name: value for name, value in tensors.items() if not name.startswith(tuple(private))}


def shared(of: Client | Spec, private: Sequence[str] = ()) -> Tree:
    """What of a model is shared, as {"params": ..., "buffers": ...}: all but the private prefixes; BatchNorm's
    statistics go with it."""
    return {"params": without(of.params, private), "buffers": floating(without(of.buffers, private))}


def take(client: Client, model: Tree) -> Client:
    """The client with a shared model in place of its own part."""
    return client._replace(params=client.params | model["params"], buffers=client.buffers | model["buffers"])


def weight(data: LocalData, weighting: Weighting) -> Tensor:
    """How much a client counts; a client without data does not."""
    n = data.counts.sum()
    return n if weighting == "samples" else (n > 0).to(n.dtype)


def send(client: Client, data: LocalData, weighting: Weighting, private: Sequence[str] = ()) -> Mean:
    """A client's shared model, weighted, as its part of the mean over clients."""
    return Mean.of(shared(client, private), weight(data, weighting))
