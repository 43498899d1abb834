"""Follow a run's folder while it is written, and report to a sink what it does not have yet."""

import json
import threading
import tomllib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from protofed.tracking.sinks.sink import RunInfo, Sink, named_numbers

LOOK_SECONDS = 0.5  # between two looks at rounds.jsonl


def tell_all(name: str, sink: Sink, folder: Path, over: threading.Event) -> None:
    """Report all rounds, then the final numbers, leaving out what the sink got before the run was resumed."""
    told = Told(folder / "track" / f"{name}.json")
    path = folder.resolve()
    settings = tomllib.loads((folder / "experiment.toml").read_text(encoding="utf-8"))
    sink.open(RunInfo(told.id, path.name, path.parent.name, told.path.parent, settings, resumed=told.round > 0))
    for line in lines(folder / "rounds.jsonl", over):
        if line["round"] > told.round:
            told.save(line["round"])  # before it is told: a kill in between leaves a gap, and nothing twice
            sink.log(line["round"], named_numbers({key: value for key, value in line.items() if key != "round"}))
    summary = folder / "summary.json"
    if summary.is_file():
        sink.final(settings["rounds"], named_numbers({"final": json.loads(summary.read_text(encoding="utf-8"))}))
    sink.close(summary.is_file())


def lines(path: Path, over: threading.Event) -> Iterator[dict[str, Any]]:
    """The whole lines of a growing file, until it is over; each byte is read once."""
    start, rest = 0, b""
    while True:
        last = over.is_set()  # asked before reading: all that was written by then is read
        if path.is_file():
            with open(path, "rb") as file:
                file.seek(start)
                *whole, rest = (rest + file.read()).split(b"\n")
                start = file.tell()
            yield from (json.loads(line) for line in whole)
        if last:
            return
        over.wait(LOOK_SECONDS)


class Told:
    """What a sink was told about a run, kept next to its files: the run's name there, and the last round."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
            self.id, self.round = str(known["id"]), int(known["round"])
        except (OSError, ValueError, KeyError, TypeError):  # none yet
            self.id = uuid.uuid4().hex[:16]
            self.save(0)

    def save(self, round: int) -> None:
        self.round = round
        scratch = self.path.with_suffix(".partial")
        scratch.write_text(json.dumps({"id": self.id, "round": round}) + "\n", encoding="utf-8")
        scratch.replace(self.path)
