"""Numbers of finished runs, by the names that entries use for them.

accuracy_mean                 a number of summary.json
accuracy_mean@50              the mean over the ten rounds up to round 50, of those in which it was measured
accuracy_mean@last            the same up to the last round
accuracy_mean@best            the highest of all rounds, which nobody can choose without the test samples
accuracy_mean@chosen          that of the round with the highest accuracy on validation samples, the first of several;
                              for accuracy_global_mean by the global model's, else by the clients' own models'
accuracy_mean@time:mpfedcl    the last one measured within the time that mpfedcl's run of this seed took
first|second@last             the first of them that the run has
domain:svhn                   mean accuracy of the clients of a domain
spread:pm_l                   standard deviation over clients of a number of clients.jsonl
embeddings:..., similarity:...  see `protofed.papers.reproduce.embed`
"""

import contextlib
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from protofed.papers.reproduce import embed
from protofed.papers.reproduce.entry import PaperEntry
from protofed.runs.measure import Result
from protofed.sweep import Cell

LOOKED_AT = {"embeddings", "similarity"}  # what is computed from models
TIMED = "@time:"  # a number at the time that another run took
LAST = 10  # rounds that "@" is the mean of
CHOOSES = "validation_mean"  # what "@chosen" goes by
OTHERS_CHOOSE = {"accuracy_global_mean": "validation_global_mean"}  # for a number of the global model


class Done(NamedTuple):
    """A finished run and its labels."""

    cell: Cell
    result: Result


Sibling = Callable[[str], Result | None]  # a method's label -> its run with the same other labels


def value(metric: str, done: Done, sibling: Sibling, views: "Views") -> float | None:
    """One number of one run; None if the run does not have it."""
    kind, colon, what = metric.partition(":")
    if kind in LOOKED_AT and colon:
        return views.numbers(done).get(what)
    if kind == "domain":
        return _mean([c["accuracy"] for c in done.result.clients if c["domain"] == what])
    if kind == "spread":
        known = [c[what] for c in done.result.clients if c.get(what) is not None]
        return float(np.std(known)) if known else None
    keys, at, when = metric.partition("@")
    for key in keys.split("|"):
        found = _at(key, when, done.result, sibling) if at else done.result.summary.get(key)
        if found is not None:
            return float(found)
    return None


def _at(key: str, when: str, result: Result, sibling: Sibling) -> float | None:
    lines = result.rounds
    if when.startswith("time:"):
        other = sibling(when.removeprefix("time:"))
        return _within(key, lines, sum(line["seconds"] for line in other.rounds)) if other else None
    if when == "best":
        return max((line[key] for line in lines if line.get(key) is not None), default=None)
    if when == "chosen":
        chooses = OTHERS_CHOOSE.get(key, CHOOSES)
        rounds = [line for line in lines if line.get(chooses) is not None and line.get(key) is not None]
        return max(rounds, key=lambda line: float(line[chooses]))[key] if rounds else None
    end = lines[-1]["round"] if when == "last" else int(when)
    return _mean([line.get(key) for line in lines if end - LAST < line["round"] <= end])


def _within(key: str, lines: list[dict[str, Any]], seconds: float) -> float | None:
    """The last value that was measured within this many seconds; for a run whose first value came later, that value."""
    spent, found = 0.0, None
    for line in lines:
        spent += line["seconds"]
        if line.get(key) is not None and (spent <= seconds or found is None):
            found = line[key]
    return found


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


class Views:
    """What is computed from the models of a finished run, once per run."""

    def __init__(self, entry: PaperEntry, data_dir: Path | None, folder: Path) -> None:
        self.entry, self.data_dir, self.folder = entry, data_dir, folder
        self._numbers: dict[str, dict[str, float | None]] = {}

    @property
    def wanted(self) -> bool:
        """Whether the entry needs models at all."""
        kinds = {column.metric.partition(":")[0] for column in self.entry.columns}
        return bool(kinds & LOOKED_AT) or (self.entry.figure is not None and self.entry.figure.kind in LOOKED_AT)

    def view(self, done: Done) -> Mapping[str, np.ndarray]:
        """Embeddings or class vectors of a run, from a file if they were computed before."""
        path = self.folder / f"{done.cell.hash}.npz"
        with contextlib.suppress(OSError, ValueError, EOFError, zipfile.BadZipFile), np.load(path) as arrays:
            return dict(arrays)
        self.folder.mkdir(parents=True, exist_ok=True)
        embed.write_embeddings(path, embed.compute(self.entry, done.result.folder, self.data_dir))
        with np.load(path) as arrays:
            return dict(arrays)

    def numbers(self, done: Done) -> dict[str, float | None]:
        if done.cell.hash not in self._numbers:
            self._numbers[done.cell.hash] = embed.embedding_numbers(self.view(done))
        return self._numbers[done.cell.hash]
