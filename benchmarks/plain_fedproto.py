"""FedProto in plain PyTorch, one client at a time: autograd, torch.optim and data in memory, no protofed in the loop.

Data, batches and initial weights are those of a protofed experiment. Only dropout draws other numbers.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.config.experiment import Experiment
from protofed.data.domain import Domain
from protofed.engines.reference import ReferenceEngine
from protofed.methods.fedproto import FedProto
from protofed.ops import random
from protofed.runs.bench import WORKLOADS, _domains
from protofed.runs.setup import prepare

WORK = WORKLOADS["fedproto-mnist"]


class Trained(NamedTuple):
    """What a client keeps, and what it sends."""

    weights: Tensor  # all parameters in one vector
    prototypes: Tensor  # (C, D) means
    counts: Tensor  # (C,)


def plan(*changes: str) -> Experiment:
    """The experiment that everybody runs."""
    return Experiment.load(WORK.experiment, *WORK.changes.split(), "device=cpu", *changes)


def images(data_dir: Path | None) -> tuple[list[Domain], str]:
    """MNIST, or images that stand in for it, with a note that says so."""
    return _domains(plan(), WORK, data_dir)


class Clients:
    """The code of all clients of a process: one network, into which the weights of the client at work are put."""

    def __init__(self, experiment: Experiment, domains: list[Domain], channels_last: bool = True) -> None:
        engine = prepare(experiment, domains=domains).engine
        assert isinstance(engine, ReferenceEngine)
        assert isinstance(experiment.method, FedProto)
        self.experiment, self.method, self.optimizer = experiment, experiment.method, experiment.optimizer
        self.engine, self.data = engine, engine.federation
        everyone = range(self.data.clients)
        self.train = [self.data.train(client) for client in everyone]
        self.test = [self.data.test(client) for client in everyone]
        self.onehot = [F.one_hot(samples.y, self.data.classes).float() for samples in self.train]
        self.foreign = self.data.counts == 0  # (clients, C)
        self.module: Any = experiment.model[0](self.data.shape(0), self.data.classes)
        if channels_last:  # a fifth faster on a CPU: max-pooling has vector code for this layout alone
            self.module.to(memory_format=torch.channels_last)

    def start(self, client: int) -> Tensor:
        """A client's initial weights."""
        params = self.engine.client(self.method, client).params
        return torch.cat([params[name].flatten() for name, _ in self.module.named_parameters()])

    def fit(self, client: int, round: int, weights: Tensor, prototypes: Tensor | None) -> Trained:
        """One local epoch, then the means of the trained network's embeddings (Eq. 3)."""
        body, head, lam = self.module.body, self.module.head, self.method.lam
        self._put(weights)
        self.module.train()
        torch.manual_seed(random.seed(self.experiment.seed, "plain", round, client))  # of the dropout
        lr, momentum = self.optimizer.rate(round), self.optimizer.momentum
        optimizer = torch.optim.SGD(self.module.parameters(), lr=lr, momentum=momentum, fused=True)
        for x, y, _ in self.data.epoch(client, round, 0):
            optimizer.zero_grad()
            z = body(x)
            loss = F.cross_entropy(head(z), y)
            if prototypes is not None:  # after the first round every class of the client has one: its own is in it
                loss = loss + lam * F.mse_loss(z, prototypes[y])
            loss.backward()
            optimizer.step()
        self.module.eval()
        with torch.inference_mode():
            onehot = self.onehot[client]
            counts = onehot.sum(0)
            own = onehot.T @ body(self.train[client].x) / counts.clamp(min=1)[:, None]
            return Trained(torch.cat([p.reshape(-1) for p in self.module.parameters()]), own, counts)

    def accuracy(self, client: int, weights: Tensor, prototypes: Tensor) -> float:
        """Share of the own test samples that lie nearest to their class's prototype, among the client's classes."""
        self._put(weights)
        self.module.eval()
        with torch.inference_mode():
            x, y = self.test[client]
            distance = torch.cdist(self.module.body(x), prototypes).masked_fill(self.foreign[client], torch.inf)
            return float((distance.argmin(1) == y).double().mean())

    @torch.no_grad()
    def _put(self, weights: Tensor) -> None:
        at = 0
        for p in self.module.parameters():
            p.copy_(weights[at : at + p.numel()].view(p.shape))
            at += p.numel()


@cache
def clients(changes: tuple[str, ...], data_dir: str) -> Clients:
    """Built once in a process, and kept."""
    torch.set_num_threads(1)
    return Clients(plan("engine.name=reference", *changes), images(Path(data_dir) if data_dir else None)[0])


def average(old: Tensor | None, sent: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Global prototypes (C, D): the mean over the clients that have the class; who has how many plays no part."""
    held = torch.stack([counts > 0 for _, counts in sent]).float()
    total = torch.einsum("nc,ncd->cd", held, torch.stack([own for own, _ in sent]))
    mean = total / held.sum(0).clamp(min=1)[:, None]
    return mean if old is None else torch.where((held.sum(0) > 0)[:, None], mean, old)


def loop(everyone: Clients) -> Iterator[float]:
    """Round after round, client after client: the clients' mean accuracy."""
    numbers = range(everyone.data.clients)
    weights = [everyone.start(client) for client in numbers]
    prototypes = None
    for round in count():
        trained = [everyone.fit(client, round, weights[client], prototypes) for client in numbers]
        weights = [one.weights for one in trained]
        prototypes = average(prototypes, [(one.prototypes, one.counts) for one in trained])
        yield sum(everyone.accuracy(client, weights[client], prototypes) for client in numbers) / len(numbers)
