"""What groups of clients need: stacked samples, networks and states."""

import threading
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from protofed.engines.reference import ReferenceEngine
from protofed.engines.stacked.data import StackedData
from protofed.engines.stacks import rows_of
from protofed.method import Client
from protofed.models.functional import FunctionalModel
from protofed.ops.trees import stack


class Members:
    """The clients of a reference engine, ready to be stacked by architecture; everything built is cached."""

    def __init__(self, reference: ReferenceEngine, workers: int, compiled: bool) -> None:
        """`compiled`: build networks from layers that are fast when compiled."""
        self.reference, self.workers, self.compiled = reference, workers, compiled
        self.federation, self.device = reference.federation, reference.federation.device
        self.lock = threading.Lock()  # held while building something that all threads share
        self._data: dict[str, StackedData] = {}
        self._models: dict[tuple[str, int], FunctionalModel] = {}
        self._together: dict[tuple[int, ...], tuple[list[Client], Client]] = {}

    def use(self, compiled: bool) -> None:
        """From now on, build networks for compiling, or do not."""
        self.compiled = compiled
        self._models.clear()

    def forget(self) -> None:
        """Release stacked states."""
        self._together.clear()

    def ids(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(list(numbers), device=self.device)

    def samples(self, architecture: str) -> StackedData:
        """The samples of all clients of an architecture."""
        with self.lock:
            kept = self._data.get(architecture)
            if kept is None or kept.edition != self.federation.edition:
                kept = self._data[architecture] = StackedData(self.federation, self.reference.members(architecture))
            return kept

    def model(self, number: int) -> FunctionalModel:
        """A client's network for this thread: two threads cannot use one module at the same time."""
        name = (self.reference.architectures[number], threading.get_ident())
        if name not in self._models:
            self._models[name] = self.reference.stacked_model(number, self.compiled)
        return self._models[name]

    def stack(self, numbers: Sequence[int], states: Mapping[int, Client]) -> Client:
        """The stacked states of these clients."""
        rows, client = self._together.get(tuple(numbers), ((), None))
        if client is not None and all(states[n] is row for n, row in zip(numbers, rows, strict=True)):
            return client
        stacked: Client = stack([states[number] for number in numbers])
        return stacked

    def unstack(self, numbers: Sequence[int], client: Client, copy: bool) -> list[Client]:
        """Each client's state; the stack itself is kept for its next use."""
        rows: list[Client] = rows_of(client, copy)
        with self.lock:
            self._together[tuple(numbers)] = rows, client
            while len(self._together) > 2 * self.workers:
                del self._together[next(iter(self._together))]
        return rows
