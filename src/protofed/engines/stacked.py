"""The stacked engine: clients of one architecture trained at once, by the same functions as one after another."""

import re
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from protofed.engines import Trained, nobody
from protofed.engines.base import OnReference
from protofed.engines.cache import OFTEN, Steps, first_line
from protofed.engines.evaluation import GroupEvaluation
from protofed.engines.groups import Group, Sizes
from protofed.engines.lanes import LaneTraining
from protofed.engines.members import Members
from protofed.engines.reference import ReferenceEngine
from protofed.engines.sums import as_row, joined, summed_in_order
from protofed.engines.threads import Threads
from protofed.engines.training import GroupTraining
from protofed.method import Method, Tree
from protofed.metrics import Tally, add, tally
from protofed.ops.trees import deal

UNSTACKED = (RuntimeError, NotImplementedError, ValueError, TypeError)  # raised by torch.vmap


class StackedEngine(OnReference):
    """Clients of one architecture together; what cannot be stacked is left to the reference engine."""

    def __init__(
        self,
        reference: ReferenceEngine,
        *,
        chunk: int = 0,
        workers: int = 1,
        compiled: bool = False,
        ordered: bool = False,
        typical: Sequence[int] = (),
        shares: int = 1,
    ) -> None:
        """`ordered`: sums over clients in the order of the cohort, whatever the groups; `typical`: the clients of a
        round, by which the number of lanes is chosen; without them, those of the first round; `shares`: engines like
        this one that a round is spread over."""
        self.reference, self.ordered = reference, ordered
        self.federation, self.device = reference.federation, reference.federation.device
        self.architectures, self.clock = reference.architectures, reference.clock
        self.notes: list[str] = []  # what the user should be told
        workers = workers if self.device.type == "cpu" else 1
        self.threads = Threads(workers)
        self.members = Members(reference, workers, compiled)
        self.sizes = Sizes(self.members, chunk, workers * shares, typical)
        self.steps = Steps(self.members, self.notes)
        self.lanes = LaneTraining(self.members, self.sizes, self.steps)
        self.training = GroupTraining(self.members, self.sizes, self.steps, self.lanes, ordered)
        self.evaluation = GroupEvaluation(self.members, self.sizes, self.steps)
        self._refused: str | None = None  # why clients cannot be stacked, if known
        self._works = self._judges = False  # training, and tests, have been done so once
        if any(reference.model(number).recurrent for number in range(len(self.architectures))):
            self._refused = "recurrent layers (LSTM, GRU)"

    def why_not(self, method: Method) -> str | None:
        """What keeps a method's clients from being stacked, in words."""
        if not method.stackable:
            return f"{type(method).__name__} works on the host, client by client"
        return self._refused

    def _refuse(self, error: Exception) -> None:
        self._refused = f"torch.vmap cannot take {_operation(error)}"
        self.notes.append(f"one client after another, not stacked: {self._refused}")

    # training

    def train(self, method: Method, server: Tree, cohort: Sequence[int], round: int) -> Trained:
        if not any(self.federation.used(number) for number in cohort):
            return nobody(cohort)
        return self.summed(self.share(method, server, cohort, self.groups(cohort), round))

    def share(
        self, method: Method, server: Tree, cohort: Sequence[int], groups: Sequence[Group], round: int
    ) -> Trained:
        """Local training of a cohort in these groups; where sums are ordered, its uploads are not summed yet."""
        while self.why_not(method) is None:
            try:
                trained = self._run(method, server, cohort, groups, round, last=False)
                self._works = True
                return trained
            except torch.OutOfMemoryError:
                pass  # what it holds is free only when it is gone
            except UNSTACKED as error:
                if self._works:
                    raise
                self._refuse(error)
                continue
            self._narrow()
        if not self.ordered:
            return self.reference.share(method, server, cohort, round)
        alone = [self.reference.share(method, server, [number], round) for number in cohort]
        return self.joined([part._replace(up=as_row(part.up)) for part in alone], range(len(cohort)))

    def finish(self, method: Method, server: Tree, cohort: Sequence[int], round: int) -> Trained:
        return self.finish_share(method, server, cohort, self.groups(cohort), round)

    def finish_share(
        self, method: Method, server: Tree, cohort: Sequence[int], groups: Sequence[Group], round: int
    ) -> Trained:
        """The last phases of a cohort in these groups."""
        if self.why_not(method):
            return self.reference.finish(method, server, cohort, round)
        return self._run(method, server, cohort, groups, round, last=True)

    def _run(
        self, method: Method, server: Tree, cohort: Sequence[int], groups: Sequence[Group], round: int, last: bool
    ) -> Trained:
        down = method.broadcast(server, self.members.ids(cohort))
        states = {number: self.reference.client(method, number) for number in cohort}  # new ones draw, one by one
        at_once = min(self.threads.many, len(groups))
        parts = self.threads.each(
            lambda group: self.training.train(method, group, states, down, round, last, at_once), groups
        )
        return self.joined(parts, [place for group in groups for place in group.places])

    def _narrow(self) -> None:
        """Fewer lanes, where there was too little memory for so many."""
        self.notes.append(self.sizes.narrow())
        self.steps.forget()
        self.members.forget()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def groups(self, cohort: Sequence[int]) -> list[Group]:
        """Clients that are trained at once."""
        return self.sizes.groups(cohort)

    def joined(self, parts: Sequence[Trained], places: Sequence[int]) -> Trained:
        """What parts of a cohort give together, in the order of the cohort: their clients have these places in it."""
        return joined(parts, self.members.ids(places).argsort(), self.ordered)

    def summed(self, trained: Trained) -> Trained:
        """The same with all uploads summed, one by one where that was asked for."""
        return trained._replace(up=summed_in_order(trained.up)) if self.ordered else trained

    # compiling

    @property
    def compiled(self) -> bool:
        """Whether training steps are compiled."""
        return self.members.compiled

    def use(self, compiled: bool) -> None:
        """From now on compile training steps, or not."""
        self.members.use(compiled)
        self.sizes.forget()
        self.steps.forget()

    def guess(self, method: Method, rounds: int) -> float:
        """Seconds of training that so many rounds take, very roughly, from sizes alone."""
        return self.sizes.guess(method, rounds)

    def trial(self, method: Method, server: Tree, cohort: Sequence[int]) -> float:
        """Seconds of training that a round takes, roughly, from a few steps; nothing comes of them."""
        for _ in range(1 + OFTEN[self.device.type]):  # what comes often is traced or captured
            self.lanes.trial = []
            try:
                self.train(method, server, cohort, 0)
                found = sum(self.lanes.trial) / self.sizes.parts
            finally:
                self.lanes.trial = None
        return found

    # evaluation

    def evaluate(
        self,
        method: Method,
        server: Tree,
        cohort: Sequence[int],
        on: str,
        who: str,
        confusion: str = "",
        groups: Sequence[Group] = (),
    ) -> list[Tally]:
        if self.why_not(method):
            return self.reference.evaluate(method, server, cohort, on, who, confusion)
        down = method.broadcast(server, self.members.ids(cohort))
        groups, whole = groups or self.groups(cohort), method.global_client(server) if who == "global" else None
        if who == "global" and whole is None:
            raise ValueError(f"{type(method).__name__} has no global model")
        states = {number: whole or self.reference.client(method, number) for number in cohort}
        try:
            counted = self.threads.each(
                lambda group: self.evaluation.evaluate(method, group, states, whole, down, on, confusion), groups
            )
        except torch.OutOfMemoryError:
            raise
        except UNSTACKED as error:
            if self._judges:
                raise
            self._refuse(error)
            return self.reference.evaluate(method, server, cohort, on, who, confusion)
        self._judges = True
        found: dict[int, Tally] = {}
        for group, tallies in zip(groups, counted, strict=True):
            found |= dict(zip(group.places, tallies, strict=True))
        return [found[place] for place in range(len(cohort))]

    def global_tally(
        self, method: Method, server: Tree, confusion: str = "", share: slice = slice(None)
    ) -> Tally | None:
        """The global model on all test samples that fit it, or on a share of them; None where that is nothing."""
        client = method.global_client(server)
        if client is None or self.sizes.parts == 1 or self.why_not(method):
            return self.reference.global_tally(method, server, confusion) if not share.start else None
        down = deal(method.broadcast(server, self.members.ids([0])), 0)
        own = torch.ones(self.federation.classes, dtype=torch.bool)
        shape, wide = self.federation.shape(0), self.reference.needs.together(0)
        tests = [self.federation.global_test(d) for d, s in enumerate(self.federation.shapes) if s == shape]
        parts = [part for x, y in tests for part in zip(x.split(wide), y.split(wide), strict=True)][share]

        @torch.no_grad()
        def count(part: tuple[Tensor, Tensor]) -> Tally:
            scores = method.predict(self.members.model(0), client, part[0], down)
            return tally(scores, part[1], own, confusion=confusion)

        return reduce(add, self.threads.each(count, parts)) if parts else None


def _operation(error: Exception) -> str:
    """Which operation an error of torch.vmap is about, or what it says."""
    found = re.search(r"aten::\w+|torch\.\w+|\.item\(\)", str(error))
    return f"{found.group()} ({first_line(error)})" if found else f"this model or method ({first_line(error)})"
