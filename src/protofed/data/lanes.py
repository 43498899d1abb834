"""Who trains when: clients one behind the other in lanes of equal length, so that few lanes ever wait."""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Change(NamedTuple):
    """At some time some lanes pass from one client to the next; -1 is nobody."""

    lanes: list[int]
    leave: list[int]
    enter: list[int]


class Lanes(NamedTuple):
    """For every time and lane (T, W) the client and which of its steps it takes; and when lanes change clients."""

    who: np.ndarray  # its place in the group; 0 where nobody is
    step: np.ndarray  # from 0
    busy: np.ndarray  # whether there is a step to take
    changes: dict[int, Change]  # by time, from 0 to T

    @property
    def length(self) -> int:
        return len(self.who)


def pack(steps: Sequence[int], width: int) -> Lanes:
    """Clients that take so many steps each, the longest first, each into the lane that is free first."""
    free = [(0, lane) for lane in range(width)]
    placed = []  # start, lane, client
    for client in sorted(range(len(steps)), key=lambda i: -steps[i]):
        if steps[client]:
            start, lane = heapq.heappop(free)
            heapq.heappush(free, (start + steps[client], lane))
            placed.append((start, lane, client))
    length = max(end for end, _ in free)
    who, step = np.zeros((2, length, width), dtype=np.int64)
    busy = np.zeros((length, width), dtype=bool)
    at: dict[int, dict[int, list[int]]] = {}  # time -> lane -> [who leaves, who enters]
    for start, lane, client in placed:
        end = start + steps[client]
        who[start:end, lane], step[start:end, lane], busy[start:end, lane] = client, np.arange(steps[client]), True
        at.setdefault(start, {}).setdefault(lane, [-1, -1])[1] = client
        at.setdefault(end, {}).setdefault(lane, [-1, -1])[0] = client
    changes = {
        time: Change(list(by_lane), [a for a, _ in by_lane.values()], [b for _, b in by_lane.values()])
        for time, by_lane in at.items()
    }
    return Lanes(who, step, busy, changes)


def natural_width(steps: Sequence[int]) -> int:
    """The fewest lanes in which all clients are done when the longest one is, or nearly so."""
    longest = max(steps, default=0)
    if not longest:
        return 1
    width = -(-sum(steps) // longest)
    widest = min(len(steps), -(-width * 5 // 4))
    return next((w for w in range(width, widest) if pack(steps, w).length <= longest), widest)
