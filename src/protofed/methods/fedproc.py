"""FedProc: averaged models whose embeddings are contrasted with one prototype per class, less from round to round.

FedProc: Prototypical Contrastive Federated Learning on Non-IID Data
    Mu et al., Future Generation Computer Systems 143, 2023. https://arxiv.org/abs/2109.12273
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from protofed.method import Batch, Client, LocalData, Mean, Method, Model, Spec, Tree
from protofed.ops.checks import same_shapes
from protofed.ops.contrast import contrast_with
from protofed.ops.losses import cross_entropy
from protofed.ops.prototypes import class_sums, no_prototypes, one_each, per_client, refresh
from protofed.ops.sharing import Weighting, send, shared, take
from protofed.ops.trees import total


@dataclass(frozen=True)
class FedProc(Method):
    """Average the models; contrast embeddings with the prototypes first, and train the classifier more and more."""

    paper = "Mu et al., FGCS 2023, arXiv 2109.12273"
    losses = (
        "alpha * -log(e^(cos(f(x), P[y]) / t) / sum over classes of e^(cos(f(x), P[c]) / t))",
        "(1 - alpha) * CE(F(w; x), y); alpha falls from 1 in the first round to 0 after `over` rounds",
    )
    not_followed = (
        "the contrast compares the body's embeddings, as MarsFL's code does; the paper has a projection head",
        "the number of rounds is a field, so that a run may go on: for T rounds set `over` to T, or T - 1 as in MarsFL",
    )
    presets = {
        "paper": {"temperature": 0.5, "first": "classifier", "source": "clean", "weighting": "samples"},
        "official": {"temperature": 1.0, "first": "contrast", "source": "inloop", "weighting": "samples"},
    }

    over: Annotated[int, Ge(1)] = 100
    """Rounds until alpha, the weight of the contrast, is 0: the number of rounds of the run."""
    temperature: Annotated[float, Gt(0)] = 0.5
    """The tau of the contrast: 0.5 as in MOON; MarsFL's code has none."""
    first: Literal["classifier", "contrast"] = "classifier"
    """While nobody has sent prototypes: cross-entropy alone, or no loss at all where alpha is 1 (MarsFL's code)."""
    source: Literal["clean", "inloop"] = "clean"
    """Prototypes from a pass after training, or from the last epoch's training steps (MarsFL's code)."""
    weighting: Weighting = "samples"
    """Models count by their number of samples, or all alike; prototypes always count alike."""

    def check(self, specs: Sequence[Spec]) -> None:
        same_shapes("fedproc", specs)

    def init_server(self, spec: Spec) -> Tree:
        return {"model": shared(spec), "prototypes": no_prototypes(spec.classes, spec.dim), "round": torch.zeros(())}

    def receive(self, model: Model, client: Client, data: LocalData, down: Tree) -> Client:
        return take(client, down["model"])

    def loss(self, model: Model, client: Client, batch: Batch, down: Tree) -> tuple[Tensor, Tree]:
        z, logits = model(client, batch.x)
        prototypes: Mean = down["prototypes"]
        alpha = (1 - down["round"] / self.over).clamp(min=0)
        if self.first == "classifier":
            alpha = alpha * (prototypes.weight > 0).any()
        contrast = contrast_with(z, batch.y, one_each(prototypes), self.temperature)
        seen = class_sums(z, batch, len(prototypes.weight)) if self.source == "inloop" else ()
        return batch.mean(alpha * contrast + (1 - alpha) * cross_entropy(logits, batch.y)), seen

    def upload(self, model: Model, client: Client, data: LocalData, down: Tree) -> tuple[Tree, Client]:
        classes = len(data.counts)
        if self.source == "inloop":
            own = data.seen or no_prototypes(classes, down["prototypes"].total.shape[1])
        else:
            own = total(class_sums(model.embed(client, b.x), b, classes) for b in data.batches)
        return {"model": send(client, data, self.weighting), "prototypes": per_client(own)}, client

    def aggregate(self, server: Tree, up: Tree, cohort: Tensor) -> Tree:
        return {
            "model": up["model"].otherwise(server["model"]),
            "prototypes": refresh(server["prototypes"], up["prototypes"]),
            "round": server["round"] + (up["model"].weight > 0),
        }

    def prototypes(self, server: Tree) -> Mean:
        return one_each(server["prototypes"])

    def global_client(self, server: Tree) -> Client:
        return Client(server["model"]["params"], server["model"]["buffers"])
