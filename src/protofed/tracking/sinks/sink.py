"""What a sink is: a place that the numbers of a run go to, under the same names everywhere."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple


class RunInfo(NamedTuple):
    """The run that is reported."""

    id: str  # the same when the run is resumed
    name: str
    group: str  # runs that belong together: those in one folder
    folder: Path  # where the sink may write
    settings: dict[str, Any]  # the experiment, nested as in its file
    resumed: bool  # told of before


class Sink(ABC):
    """One run in one sink; called from one thread, and any exception ends it."""

    needs: ClassVar[tuple[str, ...]]  # packages

    @abstractmethod
    def open(self, about: RunInfo) -> None: ...
    @abstractmethod
    def log(self, step: int, numbers: dict[str, float]) -> None: ...

    def final(self, step: int, numbers: dict[str, float]) -> None:
        """The numbers of the whole run, after its last round."""
        self.log(step, numbers)

    @abstractmethod
    def close(self, finished: bool) -> None: ...


def named_numbers(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Every number of a record, named as in rounds.jsonl; nested names are joined by a slash."""
    found: dict[str, float] = {}
    for key, value in record.items():
        name = prefix + re.sub(r"[^\w.-]", "_", str(key))
        if isinstance(value, Mapping):
            found |= named_numbers(value, f"{name}/")
        elif isinstance(value, int | float):
            found[name] = float(value)
    return found


def as_overrides(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Settings as they are written on the command line: method.lam = 1.0."""
    found: dict[str, str] = {}
    for key, value in settings.items():
        found |= (
            as_overrides(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": str(value)}
        )
    return found
