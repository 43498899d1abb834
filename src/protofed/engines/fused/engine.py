"""Several runs at once: what they request in the same round is done for the clients of all of them together."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.utils._pytree import tree_map

from protofed.engines import Trained, nobody
from protofed.engines.base import OnReference
from protofed.engines.fused.clock import SharedClock
from protofed.engines.fused.method import FusedMethod, broadcast_rows
from protofed.engines.fused.reference import JointReference
from protofed.engines.resources import Clock
from protofed.engines.stacked.engine import StackedEngine
from protofed.engines.stacked.threads import alone_on_its_core
from protofed.engines.stacks import along
from protofed.engines.sums import merged, summed, summed_in_order
from protofed.engines.wire import measure_down, measure_up, signature
from protofed.errors import first_line
from protofed.method import Client, Mean, Method, Tree
from protofed.metrics import Tally

Test = tuple[str, str, str]  # on, who, confusion


class Question(NamedTuple):
    """A run's request: to train these clients, or to test them."""

    run: int
    server: Tree
    cohort: Sequence[int]
    round: int
    test: Test | None = None  # None: train


class RunEngine(OnReference):
    """The engine of one of the runs: trains and tests together with the others, and does the rest by itself."""

    def __init__(self, fusion: "Fusion", number: int, alone: StackedEngine, rounds: int) -> None:
        """`alone`: the engine that the run would have by itself; `rounds`: how many it has."""
        self.fusion, self.number, self.alone, self.rounds = fusion, number, alone, rounds
        self.reference, self.architectures = alone.reference, alone.architectures
        self.notes: list[str] = []
        self.shared = SharedClock(alone.device)
        self.clock: Clock = self.shared
        self.choice: dict[str, Any] = {}  # what was chosen for all runs, to be kept with each
        self.over = False  # whether it has trained its last round

    def train(self, method: Method, server: Tree, cohort: Sequence[int], round: int) -> Trained:
        if not any(self.alone.federation.used(number) for number in cohort):
            return nobody(cohort)
        trained: Trained = self.fusion.answer(Question(self.number, server, cohort, round))
        self.over = round + 1 >= self.rounds
        return trained

    def evaluate(
        self, method: Method, server: Tree, cohort: Sequence[int], on: str, who: str, confusion: str = ""
    ) -> list[Tally]:
        tallies: list[Tally] = self.fusion.answer(Question(self.number, server, cohort, 0, (on, who, confusion)))
        return tallies

    def ended(self) -> None:
        self.over = True

    def finish(self, method: Method, server: Tree, cohort: Sequence[int], round: int) -> Trained:
        return self.alone.finish(method, server, cohort, round)

    def global_tally(self, method: Method, server: Tree, confusion: str = "") -> Tally | None:
        return self.alone.global_tally(method, server, confusion)


