"""A cache of lane steps and of passes over stacked clients: traced, compiled or captured."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from protofed.engines.resources import bytes_of, total_memory
from protofed.engines.stacked.data import StackedData
from protofed.engines.stacked.groups import Work
from protofed.engines.stacked.members import Members
from protofed.engines.stacked.step import Carried, Traced, lanes_step, now_of
from protofed.engines.stacks import cloned
from protofed.engines.wire import signature
from protofed.errors import first_line
from protofed.method import Phase, Tree
from protofed.ops.replay import Replay, Room

OFTEN = {"cpu": 2, "cuda": 1}  # times that a kind of step runs as it is before it is traced or captured
KEPT = 64  # most traced and captured steps
HELD = 8  # 1/8 of a GPU's memory for captured passes: cohorts change every round, so they have many shapes


class Steps:
    """The cached steps by kind and shape, and how often each was requested."""

    def __init__(self, members: Members, notes: list[str]) -> None:
        """`notes`: a list for messages to the user."""
        self.members, self.reference, self.device, self.notes = members, members.reference, members.device, notes
        self._steps: dict[Any, Any] = {}
        self._taken: dict[Any, int] = {}
        self._seen: dict[Any, Tree] = {}
        self._room: Room | None = None  # on a GPU
        self._held = 0  # bytes held by captured passes

    def forget(self) -> None:
        """Empty the cache."""
        for kept in (self._steps, self._taken, self._seen):
            kept.clear()
        self._room, self._held = None, 0

    def step(self, work: Work, phase: Phase, carried: Carried, feed: Tree, fixed: Tree) -> tuple[Any, Carried]:
        """A step of this kind, as optimised as it is worth, and its carried state, with room for reported sums."""
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
        """work(*inputs); on a GPU it is captured from the second call with the same shapes on."""
        if self.device.type != "cuda":
            return work(*inputs)
        form = (name, signature(inputs))
        self._taken[form] = self._taken.get(form, 0) + 1
        if form not in self._steps and self._taken[form] > 1:
            held = self._held + bytes_of(inputs)
            if held <= total_memory(self.device) // HELD and self._remember(form, lambda: self._replay(work, inputs)):
                self._held = held
        return self._steps[form].result(*inputs) if form in self._steps else work(*inputs)

    def _remember(self, name: Any, make: Callable[[], Any]) -> Any:
        """The cached item of this name, made now if there is room."""
        if name not in self._steps and len(self._steps) < KEPT:
            self._steps[name] = make()
        return self._steps.get(name)

    def _replay(self, work: Callable[..., Tree], inputs: Sequence[Tree]) -> Replay:
        self._room = self._room or Room()
        return Replay(work, inputs, self._room)

    def _trace(self, step: Callable[..., Any], inputs: Sequence[Tree]) -> Any:
        """The step as a list of operations, compiled if requested and possible."""
        if self.members.compiled:
            try:
                return Traced(step, inputs, compiled=True)
            except Exception as error:  # a compiler can fail in any way
                self.notes.append(
                    f"a training step could not be compiled and runs as it is ({first_line(error)[:200]})"
                )
        return Traced(step, inputs, compiled=False)

    def _captured(
        self, name: Any, core: Any, samples: StackedData, carried: Carried, feed: Tree, fixed: Tree
    ) -> Replay | None:
        """The step captured with its part of the feed; it advances the time itself."""
        length = len(feed[1])
        name = ("captured", name)
        time = torch.zeros(1, dtype=torch.int64, device=self.device)
        if name in self._steps and len(tree_leaves(self._steps[name].inputs[1])[0]) < length:
            del self._steps[name]  # no room for this many steps
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
