"""FedProto's MNIST run as fluke does it. Runs where fluke is installed: against_rivals.py starts it.

It reads clients' samples from a .npz, and waits for a line before each round. After a round it prints a line of JSON.
"""

import json
import sys
import time

import numpy as np
import torch

torchvision = torch.library.Library(
    "torchvision", "DEF"
)  # fluke imports torchvision, whose kernels want a torch with CUDA
for kernel in ("nms", "qnms"):
    torchvision.define(f"{kernel}(Tensor boxes, Tensor scores, float threshold) -> Tensor")

from fluke import DDict, FlukeENV  # noqa: E402
from fluke.algorithms.fedproto import FedProto  # noqa: E402
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader  # noqa: E402
from fluke.evaluation import ClassificationEval  # noqa: E402
from fluke.nets import EncoderHeadNet  # noqa: E402
from fluke.utils import FederationObserver  # noqa: E402
from torch import nn  # noqa: E402


class Turns(FederationObserver):
    """Tells the seconds of each round, and lets the others have their turn before the next."""

    def start_round(self, round: int, global_model) -> None:
        sys.stdin.readline()
        self.start = time.perf_counter(), time.process_time()

    def end_round(self, round: int) -> None:
        wall, cpu = time.perf_counter() - self.start[0], time.process_time() - self.start[1]
        print(json.dumps({"seconds": wall, "cpu": cpu}), file=sys.__stdout__, flush=True)  # fluke redirects sys.stdout


def network() -> EncoderHeadNet:
    """The network of FedProto's authors for MNIST."""
    encoder = nn.Sequential(
        nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(10, 20, 5), nn.Dropout2d(), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(320, 50), nn.ReLU(),
    )  # fmt: skip
    return EncoderHeadNet(encoder, nn.Sequential(nn.Dropout(), nn.Linear(50, 10)))


def main(path: str, rounds: int) -> None:
    torch.set_num_threads(1)
    with np.load(path) as file:
        clients = int(file["clients"])
        data = {
            part: [
                (torch.from_numpy(file[f"x_{part}_{i}"]), torch.from_numpy(file[f"y_{part}_{i}"]))
                for i in range(clients)
            ]
            for part in ("train", "test")
        }
    loaders = {
        part: [
            FastDataLoader(x, y, num_labels=10, batch_size=8 if part == "train" else 64, shuffle=part == "train")
            for x, y in some
        ]
        for part, some in data.items()
    }
    environment = FlukeENV()
    environment.set_seed(0)
    environment.set_eval_cfg(locals=False, server=False, pre_fit=False, post_fit=False)
    environment.set_evaluator(ClassificationEval(eval_every=1, n_classes=10))
    words = DDict(
        model=network(),
        client=DDict(
            model=network(), batch_size=8, local_epochs=1, n_protos=10, lam=1.0, clipping=0, loss="CrossEntropyLoss",
            optimizer=DDict(name="SGD", lr=0.01, momentum=0.5), scheduler=DDict(name="StepLR", gamma=1, step_size=1),
        ),
        server=DDict(weighted=True, n_protos=10),
    )  # fmt: skip
    splitter = DataSplitter(DummyDataContainer(loaders["train"], loaders["test"], None, 10))
    algorithm = FedProto(clients, splitter, words)
    for client in algorithm.clients:  # else all have the same one
        client.model = network()
    algorithm.set_callbacks(Turns())
    algorithm.run(rounds, 1.0, finalize=False)


main(sys.argv[1], int(sys.argv[2]))
