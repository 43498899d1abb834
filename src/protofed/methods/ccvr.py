"""CCVR: FedAvg whose head the server retrains on virtual embeddings, drawn from a Gaussian for each class.

No Fear of Heterogeneity: Classifier Calibration for Federated Learning with Non-IID Data
    Luo et al., NeurIPS 2021. https://arxiv.org/abs/2106.05001
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt
from torch import Tensor

from protofed.method import Batch, Client, LocalData, Method, Model, Spec, Tree
from protofed.ops import random
from protofed.ops.checks import same_shapes
from protofed.ops.losses import cross_entropy
from protofed.ops.matching import last_part, linear, linear_heads, retrain
from protofed.ops.sharing import Weighting, send, shared, take
from protofed.ops.statistics import drawn_embeddings, embedding_sums
from protofed.ops.trees import total, under


@dataclass(frozen=True)
class CCVR(Method):
    """Average the models; retrain the head on embeddings drawn from a Gaussian of each class."""

    paper = "Luo et al., NeurIPS 2021, arXiv 2106.05001"
    losses = ("CE(F(w; x), y) on the clients", "CE(head(z), c), z drawn from N(mean of c, covariance of c), Alg. 1")
    not_followed = (
        "nobody knows beforehand which round is the last, so statistics are sent in every round; they are those of the "
        "model that the round began with, so the calibrated model is FedAvg's of one round before: for T rounds of "
        "FedAvg, run T + 1",
        "with partial participation, the statistics are those of the round's clients",
    )
    presets = {
        "paper": {"start": "averaged", "weighting": "samples"},
        "official": {"start": "averaged", "head_epochs": 1, "weighting": "samples"},
    }

    virtual: Annotated[int, Gt(0)] = 200
    """Virtual embeddings of each class (FL-bench's code)."""
    head_epochs: Annotated[int, Ge(0)] = 10
    """Passes over the virtual embeddings; one in FL-bench's code."""
    head_lr: Annotated[float, Gt(0)] = 0.01
    """Step size for the head."""
    head_batch: Annotated[int, Ge(0)] = 32
    """Virtual embeddings in one step, 0 for all."""
    start: Literal["averaged", "fresh"] = "averaged"
    """The head is trained from the averaged one, or from scratch."""
    weighting: Weighting = "samples"
    """Clients count by their number of samples (the paper), or all alike."""

    def check(self, specs: Sequence[Spec]) -> None:
        same_shapes("ccvr", specs)
        linear_heads("ccvr", specs)

    def init_server(self, spec: Spec) -> Tree:
        return {"model": shared(spec), "calibrated": shared(spec), "key": random.key(spec.seed, "ccvr")}

    def broadcast(self, server: Tree, cohort: Tensor) -> Tree:
        return server["model"]

    def receive(self, model: Model, client: Client, data: LocalData, down: Tree) -> Client:
        return take(client, down)

    def loss(self, model: Model, client: Client, batch: Batch, down: Tree) -> Tensor:
        _, logits = model(client, batch.x)
        return batch.mean(cross_entropy(logits, batch.y))

    def upload(self, model: Model, client: Client, data: LocalData, down: Tree) -> tuple[Tree, Client]:
        averaged = take(client, down)  # what all clients embed with alike
        sums = total(
            embedding_sums(model.embed(averaged, b.x).detach(), b, len(data.counts), "full") for b in data.batches
        )
        return {"model": send(client, data, self.weighting), "sums": sums}, client

    def aggregate(self, server: Tree, up: Tree, cohort: Tensor) -> Tree:
        averaged, key = server["model"], server["key"]
        new = server | {"model": up["model"].otherwise(averaged), "key": random.fold(key, -1)}
        held = up["sums"]["means"].weight > 0
        if not bool(held.any()):
            return new
        old = linear(under(averaged["params"], "head."))
        z = drawn_embeddings(up["sums"], held, self.virtual, key)
        start = old if self.start == "averaged" else _fresh(old, key)
        head = retrain(
            z, "bias" in old, self.head_epochs, self.head_batch, self.head_lr, key, start, held.nonzero().flatten()
        )
        names = under(averaged["params"], "head.")
        params = averaged["params"] | {name: head[last_part(name)] for name in names}
        return new | {"calibrated": {"params": params, "buffers": averaged["buffers"]}}

    def global_client(self, server: Tree) -> Client:
        return Client(server["calibrated"]["params"], server["calibrated"]["buffers"])


def _fresh(head: Tree, key: Tensor) -> Tree:
    """A head of the same shape, drawn as torch initialises a linear layer."""
    wide = head["weight"].shape[1] ** 0.5
    parts = {
        name: random.uniform(random.fold(key, at), p.numel()).reshape(p.shape)
        for at, (name, p) in enumerate(head.items())
    }
    return {name: ((2 * part - 1) / wide).to(head[name].dtype) for name, part in parts.items()}