class Fusion:
    """Brings runs of one kind together. Each has a thread of its own for its round loop; the thread that calls `run`
    trains and tests the clients of all of them."""

    def __init__(
        self,
        methods: Sequence[Method],
        engines: Sequence[StackedEngine],
        rounds: Sequence[int],
        *,
        chunk: int = 0,
        workers: int = 1,
    ) -> None:
        """`engines`: each run's engine, as if it were alone; `rounds`: how many rounds each has."""
        self.methods, self.method = list(methods), FusedMethod.of(methods)
        self.reference = JointReference(methods, [engine.reference for engine in engines])
        starts = self.reference.joint.starts
        typical = [start + i for start, engine in zip(starts, engines, strict=True) for i in engine.sizes.typical]
        self.engine = StackedEngine(self.reference, chunk=chunk, workers=workers, ordered=True, typical=typical)
        self.runs = [RunEngine(self, i, *pair) for i, pair in enumerate(zip(engines, rounds, strict=True))]
        self.apart = ""  # why runs are trained one after another after all
        self._at_work = threading.Lock()  # held by the one run that is at work: each has a core to itself, and its time
        self._news = threading.Condition()
        self._live: set[int] = set()
        self._asked: dict[int, Question] = {}
        self._answers: dict[int, Any] = {}

    # for the runs

    def answer(self, question: Question) -> Any:
        """The answer to a run's request, given when the others have made theirs."""
        clock, asked = self.runs[question.run].shared, time.perf_counter()
        with self._news:
            self._asked[question.run] = question
            self._news.notify_all()
            self._at_work.release()
            self._news.wait_for(lambda: question.run in self._answers)
            found, seconds = self._answers.pop(question.run)
        self._at_work.acquire()
        clock.elsewhere += time.perf_counter() - asked - seconds
        if isinstance(found, BaseException):
            raise found
        return found

    # for who brings them together

    def first(self, servers: Sequence[Tree], cohorts: Sequence[Sequence[int]]) -> tuple[Tree, list[int]]:
        """What these servers send in the first round, and the numbers of the clients that receive it."""
        some = []
        for run, (server, cohort) in enumerate(zip(servers, cohorts, strict=True)):
            down = self.methods[run].broadcast(server, self.engine.members.ids(cohort))
            some.append((Question(run, server, cohort, 0), down))
        numbers, down = self._joined(some, [len(cohort) for cohort in cohorts])
        return down, numbers

    def run(self, works: Sequence[Callable[[RunEngine], None]]) -> None:
        """Carry out each run's work with its engine; returns when all have ended. KeyboardInterrupt reaches all runs
        at their next question."""
        threads = [threading.Thread(target=self._work, args=pair) for pair in zip(works, self.runs, strict=True)]
        self._live = set(range(len(threads)))
        for thread in threads:
            thread.start()
        interrupted: KeyboardInterrupt | None = None
        while self._live:
            try:
                self._answer_all(interrupted)
            except KeyboardInterrupt as stop:
                interrupted = stop
        for thread in threads:
            thread.join()

    def _work(self, work: Callable[[RunEngine], None], engine: RunEngine) -> None:
        alone_on_its_core()
        try:
            with self._at_work:
                work(engine)
        finally:
            with self._news:
                self._live.discard(engine.number)
                self._news.notify_all()

    def _answer_all(self, interrupted: KeyboardInterrupt | None) -> None:
        """Wait until there is work for all runs that can take part, and do it."""
        with self._news:
            self._news.wait_for(lambda: bool(interrupted and self._asked) or bool(self._due()) or not self._live, 0.5)
            due = list(self._asked.values()) if interrupted else self._due()
        if not due:
            return
        answers: dict[int, tuple[Any, float]] = {}
        try:
            if interrupted:
                answers = {question.run: (KeyboardInterrupt(), 0.0) for question in due}
            else:
                answers = self._answered(due)
        finally:
            with self._news:
                for number, found in answers.items():
                    self._asked.pop(number)
                    self._answers[number] = found
                self._news.notify_all()

    def _due(self) -> list[Question]:
        """The requests whose turn it is. All runs in their rounds wait for each other, and so do those that are being
        measured at the end. Tests come first, so that runs get back into step."""
        for over in (True, False):
            live = [number for number in sorted(self._live) if self.runs[number].over == over]
            asked = [self._asked[number] for number in live if number in self._asked]
            if asked and len(asked) == len(live):
                return [question for question in asked if question.test] or asked
        return []

    def _answered(self, due: Sequence[Question]) -> dict[int, tuple[Any, float]]:
        """Answers by run, with the seconds that each took."""
        kinds: dict[Any, list[tuple[Question, Tree]]] = {}
        for question in due:
            run = self.runs[question.run]
            down = self.methods[question.run].broadcast(question.server, run.alone.members.ids(question.cohort))
            form = signature(tree_map(lambda t: t[0], broadcast_rows(down, len(question.cohort))))
            kinds.setdefault((question.test, form), []).append((question, down))
        answers: dict[int, tuple[Any, float]] = {}
        for some in kinds.values():
            answers |= self._together(some) if len(some) > 1 and not self.apart else self._alone(some)
        return answers

    def _together(self, some: Sequence[tuple[Question, Tree]]) -> dict[int, tuple[Any, float]]:
        started, sizes = time.perf_counter(), [len(question.cohort) for question, _ in some]
        self.reference.clock.take()
        try:
            found = self._trained(some, sizes) if some[0][0].test is None else self._tested(some, sizes)
        except Exception as error:  # whatever it is, each run should meet it alone or not at all
            self.apart = first_line(error)[:200]
            self.engine.steps.forget()
            self.engine.members.forget()
            note = f"runs cannot be trained together ({self.apart}); they continue one after another"
            self.runs[some[0][0].run].notes.append(note)
            return self._alone(some)
        self.runs[some[0][0].run].notes += self.engine.notes
        self.engine.notes.clear()
        seconds, parts = time.perf_counter() - started, self.reference.clock.take()
        answers = {}
        for (question, _), size, answer in zip(some, sizes, found, strict=True):
            share = size / sum(sizes)
            for name, took in parts.items():
                self.runs[question.run].clock.add(name, took * share)
            answers[question.run] = answer, seconds * share
        return answers

    def _alone(self, some: Sequence[tuple[Question, Tree]]) -> dict[int, tuple[Any, float]]:
        """Do each request with the engine that its run would have alone; an error concerns this run only."""
        answers: dict[int, tuple[Any, float]] = {}
        for (run, server, cohort, round, test), _ in some:
            started, engine, method = time.perf_counter(), self.runs[run].alone, self.methods[run]
            answer: Any
            try:
                if test is None:
                    answer = engine.train(method, server, cohort, round)
                else:
                    answer = engine.evaluate(method, server, cohort, *test)
            except Exception as error:
                answer = error
            for name, took in engine.clock.take().items():
                self.runs[run].clock.add(name, took)
            self.runs[run].notes += engine.notes
            engine.notes.clear()
            answers[run] = answer, time.perf_counter() - started
        return answers

    def _joined(self, some: Sequence[tuple[Question, Tree]], sizes: Sequence[int]) -> tuple[list[int], Tree]:
        """The numbers of these clients in the joint federation, and what they receive."""
        joint = self.reference.joint
        for question, _ in some:
            joint.rounds[question.run] = question.round
        numbers = [joint.starts[question.run] + i for question, _ in some for i in question.cohort]
        methods = [self.methods[question.run] for question, _ in some]
        return numbers, self.method.joined(methods, [down for _, down in some], sizes, self.engine.device)

    def _trained(self, some: Sequence[tuple[Question, Tree]], sizes: Sequence[int]) -> list[Trained]:
        numbers, down = self._joined(some, sizes)
        trained = self.engine.share(self.method, down, numbers, self.engine.groups(numbers), 0)
        found, start = [], 0
        for (question, sent), size in zip(some, sizes, strict=True):
            rows = slice(start, start + size)
            found.append(self._part(question, sent, trained, numbers[rows], rows))
            start += size
        return found

    def _part(self, question: Question, down: Tree, trained: Trained, numbers: Sequence[int], rows: slice) -> Trained:
        """The part of a result that belongs to one run, with its uploads summed as it would sum them alone."""
        alone, many = self.runs[question.run].alone, len(numbers)
        up = tree_map(lambda t: t[rows], trained.up)
        loss: Mean = tree_map(lambda t: t[rows], trained.loss)
        clients: dict[int, Client] = {
            i: trained.clients[number] for i, number in zip(question.cohort, numbers, strict=True)
        }
        groups = alone.groups(question.cohort)
        order = alone.members.ids([place for group in groups for place in group.places]).argsort()
        sums = [summed(along(alone.members.ids(group.places), up)) for group in groups]
        return Trained(
            up=summed_in_order(up) if alone.ordered else merged(sums, order, ordered=False),
            clients=clients,
            loss=loss,
            finite=trained.finite[rows],
            sent=measure_up(up, many),
            received=measure_down(down, many),
        )

    def _tested(self, some: Sequence[tuple[Question, Tree]], sizes: Sequence[int]) -> list[list[Tally]]:
        assert some[0][0].test is not None
        on, who, confusion = some[0][0].test
        numbers, down = self._joined(some, sizes)
        if who == "global":
            wholes = [self.methods[question.run].global_client(question.server) for question, _ in some]
            each = [whole for whole, size in zip(wholes, sizes, strict=True) for _ in range(size)]
            self.reference.instead = {n: whole for n, whole in zip(numbers, each, strict=True) if whole is not None}
        try:
            tallies = self.engine.evaluate(self.method, down, numbers, on, "personal", confusion)
        finally:
            self.reference.instead = {}
        found = []
        for size in sizes:
            found.append(tallies[:size])
            tallies = tallies[size:]
        return found
