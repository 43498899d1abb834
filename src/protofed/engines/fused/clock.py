"""The seconds of one run among several that are trained together."""

import contextlib
import time
from collections.abc import Iterator

import torch

from protofed.engines.resources import Clock


class SharedClock(Clock):
    """The time that a run takes of the machine, including its share of what is done for several runs."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.elsewhere = 0.0  # seconds that passed for other runs

    def now(self) -> float:
        return time.perf_counter() - self.elsewhere

    @contextlib.contextmanager
    def part(self, name: str, at_once: int = 1) -> Iterator[None]:
        started = self.now()
        yield
        self.add(name, (self.now() - started) / at_once)
