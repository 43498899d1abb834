"""The clients of several runs, with the models and states of each."""

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from protofed.engines.fused.data import JointFederation
from protofed.engines.reference import ReferenceEngine
from protofed.engines.resources import Clock, Needs
from protofed.method import Client, Method


class Apart(Exception):
    """Raised if these runs cannot be trained together; says why."""


class JointReference(ReferenceEngine):
    """Gives a stacked engine everything that it needs about several runs; trains nothing itself."""

    def __init__(self, methods: Sequence[Method], runs: Sequence[ReferenceEngine]) -> None:
        """All runs have the same architectures, precision and optimiser, except for its step size."""
        first = runs[0]
        self.methods, self.runs = list(methods), list(runs)
        self.joint = JointFederation([run.federation for run in runs])
        self.federation, self.optimizer, self.precision = self.joint, first.optimizer, first.precision
        self.local_epochs, self.by_client, self.notes = first.local_epochs, False, []
        self.clock = Clock(self.federation.device)
        self.architectures = [name for run in runs for name in run.architectures]
        self._models, self._modules, self._common = first._models, first._modules, first._common
        self.needs = Needs(self.federation, self.architectures, self._models, self._modules, self._common)
        self.instead: dict[int, Client] = {}
        """Clients to test in place of the runs' own: their global models."""

    def client(self, method: Method, number: int) -> Client:
        """The state that a client's own run keeps for it."""
        run, mine = self.joint.owners[number]
        return self.instead.get(number) or self.runs[run].client(self.methods[run], mine)

    def rate(self, round: int, cohort: Sequence[int]) -> float | Tensor:
        """The step sizes of these clients in the rounds that their runs are in."""
        rates = [run.optimizer.rate(now) for run, now in zip(self.runs, self.joint.rounds, strict=True)]
        if len({run.optimizer for run in self.runs}) == 1 and len(set(rates)) == 1:
            return rates[0]
        return torch.tensor([rates[self.joint.owners[number][0]] for number in cohort], device=self.federation.device)

    def paces(self, round: int, cohort: Sequence[int]) -> list[float]:
        """The value that each client's own run gives."""
        places = [self.joint.owners[number] for number in cohort]
        return [self.runs[run].paces(self.joint.rounds[run], [mine])[0] for run, mine in places]

    def share(self, *args: object) -> NoReturn:
        raise Apart("their clients cannot be stacked")

    evaluate = finish = share  # type: ignore[assignment]
