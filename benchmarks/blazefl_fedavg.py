"""FedAvg as BlazeFL does it, in a pool of processes. Runs where BlazeFL is installed: against_rivals.py starts it.

It reads clients' samples from a .npz, and waits for a line before each round. After a round it prints a line of JSON.
"""

import json
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from blazefl.contrib.fedavg import FedAvgBaseServerHandler, FedAvgPartitionType, FedAvgProcessPoolClientTrainer
from blazefl.core import IPCMode
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Networks:
    """The one network of this case: PFLlib's CNN, for 3 x 32 x 32."""

    def select_model(self, model_name: str) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(1600, 512), nn.ReLU(), nn.Linear(512, 10),
        )  # fmt: skip


class Clients:
    """Samples client by client."""

    def __init__(self, path: str) -> None:
        with np.load(path) as file:
            self.number = int(file["clients"])
            self.parts = [
                TensorDataset(torch.from_numpy(file[f"x_train_{i}"]), torch.from_numpy(file[f"y_train_{i}"]))
                for i in range(self.number)
            ]

    def get_dataset(self, type_: FedAvgPartitionType, cid: int | None) -> TensorDataset:
        return self.parts[cid or 0]

    def set_dataset(self, type_: FedAvgPartitionType, cid: int | None, dataset: TensorDataset) -> None:
        self.parts[cid or 0] = dataset

    def get_dataloader(
        self, type_: FedAvgPartitionType, cid: int | None, batch_size: int | None, generator: torch.Generator | None
    ) -> DataLoader:
        return DataLoader(self.get_dataset(type_, cid), batch_size=batch_size, shuffle=True, generator=generator)


def cpu() -> float:
    """Seconds of this process and of those it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def main(path: str, rounds: int) -> None:
    torch.set_num_threads(1)
    clients, networks = Clients(path), Networks()
    words = {"model_selector": networks, "model_name": "cnn", "dataset": clients, "device": "cpu"}
    server = FedAvgBaseServerHandler(
        **words, global_round=rounds, num_clients=clients.number, sample_ratio=1.0, batch_size=50, seed=0
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = FedAvgProcessPoolClientTrainer(
            **words, share_dir=Path(folder, "share"), state_dir=Path(folder, "state"), num_clients=clients.number,
            epochs=1, batch_size=50, lr=0.1, seed=0, num_parallels=2, ipc_mode=IPCMode.SHARED_MEMORY,
        )  # fmt: skip
        for _ in range(rounds):
            sys.stdin.readline()
            wall, used = time.perf_counter(), cpu()
            trainer.local_process(server.downlink_package(), server.sample_clients())
            for package in trainer.uplink_package():
                server.load(package)
            print(json.dumps({"seconds": time.perf_counter() - wall, "cpu": cpu() - used}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
