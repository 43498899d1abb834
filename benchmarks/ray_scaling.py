"""One Ray worker against two, and both against threads: `python benchmarks/ray_scaling.py [--repeats N] [--rounds N]`.

FedProto's MNIST run with so many local epochs that a round of
one worker takes two seconds or more; every worker has one thread. The ways take turns, a few rounds each at a time, so
that whatever else the machine does meets all of them. Prints JSON: the median seconds of a round of each way, their
ratios (medians of the ratios of neighbouring turns), and the load of the machine before and after.
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from protofed import Experiment, run
from protofed.runs.watch import Watch

WAYS = {
    "ray_1": ("engine=ray", "engine.workers=1", "engine.threads=1"),
    "ray_2": ("engine=ray", "engine.workers=2", "engine.threads=1"),
    "stacked_1": ("engine=stacked", "engine.threads=1"),
    "stacked_2": ("engine=stacked", "engine.threads=2"),
}
WARM = 3  # rounds before those that count: steps are traced in them


class Said(Watch):
    """Shows that something happens."""

    def __init__(self, way: str) -> None:
        self.way = way

    def round(self, line: dict[str, Any]) -> None:
        print(f"{self.way} round {line['round']}: {line['seconds']:.2f} s", flush=True)


def turn(way: str, asked: argparse.Namespace) -> float:
    """The median round of a short run."""
    changes = (f"rounds={WARM + asked.rounds}", f"local_epochs={asked.epochs}", "device=cpu", "engine.compile=never")
    plan = Experiment.load("fedproto/mnist_n3", *changes, "record.enabled=false", "evaluate.pm_clients=1", *WAYS[way])
    with tempfile.TemporaryDirectory() as folder:
        result = run(plan, Path(folder) / "run", data_dir=asked.data_dir or None, watch=Said(way))
        return statistics.median(line["seconds"] for line in result.rounds[WARM:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--data-dir", default=os.environ.get("PROTOFED_DATA", ""))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    asked = parser.parse_args()
    before = os.getloadavg()
    turns = [{way: turn(way, asked) for way in asked.ways} for _ in range(asked.repeats)]
    found: dict[str, Any] = {way: statistics.median(one[way] for one in turns) for way in asked.ways}
    for fast, slow in (("ray_2", "ray_1"), ("stacked_2", "stacked_1"), ("ray_2", "stacked_2")):
        if {fast, slow} <= set(asked.ways):
            found[f"{slow} / {fast}"] = statistics.median(one[slow] / one[fast] for one in turns)
    load = {"load_before": before, "load_after": os.getloadavg(), "cores": os.cpu_count()}
    print(json.dumps({"a_round_s": found, **load}, indent=2))


if __name__ == "__main__":
    main()
