"""An engine whose clients are elsewhere: the round loop does not know the difference."""

import threading
import time
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from protofed.config.experiment import Experiment
from protofed.engines import Trained, nobody
from protofed.engines.reference import ReferenceEngine
from protofed.engines.resources import Clock
from protofed.engines.wire import Size, encoded_size
from protofed.method import Client, Mean, Method, Spec, Tree
from protofed.metrics import Correct, Tally, judged_by
from protofed.ops import random
from protofed.ops.trees import all_finite, alone, deal, merge, stack
from protofed.remote.form import read_tree
from protofed.remote.protocol import NAN, Message, body_of, check_answer
from protofed.remote.server.asking import Asking, Replies
from protofed.remote.server.conduct import Answers, Conduct
from protofed.remote.server.roster import Member, Roster
from protofed.remote.server.status import Status
from protofed.remote.server.verify import check_counts, loss_of, read_tallies, tally_form
from protofed.remote.settings import Rounds
from protofed.runs.measure import CONFUSED

LONGEST = 60.0  # seconds between two tries of a round in which too few answers can be used

Measured = dict[str, Tally]  # "own/personal": the counts


class RemoteEngine:
    """Clients behind a transport. Their states stay with them: here there are none."""

    in_turn = False

    def __init__(
        self,
        experiment: Experiment,
        here: ReferenceEngine,  # without any client's data
        roster: Roster,
        status: Status,
        rounds: Rounds,
        pause: float,
        folder: Path,
    ) -> None:
        self.experiment, self.here, self.roster, self.status, self.rules = experiment, here, roster, status, rounds
        self.pause = pause  # seconds between two looks at who is there
        self.stop = threading.Event()
        self.asking = Asking(roster, status, rounds, lambda: self.conduct.look(self.round))
        self.conduct = Conduct(folder, roster, status, self.asking)
        self.clients: MutableMapping[int, Client] = {}
        self.notes: list[str] = []
        self.clock = Clock(here.federation.device)
        self.round = experiment.rounds + 1  # that clients are asked for; one more than there are: after the last phases
        self._finished = False  # the last phases, in this process
        self._waited = False  # for all clients, once
        self._server: Tree = None
        self._measured: dict[int, Measured] = {}  # with this server, by client
        self._tried: set[int] = set()  # who was asked for that
        self.spent: set[int] = set()  # whose privacy budgets are spent, as they say
        self.out_of_budget = False  # too few others are left

    def specs(self) -> list[Spec]:
        return self.here.specs()

    def counts(self, cohort: Sequence[int]) -> Tensor:
        return torch.zeros(len(cohort), self.here.federation.classes)

    def samples(self, cohort: Sequence[int]) -> list[int]:
        known = self.status.clients
        return [(number in known and known[number].samples) or 0 for number in cohort]

    @property
    def architectures(self) -> list[str]:
        """What clients say they have; of those never seen, what the experiment gives them."""
        known = self.status.clients
        mine = enumerate(self.here.architectures)
        return [(number in known and known[number].architecture) or name for number, name in mine]

    # rounds

    def train(self, method: Method, server: Tree, cohort: Sequence[int], round: int) -> Trained:
        self.round = round + 1
        self._server = None
        failed = 0
        sick: set[int] = set()  # who says that its loss is not a number
        while True:
            self._wait()
            members = self._drawn(cohort, round, sick | self.spent)
            if not any(member.samples for member in members):
                return nobody([m.number for m in members])._replace(answered=tuple(m.number for m in members))
            need = min(self.rules.minimum, len(members))
            self.status.be("training", round + 1)
            down = method.broadcast(server, self._ids(members))
            if tree_leaves(down) and not bool(all_finite(down)):
                self.conduct.undo(round, "what it made of the uploads is not finite")
            dealt = {member.number: deal(down, row) for row, member in enumerate(members)}
            with self.clock.part("train"):
                bodies = [body_of(dealt[member.number]) for member in members]
                answers, asked = self.asking.ask("train", self.round, members, bodies, self._upload)
            judges = self.conduct.judges_of(round)
            sick = (sick | set(asked.not_a_number)) & judges - set(answers)
            if 2 * len(sick) > len(judges):
                self.conduct.undo(round, f"{len(sick)} of {len(judges)} clients say that their loss is {NAN}")
            self.conduct.look(self.round)
            answers, sizes = self._bounded(answers, dealt, members)
            if len(answers) >= need:
                self.conduct.merged(self.round, sizes)
                return self._trained(answers, dealt)
            if self._without_budget(asked):
                return nobody(())._replace(answered=())
            failed = 0 if asked.late else failed + 1
            self.status.tell(f"round {round + 1}: {len(answers)} answers, {need} are needed; it is tried again")
            self._pause(min(LONGEST, self.pause * 2**failed) if failed else 0.0)

    def _bounded(
        self, answers: Answers, dealt: Mapping[int, Tree], members: Sequence[Member]
    ) -> tuple[Answers, dict[int, dict[str, Any]]]:
        """The answers that may be merged, and their figures."""
        return self.conduct.bounded(self.round, answers, dealt, members)

    def _without_budget(self, asked: Replies) -> bool:
        """Whether too few members can still pay for another round."""
        self.spent |= set(asked.spent)
        there = set(self.status.clients) - set(self.status.ledger.out)
        self.out_of_budget = bool(asked.spent) and len(there - self.spent) < self.rules.minimum
        return self.out_of_budget

    def _trained(self, answers: dict[int, tuple[Tree, Mean]], dealt: dict[int, Tree]) -> Trained:
        numbers = sorted(answers)
        ups = [answers[number][0] for number in numbers]
        return Trained(
            up=stack(ups) if self.experiment.by_client else reduce(merge, map(alone, ups)),
            clients={},
            loss=stack([answers[number][1] for number in numbers]),
            finite=torch.ones(len(numbers), dtype=torch.bool),
            sent=reduce(Size.__add__, map(encoded_size, ups)),
            received=reduce(Size.__add__, (encoded_size(dealt[number]) for number in numbers)),
            answered=tuple(numbers),
        )

    def _pause(self, seconds: float) -> None:
        """Wait, and look for orders meanwhile."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.conduct.look(self.round)
            if self.stop.is_set():
                raise KeyboardInterrupt
            time.sleep(min(left, max(self.pause, 0.01)))

    def _upload(self, member: Member, message: Message) -> tuple[Tree, Mean]:
        """A checked upload, and the loss."""
        check_answer(message.head, "answer", "loss")
        phases = self.experiment.method.phases()
        epochs = sum(phase.passes(self.experiment.local_epochs) for phase in phases)
        loss = loss_of(message.head, member.samples, epochs)
        up = read_tree(message.body, member.form)
        check_counts(up, member.form, member.samples)
        device = self.here.federation.device
        return tree_map(lambda tensor: tensor.to(device), up), loss

    def _wait(self) -> None:
        """Until there are enough clients: at first for all of them, as long as that is allowed."""
        until = time.monotonic() + (0.0 if self._waited else self.rules.wait_s)
        said = False
        while True:
            self.conduct.look(self.round)
            self.roster.refresh()
            out = len(self.status.ledger.out)
            there, all_of_them = len(self.roster.members), len(self.status.clients) - out
            enough = there >= self.rules.minimum and (there == all_of_them or time.monotonic() >= until)
            if enough:
                break
            if self.stop.is_set():
                raise KeyboardInterrupt
            if not said:
                self.status.be("waiting", self.round)
                need = self.rules.minimum
                left = f" ({out} put out)" if out else ""
                self.status.tell(f"waiting for clients: {there} of {all_of_them} are here, {need} are needed{left}")
                said = True
            time.sleep(self.pause)
        self._waited = True

    def _drawn(self, cohort: Sequence[int], round: int, sick: Collection[int] = ()) -> list[Member]:
        """Who takes part: the cohort, and for those who are not here the next in the round's order who are.

        A client whose loss is not a number gives its place to one that has not said so, while there is one."""
        members = self.roster.members
        numbers = list(cohort)
        if not set(numbers) <= set(members).difference(sick):
            key = random.key(self.experiment.seed, "cohort", round)
            order = random.permutation(key, self.experiment.clients).tolist()
            order.sort(key=lambda number: (number in sick, number not in cohort))
            numbers = sorted([number for number in order if number in members][: len(cohort)])
        return [members[number] for number in numbers]

    def _ids(self, members: Sequence[Member]) -> Tensor:
        return torch.tensor([member.number for member in members], device=self.here.federation.device)

    # tests

    def ended(self) -> None:
        """Everybody is tested next, with all that is told of the end."""
        self.round = self.experiment.rounds + 1
        self._server, self._measured, self._tried = None, {}, set()

    def finish(self, method: Method, server: Tree, cohort: Sequence[int], round: int) -> Trained:
        if not self._finished:  # all clients do it at once, and are tested with what comes of it
            self._finished, self.round = True, round + 1
            self._server, self._measured, self._tried = server, {}, set()
            self._test(method, server, list(self.status.clients))
        down = method.broadcast(server, torch.tensor(list(cohort), device=self.here.federation.device))
        got = [encoded_size(deal(down, row)) for row, number in enumerate(cohort) if number in self._measured]
        return nobody(cohort)._replace(up={}, received=reduce(Size.__add__, got, Size(0, 0)))

    def evaluate(
        self, method: Method, server: Tree, cohort: Sequence[int], on: str, who: str, confusion: str = ""
    ) -> list[Tally]:
        if on == "global":  # no client has everybody's test samples
            return [self._nothing(confusion)] * len(cohort)
        if server is not self._server:
            self._server, self._measured, self._tried = server, {}, set()
        if not set(cohort) <= self._tried:
            last = self.round >= self.experiment.rounds  # then everybody is tested, and one message does
            wanted = list(self.status.clients) if last else cohort
            self._test(method, server, [number for number in wanted if number not in self._tried])
        none = {f"{on}/{who}": self._nothing(confusion)}
        return [self._measured.get(number, none)[f"{on}/{who}"] for number in cohort]

    def _nothing(self, confusion: str) -> Tally:
        form = tally_form(self._kinds(), self.here.federation.classes, confusion)
        return {kind: Correct(part["right"], part["samples"], part.get("said", ())) for kind, part in form.items()}

    def _kinds(self) -> list[str]:
        return [f"{score}{suffix}" for score in self.experiment.method.scores for suffix in ("", "_own")]

    def _test(self, method: Method, server: Tree, numbers: Sequence[int]) -> None:
        """Ask these clients, as far as they are here, for all that is counted on their own samples, in one message."""
        self._tried |= set(numbers)
        self.roster.refresh()
        members = [self.roster.members[number] for number in numbers if number in self.roster.members]
        if not members:
            return
        self.status.be("evaluating")
        whole = method.global_client(server)
        parts = ("own", "validation") if self.experiment.evaluate.validation else ("own",)
        asks = [f"{on}/{who}" for on in parts for who in (("personal",) if whole is None else ("personal", "global"))]
        final = self.round >= self.experiment.rounds
        small = self.experiment.record.enabled and self.here.federation.classes <= CONFUSED
        confusion = judged_by(method) if final and small else ""
        down = method.broadcast(server, self._ids(members))
        kind = "finish" if method.last_phases() and self.round > self.experiment.rounds else "evaluate"
        model = {} if whole is None else {"global": whole}
        bodies = [body_of({"down": deal(down, row), **model}) for row in range(len(members))]
        form = {ask: tally_form(self._kinds(), self.here.federation.classes, confusion) for ask in asks}

        def read(member: Member, message: Message) -> Measured:
            check_answer(message.head, "answer")
            held_back = member.samples + self.here.federation.classes  # of a class at most as many as are left, and one
            return read_tallies(message.body, form, {"own": member.tests, "validation": held_back})

        answers, _ = self.asking.ask(kind, self.round, members, bodies, read, ask=asks, confusion=confusion)
        self._measured |= answers

    def global_tally(self, method: Method, server: Tree, confusion: str = "") -> Tally | None:
        return self.here.global_tally(method, server, confusion)

    def labels(self, number: int, part: str) -> Tensor:
        raise NotImplementedError("samples stay with the clients")

    def embed(self, method: Method, number: int, part: str, rows: Tensor) -> Tensor:
        raise NotImplementedError("samples stay with the clients")
