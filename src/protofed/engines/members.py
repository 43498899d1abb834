"""What groups of clients are made of: samples side by side, networks, and states together."""

import threading
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from protofed.data.stacked import StackedData
from protofed.engines.reference import ReferenceEngine
from protofed.engines.stacks import rows_of, stack
from protofed.method import Client
from protofed.models.functional import FunctionalModel


class Members:
    """The clients of a reference engine, ready to be stacked by architecture; whatever is made is kept."""

    def __init__(self, reference: ReferenceEngine, workers: int, compiled: bool) -> None:
        """`compiled`: networks of layers that are fast when they are compiled."""
        self.reference, self.workers, self.compiled = reference, workers, compiled
        self.federation, self.device = reference.federation, reference.federation.device
        self.lock = threading.Lock()  # of whoever makes something that all threads use
        self._data: dict[str, StackedData] = {}
        self._models: dict[tuple[str, int], FunctionalModel] = {}
        self._together: dict[tuple[int, ...], tuple[list[Client], Client]] = {}

    def use(self, compiled: bool) -> None:
        """From now on networks that are to be compiled, or not."""
        self.compiled = compiled
        self._models.clear()

    def forget(self) -> None:
        """Let go of states that are held together."""
        self._together.clear()

    def ids(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(list(numbers), device=self.device)

    def samples(self, architecture: str) -> StackedData:
        """The samples of all clients of an architecture."""
        with self.lock:
            if architecture not in self._data:
                members = [i for i, name in enumerate(self.reference.architectures) if name == architecture]
                self._data[architecture] = StackedData(self.federation, members)
            return self._data[architecture]

    def model(self, number: int) -> FunctionalModel:
        """A client's network for this thread: a module in use by one thread cannot be called by another."""
        name = (self.reference.architectures[number], threading.get_ident())
        if name not in self._models:
            self._models[name] = self.reference.stacked_model(number, self.compiled)
        return self._models[name]

    def stack(self, numbers: Sequence[int], states: Mapping[int, Client]) -> Client:
        """The states of these clients together."""
        rows, client = self._together.get(tuple(numbers), ((), None))
        if client is not None and all(states[n] is row for n, row in zip(numbers, rows, strict=True)):
            return client
        stacked: Client = stack([states[number] for number in numbers])
        return stacked

    def unstack(self, numbers: Sequence[int], client: Client, copy: bool) -> list[Client]:
        """Every client's state; all of them together are remembered for when they are wanted next."""
        rows: list[Client] = rows_of(client, copy)
        with self.lock:
            self._together[tuple(numbers)] = rows, client
            while len(self._together) > 2 * self.workers:
                del self._together[next(iter(self._together))]
        return rows
