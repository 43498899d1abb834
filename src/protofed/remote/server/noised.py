"""The engine of a federation whose clients add noise to their uploads, and what the server notes of it."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from protofed.config.experiment import Experiment
from protofed.engines import Trained
from protofed.method import Mean, Tree
from protofed.privacy.ledger import Released, digest_of
from protofed.privacy.noise import FARTHEST
from protofed.privacy.release import signal_to_noise
from protofed.privacy.shared import share_of_noise
from protofed.remote.form import read_tree
from protofed.remote.protocol import Message, Refused, check_answer
from protofed.remote.server.conduct import Answers
from protofed.remote.server.engine import RemoteEngine
from protofed.remote.server.roster import Member
from protofed.remote.server.untold import UNSEEN, UntoldEngine
from protofed.runs.budget import noise_of
from protofed.runs.noised import layout_of
from protofed.runs.releases import Releases


class NoisedEngine(UntoldEngine):
    """Clients behind a transport, each of which sends one vector that it has noised."""

    def _upload(self, member: Member, message: Message) -> tuple[Tree, Mean]:
        """A checked vector; nobody tells a loss."""
        check_answer(message.head, "answer")
        up = read_tree(message.body, member.form)
        if float(up.weight) != 1:
            raise Refused(f"its upload counts {float(up.weight):g}, where every client counts once")
        if (largest := float(up.total.abs().max())) > self._farthest(member.number):
            raise Refused(f"its upload has a number {largest:.3g} from 0, and with clip and noise none is so far")
        device = self.here.federation.device
        return tree_map(lambda tensor: tensor.to(device), up), Mean(torch.zeros(()), torch.zeros(()))

    def _farthest(self, number: int) -> float:
        """No number of a client's honest upload is farther from 0: noise is at most so long, and is rounded."""
        privacy = self.experiment.privacy
        units = 1 if privacy.unit == "client" else self.roster.settings.most_samples(number)
        return 1.001 * privacy.clip * (units + FARTHEST * self._noise)

    @cached_property
    def _noise(self) -> float:
        return noise_of(self.experiment)

    def _bounded(
        self, answers: Answers, dealt: Mapping[int, Tree], members: Sequence[Member]
    ) -> tuple[Answers, dict[int, dict[str, Any]]]:
        """All of them: noise is longer than what bounds compare."""
        kept = {number: one for number, one in answers.items() if number not in self.status.ledger.out}
        return kept, dict.fromkeys(kept, UNSEEN)


class ToldReleases(Releases):
    """What clients of a federation released, as the server heard it. Each client keeps an account of its own."""

    source = "each client's operating system: a cryptographic source, which nobody can repeat"
    outside = (
        "who takes part and when; the names, models and shapes of samples that clients tell when they join; whether a "
        "client's loss is a number"
    )

    def __init__(
        self, experiment: Experiment, engine: RemoteEngine, folder: Path, rounds: int, tell: Callable[[str], None]
    ) -> None:
        super().__init__(experiment, engine.here, folder, rounds, tell)
        self.clients = engine

    def noised(
        self,
        trained: Trained,
        cohort: Sequence[int],
        round: int,
        server: Tree,
        again: Callable[[], Trained] | None = None,
    ) -> Trained | None:
        """A round's result with the sum of what was released as `aggregate` takes it; None if clients' budgets do not
        pay for any."""
        if self.clients.out_of_budget:
            return None
        if trained.up is None:
            self._note(round, (), torch.zeros(0), 0.0)
            return trained
        layout = layout_of(self.experiment, self.engine, server)
        total, singles = self._heard(trained.up)
        spread = self._each() * math.sqrt(len(cohort))
        self._note(round, tuple(cohort), torch.cat([total, *singles]), signal_to_noise(total, spread))
        up = layout.opened(total, len(cohort), spread, singles)
        return trained._replace(up=tree_map(lambda tensor: tensor.to(self.engine.federation.device), up))

    def _each(self) -> float:
        """The standard deviation of one client's noise."""
        if self.privacy.where == "sum":
            return share_of_noise(self.privacy, self.noise, self.cohort)
        return self.noise * self.privacy.clip

    def _heard(self, up: Mean) -> tuple[Tensor, list[Tensor]]:
        """The sum, and the vectors of single clients where these came singly."""
        heard = up.total.cpu().to(torch.float64)
        return (heard, []) if self.privacy.where == "sum" else (heard.sum(0), list(heard.unbind(0)))

    def _note(self, round: int, clients: tuple[int, ...], heard: Tensor, ratio: float) -> None:
        """Write it down, unless it is what was heard before of this round."""
        before, digest = self.ledger.of_round(round + 1), digest_of(heard)
        if digest not in [line.digest for line in before]:
            self.ledger.add(Released(round + 1, len(before), clients, digest, ratio, self.noise))
