"""A client's noise: what it sends is noised before it leaves, and the client keeps its own account of it."""

import torch
from torch import Tensor

from protofed.config.experiment import Experiment
from protofed.engines.reference import ReferenceEngine
from protofed.errors import UserError
from protofed.method import Mean, Tree
from protofed.ops.trees import stack
from protofed.privacy import accounting
from protofed.privacy.ledger import LEDGER, Released, SpendingLedger, digest_of
from protofed.privacy.noise import secret
from protofed.privacy.release import Layout, signal_to_noise
from protofed.privacy.shared import longest, share_of_noise
from protofed.remote.client.state import StateFolder
from protofed.remote.protocol import SPENT, Refused
from protofed.runs.budget import noise_of
from protofed.runs.cohort import draw_cohort
from protofed.runs.noised import layout_around, vector_around

CUT = 0.01  # a clip that leaves less than this of an upload is probably a mistake


class ClientNoise:
    """Clips, noises and pays. All runs that have this state folder are paid from one budget."""

    def __init__(self, experiment: Experiment, engine: ReferenceEngine, number: int, state: StateFolder) -> None:
        self.experiment, self.engine, self.number, self.tell = experiment, engine, number, state.tell
        self.privacy, self.noise = experiment.privacy, noise_of(experiment)
        self.ledger = SpendingLedger(state.path / LEDGER)
        self._refuse_other_unit()
        self.spread = self.noise * self.privacy.clip
        if self.privacy.where == "sum":
            self.spread = share_of_noise(self.privacy, self.noise, len(draw_cohort(experiment, 0)))

    def _refuse_other_unit(self) -> None:
        """What hides one sample says little of a client, and the other way about twice as much is needed."""
        known = {line.unit or "client" for line in self.ledger.lines} - {self.privacy.unit}
        if known:
            raise UserError(
                f"{self.ledger.path} accounts for privacy.unit = {known.pop()!r}, and this experiment has "
                f"{self.privacy.unit!r}: the two cannot be added up. Name another folder with --state, whose budget "
                "is apart."
            )

    def epsilon(self, more: int = 0) -> float:
        """What is spent, or would be after so many more releases. With noise that differed, the least is counted."""
        least = min([self.noise, *(line.noise for line in self.ledger.lines)])
        return accounting.spent(least, len(self.ledger.lines) + more, self.privacy.delta)

    def check(self) -> None:
        """Refuse a release that would take this client over its budget."""
        if self.epsilon(1) > self.privacy.epsilon:
            raise Refused(
                f"{SPENT}: epsilon {self.epsilon():.4g} in {len(self.ledger.lines)} releases, and another one would "
                f"take it over privacy.epsilon = {self.privacy.epsilon:g}"
            )

    def noised(self, round: int, up: Tree, down: Tree) -> Mean:
        """An upload as one clipped vector with noise, which is paid for when this returns."""
        self.check()
        layout = layout_around(self.experiment, self.engine, self.number, self.engine.specs()[0], down)
        vector, lengths = self._vector(layout, round, up, down)
        self._warn(layout, lengths)
        sent = layout.packed(vector + self.spread * secret(layout.size))
        self._pay(round, sent.total)
        return sent

    def _vector(self, layout: Layout, round: int, up: Tree, down: Tree) -> tuple[Tensor, list[float]]:
        """What gets noise, and how long the values of its units were before they were clipped."""
        if self.privacy.unit == "client":
            vectors, lengths = layout.vectors(stack([up]))
            return vectors[0].cpu(), lengths.tolist()
        vector, known, _ = vector_around(layout, self.experiment, self.engine, self.number, round - 1, down)
        if self.privacy.where != "sum":
            return vector.cpu(), known
        most = longest(self.privacy)
        if beyond := int((vector.abs() > most).sum()):
            self.tell(
                f"round {round}: {beyond:,} sums over this client's samples were beyond privacy.range = {most:g} and "
                "were cut. A larger range gives the same epsilon"
            )
        return vector.cpu().clamp(-most, most), known

    def _pay(self, round: int, sent: Tensor) -> None:
        whole = sent.to(torch.float64)
        ratio, before = signal_to_noise(whole, self.spread), len(self.ledger.of_round(round))
        unit = "" if self.privacy.unit == "client" else self.privacy.unit
        self.ledger.add(Released(round, before, (self.number,), digest_of(sent), ratio, self.noise, unit=unit))
        self.tell(f"round {round}: noised; epsilon {self.epsilon():.4g} of {self.privacy.epsilon:g} is spent")

    def _warn(self, layout: Layout, lengths: list[float]) -> None:
        shortest = min((length for length in lengths if length > 0), default=0.0)
        if shortest and layout.bounds[0] < CUT * shortest:
            whose = "this upload's" if self.privacy.unit == "client" else "every sample's"
            at_least = "" if self.privacy.unit == "client" else "at least "
            self.tell(
                f"privacy.clip = {self.privacy.clip:g} leaves less than {CUT:.0%} of {whose} values, which are "
                f"{at_least}{shortest:.3g} long. A larger clip gives the same epsilon"
            )
