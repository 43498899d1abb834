"""One-shot heads: what the methods have in common that compute a classifier from sums of embeddings, in one round.

Every client embeds its samples with the same encoder, which nobody trains, and sends sums. The server adds them, and
solves for a classifier. The sums of a split are those of the whole, so how samples are spread over clients, how many of
them take part in a round and in what order changes nothing.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from protofed.method import Batch, Client, Each, LocalData, Mean, Method, Model, Phase, Spec, Tree
from protofed.ops.checks import one_encoder
from protofed.ops.losses import cross_entropy
from protofed.ops.sharing import shared
from protofed.ops.statistics import Second, embedding_sums, no_sums
from protofed.ops.trees import total

HEAD = ("head.",)  # the model's own head is not used


def few_samples(spec: Spec, samples: int, asked: float) -> tuple[str, ...]:
    """What to tell a user if a covariance has fewer samples than dimensions."""
    if samples >= spec.dim:
        return ()
    return (
        f"about {max(samples, 0)} samples give a covariance of {spec.dim} dimensions, which is singular: shrinkage is "
        f"chosen by the oracle-approximating formula, and is at least method.shrinkage = {asked:g}",
    )


@dataclass(frozen=True)
class OneShot(Method):
    """Sums of embeddings go up once; a head in closed form comes down."""

    stackable: ClassVar[bool] = False  # nothing is trained, and a client's second moments take memory
    name: ClassVar[str] = ""  # in experiments

    @property
    @abstractmethod
    def second(self) -> Second:
        """Which second moments are sent?"""

    @abstractmethod
    def head(self, sums: Tree) -> dict[str, Tensor]:
        """The classifier that these sums give."""

    @abstractmethod
    def scores_of(self, head: Tree, z: Tensor) -> Tensor:
        """Scores (B, C) of embeddings (B, D)."""

    def check(self, specs: Sequence[Spec]) -> None:
        one_encoder(self.name, specs, self.init, HEAD)

    def init_server(self, spec: Spec) -> Tree:
        sums = no_sums(spec.classes, spec.dim, self.second)
        known = torch.zeros(spec.clients, dtype=torch.int64)  # whose sums are in it
        return {"body": shared(spec, HEAD), "sums": sums, "known": known, "head": self.head(sums)}

    def broadcast(self, server: Tree, cohort: Tensor) -> Tree:
        return self.heads_down(server, cohort)

    def heads_down(self, server: Tree, cohort: Tensor) -> dict[str, Tree]:
        """The classifier, and to each client whether the server has its sums."""
        return {"head": server["head"], "counted": Each(server["known"][cohort])}

    def phases(self) -> tuple[Phase, ...]:
        return ()

    def loss(self, model: Model, client: Client, batch: Batch, down: Tree) -> Tensor:
        scores = self.scores_of(down["head"], self.embed(model, client, batch.x))
        return batch.mean(cross_entropy(scores.clamp(min=-1e30), batch.y))  # of padding, -inf times 0 would be NaN

    def upload(self, model: Model, client: Client, data: LocalData, down: Tree) -> tuple[Tree, Client]:
        own = self.own_sums(model, client, data)
        first = 1 - down["counted"]  # nobody counts twice
        return {name: Mean(mean.total * first, mean.weight * first) for name, mean in own.items()}, client

    def own_sums(self, model: Model, client: Client, data: LocalData) -> dict[str, Mean]:
        """A client's sums, over all its samples."""
        classes = len(data.counts)
        parts = (embedding_sums(self.embed(model, client, b.x), b, classes, self.second) for b in data.batches)
        found: dict[str, Mean] = total(parts)
        return found

    def aggregate(self, server: Tree, up: Tree, cohort: Tensor) -> Tree:
        sums = {name: server["sums"][name] + up[name] for name in up}
        known = server["known"].index_fill(0, cohort, 1)
        return server | {"sums": sums, "known": known, "head": self.head(sums)}

    def predict(self, model: Model, client: Client, x: Tensor, down: Tree) -> dict[str, Tensor]:
        return {"head": self.scores_of(down["head"], self.embed(model, client, x))}

    def global_client(self, server: Tree) -> Client:
        return Client(server["body"]["params"], server["body"]["buffers"])
