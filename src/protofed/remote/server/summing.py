"""The server's side of a round with secure sums: four questions to the round's clients, and one sum."""

import contextlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from protofed.atomic import write_atomically
from protofed.config.experiment import Experiment
from protofed.method import Mean, Tree
from protofed.privacy.collector import SumCollector
from protofed.privacy.disputes import Suspects
from protofed.privacy.fault import SpoiltSum, SumFault
from protofed.privacy.fixed import Grid, means_of
from protofed.privacy.graph import needed
from protofed.privacy.keys import PUBLIC
from protofed.privacy.member import SEALED
from protofed.privacy.shared import noised_grid
from protofed.privacy.shares import SECRET
from protofed.remote.protocol import Message, Refused, check_answer
from protofed.remote.server.asking import Asking, Replies
from protofed.remote.server.roster import Member, Roster
from protofed.remote.server.status import Status
from protofed.remote.settings import Rounds
from protofed.remote.summing import pack_adverts, pack_left, sent_alike, split_evenly, sum_context, unpack_masked
from protofed.runs.budget import noise_of
from protofed.runs.cohort import draw_cohort
from protofed.runs.securesum import caps, cut_note, with_loss

STEP_SECONDS = 90.0  # for an answer to a step without training
TRIES = 3  # to open a sum over the clients that it was begun with
NOTED = "sum.json"  # over whom the sum of the present round is opened


class Summed(NamedTuple):
    """What came of one try of a round."""

    up: Tree  # None: there is no sum
    loss: Mean | None
    numbers: tuple[int, ...]  # whose sum it is
    asked: Replies
    up_bytes: int
    down_bytes: int
    liars: tuple[int, ...] = ()  # who should not take part in the next try
    unsettled: tuple[int, ...] = ()  # pairs of members of whom one lies each, one after another
    over: bool = False  # there will be no sum of this round


