"""How near honest uploads come to the default bounds: federations in one process, of several data sets and methods.

    python benchmarks/bounds.py --data demo --methods fedproto,fedavg --rounds 10

`digits4` and `heart` need the data folder ($PROTOFED_DATA). A share of 1 would be refused.
"""

import argparse
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "tools"))

from federated import set_up, workers

from protofed import METHODS, Experiment
from protofed.remote.server.serve import serve

PLANS = {
    "demo": ("demo", "clients=20", "record.enabled=false", "engine=reference"),
    "digits4": ("configs/domains/digits4.toml", "record.enabled=false", "engine=reference"),
    "heart": (
        "demo", "clients=4", "partition.name=domain", "partition.train_per_class=0", "partition.test_per_class=0",
        "model=mlp_digits", "local_epochs=2", "record.enabled=false", "engine=reference",
    ),
}  # fmt: skip


def plan(data: str, method: str, rounds: int, home: Path) -> Experiment:
    """The experiment; a method that averages models gets one model and one shape."""
    name, *more = PLANS[data]
    mixed = method in ("fedproto", "local")
    more += [] if mixed or data != "demo" else ["model=mlp_digits"]
    more += ["data.size=28", "data.channels=3"] if data == "digits4" and not mixed else []
    more += ["partition=domain"] if data == "heart" else []
    more += ["data.name=[" + ",".join(f'"{path}"' for path in hospitals(home)) + "]"] if data == "heart" else []
    more = [one for one in more if not (data == "heart" and one.startswith("partition."))]
    return replace(Experiment.load(name, f"method={method}", f"rounds={rounds}", "evaluate.own=0", *more), device="cpu")


def hospitals(home: Path) -> list[Path]:
    """Each hospital a file of its own, with the medians of all for what it did not measure."""
    found = np.load(Path(os.environ["PROTOFED_DATA"]) / "heart_disease4.npz")
    usual = np.nanmedian(found["x_train"], 0)
    paths = []
    for site, name in enumerate(found["sites"]):
        arrays = {}
        for part in ("train", "test"):
            mine = found[f"site_{part}"] == site
            x = found[f"x_{part}"][mine]
            arrays |= {f"x_{part}": np.where(np.isnan(x), usual, x), f"y_{part}": found[f"y_{part}"][mine].astype(int)}
        paths.append(home / f"{name.split()[0].lower()}.npz")
        np.savez(paths[-1], **arrays)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="demo", choices=PLANS)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    print("| data | method | clients | rounds | refused | largest share of the bound | part | times the usual |")
    print("|---|---|---|---|---|---|---|---|")
    for method in options.methods.split(","):
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder)
            experiment = plan(options.data, method, options.rounds, home)
            server = set_up(home, experiment, minimum=2)  # else who is refused holds it up
            serve(server, workers(home, experiment.clients), lambda line: None, pause=0.01)
            lines = [json.loads(line) for line in (server / "audit.jsonl").read_text().splitlines()]
            refused = sum(line["event"] in ("refused", "clipped", "failed") for line in lines)
            merged = [one for line in lines if line["event"] == "merged" for one in line["clients"].values()]
            top = max(merged, key=lambda one: one["share"])
            print(f"| {options.data} | {method} | {experiment.clients} | {experiment.rounds} | {refused} "
                  f"| {top['share']:.2f} | {top['part']} | {top['times']:.2f} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
