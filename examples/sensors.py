"""Five sensors see the same ten digits differently: which method copes with the shift between them?

The built-in 8x8 digits as five devices would record them. Every sensor has the same classes and few samples, so one
model for all is tempting; averaging weights over different domains can cost more than it brings.

    python examples/sensors.py
"""

import argparse
import json
from collections.abc import Callable

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from protofed import federate

METHODS = ["local", "fedavg", "fedproto", "fednh", "spfedcl"]
PER_DIGIT = 6  # training images of each digit that a sensor has


def sensors(generator: np.random.Generator) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """What each sensor makes of images (N, 8, 8) from 0 to 1."""
    gain = generator.uniform(0.3, 1.0, (8, 8))
    return {
        "clean": lambda x: x,
        "inverted": lambda x: 1 - x,
        "noisy": lambda x: np.clip(x + generator.normal(0, 0.35, x.shape), 0, 1),
        "upside down": lambda x: x[:, ::-1, ::-1],
        "uneven": lambda x: np.sqrt(x) * gain,
    }


def recorded(seed: int) -> dict[str, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Each sensor's own images: no two record the same one."""
    x, y = load_digits(return_X_y=True)
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(y))
    images, digits = x[order].reshape(-1, 8, 8) / 16, y[order]
    clients = {}
    for number, (name, see) in enumerate(sensors(generator).items()):
        mine = np.arange(len(digits)) % 5 == number
        inputs, labels = see(images[mine])[:, None], digits[mine]
        first = np.concatenate([np.flatnonzero(labels == digit)[:PER_DIGIT] for digit in range(10)])
        rest = np.setdiff1d(np.arange(len(labels)), first)
        clients[name] = {part: _pair(inputs[rows], labels[rows]) for part, rows in (("train", first), ("test", rest))}
    return clients


def _pair(x: np.ndarray, y: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


class Net(nn.Module):
    """A small CNN; protofed finds the embedding in front of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 32), nn.ReLU(),
        )  # fmt: skip
        self.classifier = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x))


def main(rounds: int = 40, methods: list[str] | None = None) -> dict[str, float]:
    """One table: methods down, sensors across."""
    clients = recorded(seed=0)
    print(f"{'':10}" + "".join(f"{name:>13}" for name in clients) + f"{'mean':>9}")
    found = {}
    for method in methods or METHODS:
        torch.manual_seed(0)
        result = federate(Net(), clients, method, rounds, batch_size=16, lr=0.003, quiet=True)
        lines = (result.folder / "clients.jsonl").read_text().splitlines()
        by_client = [json.loads(line)["accuracy"] for line in lines]
        print(f"{method:10}" + "".join(f"{right:>13.1%}" for right in by_client) + f"{result.accuracy:>9.1%}")
        found[method] = result.accuracy
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    main(parser.parse_args().rounds)
