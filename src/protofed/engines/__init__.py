"""Where clients run. An engine owns data, devices and client states; a method knows none of them."""

from collections.abc import MutableMapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from protofed.engines.resources import Clock
from protofed.engines.wire import Size
from protofed.method import Client, Mean, Method, Spec, Tree
from protofed.metrics import Tally


class Trained(NamedTuple):
    """The result of one round of a cohort. Computing it changes nothing."""

    up: Tree  # all uploads, merged, or one row per client if the engine was asked for that; None: no client had data
    clients: dict[int, Client]
    loss: Mean  # (K,) sums over each client's samples
    finite: Tensor  # (K,) whether a client's loss, parameters and upload are all finite
    sent: Size  # total over the cohort
    received: Size
    answered: tuple[int, ...] | None = None  # which clients of the cohort answered; None: all
    secure: bool = False  # whether `up` and `loss` are sums whose parts nobody has seen


def nobody(cohort: Sequence[int]) -> Trained:
    """A round in which no client has data: nothing is trained, nothing is sent."""
    none = torch.zeros(len(cohort))
    return Trained(None, {}, Mean(none, none), none == 0, Size(0, 0), Size(0, 0))


class Engine(Protocol):
    """Trains and evaluates cohorts of clients."""

    clients: MutableMapping[int, Client]
    """State of every client that has taken part; a new round's states count once they are put here."""
    notes: list[str]
    """Messages for the user, each shown once."""
    in_turn: bool
    """Whether clients run one after another, so one client's work may use all threads."""
    clock: Clock
    """Seconds of training and of uploading; the round loop adds the other parts and reads them."""

    @property
    def architectures(self) -> Sequence[str]:
        """Which model each client has."""

    def specs(self) -> list[Spec]:
        """One Spec per architecture, the server's first."""

    def train(self, method: Method, server: Tree, cohort: Sequence[int], round: int) -> Trained:
        """Local training of these clients."""

    def finish(self, method: Method, server: Tree, cohort: Sequence[int], round: int) -> Trained:
        """Run the last phases of these clients after the last round; nothing is uploaded."""

    def ended(self) -> None:
        """No other round follows, although the experiment has more: everything that is asked next concerns the end."""

    def counts(self, cohort: Sequence[int]) -> Tensor:
        """Training samples per class (K, C); zeros if clients keep this private."""

    def samples(self, cohort: Sequence[int]) -> list[int]:
        """Training samples of each of these clients."""

    def evaluate(
        self, method: Method, server: Tree, cohort: Sequence[int], on: str, who: str, confusion: str = ""
    ) -> list[Tally]:
        """Counts on each client's "own" or "global" test set or its "validation" samples, of its "personal" model or
        of the "global" one.

        `confusion` names the count that also records the predicted classes or, behind `metrics.SCORES`, the scores.
        """

    def global_tally(self, method: Method, server: Tree, confusion: str = "") -> Tally | None:
        """The global model on all test samples that fit it."""

    def labels(self, number: int, part: str) -> Tensor:
        """The classes (N,) of a client's own "train" or "test" samples."""

    def embed(self, method: Method, number: int, part: str, rows: Tensor) -> Tensor:
        """Embeddings (M, D) of some of a client's own "train" or "test" samples, by its own model."""
