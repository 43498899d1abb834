"""Inputs from prototypes: gradient descent on an input until its embedding is the prototype."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from protofed.leaks.scores import correlation, psnr, ssim

RATE = 0.1  # Adam's first step size, of the range of a value
COMPONENTS = 60  # directions in which inputs are searched that look like their class
UNLIKELY = 0.03  # weight of their mean squared deviation against the relative distance to the prototype
SMOOTH = 0.02  # weight of the total variation against the relative distance to the prototype


class Range(NamedTuple):
    """Between which a model's inputs lie: tensors that broadcast to one input."""

    low: Tensor
    high: Tensor

    def inputs(self, u: Tensor) -> Tensor:
        """Numbers from 0 to 1 as inputs of the model."""
        return self.low + u * (self.high - self.low)

    def shares(self, x: Tensor) -> Tensor:
        """Inputs of the model as numbers from 0 to 1; those of no width are 0."""
        width = self.high - self.low
        return torch.where(width > 0, (x - self.low) / width.clamp(min=1e-12), 0.0)


def variation(u: Tensor) -> Tensor:
    """The mean absolute difference (N,) between neighbouring pixels of pictures (N, C, H, W)."""
    down, right = (u[..., 1:, :] - u[..., :-1, :]).abs(), (u[..., 1:] - u[..., :-1]).abs()
    return down.flatten(1).mean(1) + right.flatten(1).mean(1)


def invert(
    embed: Callable[[Tensor], Tensor],
    prototypes: Tensor,
    starts: Tensor,
    values: Range,
    steps: int,
    smooth: float = SMOOTH,
) -> Tensor:
    """Inputs (T, ...), as numbers from 0 to 1, whose embeddings are near the prototypes (T, D); pictures are smooth.

    All are searched at once, each from several starts (T, S, ...); the one whose embedding fits best is kept.
    """
    many, tries = starts.shape[:2]
    goal = prototypes.repeat_interleave(tries, 0)
    picture = starts.ndim == 5

    def misfit(u: Tensor) -> Tensor:
        apart = _apart(embed(values.inputs(u)), goal)
        return apart + smooth * variation(u) if picture and smooth else apart

    u = _descend(misfit, starts.flatten(0, 1), steps, (0.0, 1.0))
    with torch.no_grad():
        best = misfit(u).reshape(many, tries).argmin(1)
    found = u.reshape(starts.shape)
    return found[torch.arange(many, device=found.device), best]


class Likely(NamedTuple):
    """What inputs of some classes look like: a mean (T, ...), and directions (T, K, P) as long as deviations in them
    are, from the most frequent on. Numbers are from 0 to 1."""

    mean: Tensor
    directions: Tensor

    @classmethod
    def of_samples(cls, samples: Sequence[Tensor]) -> "Likely":
        """Principal components of each class's samples (A, ...), some of whose values may be missing (NaN)."""
        means = [x.nanmean(0).nan_to_num() for x in samples]
        filled = [torch.where(x.isnan(), mean, x) - mean for x, mean in zip(samples, means, strict=True)]
        found = [torch.linalg.svd(x.flatten(1), full_matrices=False) for x in filled]
        most = min(COMPONENTS, *(len(one.S) for one in found))
        lengths = [one.S[:most, None] / len(x) ** 0.5 for one, x in zip(found, filled, strict=True)]
        return cls(
            torch.stack(means),
            torch.stack([long * one.Vh[:most] for long, one in zip(lengths, found, strict=True)]),
        )

    def inputs(self, w: Tensor) -> Tensor:
        """Inputs (T, ...) that lie this many standard deviations (T, K) out in each direction."""
        u = self.mean.flatten(1) + torch.einsum("tk,tkp->tp", w, self.directions)
        return u.clamp(0, 1).reshape(self.mean.shape)


def invert_likely(
    embed: Callable[[Tensor], Tensor], prototypes: Tensor, likely: Likely, values: Range, steps: int
) -> Tensor:
    """The same, of inputs that look like the class: searched in the directions in which the attacker's own samples
    differ, and not many deviations from their mean."""

    def misfit(w: Tensor) -> Tensor:
        return _apart(embed(values.inputs(likely.inputs(w))), prototypes) + UNLIKELY * (w**2).mean(1)

    return likely.inputs(_descend(misfit, likely.mean.new_zeros(likely.directions.shape[:2]), steps, None))


def _apart(z: Tensor, goal: Tensor) -> Tensor:
    """Squared distances (N,) to prototypes, relative to their lengths."""
    return ((z - goal) ** 2).sum(1) / (goal**2).sum(1).clamp(min=1e-12)


def _descend(
    misfit: Callable[[Tensor], Tensor], start: Tensor, steps: int, within: tuple[float, float] | None
) -> Tensor:
    """Adam on all rows (N, ...) at once, with a step size that falls."""
    at = start.detach().clone().requires_grad_()
    adam = torch.optim.Adam([at], lr=RATE)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(adam, max(1, steps), RATE / 100)
    with torch.enable_grad():
        for _ in range(steps):
            (at.grad,) = torch.autograd.grad(misfit(at).sum(), [at])
            adam.step()
            falling.step()
            if within is not None:
                with torch.no_grad():
                    at.clamp_(*within)
    return at.detach()


class Likeness(NamedTuple):
    """How near guesses (T, ...) come to the samples behind a prototype: each to the nearest of them."""

    error: Tensor  # (T,) root mean squared, over known values
    psnr: Tensor
    ssim: Tensor | None  # of pictures only
    correlation: Tensor
    nearest: Tensor  # (T,) which sample

    def row(self, place: int) -> "Likeness":
        """That of one guess alone."""
        return Likeness(*(None if part is None else part[place : place + 1] for part in self))  # type: ignore[arg-type]


def likeness(guesses: Tensor, samples: list[Tensor]) -> Likeness:
    """`samples`: for each guess those behind the prototype (S, ...), as numbers from 0 to 1; NaN is not known."""
    places, errors = [], []
    for guess, mine in zip(guesses, samples, strict=True):
        known = ~mine.isnan()
        apart = torch.where(known, (mine - guess) ** 2, 0.0).flatten(1).sum(1) / known.flatten(1).sum(1).clamp(min=1)
        place = apart.argmin()
        places.append(place)
        errors.append(apart[place])
    error, nearest = torch.stack(errors), torch.stack(places)
    picked = torch.stack([mine[at] for mine, at in zip(samples, nearest, strict=True)])
    known = (~picked.isnan()).to(guesses)
    picked = picked.nan_to_num()
    alike = ssim(guesses, picked) if guesses.ndim == 4 and min(guesses.shape[-2:]) > 1 else None
    related = correlation(guesses.flatten(1), picked.flatten(1), known.flatten(1))
    return Likeness(error.sqrt(), psnr(error), alike, related, nearest)
