"""Both engines side by side, every method in both presets: `python benchmarks/engines_agree.py [cpu|cuda]`.

Prints the largest difference of server and client states after four rounds, as a share of rtol 1e-3 + atol 1e-4.
"""

import sys
import time
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from protofed.data.batches import Federation
from protofed.data.domain import Domain
from protofed.data.split import Split
from protofed.engines import Engine
from protofed.engines.reference import ReferenceEngine
from protofed.engines.stacked.engine import StackedEngine
from protofed.method import Method
from protofed.methods import METHODS
from protofed.models import MODELS
from protofed.ops.optim import Optimizer

ROWS = (range(0, 17), (17,), range(20, 48, 4), (18, 19, 22, 23, 26), range(48, 60))
COHORTS = ([0, 1, 2, 3, 4], [2, 0], [3, 1, 4, 0, 2], [0, 1, 2, 3, 4])


def engine(method: Method, device: str) -> ReferenceEngine:
    """Five ragged clients with crops and flips."""
    g = np.random.default_rng(0)
    y = np.arange(60) % 4
    x = (g.normal(size=(60, 1, 28, 28)) + y[:, None, None, None]).astype(np.float32)
    domain = Domain("made", x, y, x[:10], y[:10], tuple("abcd"))
    rows = tuple(np.array(r) for r in ROWS)
    split = Split(np.zeros(5, int), rows, tuple(np.arange(3 + i) for i in range(5)))
    data = Federation([domain], split, seed=1, batch_size=4, device=device, augmentations=["crop", "flip"])
    optimizer = Optimizer(lr=0.01, momentum=0.5, weight_decay=1e-3, clip=5.0)
    build = [("cnn_mnist", lambda shape, classes: MODELS["cnn_mnist"](shape, classes))] * 5
    return ReferenceEngine(data, build, optimizer, seed=1, local_epochs=2, init=method.init)


def play(one: Engine, method: Method, device: str) -> tuple[Any, float]:
    """State after four rounds, and the seconds they took."""
    server = tree_map(lambda t: t.to(device), method.init_server(one.specs()[0]))
    start = time.perf_counter()
    for number, cohort in enumerate(COHORTS):
        trained = one.train(method, server, cohort, number)
        server = method.aggregate(server, trained.up, torch.tensor(cohort, device=device))
        one.clients.update(trained.clients)
        one.evaluate(method, server, cohort, on="own", who="personal")
    states = tree_map(lambda t: t.cpu().double(), (server, [one.clients[i] for i in range(5)]))
    return states, time.perf_counter() - start


def main(device: str) -> int:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    worst = 0.0
    for name, kind in METHODS.items():
        for preset in ("paper", "official"):
            method = kind.preset(preset)
            slow, slow_s = play(engine(method, device), method, device)
            fast, fast_s = play(StackedEngine(engine(method, device), workers=2), method, device)
            pairs = zip(tree_leaves(slow), tree_leaves(fast), strict=True)
            share = max(float(((a - b).abs() / (1e-4 + 1e-3 * a.abs())).max()) for a, b in pairs if a.numel())
            worst = max(worst, share)
            print(f"{name:10} {preset:9} {share:8.4f} of tolerance   {slow_s:6.2f} s {fast_s:6.2f} s", flush=True)
    print(f"worst: {worst:.4f} of tolerance on {device}, torch {torch.__version__}")
    return int(worst > 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "cpu"))
