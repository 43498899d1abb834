"""Numbers of runs as people read them."""

import pytest

from protofed.runs.numbers import amount, duration, over_seeds


@pytest.mark.parametrize(
    ("seconds", "digits", "text"),
    [
        (0.44, 0, "0 s"), (0.44, 1, "0.4 s"), (119, 0, "119 s"), (120, 0, "2 min"), (150, 1, "2.5 min"),
        (7199, 0, "120 min"), (7200, 0, "2.0 h"), (9000, 1, "2.5 h"),
    ],
)  # fmt: skip
def test_durations(seconds: float, digits: int, text: str) -> None:
    assert duration(seconds, digits) == text


def test_amounts() -> None:
    assert [amount(n) for n in (0, 999, 1000, 1_250_000, 3e9)] == ["0", "999", "1.0k", "1.2M", "3.0G"]


def test_seeds_without_the_number_are_left_out() -> None:
    assert over_seeds([1.0, None, 3.0]) == (2.0, 1.0)
    assert over_seeds([5.0]) == (5.0, 0.0)
    assert over_seeds([None]) is None
    assert over_seeds([]) is None
