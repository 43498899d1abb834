"""What releases cost: epsilon by the accountants of `dp-accounting`.

Every release is a sum of vectors, one for each unit and none longer than the sensitivity, with Gaussian noise. The
neighbouring relation is "add or remove one": a unit's vector is there, or is zero. Sampling of cohorts is never counted
as an advantage, because seed and round tell who takes part; each client pays for the rounds that it takes part in.

Where clients train in steps with noise (DP-SGD), a release also pays for its steps: each is a sum over a batch in which
every sample is with a small probability, whatever the others (Poisson), and nobody knows the batch. Where a client
chooses dimensions first, a release also pays for the choice, whose epsilon is known and whose delta is 0.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from protofed.errors import UserError

LARGE = 30.0  # from this epsilon on, the bound by Renyi divergences is enough
MOST_NOISE = 1e6  # times the clip
STEP = 1e-3  # between the privacy losses that are told apart; rounding is upwards
RELEASES = 100_000  # of one unit's data at most
ORDERS = (*range(2, 65), 80, 96, 128, 256, 512, 1024)  # of Renyi divergences of steps: whole numbers, which converge


class PaidSteps(NamedTuple):
    """The training steps with noise that lead to one release."""

    many: int  # of each client
    rate: float  # how likely each sample is in a step
    noise: float  # standard deviation over the longest gradient of a sample


NO_STEPS = PaidSteps(0, 0.0, 0.0)
NOTHING = math.inf  # the noise of a release of nothing but what was trained in steps with noise


def _library() -> Any:
    try:
        import dp_accounting
        from dp_accounting import gaussian_mechanism, pld, rdp
    except ImportError:
        raise UserError(
            "[privacy] needs the package dp-accounting, which computes epsilon: pip install 'protofed[privacy]'."
        ) from None
    return dp_accounting, gaussian_mechanism, pld, rdp


def check_accountant() -> None:
    """Refuse where epsilon cannot be computed."""
    _library()


@functools.cache
def spent(noise: float, times: int, delta: float, steps: PaidSteps = NO_STEPS, choice: float = 0.0) -> float:
    """The epsilon of so many releases of one unit's data; `noise` is the standard deviation over the sensitivity.
    `steps`: those before each release. `choice`: the epsilon, without a delta, of what is chosen for each."""
    if times == 0:
        return 0.0
    if choice:
        return _spent_with_choice(noise, times, delta, choice)
    if noise <= 0 or (steps.many and steps.noise <= 0):
        return math.inf
    events, _, pld, rdp = _library()
    event = events.SelfComposedDpEvent(events.GaussianDpEvent(noise), times)
    if steps.many:
        step = events.PoissonSampledDpEvent(steps.rate, events.GaussianDpEvent(steps.noise))
        trained = events.SelfComposedDpEvent(step, times * steps.many)
        event = trained if noise == NOTHING else events.ComposedDpEvent([trained, event])
    orders = ORDERS if steps.many else None
    bound = float(rdp.RdpAccountant(orders).compose(event).get_epsilon(delta))
    if bound > LARGE:  # the exact accountant takes minutes there
        return bound
    return min(bound, float(pld.PLDAccountant(value_discretization_interval=STEP).compose(event).get_epsilon(delta)))


def _spent_with_choice(noise: float, times: int, delta: float, choice: float) -> float:
    """The epsilon where something is chosen before each release. Nothing is assumed of the choice but its epsilon."""
    bound = times * choice + spent(noise, times, delta)
    if bound > LARGE:
        return bound
    from dp_accounting.pld import common, privacy_loss_distribution

    chosen = privacy_loss_distribution.from_privacy_parameters(
        common.DifferentialPrivacyParameters(choice, 0.0), value_discretization_interval=STEP
    )
    sums = privacy_loss_distribution.from_gaussian_mechanism(
        noise / math.sqrt(times), value_discretization_interval=STEP
    )
    both = chosen.self_compose(times).compose(sums)
    return min(bound, float(both.get_epsilon_for_delta(delta)))


@functools.cache
def noise_for(epsilon: float, delta: float, times: int, choice: float = 0.0) -> float:
    """The least noise with which so many releases of one unit's data spend no more than epsilon."""
    if choice:
        return _least(lambda least: spent(least, times, delta, choice=choice), epsilon)
    guess = float(_library()[1].get_sigma_gaussian(epsilon, delta)) * math.sqrt(times)
    while guess <= MOST_NOISE:
        if spent(guess, times, delta) <= epsilon:
            return guess
        guess *= 1.0005 if spent(guess, times, delta) < 1.01 * epsilon else 1.02
    raise UserError(
        f"privacy.epsilon = {epsilon:g} is too small: its noise would be over {MOST_NOISE:,.0f} times privacy.clip. "
        "Use a larger budget, or fewer rounds."
    )


@functools.cache
def step_noise_for(noise: float, epsilon: float, delta: float, times: int, steps: PaidSteps) -> float:
    """The least noise of the steps with which so many releases with this noise spend no more than epsilon."""
    return _least(lambda least: spent(noise, times, delta, steps._replace(noise=least)), epsilon)


@functools.cache
def noise_beside(epsilon: float, delta: float, times: int, steps: PaidSteps) -> float:
    """The least noise with which so many releases, with the steps before them, spend no more than epsilon."""
    alone = spent(NOTHING, times, delta, steps)
    if alone >= epsilon:
        raise UserError(
            f"privacy.sgd_noise = {steps.noise:g} makes the steps of all rounds spend {alone:.3g}, and leaves nothing "
            f"of privacy.epsilon = {epsilon:g} for class sums. Use more, or give privacy.noise as well."
        )
    return _least(lambda least: spent(least, times, delta, steps), epsilon)


def _least(cost: Callable[[float], float], epsilon: float) -> float:
    """The least noise, up to 0.1 %, that costs no more than epsilon."""
    high = 1.0
    while cost(high) > epsilon:
        high *= 2
        if high > MOST_NOISE:
            raise UserError(
                f"privacy.epsilon = {epsilon:g} is too small: its noise would be over {MOST_NOISE:,.0f} times the "
                "clip. Use a larger budget, fewer rounds, or a lower privacy.sgd_rate."
            )
    low = high / 2
    while low > 1e-3 and cost(low) <= epsilon:
        low, high = low / 2, low
    while high > 1.001 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if cost(middle) <= epsilon else (middle, high)
    return high


@functools.cache
def affordable(noise: float, epsilon: float, delta: float, steps: PaidSteps = NO_STEPS, choice: float = 0.0) -> int:
    """How many releases of one unit's data a budget pays for."""
    if steps.many or choice:
        low, high = 0, 1
        while high < RELEASES and spent(noise, high, delta, steps, choice) <= epsilon:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if spent(noise, middle, delta, steps, choice) <= epsilon else (low, middle)
        return low
    single = float(_library()[1].get_sigma_gaussian(epsilon, delta))
    many = min(RELEASES, int((noise / single) ** 2 * 1.001) + 1)
    while many > 0 and spent(noise, many, delta) > epsilon:
        many -= max(1, many // 1000)
    return many


def accountant() -> str:
    """Who computes epsilon, for the record."""
    from importlib.metadata import version

    return f"dp-accounting {version('dp-accounting')}, privacy loss distributions"
