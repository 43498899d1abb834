"""GPU work that is captured once and replayed."""

import warnings
from collections.abc import Callable, Sequence

import torch
from torch.utils._pytree import tree_leaves, tree_map

from protofed.method import Tree

WARM = 3  # runs before capturing, so that libraries can choose their kernels


class Room:
    """Memory that captures share, since only one of them is replayed at a time."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.first = torch.cuda.CUDAGraph()  # keeps the memory alive
        with torch.cuda.graph(self.first):
            self.something = torch.zeros(1, device="cuda")
        self.pool = self.first.pool()


class Replay:
    """GPU work captured once and replayed: launching it costs one call instead of hundreds.

    Inputs have their own memory, which the work may change. Intermediate values and results share memory with other
    captures (`room`), so take a result before another capture is replayed.
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
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # inputs may already be on the GPU
            with torch.cuda.graph(self.graph, pool=room.pool):
                self.outputs = work(*self.inputs)

    def load(self, *inputs: Tree) -> None:
        """Copy in these inputs; shorter ones fill the beginning of their buffer."""
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
        """What the work returns for these inputs."""
        self.load(*inputs)
        self.graph.replay()
        return tree_map(torch.clone, self.outputs)


def captured(work: Callable[..., Tree], *inputs: Tree) -> Callable[..., Tree]:
    """The same work for inputs of these shapes; on a GPU it is captured, so its operations need one launch."""
    return Replay(work, inputs, Room()).result if any(t.is_cuda for t in tree_leaves(inputs)) else work
