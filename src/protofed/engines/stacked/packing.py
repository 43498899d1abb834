"""Schedules clients one after another in lanes of equal length, so that few lanes are ever idle."""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Change(NamedTuple):
    """At this time, some lanes move from one client to the next, or, at the end, to none."""

    lanes: list[int]
    leave: list[int]
    enter: list[int]


class Lanes(NamedTuple):
    """For every time and lane (T, W): the client, and which of its steps it takes; and when lanes change clients."""

    who: np.ndarray  # its place in the group; in an idle lane the last client there, or the first of all
    step: np.ndarray  # from 0
    busy: np.ndarray  # whether there is a step to take
    changes: dict[int, Change]  # by time, after 0 and up to T, when all leave

    @property
    def length(self) -> int:
        return len(self.who)


def fill_lanes(steps: Sequence[int], width: int) -> Lanes:
    """Put clients with these numbers of steps, longest first, each into the lane that is free first."""
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
    now: dict[int, int] = {}  # lane -> client
    changes: dict[int, Change] = {}
    for start, lane, client in sorted(placed):
        end = start + steps[client]
        who[start:, lane], step[start:end, lane], busy[start:end, lane] = client, np.arange(steps[client]), True
        if start:
            change = changes.setdefault(start, Change([], [], []))
            change.lanes.append(lane)
            change.leave.append(now[lane])
            change.enter.append(client)
        now[lane] = client
    if placed:  # a finished client stays until its lane is needed, or until the end
        changes[length] = Change(list(now), list(now.values()), [])
    return Lanes(who, step, busy, changes)


def best_width(steps: Sequence[int], fixed: float, each: float, change: float) -> int:
    """The number of lanes that finishes these clients first, if a step of W lanes takes fixed + each * W seconds, and
    handing lanes to the next clients takes `change`."""

    def seconds(width: int) -> float:
        lanes = fill_lanes(steps, width)
        return lanes.length * (fixed + each * width) + len(lanes.changes) * change

    longest, clients = max(steps, default=0), sum(n > 0 for n in steps)
    if not longest:
        return 1
    fewest = -(-sum(steps) // longest)  # fewer lanes take longer; more lanes than clients gain nothing
    tried: set[int] = {*range(1, min(17, clients + 1)), *range(fewest, min(clients, fewest * 5 // 4) + 1), clients}
    return min(sorted(tried), key=seconds)
