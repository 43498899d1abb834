"""How well an attack does: pictures against pictures, and guesses who was a member against the truth."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

WINDOW, SPREAD = 11, 1.5  # of SSIM's Gaussian window (Wang et al., 2004)
C1, C2 = 0.01**2, 0.03**2  # SSIM's constants, for values from 0 to 1
LEAST_ERROR = 1e-10  # a mean squared error below this counts as this: 100 dB


def psnr(error: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in dB, of mean squared errors between pictures with values from 0 to 1."""
    return -10 * torch.log10(error.clamp(min=LEAST_ERROR))


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """Structural similarity (N,) of pictures (N, C, H, W) with values from 0 to 1: mean over places and channels."""
    size = min(WINDOW, *a.shape[-2:])
    at = torch.arange(size, dtype=a.dtype, device=a.device) - (size - 1) / 2
    line = torch.exp(-(at**2) / (2 * SPREAD**2))
    line = line / line.sum()
    window = (line[:, None] * line).expand(a.shape[1], 1, size, size)

    def local(x: Tensor) -> Tensor:
        return F.conv2d(x, window, groups=x.shape[1])

    mean_a, mean_b = local(a), local(b)
    var_a, var_b = local(a * a) - mean_a**2, local(b * b) - mean_b**2
    both = local(a * b) - mean_a * mean_b
    alike = (2 * mean_a * mean_b + C1) * (2 * both + C2)
    found: Tensor = (alike / ((mean_a**2 + mean_b**2 + C1) * (var_a + var_b + C2))).flatten(1).mean(1)
    return found


def correlation(a: Tensor, b: Tensor, known: Tensor) -> Tensor:
    """Pearson's correlation (N,) of rows (N, P) over the values that are known; 0 where one of the two is constant."""
    many = known.sum(1, keepdim=True).clamp(min=1)
    a, b = ((x - (x * known).sum(1, keepdim=True) / many) * known for x in (a, b))
    size = a.norm(dim=1) * b.norm(dim=1)
    return torch.where(size > 1e-12, (a * b).sum(1) / size.clamp(min=1e-12), 0.0)


def members_auc(members: Tensor, others: Tensor) -> float:
    """The probability that a member scores higher than another; ties count half."""
    ranked = others.sort().values
    below = torch.searchsorted(ranked, members, right=False)
    upto = torch.searchsorted(ranked, members, right=True)
    return float((below + upto).double().mean()) / (2 * len(others))


def tpr_at(members: Tensor, others: Tensor, fpr: float) -> float | None:
    """The share of members above a threshold that at most a share `fpr` of the others is above; None if there are too
    few others to tell such a share."""
    if len(members) == 0 or len(others) * fpr < 1 - 1e-9:
        return None
    threshold = others.sort(descending=True).values[math.floor(len(others) * fpr + 1e-9)]
    return float((members > threshold).double().mean())


def clopper_pearson(hits: int, trials: int, miss: float) -> tuple[float, float]:
    """Bounds of a probability after this many hits: each is wrong with probability `miss` at most."""
    from scipy.special import betaincinv  # takes a while to import, and is used here alone

    low = 0.0 if hits == 0 else float(betaincinv(hits, trials - hits + 1, miss))
    high = 1.0 if hits == trials else float(betaincinv(hits + 1, trials - hits, 1 - miss))
    return low, high


class LowerBound(NamedTuple):
    """What an attack that tells two worlds apart says of epsilon."""

    epsilon: float  # at least
    tpr: float
    fpr: float


def epsilon_bound(there: Tensor, absent: Tensor, delta: float, confidence: float = 0.95) -> LowerBound:
    """The epsilon that a mechanism has at least, by scores of trials with a unit and trials without it.

    The threshold is chosen on the first half of the trials; the rates, and their Clopper-Pearson bounds, are those of
    the second half. The bound holds with the given confidence.
    """
    half_there, half_absent = len(there) // 2, len(absent) // 2
    threshold = _best_threshold(there[:half_there], absent[:half_absent], delta, confidence)
    hits, alarms = (there[half_there:] > threshold).sum(), (absent[half_absent:] > threshold).sum()
    many = len(there) - half_there, len(absent) - half_absent
    epsilon = _epsilon(int(hits), many[0], int(alarms), many[1], delta, confidence)
    return LowerBound(epsilon, int(hits) / many[0], int(alarms) / many[1])


def one_run_bound(right: int, guesses: int, coins: int, delta: float, confidence: float = 0.95) -> float:
    """A lower bound on a mechanism's epsilon if this many guesses were right about which of its samples were there,
    each included by the flip of its own coin (Steinke, Nasr and Jagielski, NeurIPS 2023, Theorem 5.2)."""
    low, high = 0.0, 50.0
    if _as_many_right(low, right, guesses, coins, delta) > 1 - confidence:
        return 0.0
    for _ in range(60):
        middle = (low + high) / 2
        beyond = _as_many_right(middle, right, guesses, coins, delta) > 1 - confidence
        low, high = (low, middle) if beyond else (middle, high)
    return low


def _as_many_right(epsilon: float, right: int, guesses: int, coins: int, delta: float) -> float:
    """An upper bound on the probability that at least this many guesses are right."""
    import numpy as np
    from scipy.special import bdtrc

    if right <= 0:
        return 1.0
    chance = 1 / (1 + math.exp(-epsilon))

    def tail(least: "np.ndarray") -> "np.ndarray":
        return np.where(least <= 0, 1.0, bdtrc(np.maximum(least, 1) - 1.0, guesses, chance))

    beta = float(tail(np.array([right]))[0])
    fewer = np.arange(1, min(coins, right) + 1)
    alpha = float((2 * (tail(right - fewer) - beta) / fewer).max())
    return min(1.0, beta + alpha * coins * delta)


def _best_threshold(there: Tensor, absent: Tensor, delta: float, confidence: float) -> float:
    """Among fifty that lie evenly between all scores."""
    scores = torch.cat([there, absent]).sort().values
    tried = scores[torch.linspace(0, len(scores) - 1, 50).round().long()].tolist()

    def worth(threshold: float) -> float:
        hits, alarms = int((there > threshold).sum()), int((absent > threshold).sum())
        return _epsilon(hits, len(there), alarms, len(absent), delta, confidence)

    return float(max(tried, key=worth))


def _epsilon(hits: int, trials: int, alarms: int, quiet: int, delta: float, confidence: float) -> float:
    """The larger of what the two rates say, and what their complements say. Only two bounds are used, and each is wrong
    with half of what the confidence leaves, so both hold together."""
    miss = (1 - confidence) / 2
    tpr, fpr = clopper_pearson(hits, trials, miss), clopper_pearson(alarms, quiet, miss)
    ratios = ((tpr[0] - delta) / fpr[1], (1 - fpr[1] - delta) / (1 - tpr[0]))
    return max(0.0, *(math.log(ratio) for ratio in ratios if ratio > 0))
