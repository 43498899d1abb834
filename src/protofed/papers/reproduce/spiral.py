"""FedNH's figure 1: what a free and a uniform head make of six spirals, balanced and imbalanced.

One client has all the data. The free head is FedAvg's, trained with cross-entropy. The uniform head is FedNH's (Eq. 2)
with the prototypes it starts from: six unit vectors 60 degrees apart, which only the server could turn. Learning rate,
momentum and decay are the paper's, and momentum restarts each epoch as in the authors' notebook. Clipping is ours:
without it this learning rate breaks FedNH's loss on the printed arms. How much the free head suffers depends on how
many steps it gets: with small batches (64 on the printed arms, 512 on the released ones) its minority classes catch up.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from protofed.data.batches import Federation
from protofed.data.domain import Domain
from protofed.data.partition import Iid
from protofed.data.sources import Data, load
from protofed.local import train
from protofed.method import Method, Spec
from protofed.methods.fedavg import FedAvg
from protofed.methods.fednh import FedNH
from protofed.models.functional import FunctionalModel, fresh, state
from protofed.models.mlp import MlpSpiral
from protofed.ops.optim import Optimizer
from protofed.report import paper
from protofed.report.figure import Axis, Figure, Line, Panel, Plot, Points
from protofed.report.style import COLOURS

COUNTS = {"balanced": [3000] * 6, "imbalanced": [3000, 1500, 750, 375, 187, 93]}  # training samples of each class
SHOWN = 200  # points of a class in a panel: more only hide each other and swell the file
OPTIMIZER = Optimizer(lr=0.1, momentum=0.9, weight_decay=1e-5, lr_decay=0.99, clip=1.0)
HEADS: dict[str, Method] = {"free head": FedAvg(), "uniform head": FedNH.preset("paper")}
PANELS = {  # lettered as in the paper
    "b": ("free head", "balanced"),
    "c": ("uniform head", "balanced"),
    "d": ("free head", "imbalanced"),
    "e": ("uniform head", "imbalanced"),
}


class TrainedPanel(NamedTuple):
    """A trained panel and what was measured on the test set."""

    z: np.ndarray
    y: np.ndarray
    vectors: np.ndarray
    numbers: dict[str, Any]


class Setting(NamedTuple):
    """Which spirals, and how long they are trained on."""

    domain: Callable[[list[int]], Domain]
    epochs: int
    batch_size: int


def panels(setting: Setting, seed: int) -> dict[str, TrainedPanel]:
    """The four trained panels, by their letters."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = {}
        for letter, (head, name) in PANELS.items():
            domain = setting.domain(COUNTS[name])
            found[letter] = fit(HEADS[head], domain, setting.epochs, setting.batch_size, seed)
        return found
    finally:
        torch.set_num_threads(before)


def picture(outcomes: Mapping[str, TrainedPanel], path: Path) -> None:
    panels = [_panel(letter, outcome) for letter, outcome in outcomes.items()]
    paper.write_one(Figure("spiral", _caption(), panels=panels), path.with_suffix(""), kinds=["png"])


def angles(vectors: np.ndarray) -> np.ndarray:
    """Angles in degrees between every two rows of (C, D), in the order (0, 1), (0, 2), ..., (1, 2), ..."""
    rows = vectors.astype(np.float64)
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(min=1e-12)
    first, second = np.triu_indices(len(rows), 1)
    found: np.ndarray = np.degrees(np.arccos((rows @ rows.T)[first, second].clip(-1, 1)))
    return found


def printed(counts: list[int], noise: float = 0.1) -> Domain:
    """The arms of section 3.1: outer ends of different classes meet."""
    return load(Data(name="spiral", counts=counts, noise=noise), None)[0]


def released(counts: list[int], width: float = 0.5) -> Domain:
    """The arms of the authors' notebook: each turns by one sixth, with uniform noise, so that no two overlap."""

    def part(index: int, sizes: list[int]) -> tuple[np.ndarray, np.ndarray]:
        points = []
        for k, size in enumerate(sizes):
            along = np.linspace(0, 1, size)
            omega = np.pi / 3 * (k + along) + np.random.default_rng([index, k]).uniform(0, width, size)
            points.append((1 + 9 * along)[:, None] * np.stack([np.cos(omega), np.sin(omega)], axis=1))
        return np.concatenate(points).astype(np.float32), np.repeat(np.arange(len(sizes)), sizes)

    names = tuple(str(k) for k in range(len(counts)))
    return Domain("spiral", *part(0, counts), *part(1, [max(counts)] * len(counts)), names)


