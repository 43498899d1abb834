"""Observers that are told what happens in a run, as it happens."""

from pathlib import Path
from typing import Any

from protofed.config.experiment import Experiment


class Watch:
    """Is told what happens in a run, and does nothing with it."""

    def opened(self, folder: Path) -> None: ...
    def start(self, experiment: Experiment, done: int) -> None: ...
    def round(self, line: dict[str, Any]) -> None: ...
    def measured(self, done: int, clients: int) -> None: ...
    def note(self, text: str) -> None: ...
    def end(self) -> None: ...


class Watches(Watch):
    """Several watches at once."""

    def __init__(self, *watches: Watch) -> None:
        self.watches = watches

    def opened(self, folder: Path) -> None:
        for watch in self.watches:
            watch.opened(folder)

    def start(self, experiment: Experiment, done: int) -> None:
        for watch in self.watches:
            watch.start(experiment, done)

    def round(self, line: dict[str, Any]) -> None:
        for watch in self.watches:
            watch.round(line)

    def measured(self, done: int, clients: int) -> None:
        for watch in self.watches:
            watch.measured(done, clients)

    def note(self, text: str) -> None:
        for watch in self.watches:
            watch.note(text)

    def end(self) -> None:
        for watch in self.watches:
            watch.end()
