"""Ten hospitals with different diseases and different models learn together by prototypes alone.

The built-in 8x8 digits stand in for scans, their ten classes for diseases. Every hospital treats four to six diseases,
has three scans of each to learn from, and the model that its computers can run. None shows its scans or its model: what
goes up are the mean embeddings of its diseases.

    python examples/hospitals.py
"""

import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from protofed import federate

DISEASES = ["angina", "asthma", "cancer", "eczema", "fracture", "gout", "hernia", "measles", "mumps", "stroke"]
HOSPITALS, SCANS = 10, 3  # how many there are; scans of a disease that a hospital has to learn from
WIDTH = 32  # of the embedding: the only thing that all models have in common


def hospitals(seed: int) -> dict[str, dict[str, tuple[np.ndarray, list[str]]]]:
    """Every hospital's own scans, (N, 1, 8, 8) and the diseases' names; no two have the same one."""
    x, y = load_digits(return_X_y=True)
    generator = np.random.default_rng(seed)
    held = [generator.choice(10, generator.integers(4, 7), replace=False) for _ in range(HOSPITALS)]
    clients: dict[str, dict[str, tuple[np.ndarray, list[str]]]] = {}
    rows = {
        disease: iter(np.array_split(generator.permutation(np.flatnonzero(y == disease)), HOSPITALS))
        for disease in range(10)
    }
    for number, diseases in enumerate(held):
        mine = {disease: next(rows[disease]) for disease in sorted(diseases)}
        clients[f"hospital {number}"] = {
            part: (
                np.concatenate([x[some[where]] for some in mine.values()]).reshape(-1, 1, 8, 8).astype("float32") / 16,
                [DISEASES[disease] for disease, some in mine.items() for _ in some[where]],
            )
            for part, where in (("train", slice(SCANS)), ("test", slice(SCANS, None)))
        }
    return clients


class Convolutions(nn.Module):
    """A model of one's own: `body` makes the embedding, `head` the classes."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(16 * channels, WIDTH), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(WIDTH, len(DISEASES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def models() -> list[nn.Module]:
    """Three architectures, dealt to the hospitals; that of a Sequential is found by its last layer."""
    torch.manual_seed(0)

    def plain() -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)
        )

    return [(plain(), Convolutions(8), Convolutions(16))[number % 3] for number in range(HOSPITALS)]


def main(rounds: int = 60) -> dict[str, float]:
    """Train alone and together, and show both for every hospital."""
    clients = hospitals(seed=0)
    shared = {
        "models": models(), "clients": clients, "labels": DISEASES, "rounds": rounds, "batch_size": 8, "epochs": 2,
        "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.5}, "quiet": True,
    }  # fmt: skip
    alone = federate(**shared, method="local")
    together = federate(**shared, method="fedproto", lam=1.0, inference="head", candidates="all")

    print(f"{'':12} {'diseases':>8} {'alone':>8} {'together':>9}")
    for name, parts in clients.items():
        x, y = parts["test"]
        right = [np.mean([a == b for a, b in zip(one.predict(x, name), y, strict=True)]) for one in (alone, together)]
        print(f"{name:12} {len(set(y)):>8} {right[0]:>8.1%} {right[1]:>9.1%}")
    print(f"{'mean':12} {'':8} {alone.accuracy:>8.1%} {together.accuracy:>9.1%}")
    sent = together.metrics["bytes_up"] / rounds / HOSPITALS
    print(f"\nsent by a hospital in a round: {sent:,.0f} bytes, the prototypes of its diseases")
    print(f"the prototype of {DISEASES[0]} begins with {together.prototypes[DISEASES[0]][:4].numpy().round(2)}")
    return {"alone": alone.accuracy, "together": together.accuracy}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    main(parser.parse_args().rounds)
