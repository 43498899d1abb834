"""Linear discriminant analysis in one shot: class means and one covariance, over all samples of all clients.

The Gaussian-Head OFL Family: One-Shot Federated Learning from Client Global Statistics (GH-OFL)
    Turazza et al., ICLR 2026. https://arxiv.org/abs/2602.01186
Capture Global Feature Statistics for One-Shot Federated Learning (FedCGS)
    Guan et al., AAAI 2025. https://arxiv.org/abs/2503.06962
Personal heads, which mix a client's own statistics with those of all:
Personalized Federated Learning via Feature Distribution Adaptation (pFedFDA)
    McLaughlin and Su, NeurIPS 2024. https://arxiv.org/abs/2411.00329
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Le
from torch import Tensor

from protofed.method import Client, LocalData, Model, Phase, Spec, Tree
from protofed.methods.oneshot import HEAD, OneShot, few_samples
from protofed.ops.heads import Prior, lda_head, linear_scores
from protofed.ops.mixing import best_mixture, halves, mixed_head
from protofed.ops.statistics import Second

GH_OFL = {"covariance": "within", "shrinkage": 0.05}
FED_CGS = {"covariance": "total", "shrinkage": 0.0}


@dataclass(frozen=True)
class LDA(OneShot):
    """Add up embeddings and their second moment, once; classify by linear discriminants."""

    paper = "Turazza et al., ICLR 2026, arXiv 2602.01186 (GH-LDA); Guan et al., AAAI 2025, arXiv 2503.06962 (FedCGS)"
    losses = ("nothing is minimised: S^-1 mean of the class, and -mean' S^-1 mean / 2 + log share of the class",)
    not_followed = (
        "personal: pFedFDA also trains the encoder, and finds its mixture by L-BFGS; here the best of a grid is taken",
    )
    presets = {"paper": GH_OFL, "official": FED_CGS, "gh_ofl": GH_OFL, "fedcgs": FED_CGS}
    name = "lda"

    covariance: Literal["within", "total"] = "within"
    """The covariance about each class's mean (GH-OFL), or about the mean of all samples (FedCGS's code)."""
    shrinkage: Annotated[float, Ge(0), Le(1)] = 0.1
    """How far the covariance is moved towards a ball: 0.05 in GH-OFL's code, 0 in FedCGS's. With fewer samples than
    dimensions it is at least the oracle-approximating shrinkage."""
    prior: Prior = "counts"
    """How likely a class is beforehand: by its samples, or all alike."""
    personal: bool = False
    """After the last round each client mixes the statistics of all with its own, by the share in `betas` that suits it
    best on halves of its own samples (pFedFDA's idea). It then downloads the sums as well as the head."""
    betas: tuple[Annotated[float, Ge(0), Le(1)], ...] = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9)
    """personal: the shares of a client's own statistics to choose from; of equally good ones the first."""

    @property
    def second(self) -> Second:
        return "shared"

    def head(self, sums: Tree) -> dict[str, Tensor]:
        return lda_head(sums, self.covariance == "within", self.shrinkage, self.prior)

    def scores_of(self, head: Tree, z: Tensor) -> Tensor:
        return linear_scores(head, z)

    def remarks(self, spec: Spec, samples: int) -> Sequence[str]:
        return few_samples(spec, samples - spec.classes, self.shrinkage)

    # personal heads

    def init_client(self, spec: Spec) -> Client:
        if not self.personal:
            return Client(spec.params, spec.buffers)
        none = {"weight": torch.zeros(spec.classes, spec.dim), "bias": torch.zeros(spec.classes)}
        none |= {"held": torch.zeros(spec.classes, dtype=torch.bool), "beta": torch.zeros(())}
        return Client(spec.params, spec.buffers, none)

    def broadcast(self, server: Tree, cohort: Tensor) -> Tree:
        plain = self.heads_down(server, cohort)
        return plain | {"sums": server["sums"]} if self.personal else plain

    def last_phases(self) -> tuple[Phase, ...]:
        return (Phase(HEAD, epochs=0),) if self.personal else ()

    def last_receive(self, model: Model, client: Client, data: LocalData, down: Tree) -> Client:
        if not self.personal or not bool(data.counts.any()):
            return client
        own, everyone, within = self.own_sums(model, client, data), down["sums"], self.covariance == "within"
        z = torch.cat([self.embed(model, client, b.x) for b in data.batches])
        y, mask = torch.cat([b.y for b in data.batches]), torch.cat([b.mask for b in data.batches])
        folds = halves(z, y, mask, len(data.counts), data.key)
        beta = best_mixture(everyone, own, folds, self.betas, within, self.shrinkage)
        head = mixed_head(everyone, own, beta, within, self.shrinkage)
        return client._replace(memory=head | {"beta": torch.tensor(beta, device=z.device)})

    def predict(self, model: Model, client: Client, x: Tensor, down: Tree) -> dict[str, Tensor]:
        ready = self.personal and "held" in client.memory and bool(client.memory["held"].any())
        return {"head": self.scores_of(client.memory if ready else down["head"], self.embed(model, client, x))}
