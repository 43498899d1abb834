"""CPU threads that each compute on their own."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch


def alone_on_its_core() -> None:
    """Let a thread compute on one core, and round denormal numbers to zero: they are ten times slower."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)


class Threads:
    """A pool of threads, started on first use."""

    def __init__(self, many: int) -> None:
        self.many = many
        self._pool: ThreadPoolExecutor | None = None

    def mapping(self, things: Sequence[Any]) -> Callable[[Callable[[Any], Any], Sequence[Any]], Iterable[Any]]:
        """`map` over these items, several at a time: torch releases Python's lock while it computes."""
        if self.many == 1 or len(things) == 1:
            return map
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.many, initializer=alone_on_its_core)
        return self._pool.map