class ServerSums:
    """Sums rounds under masks. It keeps one try at a time, and no upload of a single client."""

    def __init__(
        self,
        experiment: Experiment,
        roster: Roster,
        status: Status,
        rules: Rounds,
        look: Callable[[], None],
        folder: Path,
    ) -> None:
        self.experiment, self.roster, self.status, self.path = experiment, roster, status, folder / NOTED
        self.cohort = len(draw_cohort(experiment, 0))
        self.threshold = needed(experiment.privacy.threshold, self.cohort)
        self.training = Asking(roster, status, rules, look)
        quick = replace(rules, deadline_s=min(rules.deadline_s, STEP_SECONDS))
        self.steps = Asking(roster, status, quick, look)
        self.up_bytes = self.down_bytes = 0
        self.suspects = Suspects()
        self._told: tuple[int, ...] = ()  # who is suspected, as it was last said

    def begun(self, round: int) -> list[int] | None:
        """Over whom the sum of this round was to be opened, if that was said already."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            told = json.loads(self.path.read_text(encoding="utf-8"))
            if (told["run"], told["round"]) == (self.roster.run, round):
                return [int(number) for number in told["clients"]]
        return None

    def sum(self, round: int, members: Sequence[Member], down: Tree, bodies: Sequence[bytes]) -> Summed:
        """One try of a round, with what is broadcast and each member's part of it; SumFault never leaves it."""
        self.up_bytes, self.down_bytes = 0, sum(map(len, bodies))
        attempt = secrets.token_hex(16)
        limits = caps(self.experiment, means_of(members[0].form), max(member.samples for member in members))
        privacy = self.experiment.privacy
        grid = Grid(privacy.bits, privacy.range, self.cohort, limits)
        if privacy.noisy:
            grid = noised_grid(privacy, noise_of(self.experiment), self.cohort)
        loss = None if privacy.noisy else Mean(torch.zeros(()), torch.zeros(()))
        form = with_loss(members[0].form, loss)
        context = sum_context(self.roster.hash, self.roster.run, round, attempt, sent_alike(down, bodies[0]))
        collector = SumCollector(context, self.threshold, grid, grid.size(form))
        one = _Try(self, collector, round, attempt, {member.number: member for member in members})
        asked = Replies([], [])
        try:
            asked = one.keys(bodies)
            one.share()
            one.masks(limits)
            must = self.begun(round)
            one.opening = must is not None
            if must is not None and must != collector.survivors:
                raise SumFault(f"its sum was begun over {len(must)} clients, and {len(collector.survivors)} are here")
            self._note(round, collector.survivors)
            one.open()
            opened = grid.decode(collector.total(), form, len(collector.survivors))
        except SumFault as fault:
            return self._failed(round, one, asked, fault)
        liars = self._named(one)
        self._tell_unsettled(round, collector.disputes.unsettled())
        self.suspects.opened(set(collector.survivors))
        if opened.cut:
            self.status.tell(cut_note(round, opened.cut, privacy.range))
        numbers = tuple(collector.survivors)
        return Summed(opened.up["up"], opened.up.get("loss"), numbers, asked, self.up_bytes, self.down_bytes, liars)

    def _failed(self, round: int, one: "_Try", asked: Replies, fault: SumFault) -> Summed:
        self.status.tell(f"round {round}: no sum: {fault}")
        liars = self._named(one)
        own = set(fault.accused).difference(liars)
        self._blame(own, "its mask is not the one that it shared")
        unsettled = one.collector.disputes.unsettled(own)
        self._tell_unsettled(round, unsettled)
        over = one.opening and not self.again(round)
        if over and isinstance(fault, SpoiltSum):
            self.suspects.spoilt(set(one.collector.survivors))
            self._tell_suspects(round)
        pairs = tuple(number for pair in unsettled for number in pair)
        return Summed(None, None, (), asked, self.up_bytes, self.down_bytes, (*liars, *own), pairs, over)

    def _named(self, one: "_Try") -> tuple[int, ...]:
        """Who lies, as far as it shows; each is told of."""
        found = one.collector.disputes.liars()
        earlier = found if one.at_odds is None else found & one.at_odds
        self._blame(earlier, "its keys or shares do not match those of other clients")
        self._blame(found - earlier, "its shares of other clients' masks were wrong")
        return tuple(sorted(found))

    def _tell_unsettled(self, round: int, pairs: Sequence[tuple[int, int]]) -> None:
        for one, other in pairs:
            names = f"{self.roster.name(one)} and {self.roster.name(other)}"
            self.status.tell(f"round {round}: {names} contradict each other: one of them lies, and nothing shows which")
            self.status.log("contradict", sync=False, round=round, clients=[one, other])

    def _tell_suspects(self, round: int) -> None:
        among = tuple(self.suspects.among)
        if among == self._told:
            return
        self._told, names = among, ", ".join(map(self.roster.name, among))
        if len(among) > 1:
            said = f"one of {names} masked with other numbers than it shared, or more of them. Nothing shows which, so "
            said += "if it can be done without, some of them are left out of the next rounds"
        else:
            said = (
                f"{names} was in every sum that did not open, and is left out from now on. Ban it if it is no accident"
            )
        self.status.tell(f"round {round}: {said}")
        self.status.log("suspected", sync=False, round=round, clients=list(among))

    def again(self, round: int) -> bool:
        """Count a try of a sum that was begun and did not open; whether there is another one."""
        told = json.loads(self.path.read_text(encoding="utf-8"))
        told["tries"] = told.get("tries", 0) + 1
        write_atomically(self.path, json.dumps(told).encode())
        return bool(told["tries"] < TRIES)

    def _note(self, round: int, clients: Sequence[int]) -> None:
        """Before any share is asked for: clients open a round's sum over one set of clients only."""
        if self.begun(round) is None:
            told = {"run": self.roster.run, "round": round, "clients": list(clients)}
            write_atomically(self.path, json.dumps(told).encode())

    def _blame(self, numbers: Sequence[int] | set[int], reason: str) -> None:
        for number in sorted(numbers):
            self.steps.refuse(number, reason)


