"""Threads of a CPU that each compute by themselves."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch


def alone_on_its_core() -> None:
    """A thread computes by itself, and takes numbers too small to matter for zero: they are ten times slower."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)


class Threads:
    """So many at once; they are started when they are needed first."""

    def __init__(self, many: int) -> None:
        self.many = many
        self._pool: ThreadPoolExecutor | None = None

    def each(self, work: Callable[[Any], Any], things: Sequence[Any]) -> list[Any]:
        """The work on every thing, several at a time: torch lets go of Python's lock while it computes."""
        if self.many == 1 or len(things) == 1:
            return [work(thing) for thing in things]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.many, initializer=alone_on_its_core)
        return list(self._pool.map(work, things))
