"""Four real hospitals learn together who has heart disease, although each of them measured other things.

UCI Heart Disease: Cleveland, Budapest, Switzerland and Long Beach, 13 attributes of 920 patients. What a hospital did
not measure is NaN. `mlp_table` sees for every attribute whether it is missing. In Switzerland 93 % of the patients are
sick, so always saying "sick" has an accuracy of 93 % there: look at AUC and balanced accuracy.

The data is not part of protofed. Put heart_disease4.npz into ./data or into the folder that $PROTOFED_DATA names, with
the arrays x_train, y_train, x_test, y_test, site_train, site_test (0 to 3) and sites, the hospitals' names.

    python examples/real_hospitals.py
"""

import argparse
import json
import os
from pathlib import Path

import numpy as np

from protofed import federate

METHODS = ["local", "fedavg", "fedrep", "fednh", "fedproto"]
SEEDS = (0, 1, 2)
ARRAYS = ["x_train", "y_train", "x_test", "y_test", "site_train", "site_test", "sites"]


def hospitals(file: Path) -> dict[str, dict[str, tuple[np.ndarray, list[str]]]]:
    """Every hospital's own patients, standardised by all training patients; NaN where nothing was measured."""
    with np.load(file) as arrays:
        if missing := [name for name in ARRAYS if name not in arrays]:
            raise SystemExit(
                f"{file} has no {missing[0]} (it has: {', '.join(arrays)}). It needs these: {', '.join(ARRAYS)}."
            )
        middle, spread = np.nanmean(arrays["x_train"], 0), np.nanstd(arrays["x_train"], 0)
        return {
            str(name): {
                part: (
                    (arrays[f"x_{part}"][arrays[f"site_{part}"] == site] - middle) / spread,
                    ["sick" if y else "healthy" for y in arrays[f"y_{part}"][arrays[f"site_{part}"] == site]],
                )
                for part in ("train", "test")
            }
            for site, name in enumerate(arrays["sites"])
        }


def main(rounds: int = 40, seeds: tuple[int, ...] = SEEDS) -> dict[str, float]:
    """Train alone and together, and show AUC and balanced accuracy for every hospital."""
    file = Path(os.environ.get("PROTOFED_DATA") or "data") / "heart_disease4.npz"
    if not file.is_file():
        print(f"skipped: there is no {file}. Put heart_disease4.npz there, or set PROTOFED_DATA to its folder.")
        return {}
    clients = hospitals(file)
    found = {}
    names = "".join(f"{name:>15}" for name in clients)
    print(f"{'AUC, balanced accuracy':24}{names}{'mean':>15}")
    for method in METHODS:
        numbers = []
        for seed in seeds:
            result = federate(
                "mlp_table", clients, method=method, labels=["healthy", "sick"], rounds=rounds, batch_size=16,
                seed=seed, optimizer={"name": "sgd", "lr": 0.05, "momentum": 0.5}, quiet=True,
            )  # fmt: skip
            lines = (result.folder / "clients.jsonl").read_text(encoding="utf-8").splitlines()
            numbers.append([[line["auc"], line["balanced"]] for line in map(json.loads, lines)])
        each = np.mean(numbers, axis=0)  # (hospitals, 2)
        texts = [f"{area:.1%} {balanced:.1%}" for area, balanced in (*each, each.mean(0))]
        print(f"{method:24}" + "".join(f"{text:>15}" for text in texts))
        found[method] = float(each.mean(0)[0])
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    main(parser.parse_args().rounds)
