"""FedProto: share class prototypes, keep the models.

FedProto: Federated Prototype Learning across Heterogeneous Clients
    Tan et al., AAAI 2022. https://arxiv.org/abs/2105.00243
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge
from torch import Tensor

from protofed.method import Batch, Client, LocalData, Mean, Method, Model, Spec, Tree
from protofed.ops.checks import same_width
from protofed.ops.distances import Distance
from protofed.ops.losses import cross_entropy
from protofed.ops.prototypes import (
    ScoredBy,
    as_downloaded,
    class_sums,
    distance_of_means,
    distance_to_own,
    downloaded,
    holders,
    nearest,
    no_prototypes,
    one_each,
    per_client,
    refresh,
)
from protofed.ops.trees import total


@dataclass(frozen=True)
class FedProto(Method):
    """Pull embeddings towards the class prototypes of all clients; classify by the nearest prototype."""

    paper = "Tan et al., AAAI 2022, arXiv 2105.00243"
    losses = ("CE(F(w; x), y), Eq. 1", "lam * d(f(x), C[y]) by sample, or lam * sum_j d(C_i[j], C[j]), Eqs. 7, 8")
    scores = ("head", "proto")
    not_followed = ("the published deviations come from counters that are never reset; here every client has its own",)
    presets = {
        "paper": {
            "candidates": "all",
            "distance": "l2",
            "pull": "prototype",
            "aggregation": "literal",
            "source": "clean",
            "absent": "keep",
            "scored_by": "newest",
        },
        "official": {
            "init": "per_client",
            "candidates": "own",
            "distance": "mse",
            "pull": "sample",
            "aggregation": "mean",
            "source": "inloop",
            "absent": "forget",
            "scored_by": "newest",
        },
    }

    inference: Literal["head", "proto"] = "proto"
    """Classify by the nearest global prototype (Eq. 4) or by the client's own classifier."""
    candidates: Literal["all", "own"] = "own"
    """Nearest among the classes the client trains on (the paper's code), or among all (Eq. 4)."""
    lam: Annotated[float, Ge(0)] = 1.0
    """Weight of the pull towards the global prototypes (the paper's lambda, Eq. 7)."""
    distance: Distance = "mse"
    """The d of Eq. 8: mse (the paper's code), l2 (its text), or another (`protofed.ops.distances` has the formulas)."""
    pull: Literal["sample", "prototype"] = "sample"
    """Every sample is pulled towards its prototype (the paper's code), or the batch's mean of each class (Eq. 8)."""
    aggregation: Literal["mean", "weighted", "literal"] = "mean"
    """Prototypes of clients averaged alike (the paper's code), by sample counts (Appendix B), or by Eq. 6 to the
    letter, which divides by the number of clients once more."""
    source: Literal["clean", "inloop"] = "clean"
    """Prototypes from a pass after training (Eq. 3), or from the last epoch's training steps (the paper's code)."""
    absent: Literal["keep", "forget"] = "keep"
    """A class that no client of this round holds keeps its prototype, or loses it (the paper's code)."""
    scored_by: ScoredBy = "newest"
    """A client is scored with the server's newest prototypes (the paper's code), or with those it downloaded at the
    start of its last round (FedNH's code)."""

    def check(self, specs: Sequence[Spec]) -> None:
        same_width("fedproto", specs)

    def init_server(self, spec: Spec) -> Mean:
        return no_prototypes(spec.classes, spec.dim)

    def init_client(self, spec: Spec) -> Client:
        none = downloaded(no_prototypes(spec.classes, spec.dim))
        return Client(spec.params, spec.buffers, none if self.scored_by == "downloaded" else {})

    def receive(self, model: Model, client: Client, data: LocalData, down: Mean) -> Client:
        return client._replace(memory=downloaded(down)) if self.scored_by == "downloaded" else client

    def loss(self, model: Model, client: Client, batch: Batch, down: Mean) -> tuple[Tensor, Tree]:
        z, logits = model(client, batch.x)
        supervised = cross_entropy(logits, batch.y)  # L_S
        seen = class_sums(z, batch, len(down.weight)) if self.source == "inloop" else ()
        if self.pull == "prototype":
            return batch.mean(supervised) + self.lam * distance_of_means(z, batch, down, self.distance), seen
        return batch.mean(supervised + self.lam * distance_to_own(z, batch.y, down, self.distance)), seen

    def upload(self, model: Model, client: Client, data: LocalData, down: Mean) -> tuple[Tree, Client]:
        classes = len(down.weight)
        if self.source == "inloop":
            own = data.seen or no_prototypes(classes, down.total.shape[1])
        else:
            own = total(class_sums(model.embed(client, b.x), b, classes) for b in data.batches)  # Eq. 3
        if self.aggregation == "mean":
            return {"prototypes": per_client(own)}, client
        if self.aggregation == "weighted":
            return {"prototypes": own}, client
        return {"prototypes": own, "holders": holders(own)}, client

    def aggregate(self, server: Mean, up: Tree, cohort: Tensor) -> Mean:
        new = up["prototypes"]  # Eq. 6: their mean
        if self.aggregation == "literal":
            new = Mean(new.total / up["holders"].weight.clamp(min=1)[:, None], new.weight)
        return refresh(server, new, forget=self.absent == "forget")

    def predict(self, model: Model, client: Client, x: Tensor, down: Mean) -> dict[str, Tensor]:
        z, logits = model(client, x)
        return {"head": logits, "proto": nearest(z, _scored_with(client, down))}  # Eq. 4

    def prototypes(self, server: Mean) -> Mean:
        return one_each(server)

    def prototypes_of(self, client: Client, server: Mean) -> Mean:
        return one_each(_scored_with(client, server))


def _scored_with(client: Client, newest: Mean) -> Mean:
    return as_downloaded(client.memory, newest) if "downloaded" in client.memory else newest