class _Try:
    """The four steps of one sum."""

    def __init__(
        self, sums: ServerSums, collector: SumCollector, round: int, attempt: str, members: Mapping[int, Member]
    ) -> None:
        self.sums, self.collector, self.round, self.attempt, self.members = sums, collector, round, attempt, members
        self.opening = False
        self.at_odds: set[int] | None = None  # who lies, as it shows before the sum is opened

    def keys(self, bodies: Sequence[bytes]) -> Replies:
        """Step 1, with training."""

        def read(member: Member, message: Message) -> None:
            self._size(message, PUBLIC)
            self._step(self.collector.advertise, member.number, message.body)

        everybody = list(self.members.values())
        _, asked = self.sums.training.ask("train", self.round, everybody, bodies, read, **{"try": self.attempt})
        self.collector.begin()
        return asked

    def share(self) -> None:
        """Step 2."""
        listed = pack_adverts(self.collector.adverts)

        def read(member: Member, message: Message) -> None:
            near = len(self.collector.near[member.number])
            self._size(message, near * SEALED)
            parts = split_evenly(message.body, SEALED, near)
            self._step(self.collector.share, member.number, parts)

        self._ask("share", dict.fromkeys(self.collector.adverts, listed), read)

    def masks(self, limits: Sequence[float]) -> None:
        """Step 3."""
        collector = self.collector
        left = pack_left(collector.shared.keys(), sorted(collector.adverts))

        def read(member: Member, message: Message) -> None:
            self._size(message, SECRET + collector.size * collector.grid.bits // 8)
            try:
                masked = unpack_masked(message.body, collector.grid, collector.size)
                collector.add(member.number, masked.commitment, masked.vector)
            except SumFault as fault:
                raise Refused(str(fault)) from None

        sealed = {n: left + b"".join(collector.for_member(n).values()) for n in sorted(collector.shared)}
        self._ask("mask", sealed, read, caps=list(limits))
        if len(collector.survivors) < collector.threshold:
            raise SumFault(
                f"{len(collector.survivors)} clients are left for the sum, and {collector.threshold} are needed"
            )

    def open(self) -> None:
        """Step 4; who gives no answer is asked again while it is needed."""
        collector, self.opening = self.collector, True
        self.at_odds = collector.disputes.liars()
        left = pack_left(set(collector.survivors), sorted(collector.adverts))
        waiting = list(collector.survivors)

        def read(member: Member, message: Message) -> None:
            owners = collector.holdings(member.number)
            self._size(message, SECRET * len(owners))
            parts = split_evenly(message.body, SECRET, len(owners))
            self._step(collector.open_with, member.number, dict(zip(owners, parts, strict=True)))
            waiting.remove(member.number)

        for _ in range(TRIES):
            here = [number for number in waiting if self._here(number)]
            if collector.openable or not here:
                break
            self._ask("open", dict.fromkeys(here, left), read)

    def _here(self, number: int) -> bool:
        known = self.sums.roster.members.get(number)
        return known is not None and known.session == self.members[number].session

    def _ask(
        self, kind: str, bodies: Mapping[int, bytes], read: Callable[[Member, Message], None], **more: Any
    ) -> None:
        self.sums.down_bytes += sum(map(len, bodies.values()))
        some = [self.members[number] for number in bodies]
        _, asked = self.sums.steps.ask(
            kind, self.round, some, list(bodies.values()), read, **{"try": self.attempt}, **more
        )
        for number, blamed in asked.accused.items():
            for other in set(blamed) & self.members.keys():
                self.collector.disputes.add(number, other)

    def _size(self, message: Message, size: int) -> None:
        check_answer(message.head, "answer")
        if len(message.body) != size:
            raise Refused(f"its answer has {len(message.body):,} bytes, where {size:,} are expected")
        self.sums.up_bytes += size

    def _step(self, step: Callable[[int, Any], None], number: int, told: Any) -> None:
        try:
            step(number, told)
        except SumFault as fault:
            raise Refused(str(fault)) from None
