"""The contract: what a federated method must say, and nothing about where it runs.

A method is one short file that reads like its paper's algorithm box: pure functions over trees of tensors. The same
file runs one client after another, many clients stacked, spread over machines, or on real clients with private data.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

Tree = Any  # nested dicts, lists, tuples and NamedTuples whose leaves are tensors
Params = dict[str, Tensor]  # as in state_dict(): "body.conv1.weight", "head.fc.bias", ...


class Batch(NamedTuple):
    """Some samples. Padding hides behind `mean`: a loss never touches the mask."""

    x: Tensor
    y: Tensor
    mask: Tensor  # 1 for a real sample, 0 for padding

    def mean(self, per_sample: Tensor) -> Tensor:
        return (per_sample * self.mask).sum() / self.mask.sum().clamp(min=1)


class Client(NamedTuple):
    """What a client keeps between rounds."""

    params: Params  # everything trainable; a second model has its own prefix, such as "personal."
    buffers: Params  # what a model keeps besides its parameters, such as BatchNorm's statistics
    memory: Tree = {}  # (a NamedTuple's default is never mutated: clients are values)


class LocalData(NamedTuple):
    """What a client knows about its own data when it receives and when it uploads."""

    batches: Sequence[Batch]  # every training sample once, in a fixed order, not augmented
    counts: Tensor  # (C,) training samples per class
    key: Tensor  # this client's randomness for this round, for protofed.ops.random
    seen: Tree = ()  # what the loss reported, summed over the last local epoch


class Mean(NamedTuple):
    """An upload that is only used as a sum over clients, so it may be pre-reduced, noised or securely summed.

    `total` is a tensor or a tree of them; `weight` is one number for the whole or one per row (per class). An absent
    class has weight 0: no None, no branches.
    """

    total: Tree
    weight: Tensor

    @classmethod
    def of(cls, value: Tree, weight: Tensor) -> "Mean":
        return cls(tree_map(lambda leaf: leaf * _rows(weight, leaf), value), weight)

    def __add__(self, other: "Mean") -> "Mean":  # type: ignore[override]
        return Mean(tree_map(torch.add, self.total, other.total), self.weight + other.weight)

    @property
    def value(self) -> Tree:
        """The mean; 0 where nothing was added."""
        return tree_map(lambda leaf: leaf / _rows(self.weight.clamp(min=1e-12), leaf), self.total)

    def otherwise(self, old: Tree) -> Tree:
        """The mean; the old value where nothing was added."""
        return tree_map(lambda new, kept: torch.where(_rows(self.weight > 0, new), new, kept), self.value, old)


def _rows(weight: Tensor, leaf: Tensor) -> Tensor:
    """The weight, shaped to multiply a leaf row by row."""
    return weight.reshape((*weight.shape, *[1] * (leaf.ndim - weight.ndim)))


class Each(NamedTuple):
    """A value per client: in an upload, one row per client of the cohort; in a broadcast, the row for one client."""

    rows: Tree


class Spec(NamedTuple):
    """What a method starts from: a freshly built model and the shape of the task."""

    architecture: str
    classes: int
    dim: int  # width of the embedding
    params: Params
    buffers: Params
    seed: int
    clients: int = 1  # how many clients the federation has
    largest: int = 0  # the most samples that any client has of one class; 0: not known

    def generator(self) -> torch.Generator:
        """Randomness for an initial state."""
        return torch.Generator().manual_seed(self.seed)


class Model(Protocol):
    """A client's network as pure functions; `at` picks a second network kept under a prefix ("personal.").

    Inside `loss` it is in training mode (dropout, batch statistics); in `receive`, `upload` and `predict` it is not.
    """

    def __call__(self, client: Client, x: Tensor, at: str = "") -> tuple[Tensor, Tensor]:
        """Embeddings (B, D) and logits (B, C)."""

    def embed(self, client: Client, x: Tensor, at: str = "") -> Tensor:
        """Embeddings (B, D)."""

    def classify(self, client: Client, z: Tensor, at: str = "") -> Tensor:
        """Logits (B, C) of embeddings (B, D)."""


Loss = Callable[[Model, Client, Batch, Tree], Tensor | tuple[Tensor, Tree]]


class Phase(NamedTuple):
    """One stage of local training: what is trained, on which loss, for how long."""

    trains: tuple[str, ...] = ("",)  # prefixes of client.params; the rest is frozen
    loss: Loss | None = None  # None: the method's own
    epochs: int | None = None  # None: the experiment's local_epochs
    lr: float | None = None  # None: the experiment's, decayed
    plain: bool = False  # without momentum and weight decay
    clip: bool = True  # whether optimizer.clip bounds its gradients
    pull: Callable[[Client, Tree], Params] | None = None  # added to the loss's gradient after clipping

    def passes(self, local_epochs: int) -> int:
        """How many epochs this phase takes in an experiment with `local_epochs`."""
        return local_epochs if self.epochs is None else self.epochs


@dataclass(frozen=True)
class Method(ABC):
    """One federated method. Its fields are its hyperparameters and configuration keys; its functions are pure."""

    paper: ClassVar[str] = ""
    losses: ClassVar[tuple[str, ...]] = ()  # what is minimised, with the paper's equation numbers, for `explain`
    not_followed: ClassVar[tuple[str, ...]] = ()  # where every preset departs from the paper or its code
    scores: ClassVar[tuple[str, ...]] = ("head",)  # the names that `predict` returns
    stackable: ClassVar[bool] = True  # False if its functions need the host, one client at a time
    presets: ClassVar[dict[str, dict[str, Any]]] = {}  # the fields that follow the "paper", and its "official" code

    init: Literal["common", "per_client"] = "common"
    """Initial weights: the same for all clients of one architecture, or different for each client."""
    inference: Literal["head", "proto"] = "head"
    """What the method is judged by: its classifier, or the nearest prototype where it has prototypes."""
    candidates: Literal["all", "own"] = "all"
    """Which classes it chooses among on a client's own test set: all, or those the client trains on."""

    @classmethod
    def preset(cls, reading: str, **fields: Any) -> Self:
        """The method as its authors describe it ("paper") or as the released code does it ("official")."""
        return cls(**cls.presets[reading] | fields)

    def remarks(self, spec: Spec, samples: int) -> Sequence[str]:
        """What should a user be told before a run with this many training samples?"""
        return ()

    def check(self, specs: Sequence[Spec]) -> None:  # noqa: B027  (most methods accept any)
        """Raise a UserError if this method cannot serve clients with these architectures."""

    @abstractmethod
    def init_server(self, spec: Spec) -> Tree:
        """What does the server hold before round one?"""

    def init_client(self, spec: Spec) -> Client:
        """What does a client keep before its first round?"""
        return Client(spec.params, spec.buffers)

    def broadcast(self, server: Tree, cohort: Tensor) -> Tree:
        """What is sent to these clients? An `Each` gives one row to each of them."""
        return server

    def newcomer(self, server: Tree) -> Tree:
        """What is sent to a client that joins later, which the server knows nothing of? Not an `Each`."""
        return self.broadcast(server, torch.zeros(1, dtype=torch.int64))

    def receive(self, model: Model, client: Client, data: LocalData, down: Tree) -> Client:
        """What does a client start from?"""
        return client

    def phases(self) -> tuple[Phase, ...]:
        """What is trained, and in what order?"""
        return (Phase(),)

    @abstractmethod
    def loss(self, model: Model, client: Client, batch: Batch, down: Tree) -> Tensor | tuple[Tensor, Tree]:
        """What does a client minimise? Optionally with sums (Means) that `upload` will find in `data.seen`."""

    @abstractmethod
    def upload(self, model: Model, client: Client, data: LocalData, down: Tree) -> tuple[Tree, Client]:
        """What is sent (a tree of Mean and Each), and what is kept?"""

    @abstractmethod
    def aggregate(self, server: Tree, up: Tree, cohort: Tensor) -> Tree:
        """How does the server combine?"""

    def predict(self, model: Model, client: Client, x: Tensor, down: Tree) -> dict[str, Tensor]:
        """How do we classify? Named scores (B, C): "head", and "proto" where there are prototypes."""
        return {"head": model(client, x)[1]}

    def embed(self, model: Model, client: Client, x: Tensor) -> Tensor:
        """How does a client embed a sample? Embeddings (B, D), as they are compared with prototypes, if any."""
        return model.embed(client, x)

    def prototypes(self, server: Tree) -> Mean | None:
        """Which prototypes does it classify by? (C, K, D), up to K per class; weight (C, K) is 1 if one exists."""
        return None

    def prototypes_of(self, client: Client, server: Tree) -> Mean | None:
        """Which prototypes is this client scored with? The server's, in the same form, unless it keeps others."""
        return self.prototypes(server)

    def global_client(self, server: Tree) -> Client | None:
        """The global model as a client would hold it, if the method has one."""
        return None

    def last_receive(self, model: Model, client: Client, data: LocalData, down: Tree) -> Client:
        """What does a client start the last phases from?"""
        return self.receive(model, client, data, down)

    def last_phases(self) -> tuple[Phase, ...]:
        """What does every client train once, after the last round?"""
        return ()
