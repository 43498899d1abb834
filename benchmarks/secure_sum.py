"""What a secure sum costs: `python benchmarks/secure_sum.py`, in CPU seconds of one core and in bytes.

Two rounds of each federation, all members in this process, by the code that a real federation runs: 20 clients with ten
prototypes of 50 numbers, and 100 clients
with the CNN that FedAvg trains on CIFAR-10 in FedNH's paper. Members make their lasting keys and agree
on them in the first round only. The server's part is what it does with the masks after it has all answers.
"""

import time
from typing import Annotated

import torch
import typer
from torch.utils._pytree import tree_map

from protofed.config.registry import ModelChoice
from protofed.engines.wire import encoded_size
from protofed.method import Mean, Tree
from protofed.models.functional import state
from protofed.privacy import Privacy
from protofed.privacy.collector import SumCollector
from protofed.privacy.simulated import SimulatedSums


def prototypes(clients: int) -> Tree:
    """Ten prototypes of 50 numbers of each client."""
    return {"up": {"prototypes": Mean(torch.randn(clients, 10, 50), torch.ones(clients, 10))}, "loss": loss(clients)}


def cnn(clients: int) -> Tree:
    """The CNN of FedNH's paper, which FedAvg trains there, of each client."""
    params, _ = state(ModelChoice("cnn_fednh")((3, 32, 32), 10))
    total = {name: torch.randn(1, *value.shape).expand(clients, *value.shape) for name, value in params.items()}
    return {"up": Mean(total, torch.ones(clients)), "loss": loss(clients)}


def loss(clients: int) -> Mean:
    return Mean(torch.ones(clients), torch.ones(clients))


def measured(name: str, rows: Tree, clients: int, bits: int) -> None:
    sums, cohort = SimulatedSums(Privacy(secure_sum=True, bits=bits), clients), list(range(clients))
    opening = [0.0]
    total = SumCollector.total

    def timed(collector: SumCollector) -> object:
        begin = time.process_time()
        found = total(collector)
        opening[0] = time.process_time() - begin
        return found

    SumCollector.total = timed  # type: ignore[assignment,method-assign]
    seconds = []
    for round in range(2):
        begin = time.process_time()
        _, traffic = sums.sum(rows, cohort, round, (1.0, 1.0))
        seconds.append(time.process_time() - begin)
    SumCollector.total = total  # type: ignore[method-assign]
    plain = encoded_size(tree_map(lambda tensor: tensor[0], rows["up"])).bytes
    print(
        f"{name}, {bits} bits: {seconds[0]:.2f} s in the first round, then {seconds[1]:.2f} s, of them "
        f"{opening[0]:.2f} s on the server and {(seconds[1] - opening[0]) / clients:.3f} s on each client; up "
        f"{traffic.up / clients:,.0f} bytes a client (plain {plain:,}, {traffic.up / clients / plain:.2f} times), down "
        f"{traffic.down / clients:,.0f} more"
    )


def main(bits: Annotated[int, typer.Option(help="Bits of each number.")] = 32) -> None:
    torch.set_num_threads(1)
    measured("20 clients, 10 x 50 prototypes", prototypes(20), 20, bits)
    measured("100 clients, FedAvg's CNN of CIFAR-10", cnn(100), 100, bits)


if __name__ == "__main__":
    typer.run(main)
