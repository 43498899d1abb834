"""The accountant against two others: the analytic Gaussian mechanism, and Renyi divergences by hand."""

import builtins
import math
from typing import Any

import pytest

from protofed import UserError
from protofed.privacy import accounting
from protofed.privacy.accounting import affordable, noise_for, spent

pytest.importorskip("dp_accounting", reason="needs dp-accounting: pip install 'protofed[privacy]'")
CASES = [(1.0, 1, 1e-5), (5.0, 50, 1e-5), (0.8, 1, 1e-3), (20.0, 200, 1e-6)]


def delta_of(epsilon: float, noise: float) -> float:
    """Balle and Wang, 2018, Theorem 8, for sensitivity 1."""

    def below(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    shift, at = 1 / (2 * noise), epsilon * noise
    return below(shift - at) - math.exp(epsilon) * below(-shift - at)


def analytic(noise: float, times: int, delta: float) -> float:
    """Epsilon of one Gaussian release that tells as much as so many, by bisection."""
    low, high = 0.0, 200.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(middle, noise / math.sqrt(times)) > delta else (low, middle)
    return high


def by_renyi(noise: float, times: int, delta: float) -> float:
    """Mironov, 2017, Propositions 1, 3 and 7: the Gaussian's divergence of order a is a / (2 sigma^2); they add up."""
    orders = [1 + i / 100 for i in range(1, 20_000)]
    return min(times * a / (2 * noise**2) + math.log(1 / delta) / (a - 1) for a in orders)


@pytest.mark.parametrize(("noise", "times", "delta"), CASES)
def test_epsilon_is_the_analytic_one_and_below_the_bound_by_hand(noise: float, times: int, delta: float) -> None:
    exact = analytic(noise, times, delta)
    assert exact <= spent(noise, times, delta) * (1 + 1e-6)
    assert spent(noise, times, delta) == pytest.approx(exact, rel=0.01)
    assert spent(noise, times, delta) < by_renyi(noise, times, delta)


def test_a_large_epsilon_is_a_bound_and_does_not_take_minutes() -> None:
    assert analytic(0.4, 20, 1e-5) < spent(0.4, 20, 1e-5) <= by_renyi(0.4, 20, 1e-5) * (1 + 1e-6)


def test_nothing_released_spends_nothing_and_no_noise_spends_everything() -> None:
    assert spent(1.0, 0, 1e-5) == 0
    assert spent(0.0, 1, 1e-5) == math.inf


@pytest.mark.parametrize(("epsilon", "times"), [(0.5, 1), (8.0, 30), (60.0, 3)])
def test_the_noise_for_a_budget_keeps_it_and_is_hardly_more_than_needed(epsilon: float, times: int) -> None:
    noise = noise_for(epsilon, 1e-5, times)
    assert spent(noise, times, 1e-5) <= epsilon
    assert analytic(noise * 0.95, times, 1e-5) > epsilon
    assert affordable(noise, epsilon, 1e-5) >= times


def test_what_a_budget_pays_for() -> None:
    many = affordable(4.0, 6.0, 1e-5)
    assert spent(4.0, many, 1e-5) <= 6.0 < spent(4.0, many + 1, 1e-5)
    assert affordable(0.1, 1.0, 1e-5) == 0


def test_a_budget_that_would_need_absurd_noise_is_refused() -> None:
    with pytest.raises(UserError, match="epsilon = 1e-08 is too small"):
        noise_for(1e-8, 1e-12, 100)


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    load = builtins.__import__

    def missing(name: str, *words: Any, **more: Any) -> Any:
        if name.startswith("dp_accounting"):
            raise ImportError(name)
        return load(name, *words, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(UserError, match=r"pip install 'protofed\[privacy\]'"):
        accounting.check_accountant()
