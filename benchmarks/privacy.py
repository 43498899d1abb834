"""Accuracy against epsilon: `python benchmarks/privacy.py`, class means of the 8x8 digits in one round.

The images themselves are the embeddings, so nothing is trained and the encoder is public. Clients have samples of all
classes. Each row is a unit and a place of the noise, each column an epsilon; a cell is the mean accuracy in percent on
clients' own test samples over the seeds, and its standard deviation. Needs `protofed[privacy,secure]`.
"""

import math
import statistics
import tempfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from sklearn.datasets import load_digits
from torch import Tensor, nn

from protofed import federate

UNITS = ("client", "sample")


class Pixels(nn.Module):
    """Images as they are, and a classifier that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Flatten()
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.body(x))
        return scores


def shares(clients: int, seed: int) -> list[tuple[Any, Any]]:
    """The digits, dealt to clients at random."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(y))
    return [((x[part] / 16).astype(np.float32), y[part]) for part in np.array_split(order, clients)]


def accuracy(clients: int, seed: int, privacy: dict[str, Any]) -> float:
    """Of one run, in percent."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"privacy": privacy, "record": {"enabled": False}, "engine": {"threads": 1}}
        found = federate(
            Pixels(), shares(clients, seed), "classmeans", 1, out=Path(folder) / "run", embedding="body", head="head",
            frozen=True, seed=seed, quiet=True, settings=settings,
        )  # fmt: skip
        return 100 * float(found.accuracy)


def main(
    clients: Annotated[int, typer.Option(help="Clients, all of which take part.")] = 40,
    seeds: Annotated[int, typer.Option(help="Runs of each cell.")] = 3,
    epsilons: Annotated[str, typer.Option(help="Budgets, with commas.")] = "0.5,1,2,4,8",
    places: Annotated[str, typer.Option(help="Who adds the noise, with commas.")] = "client,sum,server",
    client_clip: Annotated[float, typer.Option(help="For unit client: ten class means are about this long.")] = 10.0,
    sample_clip: Annotated[float, typer.Option(help="For unit sample: an image is about this long.")] = 3.5,
) -> None:
    """Print the table row by row."""
    budgets = [float(word) for word in epsilons.split(",")]
    plain = [accuracy(clients, seed, {}) for seed in range(seeds)]
    print(f"{clients} clients, {seeds} seeds; without noise {statistics.mean(plain):.1f}", flush=True)
    print(f"| unit | noise | {' | '.join(f'{epsilon:g}' for epsilon in budgets)} |", flush=True)
    print(f"|{'---|' * (len(budgets) + 2)}", flush=True)
    for unit in UNITS:
        clip = client_clip if unit == "client" else sample_clip
        for place in places.split(","):
            cells = []
            for epsilon in budgets:
                privacy = {"unit": unit, "epsilon": epsilon, "where": place, "clip": clip, "delta": 1e-5}
                privacy |= {"secure_sum": True} if place == "sum" else {}
                found = [accuracy(clients, seed, privacy) for seed in range(seeds)]
                spread = statistics.stdev(found) if len(found) > 1 else math.nan
                cells.append(f"{statistics.mean(found):.1f} ± {spread:.1f}")
            print(f"| {unit} | {place} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
