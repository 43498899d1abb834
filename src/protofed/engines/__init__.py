"""Where clients run. An engine owns data, devices and client states; a method knows none of them."""

from collections.abc import MutableMapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from protofed.engines.clock import Clock
from protofed.engines.wire import Size
from protofed.method import Client, Mean, Method, Spec, Tree
from protofed.metrics import Tally


class Trained(NamedTuple):
    """What one round of a cohort gives. Nothing is changed by it."""

    up: Tree  # all uploads, merged; None if nobody had any data
    clients: dict[int, Client]
    loss: Mean  # (K,) sums over each client's samples
    finite: Tensor  # (K,) whether all of a client's loss, parameters and upload are numbers
    sent: Size  # over the cohort
    received: Size
    answered: tuple[int, ...] | None = None  # which of the cohort this is, where some did not answer; None: all


def nobody(cohort: Sequence[int]) -> Trained:
    """A round in which nobody has any data: nothing is trained, nothing is sent."""
    none = torch.zeros(len(cohort))
    return Trained(None, {}, Mean(none, none), none == 0, Size(0, 0), Size(0, 0))


class Engine(Protocol):
    """Trains and evaluates cohorts of clients."""

    clients: MutableMapping[int, Client]
    """State of every client that has taken part; a new round's states count once they are put here."""
    notes: list[str]
    """What the user should be told, once."""
    clock: Clock
    """Seconds of training and of uploading; whoever runs the rounds adds the other parts, and takes them."""

    @property
    def architectures(self) -> list[str]:
        """Which model each client has."""

    def specs(self) -> list[Spec]:
        """One for each architecture, the server's first."""

    def train(self, method: Method, server: Tree, cohort: Sequence[int], round: int) -> Trained:
        """Local training of these clients."""

    def finish(self, method: Method, server: Tree, cohort: Sequence[int], round: int) -> Trained:
        """The last phases of these clients, after the last round; nothing goes up."""

    def counts(self, cohort: Sequence[int]) -> Tensor:
        """Training samples per class (K, C); zeros where clients keep that to themselves."""

    def samples(self, cohort: Sequence[int]) -> list[int]:
        """Training samples of each of these clients."""

    def evaluate(
        self, method: Method, server: Tree, cohort: Sequence[int], on: str, who: str, confusion: str = ""
    ) -> list[Tally]:
        """Counts on each client's "own" or "global" test set or its "validation" samples, of its "personal" model or
        of the "global" one.

        `confusion` names the count that also tells which class was said.
        """

    def global_tally(self, method: Method, server: Tree, confusion: str = "") -> Tally | None:
        """The global model on all test samples that fit it."""

    def labels(self, number: int, part: str) -> Tensor:
        """The classes (N,) of a client's own "train" or "test" samples."""

    def embed(self, method: Method, number: int, part: str, rows: Tensor) -> Tensor:
        """Embeddings (M, D) by a client's own model of some of its own "train" or "test" samples."""
