"""Which clients are together, and how many of them train at once: chosen by sizes, cache and memory alone."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.func import vmap

from protofed.data.lanes import best_width
from protofed.engines import memory
from protofed.engines.members import Members
from protofed.engines.stacks import one_by_one
from protofed.errors import UserError
from protofed.method import Method, Tree

BUSY = {"cpu": 3e7, "cuda": 2e11}  # operations of one client that keep a device busy by themselves
CACHE = 5 * 2**19  # bytes for the largest thing that a step makes on a CPU, so that the next operation finds it there
PADDED = 1.15  # samples with padding to those without, in one pass on a CPU


class Pace(NamedTuple):
    """Roughly what a step takes, whoever trains, to choose the number of lanes by."""

    step: float  # seconds, whatever is in it
    change: float  # seconds to pass lanes on
    speed: float  # operations a second


PACE = {"cuda": Pace(4e-4, 5e-4, 2e13), "cpu": Pace(1e-2, 5e-4, 2e10), "compiled": Pace(1e-3, 5e-4, 4e10)}


class Group(NamedTuple):
    """Clients that are trained at once."""

    architecture: str
    places: list[int]  # in the cohort
    numbers: list[int]

    def some(self, piece: Sequence[int]) -> "Group":
        """Those at these places in the group."""
        return Group(self.architecture, [self.places[i] for i in piece], [self.numbers[i] for i in piece])


class Work(NamedTuple):
    """What a group does in a round."""

    method: Method
    group: Group
    round: int
    key: Tensor  # (M, 2)
    down: Tree  # what its clients get
    dims: Tree  # along which axis that is dealt to them


class Sizes:
    """Groups, lanes and pieces of the clients of an engine."""

    def __init__(self, members: Members, chunk: int, parts: int, typical: Sequence[int]) -> None:
        """`chunk`: lanes at most, or 0; `parts`: groups of one architecture at least; `typical`: the clients of a
        round."""
        self.members, self.reference, self.federation = members, members.reference, members.federation
        self.chunk, self.parts, self.typical = chunk, parts, typical
        self._kind = members.device.type
        self._widths: dict[str, int] = {}

    def forget(self) -> None:
        """Choose the number of lanes anew."""
        self._widths.clear()

    def narrow(self) -> str:
        """Fewer lanes, where there was too little memory for so many; returns what the user should be told."""
        widest = max(self._widths.values(), default=1)
        if widest == 1:
            raise UserError(
                "training one client at a time takes more memory than there is: "
                f"{memory.told(self.members.device)}. Use a smaller model or batch_size."
            )
        self.chunk = widest // 2
        self.forget()
        return f"too little memory for {widest} clients at once; going on with {self.chunk}"

    # training

    def groups(self, cohort: Sequence[int]) -> list[Group]:
        """Clients of one architecture, those with the most samples first, dealt evenly to the workers."""
        by_name: dict[str, list[int]] = {}
        for place in sorted(range(len(cohort)), key=lambda place: -self.federation.used(cohort[place])):
            by_name.setdefault(self.reference.architectures[cohort[place]], []).append(place)
        groups = []
        for name, places in by_name.items():
            fits = self.reference.needs.states_that_fit(cohort[places[0]])
            parts = min(len(places), max(self.parts, -(-len(places) // fits)))
            dealt: list[list[int]] = [[] for _ in range(parts)]
            loads = [0] * parts
            for place in places:  # each to the group that has least to do
                group = loads.index(min(loads))
                dealt[group].append(place)
                loads[group] += self.federation.used(cohort[place]) + 1
            groups += [Group(name, some, [cohort[place] for place in some]) for some in dealt]
        return groups

    def width(self, group: Group) -> int:
        """Lanes for this architecture: the same in every round, so that a step has the same shape."""
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
        """Seconds of training that so many rounds take, very roughly."""
        epochs = sum(phase.passes(self.reference.local_epochs) for phase in method.phases())
        seconds = 0.0
        for group in self.groups(self.typical):
            steps, each = sum(self._steps(group)), self._seconds(group)
            seconds += steps * epochs * (self._pace.step / self.width(group) + each)
        return rounds * seconds / self.parts

    @property
    def _pace(self) -> Pace:
        return PACE["cuda" if self._kind == "cuda" else "compiled" if self.members.compiled else "cpu"]

    def _steps(self, group: Group) -> list[int]:
        """Training steps of each client in an epoch."""
        return [self.federation.steps(i) for i in group.numbers]

    def _seconds(self, group: Group) -> float:
        """What a lane adds to a step, roughly."""
        return self.reference.needs.flops(group.numbers[0]) * self.federation.widest / self._pace.speed

    # outside of training

    def at_once(self, group: Group) -> int:
        """Samples of all clients in one pass."""
        return self.reference.needs.together(group.numbers[0])

    def mapped(self, group: Group, sizes: Sequence[int]) -> Callable[..., Any]:
        """How a function of one client becomes one of many."""
        return one_by_one if self._alone(group, sizes) else vmap

    def pieces(self, group: Group, sizes: Sequence[int]) -> list[list[int]]:
        """Clients that are passed together: on a CPU those of like size, for less padding, unless one alone keeps it
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

    def _alone(self, group: Group, sizes: Sequence[int]) -> bool:
        """Whether so many samples of one client keep the device busy by themselves."""
        return self.reference.needs.flops(group.numbers[0]) * sum(sizes) / max(1, len(sizes)) > BUSY[self._kind]
