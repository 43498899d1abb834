"""Steps of lanes, and passes over stacked clients, that are kept: traced, compiled or captured."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from protofed.data.stacked import StackedData
from protofed.engines import memory
from protofed.engines.groups import Work
from protofed.engines.members import Members
from protofed.engines.stacks import cloned
from protofed.engines.step import Carried, Traced, lanes_step, now_of
from protofed.engines.wire import signature
from protofed.method import Phase, Tree
from protofed.ops.replay import Replay, Room

OFTEN = {"cpu": 2, "cuda": 1}  # times that a kind of step comes as it is, before it is traced or captured
KEPT = 64  # traced and captured steps
HELD = 8  # part of a GPU's memory for what captured passes take: with another cohort every round their shapes are many


class Steps:
    """What there is of every kind and shape, and how often it came."""

    def __init__(self, members: Members, notes: list[str]) -> None:
        """`notes`: where to put what the user should be told."""
        self.members, self.reference, self.device, self.notes = members, members.reference, members.device, notes
        self._steps: dict[Any, Any] = {}
        self._taken: dict[Any, int] = {}
        self._seen: dict[Any, Tree] = {}
        self._room: Room | None = None  # on a GPU
        self._held = 0  # bytes of what captured passes take

    def forget(self) -> None:
        """Begin anew."""
        for kept in (self._steps, self._taken, self._seen):
            kept.clear()
        self._room, self._held = None, 0

    def step(self, work: Work, phase: Phase, carried: Carried, feed: Tree, fixed: Tree) -> tuple[Any, Carried]:
        """A step of this kind, as fast as it is worth, and what it carries, with room for what is seen."""
        method, group, dims = work.method, work.group, work.dims
        samples, model = self.members.samples(group.architecture), self.members.model(group.numbers[0])
        compiled = self.members.compiled
        plain = lanes_step(method, phase, model, self.reference.optimizer, dims, self.reference.rounding, compiled)
        name = (group.architecture, method, phase, str(dims), signature((carried, fixed)))
        now = now_of(samples, tree_map(lambda t: t[0], feed), fixed)
        with self.members.lock:
            if name not in self._seen:
                self._seen[name] = tree_map(torch.zeros_like, plain(cloned(carried), now, *fixed[1:]))
            carried = carried._replace(seen=tree_map(torch.clone, self._seen[name]))
            form = (name, signature(now))
            self._taken[form] = self._taken.get(form, 0) + 1
            often = self._taken[form] > OFTEN[self.device.type]
            core: Any = plain
            if compiled or (often and self.device.type == "cpu"):
                core = self._remember(form, lambda: self._trace(plain, (carried, now, *fixed[1:]))) or plain
            if not often or self.device.type == "cpu":
                return core, carried
            return self._captured(form, core, samples, carried, feed, fixed) or core, carried

    def passed(self, name: Any, work: Callable[..., Tree], *inputs: Tree) -> Tree:
        """work(*inputs); on a GPU captured from the second time on that it comes in these shapes."""
        if self.device.type != "cuda":
            return work(*inputs)
        form = (name, signature(inputs))
        self._taken[form] = self._taken.get(form, 0) + 1
        if form not in self._steps and self._taken[form] > 1:
            held = self._held + memory.size(inputs)
            if held <= memory.whole(self.device) // HELD and self._remember(form, lambda: self._replay(work, inputs)):
                self._held = held
        return self._steps[form].result(*inputs) if form in self._steps else work(*inputs)

    def _remember(self, name: Any, make: Callable[[], Any]) -> Any:
        """What was made under this name, made now if there is room."""
        if name not in self._steps and len(self._steps) < KEPT:
            self._steps[name] = make()
        return self._steps.get(name)

    def _replay(self, work: Callable[..., Tree], inputs: Sequence[Tree]) -> Replay:
        self._room = self._room or Room()
        return Replay(work, inputs, self._room)

    def _trace(self, step: Callable[..., Any], inputs: Sequence[Tree]) -> Any:
        """The step as operations, compiled if that was asked for and works."""
        if self.members.compiled:
            try:
                return Traced(step, inputs, compiled=True)
            except Exception as error:  # whatever goes wrong in a compiler
                self.notes.append(f"a training step could not be compiled and runs as it is ({first_line(error)})")
        return Traced(step, inputs, compiled=False)

    def _captured(
        self, name: Any, core: Any, samples: StackedData, carried: Carried, feed: Tree, fixed: Tree
    ) -> Replay | None:
        """The step with its share of the feed captured, time counting up by itself."""
        length = len(feed[1])
        name = ("captured", name)
        time = torch.zeros(1, dtype=torch.int64, device=self.device)
        if name in self._steps and len(tree_leaves(self._steps[name].inputs[1])[0]) < length:
            del self._steps[name]  # it has no room for so many steps
        room = -(-length * 5 // 4)

        def step(carried: Carried, feed: Tree, time: Tensor, fixed: Tree) -> None:
            core(carried, now_of(samples, tree_map(lambda t: t.index_select(0, time)[0], feed), fixed), *fixed[1:])
            time.add_(1)

        def make() -> Replay:
            long = tree_map(lambda t: torch.cat([t, t.new_zeros(room - length, *t.shape[1:])]), feed)
            return self._replay(step, (carried, long, time, fixed))

        replay: Replay | None = self._remember(name, make)
        if replay is not None:
            replay.load(carried, feed, time, fixed)
        return replay


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
