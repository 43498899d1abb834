"""The numbers of runs as people read them."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np


def over_seeds(values: Iterable[float | None], sample: bool = False) -> tuple[float, float] | None:
    """Mean and standard deviation over the seeds that have the number; None if none has it. The deviation is that of
    the population (divided by n), or of the sample (divided by n - 1; not a number if n is 1).

    The deviation is that of the population (divided by n), or of the sample (by n - 1; not a number where n is 1)."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return float(np.mean(known)), math.nan if sample and len(known) < 2 else float(np.std(known, ddof=int(sample)))


def amount(number: float) -> str:
    """A number of parameters or bytes, with a prefix such as M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f}{unit}"
    return f"{number:.0f}"


def duration(seconds: float, digits: int = 0) -> str:
    """Seconds below two minutes, minutes below two hours, then hours."""
    if seconds < 120:
        return f"{seconds:.{digits}f} s"
    return f"{seconds / 60:.{digits}f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def of_theorem(key: str, value: Any) -> str:
    """A number of a round's `theory` entry in a few digits."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "-"
    if key == "rho_min" and value == 1:
        return "none"
    return below_one(value) if key in ("rho", "rho_min") else f"{value:.3g}"


def below_one(value: float) -> str:
    """A number below 1 with enough digits to tell it from 1."""
    return f"{value:.{digits_below_one(value)}g}" if value < 1 else f"{value:g}"


def digits_below_one(value: float) -> int:
    """The digits that tell a number below 1 from 1."""
    return max(3, 1 - math.floor(math.log10(1 - value)))
