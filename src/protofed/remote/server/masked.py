"""The engine of a federation whose uploads are summed under masks: clients are trained and never tested singly."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch.utils._pytree import tree_leaves, tree_map

from protofed.config.experiment import Experiment
from protofed.engines import Trained, nobody
from protofed.engines.reference import ReferenceEngine
from protofed.engines.wire import Size, encoded_size
from protofed.method import Method, Tree
from protofed.ops.trees import all_finite, deal
from protofed.privacy.graph import needed
from protofed.remote.protocol import NAN, body_of
from protofed.remote.server.engine import LONGEST
from protofed.remote.server.roster import Member, Roster
from protofed.remote.server.status import Status
from protofed.remote.server.summing import TRIES, ServerSums, Summed
from protofed.remote.server.untold import UNSEEN, UntoldEngine
from protofed.remote.settings import Rounds
from protofed.runs.cohort import draw_cohort
from protofed.runs.securesum import KIND

NOT_OPENED = (
    "its sum cannot be opened over the clients that it was begun with, and a second one could tell a single client's "
    "upload"
)


class MaskedEngine(UntoldEngine):
    """Clients behind a transport, of whose uploads only the sum is known."""

    def __init__(
        self,
        experiment: Experiment,
        here: ReferenceEngine,
        roster: Roster,
        status: Status,
        rounds: Rounds,
        pause: float,
        folder: Path,
    ) -> None:
        cohort = len(draw_cohort(experiment, 0))
        least = max(rounds.minimum, needed(experiment.privacy.threshold, cohort))  # a round needs as many as a sum
        rules = replace(rounds, minimum=least)
        super().__init__(experiment, here, roster, status, rules, pause, folder)
        self.liars: dict[int, str] = {}  # who lied in a sum, by its session: started again, it may be mended
        self.sums = ServerSums(experiment, roster, status, rules, lambda: self.conduct.look(self.round), folder)

    def train(self, method: Method, server: Tree, cohort: Sequence[int], round: int) -> Trained:
        self.round = round + 1
        self._server = None
        failed = 0
        sick: set[int] = set()  # who says that its loss is not a number
        apart: set[int] = set()  # who contradicts another one, and nothing shows which of the two lies
        disputed = 0  # tries that failed for that
        while True:
            self._wait()
            members = self._for_sum(cohort, round, sick, apart)
            if members is None:
                return self._skipped()
            if not any(member.samples for member in members):
                return nobody([m.number for m in members])._replace(answered=tuple(m.number for m in members))
            self.status.be("training", round + 1)
            down = method.broadcast(server, self._ids(members))
            if tree_leaves(down) and not bool(all_finite(down)):
                self.conduct.undo(round, "what it made of the uploads is not finite")
            with self.clock.part("train"):
                bodies = [body_of(deal(down, row)) for row in range(len(members))]
                summed = self.sums.sum(self.round, members, down, bodies)
            self.liars |= {n: self.roster.members[n].session for n in summed.liars if n in self.roster.members}
            judges = self.conduct.judges_of(round)
            ill = set(summed.asked.not_a_number) & judges - set(summed.numbers)
            if 2 * len(ill) > len(judges):
                self.conduct.undo(round, f"{len(ill)} of {len(judges)} clients say that their loss is {NAN}")
            self.conduct.look(self.round)
            if summed.up is not None:
                self.conduct.merged(self.round, dict.fromkeys(summed.numbers, UNSEEN))
                return self._trained_together(summed, members)
            if summed.over:
                return self._skipped()
            if self._without_budget(summed.asked):
                return nobody(())._replace(answered=(), secure=True)
            apart |= set(summed.unsettled)
            disputed += bool(summed.unsettled)
            if disputed >= TRIES:
                return self._skipped("members contradict each other, and nothing shows which of them lie")
            sick |= ill | self.spent
            failed = 0 if summed.asked.late else failed + 1
            self.status.tell(f"round {round + 1} is tried again")
            self._pause(min(LONGEST, self.pause * 2**failed) if failed else 0.0)

    def _for_sum(self, cohort: Sequence[int], round: int, sick: set[int], apart: set[int]) -> list[Member] | None:
        """Who is asked: the round's clients, or those whose sum is to be opened already; None: give the round up."""
        must = self.sums.begun(round + 1)
        if must is None:
            return self._trusted(cohort, round, sick, apart)
        while not set(must) <= set(self.roster.members):
            if not self.sums.again(round + 1):
                return None
            self._pause(min(LONGEST, self.rules.deadline_s))
            self.roster.refresh()
        return [self.roster.members[number] for number in must]

    def _trusted(self, cohort: Sequence[int], round: int, sick: set[int], apart: set[int]) -> list[Member]:
        """The round's clients without those that lie or may lie, as far as enough are left for a sum."""
        known = self.roster.members
        liars = {n for n, session in self.liars.items() if n in known and known[n].session == session}
        drawn = self._drawn(cohort, round, sick | liars | apart)
        for wrong in (liars, apart):
            rest = [member for member in drawn if member.number not in wrong]
            drawn = rest if len(rest) >= self.rules.minimum else drawn
        aside = self.sums.suspects.aside({member.number for member in drawn}, len(drawn) - self.rules.minimum)
        return [member for member in drawn if member.number not in aside]

    def _skipped(self, why: str = NOT_OPENED) -> Trained:
        self.status.tell(f"round {self.round} is left out: {why}. Nothing is merged")
        self.status.log("left out", sync=False, round=self.round, reason=why)
        return nobody(())._replace(answered=(), secure=True)

    def _trained_together(self, summed: Summed, members: Sequence[Member]) -> Trained:
        device = self.here.federation.device
        counted = encoded_size(members[0].form).params * len(summed.numbers)
        none = nobody(summed.numbers)
        return none._replace(
            up=tree_map(lambda tensor: tensor.to(device), summed.up),
            loss=none.loss if summed.loss is None else tree_map(lambda tensor: tensor[None], summed.loss),
            sent=Size(summed.up_bytes, counted, {KIND: summed.up_bytes}),
            received=Size(summed.down_bytes, 0, {KIND: summed.down_bytes}),
            answered=summed.numbers,
            secure=True,
        )
