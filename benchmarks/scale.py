"""Ten thousand clients, a hundred a round, against a hundred clients all in: `python benchmarks/scale.py [--rounds N]`.

Prints JSON: seconds a round of both (medians of whole rounds of a real run, with checkpoints and logging), their ratio,
and the largest resident memory of each.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RUN = """
import json, resource, sys
from protofed import Experiment, run
out, data, *changes = sys.argv[1:]
plan = Experiment.load("fedproto/mnist_n3", *changes)
result = run(plan, out, data_dir=data or None)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps([[line["seconds"] for line in result.rounds], peak]))
"""
SAME = (
    "partition.ways=2",
    "partition.spread=0",
    "partition.shots=2",
    "partition.test_shots=0",
    "evaluate.pm_clients=1",
    "evaluate.own=0",  # test sets are dealt to all clients, so those of few are larger
)


def measure(clients: int, share: float, rounds: int, data_dir: str) -> dict[str, Any]:
    changes = (f"clients={clients}", f"participation={share}", f"rounds={rounds}", *SAME)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", RUN, str(Path(folder) / "run"), data_dir, *changes]
        seconds, peak = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {"clients": clients, "a_round_s": statistics.median(seconds[3:]), "peak_mb": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--data-dir", default="")
    asked = parser.parse_args()
    many = measure(10_000, 0.01, asked.rounds, asked.data_dir)
    few = measure(100, 1.0, asked.rounds, asked.data_dir)
    print(json.dumps({"many": many, "few": few, "ratio": many["a_round_s"] / few["a_round_s"]}, indent=2))


if __name__ == "__main__":
    main()
