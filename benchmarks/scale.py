"""Seconds and bytes of runs with 100 to 1,000,000 clients, 100 a round: `python benchmarks/scale.py [--rounds N]`.

The data is computed when a client is drawn (`data.name = "gaussians"`). Every run has a process of its own, which logs,
saves checkpoints and measures 100 clients at the end. Seconds are those of its one thread, so that others on the
machine disturb them little. Numbers go to docs/scale.json, and the picture that docs/performance.md shows to
docs/images; --write only draws it.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs"
COHORT = 100
POPULATIONS = (100, 1_000, 10_000, 100_000, 1_000_000)
METHODS = ("fedavg", "fedproto")
RUN = """
import json, resource, sys, time
from protofed import Experiment
from protofed.runs.loop import run
from protofed.runs.watch import Watch
out, *changes = sys.argv[1:]

class Timed(Watch):
    def start(self, experiment, done):
        self.at = [time.process_time()]
    def round(self, line):
        self.at.append(time.process_time())

watch = Timed()
run(Experiment.load("demo", *changes), out, watch=watch)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps([watch.at, peak]))
"""


def measure(method: str, clients: int, rounds: int) -> dict[str, Any]:
    changes = (
        f"method={{name='{method}',init='{'common' if method == 'fedavg' else 'per_client'}'}}", f"clients={clients}",
        f"participation={COHORT / clients}", f"rounds={rounds}", "data={name='gaussians'}",
        "partition={name='natural'}", "model=cnn_digits", f"evaluate.clients={COHORT}", "engine.threads=1",
        "engine.compile=never",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", RUN, str(Path(folder) / "run"), *changes]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        at, peak = json.loads(done.stdout.splitlines()[-1])
        saved = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    each = [after - before for before, after in itertools.pairwise(at)]
    # The first rounds trace the steps.
    return {"setup_s": at[0], "round_s": statistics.median(each[4:]), "peak_bytes": peak, "saved_bytes": saved}


def draw(found: dict[str, dict[str, dict[str, float]]], folder: Path) -> None:
    import matplotlib
    import matplotlib.pyplot as plt

    matplotlib.use("Agg")
    plt.rcParams.update({"svg.hashsalt": "scale", "svg.fonttype": "none", "font.size": 9})
    about = {
        "setup_s": ("set-up in seconds", 1.0),
        "round_s": ("a round in seconds", 1.0),
        "peak_bytes": ("memory in MB", 1e6),
        "saved_bytes": ("run folder in MB", 1e6),
    }
    figure, axes = plt.subplots(1, 4, figsize=(11, 2.6), layout="constrained")
    for axis, (key, (title, unit)) in zip(axes, about.items(), strict=True):
        for method, marker in zip(METHODS, "os", strict=True):
            points = {int(clients): numbers[key] / unit for clients, numbers in found[method].items()}
            axis.plot(list(points), list(points.values()), marker=marker, markersize=4, label=method)
        highest = max(numbers[key] / unit for method in METHODS for numbers in found[method].values())
        axis.set(xscale="log", title=title, xlabel="clients", ylim=(0, 1.15 * highest))
        axis.grid(alpha=0.3)
    axes[0].legend(loc="lower right")
    figure.savefig(folder / "scale.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--populations", type=int, nargs="*", default=POPULATIONS)
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=METHODS)
    parser.add_argument("--docs", type=Path, default=DOCS)
    parser.add_argument("--write", action="store_true", help="only draw the picture")
    asked = parser.parse_args()
    kept = asked.docs / "scale.json"
    found: dict[str, Any] = json.loads(kept.read_text()) if kept.is_file() else {method: {} for method in METHODS}
    for clients in () if asked.write else asked.populations:
        for method in asked.methods:
            found[method][str(clients)] = numbers = measure(method, clients, asked.rounds)
            kept.write_text(json.dumps(found, indent=1) + "\n")
            print(method, clients, json.dumps(numbers), flush=True)
    for method in [method for method in METHODS if {str(n) for n in POPULATIONS} <= set(found[method])]:
        first, last = (found[method][str(clients)]["round_s"] for clients in (POPULATIONS[0], POPULATIONS[-1]))
        print(f"{method}: a round of {POPULATIONS[-1]:,} clients takes {last / first:.2f} times that of 100")
    if all(found.values()):
        draw(found, asked.docs / "images")


if __name__ == "__main__":
    main()
