"""The Ray engine: stacked engines on the machines of a cluster, each doing a share of every round."""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch

from protofed.engines import Trained, nobody
from protofed.engines.base import OnReference
from protofed.engines.ray.cluster import Cluster
from protofed.engines.ray.worker import Job, Made, pack_states, pack_trees, unpack_tallies, unpack_trained
from protofed.engines.stacked.engine import StackedEngine
from protofed.engines.stacked.groups import ClientGroup
from protofed.method import Client, Method, Tree
from protofed.metrics import Tally, add


class RayEngine(OnReference):
    """Client states stay here and are sent to workers that lack them, so losing a worker loses no state.

    The grouping of clients, and so every sum, depends on the number of workers, not on which worker does what.
    """

    def __init__(
        self,
        stacked: StackedEngine,
        method: Method,
        make: Callable[[int, int], Made],
        data: str,
        join: Callable[[Callable[[str], None]], Cluster],
    ) -> None:
        """`make` builds a worker's engine on its machine, `data` is the data's expected hash, `join` finds machines."""
        self.stacked, self.reference, self.method = stacked, stacked.reference, method
        self.federation, self.device = stacked.federation, stacked.device
        self.architectures, self.clock = stacked.architectures, stacked.clock
        self.notes: list[str] = []
        self._make, self._data, self._join = make, data, join
        self._cluster: Cluster | None = None
        self._held: dict[int, Mapping[int, Client]] = {}  # by place: the states that the worker there has
        self._told: set[str] = set()
        self._server: tuple[Tree, Any] = None, None  # the latest server, and its bytes in Ray's store

    def start(self, tell: Callable[[str], None]) -> None:
        """Join or start Ray, and start all workers."""
        self._cluster = self._join(tell)
        try:
            self.device = torch.device(self.cluster.start(self._make, self._data))
        except BaseException:
            self.close()
            raise
        many, threads = self.cluster.workers, 1 if self.cluster.gpu else self.cluster.threads
        self.stacked.sizes.parts = threads * many
        each = "a GPU" if self.cluster.gpu else f"{threads} core{'s' * (threads > 1)}"
        tell(f"{many} worker{'s' * (many > 1)}{', each' if many > 1 else ''} with {each}")

    def close(self) -> None:
        """Stop the workers, and Ray if it was started for them."""
        if self._cluster is not None:
            self._cluster.close()
        self._cluster = None

    @property
    def cluster(self) -> Cluster:
        assert self._cluster is not None, "the engine is not started"
        return self._cluster

    # training

    def train(self, method: Method, server: Tree, cohort: Sequence[int], round: int) -> Trained:
        self.stacked.turn(round)
        if not any(self.federation.used(number) for number in cohort):
            return nobody(cohort)
        return self.stacked.summed(self._train("train", server, cohort, round))

    def finish(self, method: Method, server: Tree, cohort: Sequence[int], round: int) -> Trained:
        self.stacked.turn(round)
        return self._train("finish", server, cohort, round)

    def _train(self, work: str, server: Tree, cohort: Sequence[int], round: int) -> Trained:
        shares = self._shares(cohort)
        parts: dict[int, Trained] = {}

        def take(job: int, place: int, answer: Mapping[str, Any]) -> None:
            parts[job] = unpack_trained(answer, self.stacked.device)
            self._held[place] = parts[job].clients
            for name, seconds in answer["clock"].items():
                self.clock.add(name, seconds / len(shares))

        self._spread(work, shares, server, [{"round": round}] * len(shares), take)
        places = [place for share in shares for group in share for place in group.places]
        return self.stacked.joined([parts[i] for i in range(len(shares))], places)

    def _shares(self, cohort: Sequence[int]) -> list[list[ClientGroup]]:
        """The groups that one machine would make, each given to the worker with the least work."""
        groups = self.stacked.groups(cohort)
        shares: list[list[ClientGroup]] = [[] for _ in range(min(self.cluster.workers, len(groups)))]
        loads = [0.0] * len(shares)
        for group in sorted(groups, key=lambda group: -self._load(group)):
            least = loads.index(min(loads))
            shares[least].append(group)
            loads[least] += self._load(group)
        return shares

    def _load(self, group: ClientGroup) -> float:
        """A rough estimate of what a group costs."""
        samples = sum(self.federation.used(number) + 1 for number in group.numbers)
        return samples * (1e6 + self.reference.needs.flops(group.numbers[0]))

    def _spread(
        self,
        work: str,
        shares: Sequence[Sequence[ClientGroup]],
        server: Tree,
        options: Sequence[dict[str, Any]],
        take: Callable[[int, int, Mapping[str, Any]], None],
        states: bool = True,
    ) -> None:
        """Give each worker a share of the work."""
        told = self._put(server)

        def call(job: int, place: int) -> tuple[Any, Job]:
            groups = [(group.architecture, group.numbers) for group in shares[job]]
            numbers = [number for _, some in groups for number in some if states and number in self.clients]
            mine = {number: self.clients[number] for number in numbers}
            held = self._held.pop(place, {})
            known = [number for number, state in mine.items() if held.get(number) is state]
            lacking = {number: state for number, state in mine.items() if held.get(number) is not state}
            if not states:  # it keeps what it has
                known, mine = list(held), dict(held)
            sending[place] = mine
            return told, Job(work, groups, known, pack_states(lacking), options[job])

        def taken(job: int, place: int, answer: Mapping[str, Any]) -> None:
            self._held[place] = sending[place]
            self._note(answer["notes"])
            take(job, place, answer)

        sending: dict[int, Mapping[int, Client]] = {}
        self.cluster.spread(len(shares), call, taken)
        losses, self.cluster.losses = self.cluster.losses, []
        self.notes += losses

    def _note(self, notes: Sequence[str]) -> None:
        """Note the workers' messages, each once."""
        for note in notes:
            if note not in self._told:
                self._told.add(note)
                self.notes.append(note)

    def _put(self, server: Tree) -> Any:
        """Put a server into Ray's store, once for all workers and all uses."""
        if self._server[0] is not server or self._server[1] is None:
            self._server = server, self.cluster.ray.put(pack_trees(server))
        return self._server[1]

    # evaluation

    def evaluate(
        self, method: Method, server: Tree, cohort: Sequence[int], on: str, who: str, confusion: str = ""
    ) -> list[Tally]:
        shares = self._shares(cohort)
        found: dict[int, Tally] = {}

        def take(job: int, place: int, answer: Mapping[str, Any]) -> None:
            places = [place for group in shares[job] for place in group.places]
            found.update(zip(places, unpack_tallies(answer["tallies"]), strict=True))

        options = [{"on": on, "who": who, "confusion": confusion}] * len(shares)
        self._spread("evaluate", shares, server, options, take, states=who != "global")
        return [found[place] for place in range(len(cohort))]

    def global_tally(self, method: Method, server: Tree, confusion: str = "") -> Tally | None:
        if method.global_client(server) is None:
            return None
        many, found = self.cluster.workers, dict[int, list[Tally]]()

        def take(job: int, place: int, answer: Mapping[str, Any]) -> None:
            found[job] = unpack_tallies(answer["tallies"])

        options = [{"confusion": confusion, "share": slice(i, None, many)} for i in range(many)]
        self._spread("global", [[]] * many, server, options, take, states=False)
        return reduce(add, [tally for job in sorted(found) for tally in found[job]])

    # compiling

    def why_not(self, method: Method) -> str | None:
        return self.stacked.why_not(method)

    def guess(self, method: Method, rounds: int) -> float:
        return self.stacked.guess(method, rounds)

    def trial(self, method: Method, server: Tree, cohort: Sequence[int]) -> float:
        """Seconds of training per round, roughly: the longest that a worker reports."""
        seconds: list[float] = []
        many, options = self.cluster.workers, {"cohort": list(cohort)}

        def take(job: int, place: int, answer: Mapping[str, Any]) -> None:
            seconds.append(answer["seconds"])

        self._spread("trial", [[]] * many, server, [options] * many, take, states=False)
        return max(seconds)

    def use(self, compiled: bool) -> None:
        """From now on, compile training steps, or do not."""
        self.stacked.use(compiled)
        self.cluster.use(compiled)
