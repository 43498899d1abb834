"""What the theorems conclude from their constants: numbers in, numbers out. docs/theory.md derives every line.

`step` is the step size of plain SGD; with momentum, callers put lr / (1 - momentum). Where an upper bound is 0, no step
satisfies the condition; None is no bound at all.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

TINY = 1e-12  # cost of turning that is none
THIRDS = 100  # cut off from the interval that has the best step in it

Range = dict[str, tuple[float, float]]  # of each key that can be chosen: from, to; empty where nothing will do


@dataclass(frozen=True)
class Constants:
    """The quantities that the assumptions of either theorem bound, and the squared gradient norm along one round."""

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
        """The largest step with which local training alone is certain to lower the loss."""
        return _over(self.grad_sq, self.noisy)

    def decrease(self, step: float) -> float:
        """The least amount by which a round of local training lowers the loss (lemma 1; FedNH's Eq. 8)."""
        return self.steps * step * (self.grad_sq - self.noisy * step)

    def floor(self, step: float, price: float) -> float | None:
        """The smallest mean squared gradient norm that can be promised, if each step costs `price` in addition (theorem
        2)."""
        left = 2 - step * self.L1
        return (step * self.L1 * self.sigma2 + 2 * price) / left if left > 0 else None


@dataclass(frozen=True)
class LossBounds:
    """Bounds on what can be chosen. The loss after a round is at most `change` above the loss before it."""

    step_max: float | None
    step_min: float | None
    change: float
    floor: float | None
    lam_max: float | None = None
    rho_min: float | None = None


def fedproto(c: Constants, step: float, lam: float, pull: float) -> LossBounds:
    """Theorem 1, corollary 1 (with the whole sum over the round) and theorem 2; `pull` is 1 for the norm of Eq. 8."""
    price = lam * pull * c.L2 * c.G
    left = max(c.grad_sq - price, 0.0)
    return LossBounds(
        step_max=_over(left, c.noisy),
        step_min=None,
        change=c.steps * step * price - c.decrease(step),
        floor=c.floor(step, price),
        lam_max=_over(c.grad_sq, pull * c.L2 * c.G),
    )


def fedproto_range(several: Sequence[tuple[Constants, float]]) -> Range:
    """Half of either bound, from constants and `pull`: every lr and lam below these satisfy theorem 1 together, for all
    of them."""
    highest = {
        "lr": [c.alone for c, _ in several],
        "lam": [_over(c.grad_sq, pull * c.L2 * c.G) for c, pull in several],
    }
    least = {name: min(there) for name, found in highest.items() if (there := [b for b in found if b is not None])}
    return {name: (0.0, bound / 2) for name, bound in least.items()} if all(least.values()) else {}


def fednh(c: Constants, step: float, rho: float, averaging: float, turning: float) -> LossBounds:
    """Lemma 3, corrected. `averaging`: what averaging the bodies costs, over steps and step size; `turning`: what
    turning the prototypes costs, over 1 - rho."""
    left, turn = c.grad_sq - averaging, (1 - rho) * turning / c.steps
    root = left**2 - 4 * c.noisy * turn
    possible = left > 0 and root > 0
    gain = c.steps * max(step * (left - c.noisy * step), 0.0)
    return LossBounds(
        step_max=_over(left + math.sqrt(root), 2 * c.noisy) if possible else 0.0,
        step_min=2 * turn / (left + math.sqrt(root)) if possible else None,
        change=c.steps * (step * averaging + turn) - c.decrease(step),
        floor=c.floor(step, averaging + turn / step),
        rho_min=max(1 - gain / turning, 0.0) if turning > 0 else 0.0,
    )


def fednh_range(several: Sequence[tuple[Constants, float, float]]) -> Range:
    """Every lr and rho in it will do for all of these, of constants, `averaging` and `turning`.

    The step with which all prototypes may turn farthest is looked for; rho allows three quarters of that, and lr is
    what will do with it: for a single one, from half to three halves of the step that gains most.
    """
    costs = [(c, averaging, max(turning, TINY)) for c, averaging, turning in several]
    tops = [_over(c.grad_sq - averaging, c.noisy) or 0.0 for c, averaging, _ in costs]
    if min(tops) <= 0:
        return {}

    def room(step: float) -> float:
        """The largest 1 - rho."""
        return min(c.steps * step * (c.grad_sq - a - c.noisy * step) / turning for c, a, turning in costs)

    rho = 1 - 0.75 * _highest(room, min(tops))
    found = [fednh(c, 1.0, rho, averaging, turning) for c, averaging, turning in costs]
    low, high = max(one.step_min or 0.0 for one in found), min(one.step_max or 0.0 for one in found)
    return {"lr": (low, high), "rho": (max(rho, 0.0), 1.0)} if rho < 1 and low < high else {}


def _highest(concave: Callable[[float], float], top: float) -> float:
    """The largest value that a concave function reaches between 0 and `top`."""
    low, high = 0.0, top
    for _ in range(THIRDS):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        low, high = (left, high) if concave(left) < concave(right) else (low, right)
    return concave((low + high) / 2)


def _over(top: float, bottom: float) -> float | None:
    return top / bottom if bottom > 0 else None
