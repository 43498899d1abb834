"""Work on a GPU that is captured once and replayed."""

import warnings
from collections.abc import Callable, Sequence

import torch
from torch.utils._pytree import tree_leaves, tree_map

from protofed.method import Tree

WARM = 3  # runs before capturing, in which libraries choose their kernels


class Room:
    """Memory that captured works share, since only one of them is replayed at a time."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.first = torch.cuda.CUDAGraph()  # while there is one, the memory stays
        with torch.cuda.graph(self.first):
            self.something = torch.zeros(1, device="cuda")
        self.pool = self.first.pool()


class Replay:
    """Work on a GPU captured once and replayed: launching it costs one call instead of hundreds.

    It has memory of its own for all that it takes, which the work may change; what is made in between, and what it
    returns, is where others make theirs (`room`), so that a result is to be taken before another is replayed.
    """

    def __init__(self, work: Callable[..., Tree], inputs: Sequence[Tree], room: Room) -> None:
        room.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(room.stream):
            self.inputs = tree_map(lambda t: t.clone(memory_format=torch.contiguous_format), tuple(inputs))
            for _ in range(WARM):
                work(*self.inputs)
        torch.cuda.current_stream().wait_stream(room.stream)
        self.graph = torch.cuda.CUDAGraph()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # what is sent may be there already
            with torch.cuda.graph(self.graph, pool=room.pool):
                self.outputs = work(*self.inputs)

    def load(self, *inputs: Tree) -> None:
        """Take these; those that are shorter than what there is room for fill its beginning."""
        mine, given = tree_leaves(self.inputs), tree_leaves(inputs)
        same = [(m, g) for m, g in zip(mine, given, strict=True) if m.shape == g.shape]
        if same:
            torch._foreach_copy_([m for m, _ in same], [g for _, g in same])
        for room, short in zip(mine, given, strict=True):
            if room.shape != short.shape:
                room[: len(short)].copy_(short)

    def __call__(self) -> None:
        self.graph.replay()

    def result(self, *inputs: Tree) -> Tree:
        """What the work returns for these."""
        self.load(*inputs)
        self.graph.replay()
        return tree_map(torch.clone, self.outputs)


def captured(work: Callable[..., Tree], *inputs: Tree) -> Callable[..., Tree]:
    """The same work for inputs of these shapes, on a GPU without launching its every operation."""
    return Replay(work, inputs, Room()).result if any(t.is_cuda for t in tree_leaves(inputs)) else work
