"""Noise that clients add together, each a share of it, under a secure sum.

With a sum over t clients or more, of which up to c may tell or leave out their shares, each share has a standard
deviation of noise * clip / sqrt(t - c): the other t - c shares, at least, are noise enough. Every client knows its own
share, so c is 1 at least where the noise should hold against the other clients, too.

Each client rounds its numbers to the grid of the sum, after it has added noise. A share is at least `FINE` steps of the
grid, so what rounding changes says nothing of the numbers, but with a probability below 1e-200. No number is cut at the
ends of the grid: they are farther away than any noise.
"""

import math

from protofed.errors import UserError
from protofed.privacy import Privacy
from protofed.privacy.fixed import Grid
from protofed.privacy.graph import needed
from protofed.privacy.noise import FARTHEST

FINE = 8.0  # steps of the grid in a share's standard deviation at least


def honest_answers(privacy: Privacy, cohort: int) -> int:
    """The fewest answers of a sum whose noise is counted on, of a round of so many clients."""
    threshold = needed(privacy.threshold, cohort)
    if privacy.dishonest >= threshold:
        raise UserError(
            f"privacy.dishonest = {privacy.dishonest} leaves nobody to add noise: a sum may have only {threshold} "
            f"clients. Use at most {threshold - 1}, or a larger privacy.threshold."
        )
    return threshold - privacy.dishonest


def share_of_noise(privacy: Privacy, noise: float, cohort: int) -> float:
    """The standard deviation of each client's share."""
    return noise * privacy.clip / math.sqrt(honest_answers(privacy, cohort))


def noised_grid(privacy: Privacy, noise: float, cohort: int, models: int = 0) -> Grid:
    """The grid for one vector with noise, at whose ends no number is cut, and so many models, which may be. Without a
    vector (infinite noise) for the models alone."""
    if math.isinf(noise):
        return Grid(privacy.bits, privacy.range, cohort, (1.0,) * models)
    share = share_of_noise(privacy, noise, cohort)
    grid = Grid(privacy.bits, longest(privacy) + FARTHEST * share, cohort, (1.0,) * (1 + models))
    if grid.total_step(1.0) * FINE > share:
        raise UserError(
            f"privacy.bits = {privacy.bits} makes steps of {grid.total_step(1.0):.2g}, too wide for noise of "
            f"{share:.2g} a client. Use more bits, or more noise."
        )
    return grid


def longest(privacy: Privacy) -> float:
    """The largest number of a vector without noise: of a client it is no longer than the clip, of samples it is cut."""
    return privacy.clip if privacy.unit == "client" else privacy.range