def fit(method: Method, domain: Domain, epochs: int, batch_size: int, seed: int) -> TrainedPanel:
    """Train one client that has all data, and measure it on the balanced test set."""
    federation = Federation([domain], Iid()([domain], 1, seed), seed=seed, batch_size=batch_size)
    module = fresh(lambda: MlpSpiral(domain.shape, domain.classes), seed)
    model, (params, buffers) = FunctionalModel(module), state(module)
    spec = Spec("mlp_spiral", domain.classes, 2, params, buffers, seed)
    down = method.broadcast(method.init_server(spec), torch.tensor([0]))
    client = method.receive(model, method.init_client(spec), federation.local(0, 0), down)
    for epoch in range(epochs):
        client, loss, _ = train(
            method,
            model,
            OPTIMIZER,
            method.phases(),
            client,
            lambda _, epoch=epoch: federation.epoch(0, epoch, 0),  # type: ignore[misc]
            down,
            federation.local(0, epoch).key,
            OPTIMIZER.rate(epoch),
            1,
        )
    x, y = federation.global_test(0)
    with torch.no_grad():
        z, scores = model.embed(client, x), method.predict(model, client, x, down)["head"]
    if isinstance(method, FedNH):
        z, vectors = F.normalize(z), down["prototypes"]
    else:
        vectors = client.params["head.fc.weight"]
    numbers = _measure(z.numpy(), y.numpy(), scores.argmax(1).numpy(), vectors.numpy())
    return TrainedPanel(z.numpy(), y.numpy(), vectors.numpy(), {"loss": float(loss.value), **numbers})


def _measure(z: np.ndarray, y: np.ndarray, guess: np.ndarray, vectors: np.ndarray) -> dict[str, Any]:
    classes = range(len(vectors))
    right = [float((guess[y == k] == k).mean()) for k in classes]
    between, length = angles(vectors), np.linalg.norm(vectors, axis=1)
    means = angles(np.stack([z[y == k].mean(0) for k in classes]))
    pair = np.transpose(np.triu_indices(len(vectors), 1))[between.argmin()]
    return {
        "accuracy": float(np.mean(right)),
        "accuracy_by_class": right,
        "smallest_angle": float(between.min()),
        "closest_classes": pair.tolist(),
        "longest_over_shortest": float(length.max() / length.min()),
        "mean_angle_of_class_means": float(means.mean()),
        "smallest_angle_of_class_means": float(means.min()),
    }


def _panel(letter: str, outcome: TrainedPanel) -> Panel:
    head, name = PANELS[letter]
    accuracy, angle = outcome.numbers["accuracy"], outcome.numbers["smallest_angle"]
    title = f"({letter}) {head}, {name}\naccuracy {100 * accuracy:.1f} %, smallest angle {angle:.0f}°"
    return Panel({"": _plot(outcome.z, outcome.y, outcome.vectors)}, title)


def _plot(z: np.ndarray, y: np.ndarray, vectors: np.ndarray) -> Plot:
    """Embeddings (N, 2) of classes (N,), coloured by class, and the vectors that the head compares them with, one per
    class."""
    colours = [COLOURS[k % len(COLOURS)] for k in range(len(vectors))]
    length, random = np.linalg.norm(z, axis=1), np.random.default_rng(0)
    unit = bool(np.allclose(length, 1, atol=1e-3))
    reach = 1.0 if unit else float(np.quantile(length, 0.98))
    of_class = [np.flatnonzero(y == k) for k in range(len(vectors))]
    some = np.concatenate([rows[np.linspace(0, len(rows) - 1, SHOWN).astype(int)] for rows in of_class if len(rows)])
    some = random.permutation(np.unique(some))  # so that no class lies on top of the others
    if unit:  # a ring, because on a line they would hide each other
        z = z * random.uniform(0.96, 1.04, (len(z), 1))
    dots = Points("samples", z[some, 0], z[some, 1], [colours[int(k)] for k in y[some]], 5, opacity=0.55)
    tips = vectors * (0.8 * reach / np.linalg.norm(vectors, axis=1).max())
    lines = [Line(f"class {k}", [0, tip[0]], [0, tip[1]], colours[k]) for k, tip in enumerate(tips)]
    ends = Points("class vectors", tips[:, 0], tips[:, 1], colours, 12, "diamond", outline=True)
    turn = np.linspace(0, 2 * np.pi, 121)
    circle = [Line("", np.cos(turn).tolist(), np.sin(turn).tolist(), "#cccccc")] if unit else []
    side = Axis(range=(-1.15 * reach, 1.15 * reach))
    return Plot([*circle, dots, *lines, ends], side, side, square=True)


def _caption() -> str:
    return (
        f"Test samples. Imbalanced: {', '.join(map(str, COUNTS['imbalanced']))} training samples of classes 0 to 5.\n"
        "Lines: class vectors, a panel's on one scale. Uniform head: embeddings of length 1, spread to a ring."
    )


SETTINGS = {"printed": Setting(printed, 400, 512), "released": Setting(released, 200, 5000)}
"""The paper's formula, and that of the authors' notebook with its batches."""
