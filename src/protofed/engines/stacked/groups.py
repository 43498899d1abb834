"""How clients are grouped, and how many train at once: decided by sizes, cache and memory alone."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.func import vmap

from protofed.engines.resources import memory_in_words
from protofed.engines.stacked.members import Members
from protofed.engines.stacked.packing import best_width
from protofed.engines.stacks import one_by_one
from protofed.errors import UserError
from protofed.method import Method, Tree

BUSY = {"cpu": 3e7, "cuda": 2e11}  # operations with which one client alone keeps a device busy
CACHE = 5 * 2**19  # bytes of the largest tensor in a step on a CPU, so the next operation finds it in the cache
PADDED = 1.15  # most padded samples per real sample, in one pass on a CPU


class Pace(NamedTuple):
    """The rough cost of a step, for choosing the number of lanes."""

    step: float  # seconds per step, whatever its content
    change: float  # seconds to hand lanes to the next clients
    speed: float  # operations per second


PACE = {"cuda": Pace(4e-4, 5e-4, 2e13), "cpu": Pace(1e-2, 5e-4, 2e10), "compiled": Pace(1e-3, 5e-4, 4e10)}


class ClientGroup(NamedTuple):
    """Clients that are trained at once."""

    architecture: str
    places: list[int]  # in the cohort
    numbers: list[int]

    def some(self, piece: Sequence[int]) -> "ClientGroup":
        """The clients at these places in the group."""
        return ClientGroup(self.architecture, [self.places[i] for i in piece], [self.numbers[i] for i in piece])


class Work(NamedTuple):
    """A group's work in a round."""

    method: Method
    group: ClientGroup
    round: int
    key: Tensor  # (M, 2)
    down: Tree  # what its clients receive
    dims: Tree  # the axis of clients in each leaf of it


class Sizes:
    """Chooses groups, lanes and pieces for an engine's clients."""

    def __init__(self, members: Members, chunk: int, parts: int, typical: Sequence[int]) -> None:
        """`chunk`: most lanes, or 0; `parts`: fewest groups per architecture; `typical`: the clients of a typical
        round."""
        self.members, self.reference, self.federation = members, members.reference, members.federation
        self.chunk, self.parts, self.typical = chunk, parts, typical
        self._kind = members.device.type
        self._widths: dict[str, int] = {}

    def forget(self) -> None:
        """Choose the number of lanes again."""
        self._widths.clear()

    def narrow(self) -> str:
        """Use fewer lanes after running out of memory; returns a message for the user."""
        widest = max(self._widths.values(), default=1)
        if widest == 1:
            raise UserError(
                "training one client at a time takes more memory than there is: "
                f"{memory_in_words(self.members.device)}. Use a smaller model or batch_size."
            )
        self.chunk = widest // 2
        self.forget()
        return f"too little memory for {widest} clients at once; going on with {self.chunk}"

    # training

    def groups(self, cohort: Sequence[int]) -> list[ClientGroup]:
        """Clients of one architecture, most samples first, spread evenly over the workers."""
        by_name: dict[str, list[int]] = {}
        for place in sorted(range(len(cohort)), key=lambda place: -self.federation.used(cohort[place])):
            by_name.setdefault(self.reference.architectures[cohort[place]], []).append(place)
        groups = []
        for name, places in by_name.items():
            fits = self.reference.needs.states_that_fit(cohort[places[0]])
            parts = min(len(places), max(self.parts, -(-len(places) // fits)))
            dealt: list[list[int]] = [[] for _ in range(parts)]
            loads = [0] * parts
            for place in places:  # each to the group with the least work
                group = loads.index(min(loads))
                dealt[group].append(place)
                loads[group] += self.federation.used(cohort[place]) + 1
            groups += [ClientGroup(name, some, [cohort[place] for place in some]) for some in dealt]
        return groups

    def width(self, group: ClientGroup) -> int:
        """Lanes for this architecture: the same in every round, so steps keep their shape."""
        with self.members.lock:
            name = group.architecture
            if name not in self._widths:
                groups = [g for g in self.groups(self.typical) if g.architecture == name] or [group]
                pace, each = self._pace, self._seconds(group)
                width = max(best_width(self._steps(g), pace.step, each, pace.change) for g in groups)
                at_once = self.parts if self._kind == "cpu" else 1
                fits = self.reference.needs.lanes_that_fit(group.numbers[0]) // at_once
                if self._kind == "cpu":
                    each_lane = self.reference.needs.largest(group.numbers[0]) * self.federation.widest
                    fits = min(fits, CACHE // max(1, each_lane))
                self._widths[name] = max(1, min(width, self.chunk or width, fits))
            return self._widths[name]

    def guess(self, method: Method, rounds: int) -> float:
        """Seconds of training for `rounds` rounds, a very rough guess."""
        epochs = sum(phase.passes(self.reference.local_epochs) for phase in method.phases())
        seconds = 0.0
        for group in self.groups(self.typical):
            steps, each = sum(self._steps(group)), self._seconds(group)
            seconds += steps * epochs * (self._pace.step / self.width(group) + each)
        return rounds * seconds / self.parts

    @property
    def _pace(self) -> Pace:
        return PACE["cuda" if self._kind == "cuda" else "compiled" if self.members.compiled else "cpu"]

    def _steps(self, group: ClientGroup) -> list[int]:
        """Training steps of each client in an epoch."""
        return [self.federation.steps(i) for i in group.numbers]

    def _seconds(self, group: ClientGroup) -> float:
        """Seconds that a lane adds to a step, roughly."""
        return self.reference.needs.flops(group.numbers[0]) * self.federation.widest / self._pace.speed

    # outside of training

    def at_once(self, group: ClientGroup) -> int:
        """Samples of all clients in one pass."""
        return self.reference.needs.together(group.numbers[0])

    def mapped(self, group: ClientGroup, sizes: Sequence[int]) -> Callable[..., Any]:
        """How to turn a function of one client into one of many."""
        return one_by_one if self._alone(group, sizes) else vmap

    def pieces(self, group: ClientGroup, sizes: Sequence[int]) -> list[list[int]]:
        """Clients to pass together: on a CPU those of similar size, to save padding, unless one alone keeps it
        busy."""
        if self._kind != "cpu":
            return [list(range(len(sizes)))]
        if self._alone(group, sizes):
            return [[place] for place in range(len(sizes))]
        pieces: list[list[int]] = []
        largest = real = 0
        for place in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            padded = largest * (len(pieces[-1]) + 1) if pieces else 0
            if not pieces or padded > max(1024, PADDED * (real + sizes[place])):
                pieces.append([])
                largest, real = sizes[place], 0
            pieces[-1].append(place)
            real += sizes[place]
        return [sorted(piece) for piece in pieces]

    def _alone(self, group: ClientGroup, sizes: Sequence[int]) -> bool:
        """Whether this many samples of one client keep the device busy by themselves."""
        return self.reference.needs.flops(group.numbers[0]) * sum(sizes) / max(1, len(sizes)) > BUSY[self._kind]
