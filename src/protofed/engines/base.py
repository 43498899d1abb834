"""What engines built on the reference engine have in common."""

from collections.abc import MutableMapping, Sequence

from torch import Tensor

from protofed.engines.reference import ReferenceEngine
from protofed.method import Client, Method, Spec


class OnReference:
    """An engine that takes its data, models and client states from a reference engine."""

    in_turn = False
    reference: ReferenceEngine

    @property
    def clients(self) -> MutableMapping[int, Client]:
        return self.reference.clients

    @clients.setter
    def clients(self, clients: MutableMapping[int, Client]) -> None:
        self.reference.clients = clients

    def ended(self) -> None:
        self.reference.ended()

    def specs(self) -> list[Spec]:
        return self.reference.specs()

    def counts(self, cohort: Sequence[int]) -> Tensor:
        return self.reference.counts(cohort)

    def samples(self, cohort: Sequence[int]) -> list[int]:
        return self.reference.samples(cohort)

    def labels(self, number: int, part: str) -> Tensor:
        return self.reference.labels(number, part)

    def embed(self, method: Method, number: int, part: str, rows: Tensor) -> Tensor:
        return self.reference.embed(method, number, part, rows)
