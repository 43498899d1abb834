"""Whether one row is above another: differences seed by seed, and how certain they are with so few seeds."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

FEWEST = 5  # seeds below which no difference is marked, whatever its p
WILCOXON = 6  # seeds from which on the exact signed-rank test can fall below 0.05 at all
LEVEL = 0.05


class Paired(NamedTuple):
    """A row against the baseline, over the seeds that both have."""

    n: int
    difference: float  # mean over seeds
    higher: int  # seeds in which the row is above
    low: float | None = None  # 95 % interval of the difference, from the t distribution
    high: float | None = None
    p: float | None = None  # of the two-sided paired t-test
    p_wilcoxon: float | None = None  # of the exact signed-rank test, where it could say anything
    p_holm: float | None = None  # p corrected for all rows that are tested in this column

    @property
    def marked(self) -> bool:
        """Whether the difference is significant for this number of seeds, after correction."""
        return self.n >= FEWEST and self.p_holm is not None and self.p_holm < LEVEL


def paired_test(row: Mapping[int, float], baseline: Mapping[int, float]) -> Paired | None:
    """The row's values by seed against the baseline's; None without a common seed."""
    seeds = sorted(set(row) & set(baseline))
    if not seeds:
        return None
    gains = np.array([row[seed] - baseline[seed] for seed in seeds])
    n, mean = len(gains), float(gains.mean())
    plain = Paired(n, mean, int((gains > 0).sum()))
    error = float(gains.std(ddof=1) / np.sqrt(n)) if n > 1 else 0.0
    if error <= 1e-12 * max(1.0, abs(mean)):  # one seed, or all alike: there is no spread to test against
        return plain
    from scipy import stats  # it takes a second to load

    reach = float(stats.t.ppf(0.975, n - 1)) * error
    p = float(2 * stats.t.sf(abs(mean) / error, n - 1))
    rank = float(stats.wilcoxon(gains, method="exact").pvalue) if n >= WILCOXON and _distinct(gains) else None
    return plain._replace(low=mean - reach, high=mean + reach, p=p, p_wilcoxon=rank)


def _distinct(gains: np.ndarray) -> bool:
    """The exact signed-rank test allows neither ties nor zeros."""
    return bool((gains != 0).all()) and len(np.unique(np.abs(gains))) == len(gains)


def holm(tests: Sequence[Paired | None]) -> list[Paired | None]:
    """The tests of one column, with each p corrected for their number (Holm's step-down method)."""
    order = sorted((t.p, i) for i, t in enumerate(tests) if t is not None and t.p is not None)
    result, largest = list(tests), 0.0
    for place, (p, i) in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - place) * p))
        result[i] = tests[i]._replace(p_holm=largest)  # type: ignore[union-attr]
    return result
