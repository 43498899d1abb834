"""An engine whose clients are elsewhere: the round loop does not know the difference."""

import threading
import time
from collections.abc import Callable, MutableMapping, Sequence
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from protofed.engines import Trained, nobody
from protofed.engines.clock import Clock
from protofed.engines.reference import ReferenceEngine
from protofed.engines.stacks import stack
from protofed.engines.wire import Size, measure
from protofed.errors import UserError
from protofed.experiment import Experiment
from protofed.federation.protocol import Message, Refused, body_of, one_line, pack, unpack
from protofed.federation.roster import Member, Roster
from protofed.federation.settings import Rounds
from protofed.federation.status import Status
from protofed.federation.verify import check_counts, loss_of, read_tallies, read_tree, tally_form
from protofed.method import Client, Mean, Method, Spec, Tree
from protofed.metrics import Correct, Tally, judged_by
from protofed.ops import random
from protofed.ops.trees import alone, deal, merge
from protofed.results import CONFUSED

TRIES = 3  # of a round in which everybody answers, and too few answers can be used

Found = TypeVar("Found")
Measured = dict[str, Tally]  # "own/personal": the counts


class RemoteEngine:
    """Clients behind a transport. Their states stay with them: here there are none."""

    def __init__(
        self,
        experiment: Experiment,
        here: ReferenceEngine,  # without any client's data
        roster: Roster,
        status: Status,
        rounds: Rounds,
        pause: float,
    ) -> None:
        self.experiment, self.here, self.roster, self.status, self.rules = experiment, here, roster, status, rounds
        self.pause = pause  # seconds between two looks at who is there
        self.stop = threading.Event()
        self.clients: MutableMapping[int, Client] = {}
        self.notes: list[str] = []
        self.clock = Clock(here.federation.device)
        self.round = experiment.rounds + 1  # that clients are asked for; one more than there are: after the last phases
        self._finished = False  # the last phases, in this process
        self._waited = False  # for all clients, once
        self._server: Tree = None
        self._measured: dict[int, Measured] = {}  # with this server, by client
        self._tried: set[int] = set()  # who was asked for that

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
        while True:
            self._wait()
            members = self._drawn(cohort, round)
            if not any(member.samples for member in members):
                return nobody([m.number for m in members])._replace(answered=tuple(m.number for m in members))
            need = min(self.rules.minimum, len(members))
            self.status.be("training", round + 1)
            down = method.broadcast(server, self._ids(members))
            dealt = {member.number: deal(down, row) for row, member in enumerate(members)}
            with self.clock.part("train"):
                bodies = [body_of(dealt[member.number]) for member in members]
                answers, missing = self._ask("train", members, bodies, self._upload)
            if len(answers) >= need:
                return self._trained(answers, dealt)
            failed = 0 if missing else failed + 1
            if failed == TRIES:
                last = self.status.refused[-1]["reason"] if self.status.refused else "no reason was given"
                raise UserError(
                    f"round {round + 1}: {len(answers)} of {len(members)} answers could be used, {need} are needed "
                    f"(the last reason: {last}). All rounds before are saved: mend it, and start the server again."
                )
            self.status.tell(f"round {round + 1}: {len(answers)} answers, {need} are needed; it is tried again")

    def _trained(self, answers: dict[int, tuple[Tree, Mean]], dealt: dict[int, Tree]) -> Trained:
        numbers = sorted(answers)
        ups = [answers[number][0] for number in numbers]
        return Trained(
            up=reduce(merge, map(alone, ups)),
            clients={},
            loss=stack([answers[number][1] for number in numbers]),
            finite=torch.ones(len(numbers), dtype=torch.bool),
            sent=reduce(Size.__add__, map(measure, ups)),
            received=reduce(Size.__add__, (measure(dealt[number]) for number in numbers)),
            answered=tuple(numbers),
        )

    def _upload(self, member: Member, message: Message) -> tuple[Tree, Mean]:
        """A checked upload, and the loss."""
        phases = self.experiment.method.phases()
        epochs = sum(phase.passes(self.experiment.local_epochs) for phase in phases)
        loss = loss_of(message.head, member.samples, epochs)
        up = read_tree(message.body, member.form)
        check_counts(up, member.samples)
        device = self.here.federation.device
        return tree_map(lambda tensor: tensor.to(device), up), loss

    def _wait(self) -> None:
        """Until there are enough clients: at first for all of them, as long as that is allowed."""
        until = time.monotonic() + (0.0 if self._waited else self.rules.wait_s)
        said = False
        while True:
            self.roster.refresh()
            there, all_of_them = len(self.roster.members), len(self.status.clients)
            enough = there >= self.rules.minimum and (there == all_of_them or time.monotonic() >= until)
            if enough:
                break
            if self.stop.is_set():
                raise KeyboardInterrupt
            if not said:
                self.status.be("waiting", self.round)
                need = self.rules.minimum
                self.status.tell(f"waiting for clients: {there} of {all_of_them} are here, {need} are needed")
                said = True
            time.sleep(self.pause)
        self._waited = True

    def _drawn(self, cohort: Sequence[int], round: int) -> list[Member]:
        """Who takes part: the cohort, and for those who are not here the next in the round's order who are."""
        members = self.roster.members
        numbers = list(cohort)
        if not set(numbers) <= set(members):
            key = random.key(self.experiment.seed, "cohort", round)
            order = random.permutation(key, self.experiment.clients).tolist()
            numbers = sorted([number for number in order if number in members][: len(cohort)])
        return [members[number] for number in numbers]

    def _ids(self, members: Sequence[Member]) -> Tensor:
        return torch.tensor([member.number for member in members], device=self.here.federation.device)

    def _ask(
        self,
        kind: str,
        members: Sequence[Member],
        bodies: Sequence[bytes],
        read: Callable[[Member, Message], Found],
        **more: Any,
    ) -> tuple[dict[int, Found], list[int]]:
        """Everybody's answer that can be used, and who gave none in time."""
        by_node = {member.node: member for member in members}
        packed = {
            member.node: pack(self.roster.head(kind, member.number, round=self.round, **more), body)
            for member, body in zip(members, bodies, strict=True)
        }
        for member in by_node.values():
            self.status.clients[member.number].state = "training"
        self.status.write()
        found: dict[int, Found] = {}
        heard: set[int] = set()
        started = time.monotonic()
        for reply in self.roster.transport.exchange(packed, self.rules.deadline_s):
            if reply.node not in by_node or by_node[reply.node].number in found:
                continue  # not asked, or said twice
            member = by_node[reply.node]
            if time.monotonic() - started > self.rules.deadline_s:
                break
            try:
                found[member.number] = self._accept(member, reply.content, reply.error, read)
                self.status.client(member.number, "answered", last_reason=None)
            except Refused as refused:
                lost = reply.content is None
                self.status.refuse(member.number, str(refused), state="lost" if lost else "refused")
            heard.add(member.number)
        late = [member.number for member in members if member.number not in heard]
        for number in late:
            self.status.refuse(number, f"no answer within {self.rules.deadline_s:g} s", state="late")
        return found, late

    def _accept(
        self, member: Member, content: bytes | None, error: str | None, read: Callable[[Member, Message], Found]
    ) -> Found:
        if content is None:
            self.roster.forget(member.number, later=True)
            raise Refused(f"no answer: {one_line(error)}")
        message = unpack(content, self.rules.max_bytes)
        head = message.head
        if head.get("kind") == "error":
            raise Refused(f"it says: {one_line(head.get('reason'))}")
        for key, mine in (("experiment", self.roster.hash), ("run", self.roster.run), ("client", member.number)):
            if head.get(key) != mine:
                raise Refused(f"it answers for another {key} ({one_line(head.get(key))[:20]})")
        if head.get("round") != self.round:
            raise Refused(f"it answers round {one_line(head.get('round'))[:20]}, but this is round {self.round}")
        if head.get("session") != member.session:
            self.roster.forget(member.number)  # started anew: it is greeted again before the next round
        try:
            return read(member, message)
        except (ValueError, RuntimeError, TypeError, KeyError, IndexError, MemoryError) as error:
            raise Refused(f"it cannot be read ({one_line(error)})") from None

    # tests

    def finish(self, method: Method, server: Tree, cohort: Sequence[int], round: int) -> Trained:
        if not self._finished:  # all clients do it at once, and are tested with what comes of it
            self._finished, self.round = True, round + 1
            self._server, self._measured, self._tried = server, {}, set()
            self._test(method, server, list(self.status.clients))
        down = method.broadcast(server, torch.tensor(list(cohort), device=self.here.federation.device))
        got = [measure(deal(down, row)) for row, number in enumerate(cohort) if number in self._measured]
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
        answers, _ = self._ask(
            kind, members, bodies, lambda _, message: read_tallies(message.body, form), ask=asks, confusion=confusion
        )
        self._measured |= answers

    def global_tally(self, method: Method, server: Tree, confusion: str = "") -> Tally | None:
        return self.here.global_tally(method, server, confusion)

    def labels(self, number: int, part: str) -> Tensor:
        raise NotImplementedError("samples stay with the clients")

    def embed(self, method: Method, number: int, part: str, rows: Tensor) -> Tensor:
        raise NotImplementedError("samples stay with the clients")
