"""Who is behind a prototype: samples that were averaged against samples of the same class that were not."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from protofed.leaks.scores import members_auc, tpr_at

SHRINK = 0.3  # of a covariance towards a multiple of the identity
FPRS = (0.01, 0.001)


class Background(NamedTuple):
    """What the attacker knows of a class from samples of its own: mean (D,) and whitening (D, D) of embeddings."""

    z: Tensor  # (A, D)
    mean: Tensor
    whiten: Tensor

    @classmethod
    def of_embeddings(cls, z: Tensor) -> "Background":
        """From embeddings (A, D) of the attacker's own samples."""
        mean = z.mean(0)
        spread = (z - mean).T @ (z - mean) / max(1, len(z) - 1)
        level = spread.diagonal().mean().clamp(min=1e-12)
        spread = (1 - SHRINK) * spread + SHRINK * level * torch.eye(len(mean), dtype=z.dtype, device=z.device)
        values, vectors = torch.linalg.eigh(spread.double())
        whiten = (vectors / values.clamp(min=1e-12).sqrt()).T.to(z)
        return cls(z, mean, whiten)

    def scores(self, z: Tensor, prototypes: Tensor, samples: float | None) -> dict[str, Tensor]:
        """How much samples (N, D) look like members of the nearest of a class's prototypes (K, D), by two attacks; in
        both, 0 and 1 are mean and deviation of the attacker's own samples.

        `samples`: how many the prototype is made of; None: that is guessed from how far it is from the mean.
        """
        apart = torch.cdist(torch.cat([z, self.z]), prototypes)
        nearest = apart.argmin(1)
        traced = torch.cat([z, self.z]) - self.mean
        goal = (prototypes - self.mean)[nearest]
        traced, goal = traced @ self.whiten.T, goal @ self.whiten.T
        if samples is None:
            size = (goal.shape[1] / (goal**2).sum(1).clamp(min=1e-12)).clamp(min=1)
        else:
            size = torch.full_like(goal[:, 0], max(1.0, samples))
        ratio = 2 * (traced * goal).sum(1) - (traced**2).sum(1) / size
        found = {"distance": -apart.amin(1).clamp(min=1e-6).log(), "likelihood": ratio}
        return {name: _standard(score[: len(z)], score[len(z) :]) for name, score in found.items()}


def _standard(score: Tensor, own: Tensor) -> Tensor:
    """Scores in deviations of the attacker's own."""
    return (score - own.mean()) / own.std(correction=0).clamp(min=1e-12)


def likelihood_ratios(known: Tensor, there: Tensor, goal: Tensor) -> Tensor:
    """How much likelier scores (N,) are if each sample was there, by its scores (S, N) in runs in which it was `there`
    (S, N) and in others: two Gaussians for each sample, of one variance for all. Where a sample was there in a few runs
    only, or in all, the mean over all samples counts as one more."""

    def centre(inside: Tensor) -> Tensor:
        usual = known[inside].mean() if bool(inside.any()) else known.mean()
        return ((known * inside).sum(0) + usual) / (inside.sum(0) + 1)

    member, other = centre(there), centre(~there)
    spread = ((known - torch.where(there, member, other)) ** 2).mean().clamp(min=1e-12)
    return ((goal - other) ** 2 - (goal - member) ** 2) / (2 * spread)


def guessed_from_others(known: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    """Likelihood ratios for the samples of the second half of runs (G,), by the scores (S, N) of the first half and by
    which samples were `there` (S, N), and the truth (G,). None of the coins that are guessed says how to guess another
    one: a bound on how many guesses are right would not hold then."""
    first = len(known) // 2
    ratios = [likelihood_ratios(known[:first], there[:first], goal) for goal in known[first:]]
    return torch.cat(ratios), there[first:].flatten()


class Guesses:
    """Scores of members and others, collected over prototypes."""

    def __init__(self) -> None:
        self.members: dict[str, list[Tensor]] = {}
        self.others: dict[str, list[Tensor]] = {}
        self.prototypes = 0

    def add(
        self, known: Background, prototypes: Tensor, members: Tensor, others: Tensor, samples: float | None
    ) -> None:
        """One prototype (or a class's several, (K, D)), with embeddings of its members and of others."""
        self.prototypes += 1
        scores = known.scores(torch.cat([members, others]), prototypes, samples)
        for name, score in scores.items():
            self.members.setdefault(name, []).append(score[: len(members)])
            self.others.setdefault(name, []).append(score[len(members) :])

    def told(self) -> dict[str, Any]:
        """AUC, and the share of members found at low rates of false alarms, by each attack."""
        found: dict[str, Any] = {"prototypes": self.prototypes}
        for name in self.members:
            members, others = torch.cat(self.members[name]).double().cpu(), torch.cat(self.others[name]).double().cpu()
            rates = {f"tpr_at_{fpr:g}": tpr_at(members, others, fpr) for fpr in FPRS}
            found |= {"members": len(members), "others": len(others)}
            found[name] = {"auc": members_auc(members, others), **rates}
        return found
