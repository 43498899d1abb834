"""What the theorems conclude from their constants: numbers in, numbers out. docs/theory.md derives every line.

`step` is the step size of plain SGD; with momentum, callers put lr / (1 - momentum). Where an upper bound is 0, no step
satisfies the condition; None is no bound at all.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

Range = dict[str, tuple[float, float]]  # of each key that can be chosen: from, to


@dataclass(frozen=True)
class Constants:
    """What the assumptions of either theorem bound, and the squared gradient norm on the way of one round."""

    L1: float  # smoothness of the local objective (FedNH: L_g)
    L2: float  # Lipschitz constant of the embedding in the parameters (FedNH: M_f)
    G: float  # E|g| (FedProto), or the root of E|g|^2 (FedNH: M_G)
    sigma2: float  # variance of the stochastic gradients
    grad_sq: float  # mean over the steps of a round of |gradient|^2
    steps: float  # E, or J: local steps of a round

    @property
    def noisy(self) -> float:
        """Half the curvature's price of a squared step: L1 (|gradient|^2 + sigma^2) / 2."""
        return self.L1 * (self.grad_sq + self.sigma2) / 2

    @property
    def alone(self) -> float | None:
        """The largest step with which local training alone is sure to lower the loss."""
        return _over(self.grad_sq, self.noisy)

    def decrease(self, step: float) -> float:
        """How much a round of local training lowers the loss at least (lemma 1; FedNH's Eq. 8)."""
        return self.steps * step * (self.grad_sq - self.noisy * step)

    def floor(self, step: float, price: float) -> float | None:
        """The smallest mean squared gradient norm that can be promised, if a step costs `price` beside (theorem 2)."""
        left = 2 - step * self.L1
        return (step * self.L1 * self.sigma2 + 2 * price) / left if left > 0 else None


@dataclass(frozen=True)
class Verdict:
    """Bounds on what can be chosen. The loss after a round is at most `change` above the loss before it."""

    step_max: float | None
    step_min: float
    change: float
    floor: float | None
    lam_max: float | None = None
    rho_min: float | None = None


def fedproto(c: Constants, step: float, lam: float, pull: float) -> Verdict:
    """Theorem 1, corollary 1 (with the whole sum over the round) and theorem 2; `pull` is 1 for the norm of Eq. 8."""
    price = lam * pull * c.L2 * c.G
    left = max(c.grad_sq - price, 0.0)
    return Verdict(
        step_max=_over(left, c.noisy),
        step_min=0.0,
        change=c.steps * step * price - c.decrease(step),
        floor=c.floor(step, price),
        lam_max=_over(c.grad_sq, pull * c.L2 * c.G),
    )


def fedproto_range(c: Constants, pull: float) -> Range:
    """Half of either bound: every lr and lam in it satisfy theorem 1 together."""
    highest = {"lr": c.alone, "lam": _over(c.grad_sq, pull * c.L2 * c.G)}
    return {name: (0.0, bound / 2) for name, bound in highest.items() if bound is not None}


def fednh(c: Constants, step: float, rho: float, averaging: float, turning: float) -> Verdict:
    """Lemma 3, corrected. `averaging`: what averaging the bodies costs, over steps and step size; `turning`: what
    turning the prototypes costs, over 1 - rho."""
    left, turn = c.grad_sq - averaging, (1 - rho) * turning / c.steps
    root = left**2 - 4 * c.noisy * turn
    possible = left > 0 and root > 0
    gain = c.steps * max(step * (left - c.noisy * step), 0.0)
    return Verdict(
        step_max=_over(left + math.sqrt(root), 2 * c.noisy) if possible else 0.0,
        step_min=2 * turn / (left + math.sqrt(root)) if possible else 0.0,
        change=c.steps * (step * averaging + turn) - c.decrease(step),
        floor=c.floor(step, averaging + turn / step),
        rho_min=max(1 - gain / turning, 0.0) if turning > 0 else 0.0,
    )


def fednh_range(c: Constants, averaging: float, turning: float) -> Range:
    """Around the step that gains most: from half to three halves of it, where three quarters are gained at least."""
    left = c.grad_sq - averaging
    best = _over(left, 2 * c.noisy)
    if best is None or best <= 0:
        return {}
    gain = 0.75 * c.steps * best * left / 2
    return {"lr": (best / 2, 1.5 * best), "rho": (max(1 - gain / turning, 0.0) if turning > 0 else 0.0, 1.0)}


def common(ranges: Sequence[Range]) -> Range:
    """What is in all of these ranges, for the keys that all of them have; empty where nothing is."""
    keys = [key for key in ranges[0] if all(key in one for one in ranges)]
    found = {key: (max(one[key][0] for one in ranges), min(one[key][1] for one in ranges)) for key in keys}
    return found if all(low < high for low, high in found.values()) else {}


def _over(top: float, bottom: float) -> float | None:
    return top / bottom if bottom > 0 else None
