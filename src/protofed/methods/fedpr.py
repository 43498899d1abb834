"""FedPR: FedAvg whose clients are pulled towards common class prototypes; classify by the nearest prototype.

Boosting Federated Learning Convergence with Prototype Regularization
    Qiao, Le and Hong, 2023. https://arxiv.org/abs/2307.10575
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge
from torch import Tensor

from protofed.method import Batch, Client, LocalData, Mean, Method, Model, Spec, Tree
from protofed.ops.checks import same_shapes
from protofed.ops.distances import Distance
from protofed.ops.losses import cross_entropy
from protofed.ops.prototypes import class_sums, distance_to_own, nearest, no_prototypes, one_each, per_client, refresh
from protofed.ops.sharing import Weighting, send, shared, take
from protofed.ops.trees import total


@dataclass(frozen=True)
class FedPR(Method):
    """Average models and prototypes; pull embeddings towards the prototype of their class."""

    paper = "Qiao, Le and Hong, 2023, arXiv 2307.10575"
    losses = ("CE(F(w; x), y) + lam * d(f(x), y_bar[y]), Eq. 4",)
    scores = ("head", "proto")
    presets = {
        "paper": {"inference": "proto", "distance": "l2", "divide": "everyone", "weighting": "samples"},
        "official": {"inference": "proto", "distance": "mse", "divide": "holders", "weighting": "uniform"},
    }

    inference: Literal["head", "proto"] = "head"
    """Classify by the classifier, by which FedPR is above FedAvg (docs/results.md), or by the nearest global prototype
    (Alg. 1, l. 10-16), by which it mostly is not."""
    lam: Annotated[float, Ge(0)] = 1.0
    """Weight of the pull; the paper has none, which is 1."""
    distance: Distance = "mse"
    """The l2 of Eq. 4: mse, as in FedProto's code; l2, to the letter, which collapses; or another."""
    divide: Literal["holders", "everyone", "samples"] = "samples"
    """Eq. 3: the mean over the clients that hold the class (its text), over all of the round (its formula, which
    shrinks prototypes), or over all samples of the class."""
    weighting: Weighting = "samples"
    """Models count by their number of samples (Eq. 1), or all alike."""

    def check(self, specs: Sequence[Spec]) -> None:
        same_shapes("fedpr", specs)

    def init_server(self, spec: Spec) -> Tree:
        return {"model": shared(spec), "prototypes": no_prototypes(spec.classes, spec.dim)}

    def receive(self, model: Model, client: Client, data: LocalData, down: Tree) -> Client:
        return take(client, down["model"])

    def loss(self, model: Model, client: Client, batch: Batch, down: Tree) -> Tensor:
        z, logits = model(client, batch.x)
        pull = distance_to_own(z, batch.y, down["prototypes"], self.distance)
        return batch.mean(cross_entropy(logits, batch.y) + self.lam * pull)  # Eq. 4

    def upload(self, model: Model, client: Client, data: LocalData, down: Tree) -> tuple[Tree, Client]:
        classes = len(data.counts)
        own = total(class_sums(model.embed(client, b.x), b, classes) for b in data.batches)  # Eq. 2
        prototypes = own if self.divide == "samples" else per_client(own)
        return {"model": send(client, data, self.weighting), "prototypes": prototypes}, client

    def aggregate(self, server: Tree, up: Tree, cohort: Tensor) -> Tree:
        new = up["prototypes"]  # Eq. 3: their mean
        if self.divide == "everyone":
            new = Mean(new.value * (new.weight / len(cohort))[:, None], (new.weight > 0).to(new.weight.dtype))
        return {"model": up["model"].otherwise(server["model"]), "prototypes": refresh(server["prototypes"], new)}

    def predict(self, model: Model, client: Client, x: Tensor, down: Tree) -> dict[str, Tensor]:
        z, logits = model(client, x)
        return {"head": logits, "proto": nearest(z, down["prototypes"])}

    def prototypes(self, server: Tree) -> Mean:
        return one_each(server["prototypes"])

    def global_client(self, server: Tree) -> Client:
        return Client(server["model"]["params"], server["model"]["buffers"])
