"""Five hospitals with different diseases, different sizes and different models learn together by prototypes alone.

Lab values of made-up patients: each disease moves some of 20 values together, and every hospital's devices read a
little differently. No hospital shows its patients or its model; what goes up are the mean embeddings of its diseases.

    python examples/hospitals.py
"""

import argparse
import math

import numpy as np
from torch import Tensor, nn

from protofed import federate

DISEASES = ["anaemia", "diabetes", "gout", "hepatitis", "influenza", "nephritis"]
HOSPITALS = {  # which diseases each treats
    "Northside": ["anaemia", "diabetes", "gout"],
    "Riverside": ["diabetes", "gout", "hepatitis", "influenza"],
    "St Mary's": ["hepatitis", "influenza", "nephritis"],
    "University": ["anaemia", "gout", "influenza", "nephritis"],
    "Valley": ["anaemia", "diabetes", "hepatitis", "nephritis"],
}
VALUES, WIDTH = 20, 24  # lab values of a patient; width of the embedding, the only thing that has to agree


def patients(generator: np.random.Generator, disease: str, count: int, offset: np.ndarray) -> np.ndarray:
    """Lab values (count, 20): a disease sets which values rise together, its course how far."""
    pattern = np.random.default_rng(DISEASES.index(disease)).normal(size=(3, VALUES))
    course = generator.normal(size=(count, 2))
    shape = pattern[0] + course[:, :1] * pattern[1] + np.abs(course[:, 1:]) * pattern[2]
    return (shape + generator.normal(size=(count, VALUES)) * 1.5 + offset).astype(np.float32)


def hospital(number: int, diseases: list[str], per_disease: int) -> dict[str, tuple[np.ndarray, list[str]]]:
    """Training and test patients of one hospital, with the diseases' names as labels."""
    generator = np.random.default_rng(100 + number)
    offset = generator.normal(size=VALUES) * 0.3  # this hospital's devices

    def some(count: int) -> tuple[np.ndarray, list[str]]:
        x = np.concatenate([patients(generator, disease, count, offset) for disease in diseases])
        return x, [disease for disease in diseases for _ in range(count)]

    return {"train": some(per_disease), "test": some(100)}


class Deep(nn.Module):
    """A model of one's own: `body` makes the embedding, `head` the classes."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(VALUES, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, WIDTH), nn.ReLU()
        )
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def models() -> list[nn.Module]:
    """Each hospital has what its computers can do."""
    classes = len(DISEASES)
    small = [nn.Sequential(nn.Linear(VALUES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, classes)) for _ in range(2)]
    wide = nn.Sequential(nn.Linear(VALUES, 128), nn.Tanh(), nn.Linear(128, WIDTH), nn.ReLU(), nn.Linear(WIDTH, classes))
    return [*small, Deep(classes), Deep(classes), wide]


def main(rounds: int = 60, per_disease: int = 6) -> dict[str, float]:
    """Train alone and together, and show both for every hospital."""
    clients = {name: hospital(number, held, per_disease) for number, (name, held) in enumerate(HOSPITALS.items())}
    shared = {"models": models(), "clients": clients, "rounds": rounds, "batch_size": 8, "lr": 0.003, "quiet": True}
    alone = federate(**shared, method="local")
    together = federate(**shared, method="fedproto", lam=2.0, inference="head", candidates="all")

    print(f"{'':12} {'diseases':>8} {'alone':>8} {'together':>9}")
    for number, name in enumerate(HOSPITALS):
        right = [accuracy(result, number, *clients[name]["test"]) for result in (alone, together)]
        print(f"{name:12} {len(HOSPITALS[name]):>8} {right[0]:>8.1%} {right[1]:>9.1%}")
    print(f"{'mean':12} {'':8} {alone.accuracy:>8.1%} {together.accuracy:>9.1%}")
    sent = together.metrics["bytes_up"] / rounds / len(HOSPITALS)
    print(f"\nsent by a hospital in a round: {sent:,.0f} bytes; prototypes of {', '.join(together.prototypes)}")
    print(f"the whole run: {together.folder}")
    return {"alone": alone.accuracy, "together": together.accuracy}


def accuracy(result: "object", client: int, x: np.ndarray, y: list[str]) -> float:
    said = result.predict(x, client)  # type: ignore[attr-defined]
    return math.fsum(a == b for a, b in zip(said, y, strict=True)) / len(y)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    main(parser.parse_args().rounds)
