"""Clients in lanes: everybody takes all steps, in order, and lanes are passed on when they are free."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protofed.engines.stacked.packing import best_width, fill_lanes


@given(st.lists(st.integers(0, 12), min_size=1, max_size=12), st.integers(1, 6))
def test_everybody_takes_all_steps_in_order_in_one_lane(steps: list[int], width: int) -> None:
    lanes = fill_lanes(steps, width)
    assert lanes.busy.sum() == sum(steps)
    for client, n in enumerate(steps):
        times, where = np.nonzero(lanes.busy & (lanes.who == client))
        assert lanes.step[times, where].tolist() == list(range(n))
        assert len(set(where)) <= 1
        assert times.tolist() == list(range(times[0], times[0] + n)) if n else not len(times)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=12), st.integers(1, 6))
def test_whoever_entered_leaves_after_the_last_step_and_all_have_left_at_the_end(steps: list[int], width: int) -> None:
    lanes = fill_lanes(steps, width)
    inside = dict(enumerate(lanes.who[0])) if lanes.length else {}
    left: list[int] = []
    for time, change in sorted(lanes.changes.items()):
        assert 0 < time <= lanes.length
        for lane, client in zip(change.lanes, change.leave, strict=True):
            assert inside[lane] == client
            assert not (lanes.busy[time:, lane] & (lanes.who[time:, lane] == client)).any()
            left.append(client)
        inside |= dict(zip(change.lanes, change.enter, strict=False))
    assert sorted(left) == [client for client, n in enumerate(steps) if n]


def test_lanes_by_hand() -> None:
    lanes = fill_lanes([1, 3, 2], 2)
    assert lanes.who.tolist() == [[1, 2], [1, 2], [1, 0]]  # the longest first, the shortest behind the shorter
    assert lanes.step.tolist() == [[0, 0], [1, 1], [2, 0]]
    assert lanes.busy.all()
    assert {time: tuple(change) for time, change in lanes.changes.items()} == {
        2: ([1], [2], [0]),
        3: ([0, 1], [1, 0], []),
    }


@pytest.mark.parametrize(
    ("steps", "fixed", "each", "width"),
    [
        ([4, 4, 4, 4], 1.0, 0.0, 4),  # a step costs the same however many take it
        ([8, 1, 1, 1, 1, 1, 1, 1], 1.0, 1.0, 2),  # more lanes than two would only wait for the longest
        ([5, 5], 0.0, 1.0, 1),  # nothing is gained by taking steps together
        ([0, 0], 1.0, 1.0, 1),
    ],
)
def test_the_number_of_lanes_is_the_fastest(steps: list[int], fixed: float, each: float, width: int) -> None:
    assert best_width(steps, fixed, each, 0.0) == width
