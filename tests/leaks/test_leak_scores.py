"""Scores of attacks against values computed by hand, by scipy, and place by place."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import beta, binomtest

from protofed.leaks.scores import clopper_pearson, correlation, epsilon_bound, members_auc, psnr, ssim, tpr_at


def test_psnr_of_a_known_error() -> None:
    assert psnr(torch.tensor([0.01, 1.0, 0.0])).tolist() == pytest.approx([20, 0, 100])


def slow_ssim(a: np.ndarray, b: np.ndarray) -> float:
    """Of one channel, window by window, with weighted moments as Wang et al. write them."""
    at = np.arange(11) - 5
    line = np.exp(-(at**2) / (2 * 1.5**2))
    weight = np.outer(line, line) / line.sum() ** 2
    found = []
    for i in range(a.shape[0] - 10):
        for j in range(a.shape[1] - 10):
            x, y = a[i : i + 11, j : j + 11], b[i : i + 11, j : j + 11]
            mx, my = (weight * x).sum(), (weight * y).sum()
            vx, vy = (weight * (x - mx) ** 2).sum(), (weight * (y - my) ** 2).sum()
            both = (weight * (x - mx) * (y - my)).sum()
            found.append((2 * mx * my + 1e-4) * (2 * both + 9e-4) / ((mx**2 + my**2 + 1e-4) * (vx + vy + 9e-4)))
    return float(np.mean(found))


def test_ssim_is_that_of_every_window() -> None:
    rng = np.random.default_rng(0)
    a = rng.random((2, 3, 16, 14))
    b = np.clip(a + 0.2 * rng.normal(size=a.shape), 0, 1)
    wanted = [
        np.mean([slow_ssim(x, y) for x, y in zip(one, other, strict=True)]) for one, other in zip(a, b, strict=True)
    ]
    assert ssim(torch.tensor(a), torch.tensor(b)).tolist() == pytest.approx(wanted, abs=1e-10)
    assert ssim(torch.tensor(a), torch.tensor(a)).tolist() == pytest.approx([1, 1])


def test_ssim_of_two_flat_pictures() -> None:
    a, b = torch.full((1, 1, 12, 12), 0.2), torch.full((1, 1, 12, 12), 0.8)
    assert float(ssim(a, b)) == pytest.approx((2 * 0.16 + 1e-4) / (0.04 + 0.64 + 1e-4), abs=1e-4)


def test_correlation_leaves_out_what_is_not_known() -> None:
    a, b = torch.tensor([[1.0, 2, 3, 99], [5, 5, 5, 5]]), torch.tensor([[2.0, 4, 6, -7], [1, 2, 3, 4]])
    known = torch.tensor([[1.0, 1, 1, 0], [1, 1, 1, 1]])
    assert correlation(a, b, known).tolist() == pytest.approx([1, 0])
    assert float(correlation(b[1:], b[1:], known[1:])) == pytest.approx(1)


def test_auc_counts_pairs_and_half_of_the_ties() -> None:
    assert members_auc(torch.tensor([3.0, 1.0]), torch.tensor([2.0, 0.0])) == 0.75
    assert members_auc(torch.tensor([1.0, 1.0]), torch.tensor([1.0, 0.0])) == 0.75
    assert members_auc(torch.zeros(5), torch.zeros(3)) == 0.5


def test_tpr_at_a_rate_of_false_alarms() -> None:
    others = torch.arange(100.0)
    members = torch.tensor([98.5, 99.0, 99.5, 120.0])
    assert tpr_at(members, others, 0.01) == 1.0  # above 98, which one of the hundred is
    assert tpr_at(members, others, 0.02) == 1.0
    assert tpr_at(torch.tensor([98.0, 98.5]), others, 0.01) == 0.5
    assert tpr_at(members, others, 0.001) is None
    assert tpr_at(members[:0], others, 0.01) is None


@pytest.mark.parametrize(("hits", "trials"), [(0, 10), (10, 10), (3, 17), (999, 1000), (1, 1)])
def test_clopper_pearson_is_that_of_scipy(hits: int, trials: int) -> None:
    wanted = binomtest(hits, trials).proportion_ci(confidence_level=0.9, method="exact")
    assert clopper_pearson(hits, trials, 0.05) == pytest.approx((wanted.low, wanted.high), abs=1e-9)
    low = beta.ppf(0.05, hits, trials - hits + 1) if hits else 0
    assert clopper_pearson(hits, trials, 0.05)[0] == pytest.approx(low, abs=1e-9)


def test_the_bound_of_an_attack_that_never_errs() -> None:
    bound = epsilon_bound(torch.ones(400), torch.zeros(400), 0.0, 0.95)
    low, high = 0.025 ** (1 / 200), 1 - 0.025 ** (1 / 200)  # of 200 hits in 200 trials, and of none
    assert (bound.tpr, bound.fpr) == (1, 0)
    assert bound.epsilon == pytest.approx(math.log(low / high))
    assert epsilon_bound(torch.ones(400), torch.zeros(400), 1e-2, 0.95).epsilon < bound.epsilon


def test_nothing_is_proved_where_nothing_differs() -> None:
    generator = torch.Generator().manual_seed(0)
    bounds = [epsilon_bound(*torch.randn(2, 2000, generator=generator), 0.0).epsilon for _ in range(20)]
    assert sum(bound > 0 for bound in bounds) <= 3


def test_the_bound_stays_below_the_truth_of_randomised_answers() -> None:
    """A coin that tells the truth with probability p has epsilon log(p / (1 - p))."""
    generator = torch.Generator().manual_seed(1)
    truth = math.log(0.9 / 0.1)
    bounds = []
    for _ in range(20):
        there = (torch.rand(4000, generator=generator) < 0.9).double()
        absent = (torch.rand(4000, generator=generator) < 0.1).double()
        bounds.append(epsilon_bound(there, absent, 0.0).epsilon)
    assert sum(bound > truth for bound in bounds) <= 3
    assert min(bounds) > 0.7 * truth
