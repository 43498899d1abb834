"""Where the seconds of a round go."""

import contextlib
import threading
import time
from collections.abc import Iterator

import torch


class Clock:
    """Seconds by part. On a GPU they are told by marks in its own queue, so that nobody waits for it on the way."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._seconds: dict[str, float] = {}
        self._marks: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def part(self, name: str, at_once: int = 1) -> Iterator[None]:
        """What is done in here belongs to this part; `at_once` threads do so, taken to be equally busy."""
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record(stream)
            yield
            last.record(stream)
            self._marks.append((name, first, last))
            return
        started = time.perf_counter()
        yield
        self.add(name, (time.perf_counter() - started) / at_once)

    def add(self, name: str, seconds: float) -> None:
        """So many more seconds for a part."""
        with self._lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """The seconds since they were taken last; these parts are done when it returns."""
        for name, first, last in self._marks:
            last.synchronize()
            self.add(name, first.elapsed_time(last) / 1000)
        found, self._seconds, self._marks = self._seconds, {}, []
        return found
