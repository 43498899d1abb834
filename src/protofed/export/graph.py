"""What is exported: a client's whole way from raw inputs to answers, as one module."""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

from protofed.data.batches import Samples
from protofed.data.scaling import described_scaler
from protofed.method import Client, Mean, Method, Params, Tree
from protofed.models.functional import FunctionalModel
from protofed.ops.prototypes import distances


class Subject(NamedTuple):
    """A model to export, with everything that its answers depend on."""

    method: Method
    model: FunctionalModel
    client: Client
    down: Tree
    prototypes: Mean | None
    inputs: dict[str, Any]  # one domain of inputs.json: shape, type and scaling
    class_names: Sequence[str]
    own: Tensor  # (C,) the classes it was trained on
    known: Samples  # scaled samples that confidence and threshold are fitted to
    known_from: str  # what they are: "validation" or "training" samples
    test: Samples
    about: dict[str, Any]  # where it comes from
    judge: Client | None = None  # who was trained without the samples to fit to, where that is another client
    encoder: nn.Module | None = None  # a frozen one in front of the model
    state: Params | None = None  # the tensors by the names of the user's own module, where it is one

    def __repr__(self) -> str:
        """Without samples or weights: it may end up in a log."""
        return f"<Subject: {self.about.get('architecture')}, client {self.about.get('client')}>"


class _Once:
    """A model that computes its input's embedding only once."""

    def __init__(self, model: FunctionalModel) -> None:
        self.model, self.classify = model, model.classify
        self.found: dict[str, Tensor] = {}

    def embed(self, client: Client, x: Tensor, at: str = "") -> Tensor:
        if at not in self.found:
            self.found[at] = self.model.embed(client, x, at)
        return self.found[at]

    def __call__(self, client: Client, x: Tensor, at: str = "") -> tuple[Tensor, Tensor]:
        z = self.embed(client, x, at)
        return z, self.classify(client, z, at)


class Network(nn.Module):
    """Raw inputs (B, ...) to embeddings (B, D), scores by head (B, C), and distances to prototypes (B, C) if any."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.method, self.model = subject.method, subject.model
        self.encoder = () if subject.encoder is None else (subject.encoder,)  # no module of this one: called by tensors
        frozen = {} if subject.encoder is None else dict(chain(*_tensors(subject.encoder)))
        scale = described_scaler(subject.inputs)
        self.whole, self.unit = scale.whole, scale.unit
        self.register_buffer("mean", torch.from_numpy(scale.mean))
        self.register_buffer("std", torch.from_numpy(scale.std))
        leaves, self.form = tree_flatten((subject.client, subject.down, subject.prototypes or (), frozen))
        self.leaves = len(leaves)
        for number, leaf in enumerate(leaves):
            self.register_buffer(f"tensor{number}", leaf.detach().cpu().clone())

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        if not self.whole:
            x = (x / self.unit - self.get_buffer("mean")) / self.get_buffer("std")
        leaves = [self.get_buffer(f"tensor{number}") for number in range(self.leaves)]
        client, down, prototypes, frozen = tree_unflatten(leaves, self.form)
        for encoder in self.encoder:
            x = functional_call(encoder, frozen, (x,))
        model: Any = _Once(self.model)
        scores = self.method.predict(model, client, x, down)["head"]
        z = self.method.embed(model, client, x)
        return (z, scores) if not prototypes else (z, scores, distances(z, prototypes))


def _tensors(module: nn.Module) -> tuple[Any, Any]:
    return module.named_parameters(), module.named_buffers()


def raw(samples: Tensor, inputs: dict[str, Any]) -> Tensor:
    """Samples as they were before scaling."""
    scale = described_scaler(inputs)
    if scale.whole:
        return samples
    return (samples * torch.from_numpy(scale.std) + torch.from_numpy(scale.mean)) * scale.unit
