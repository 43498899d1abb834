"""The stacked engine: trains clients of one architecture at once, with the same functions as one after another."""

import re
from collections.abc import Sequence
from functools import partial, reduce

import torch
from torch import Tensor

from protofed.engines import Trained, nobody
from protofed.engines.base import OnReference
from protofed.engines.reference import ReferenceEngine
from protofed.engines.stacked.cache import OFTEN, Steps
from protofed.engines.stacked.evaluation import GroupEvaluation
from protofed.engines.stacked.groups import ClientGroup, Sizes
from protofed.engines.stacked.lanes import LaneTraining
from protofed.engines.stacked.members import Members
from protofed.engines.stacked.threads import Threads
from protofed.engines.stacked.training import GroupTraining
from protofed.engines.sums import as_row, joined_parts, summed_in_order
from protofed.errors import first_line
from protofed.method import Method, Tree
from protofed.metrics import Tally, add, tally
from protofed.ops.trees import deal

UNSTACKED = (RuntimeError, NotImplementedError, ValueError, TypeError)  # raised by torch.vmap


class StackedEngine(OnReference):
    """Runs clients of one architecture together; the reference engine runs what cannot be stacked."""

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
        by_client: bool = False,
    ) -> None:
        """`ordered`: sum over clients in cohort order, whatever the groups; `typical`: clients of a typical round, for
        choosing the number of lanes (default: those of the first round); `shares`: number of engines like this one
        that share a round; `by_client`: do not sum uploads, keep one row per client."""
        ordered = ordered or by_client
        self.reference, self.ordered, self.by_client = reference, ordered, by_client
        self.federation, self.device = reference.federation, reference.federation.device
        self.architectures, self.clock = reference.architectures, reference.clock
        self.notes: list[str] = []  # messages for the user
        workers = workers if self.device.type == "cpu" else 1
        self.threads = Threads(workers)
        self.members = Members(reference, workers, compiled)
        self.sizes = Sizes(self.members, chunk, workers * shares, typical)
        self.steps = Steps(self.members, self.notes)
        self.lanes = LaneTraining(self.members, self.sizes, self.steps)
        self.training = GroupTraining(self.members, self.sizes, self.steps, self.lanes, ordered)
        self.evaluation = GroupEvaluation(self.members, self.sizes, self.steps)
        self._refused: str | None = None  # why clients cannot be stacked, once known
        self._works = self._judges = False  # whether stacked training, and stacked tests, worked once
        if any(reference.model(number).recurrent for number in reference.federation.examples):
            self._refused = "recurrent layers (LSTM, GRU)"

    def why_not(self, method: Method) -> str | None:
        """Why a method's clients cannot be stacked, in words."""
        if not method.stackable:
            return f"{type(method).__name__} works on the host, client by client"
        if self.reference.stand_in is not None:
            return "training steps with noise take a client's samples together instead (privacy.sgd_rate)"
        return self._refused

    def _refuse(self, error: Exception) -> None:
        self._refused = f"torch.vmap cannot take {_operation(error)}"
        self.notes.append(f"one client after another, not stacked: {self._refused}")

    # training

    def train(self, method: Method, server: Tree, cohort: Sequence[int], round: int) -> Trained:
        self.turn(round)
        self._hold(cohort)
        if self.reference.stand_in is None and not any(self.federation.used(number) for number in cohort):
            return nobody(cohort)
        return self.summed(self.share(method, server, cohort, self.groups(cohort), round))

    def share(
        self, method: Method, server: Tree, cohort: Sequence[int], groups: Sequence[ClientGroup], round: int
    ) -> Trained:
        """Local training of a cohort in these groups; with ordered sums, its uploads are not summed yet."""
        self.turn(round)
        while self.why_not(method) is None:
            try:
                trained = self._run(method, server, cohort, groups, round, last=False)
                self._works = True
                return trained
            except torch.OutOfMemoryError:
                pass  # its memory is free only once the exception is gone
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
        self.turn(round)
        return self.finish_share(method, server, cohort, self.groups(cohort), round)

    def finish_share(
        self, method: Method, server: Tree, cohort: Sequence[int], groups: Sequence[ClientGroup], round: int
    ) -> Trained:
        """The last phases of a cohort in these groups."""
        self.turn(round)
        if self.why_not(method):
            return self.reference.finish(method, server, cohort, round)
        return self._run(method, server, cohort, groups, round, last=True)

    def _run(
        self, method: Method, server: Tree, cohort: Sequence[int], groups: Sequence[ClientGroup], round: int, last: bool
    ) -> Trained:
        self._hold(cohort)
        down = method.broadcast(server, self.members.ids(cohort))
        states = {number: self.reference.client(method, number) for number in cohort}  # draws new ones in order
        at_once = min(self.threads.many, len(groups))
        train = partial(self.training.train, method, states, down, round, last, at_once)
        parts = list(self.threads.mapping(groups)(train, groups))
        return self.joined(parts, [place for group in groups for place in group.places])

    def turn(self, round: int) -> None:
        """Move to the samples that clients train on in this round; sizes and steps are those of this round, whatever
        came before."""
        if self.federation.turn(round):
            self.sizes.forget()
            self.steps.forget()

    def _hold(self, cohort: Sequence[int]) -> None:
        """Make the samples of these clients ready."""
        if self.federation.hold(cohort):
            self.steps.forget()  # captured steps read them where they were

    def _narrow(self) -> None:
        """Use fewer lanes after running out of memory."""
        self.notes.append(self.sizes.narrow())
        self.steps.forget()
        self.members.forget()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def groups(self, cohort: Sequence[int]) -> list[ClientGroup]:
        """The groups of clients that are trained at once."""
        return self.sizes.groups(cohort)

    def joined(self, parts: Sequence[Trained], places: Sequence[int]) -> Trained:
        """Combine the results of parts of a cohort in cohort order, given the places of their clients."""
        return joined_parts(parts, self.members.ids(places).argsort(), self.ordered)

    def summed(self, trained: Trained) -> Trained:
        """The same with all uploads summed, one by one if requested."""
        as_it_is = self.by_client or not self.ordered
        return trained if as_it_is else trained._replace(up=summed_in_order(trained.up))

    # compiling

    @property
    def compiled(self) -> bool:
        """Whether training steps are compiled."""
        return self.members.compiled

    def use(self, compiled: bool) -> None:
        """From now on, compile training steps, or do not."""
        self.members.use(compiled)
        self.sizes.forget()
        self.steps.forget()

    def guess(self, method: Method, rounds: int) -> float:
        """Seconds of training for `rounds` rounds: a very rough guess from sizes alone."""
        return self.sizes.guess(method, rounds)

    def trial(self, method: Method, server: Tree, cohort: Sequence[int]) -> float:
        """Seconds of training per round, roughly, from a few steps whose results are discarded."""
        for _ in range(1 + OFTEN[self.device.type]):  # frequent steps are traced or captured
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
        groups: Sequence[ClientGroup] = (),
    ) -> list[Tally]:
        if self.why_not(method):
            return self.reference.evaluate(method, server, cohort, on, who, confusion)
        self._hold(cohort)
        down = method.broadcast(server, self.members.ids(cohort))
        groups, whole = groups or self.groups(cohort), method.global_client(server) if who == "global" else None
        if who == "global" and whole is None:
            raise ValueError(f"{type(method).__name__} has no global model")
        states = {number: whole or self.reference.client(method, number) for number in cohort}
        try:
            evaluate = partial(self.evaluation.evaluate, method, states, whole, down, on, confusion)
            counted = list(self.threads.mapping(groups)(evaluate, groups))
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
        """The global model on all test samples that fit it, or on a share of them; None if there are none."""
        client = method.global_client(server)
        if client is None or self.sizes.parts == 1 or self.why_not(method):
            return self.reference.global_tally(method, server, confusion) if not share.start else None
        down = deal(method.broadcast(server, self.members.ids([0])), 0)
        own = torch.ones(self.federation.classes, dtype=torch.bool)
        shape, wide = self.federation.shape(0), self.reference.needs.together(0)
        tests = [self.federation.global_test(d) for d, s in enumerate(self.federation.shapes) if s == shape]
        parts = [part for x, y in tests for part in zip(torch.split(x, wide), torch.split(y, wide), strict=True)][share]

        @torch.no_grad()
        def count(part: tuple[Tensor, Tensor]) -> Tally:
            scores = method.predict(self.members.model(0), client, part[0], down)
            return tally(scores, part[1], own, confusion=confusion)

        return reduce(add, self.threads.mapping(parts)(count, parts)) if parts else None


def _operation(error: Exception) -> str:
    """The operation that an error of torch.vmap is about, or else its message."""
    found = re.search(r"aten::\w+|torch\.\w+|\.item\(\)", str(error))
    what = found.group() if found else "this model or method"
    return f"{what} ({first_line(error)[:200]})"
