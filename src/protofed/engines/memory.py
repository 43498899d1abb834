"""How much memory there is, and how much a model takes: counted on shapes alone, before anything is allocated."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from protofed.errors import UserError
from protofed.method import Tree

SHARE = 0.4  # of all memory, for the steps of training; the rest is for states, data and everything else


class _Counter(TorchDispatchMode):
    """Bytes of all that operations make, and of the largest of them."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not func.is_view:
            size = sum(t.numel() * t.element_size() for t in tree_leaves(made) if isinstance(t, Tensor))
            self.total, self.largest = self.total + size, max(self.largest, size)
        return made


def on_meta(tree: Tree) -> Tree:
    """Shapes without numbers."""
    return tree_map(lambda t: torch.empty_like(t, device="meta"), tree)


def size(tree: Tree) -> int:
    """Bytes of all tensors in a tree."""
    return sum(t.numel() * t.element_size() for t in tree_leaves(tree))


def counted(work: Callable[..., Any], *inputs: Tree) -> tuple[int, int]:
    """Bytes that some work makes in all, and in its largest operation, on inputs of these shapes."""
    with _Counter() as counter:
        work(*on_meta(inputs))
    return counter.total, counter.largest


def free(device: torch.device) -> int:
    """Bytes that can still be had."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        left = whole(device) - torch.cuda.memory_reserved(device)  # of this process's part
        return min(torch.cuda.mem_get_info(device)[0], left) + cached
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    limits = [limit - used for limit, used in (_group_limit(),) if limit is not None]
    return min([*found, *limits], default=4 * 2**30)


def _group_limit() -> tuple[int | None, int]:
    """What this process's control group may use, if it says so, and what it uses."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        numbers = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None, 0
    return (None if limit == "max" else int(limit)), used - int(numbers.get("inactive_file", 0))  # files can go


def whole(device: torch.device) -> int:
    """Bytes that there are: by this, which does not change, is chosen how many clients are trained at once."""
    if device.type == "cuda":
        number = torch.cuda.current_device() if device.index is None else device.index
        part = torch.cuda.get_per_process_memory_fraction(number)  # less than 1 where others are on it
        return int(torch.cuda.get_device_properties(device).total_memory * part)
    limit, _ = _group_limit()
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return pages if limit is None else min(pages, limit)


def fitting(each: int, device: torch.device, what: str, remedy: str) -> int:
    """How many things of so many bytes fit; an error where not even one does."""
    if each > free(device):
        raise UserError(f"{what} takes about {_mb(each)}, but {told(device)}. {remedy}")
    return max(1, int(whole(device) * SHARE) // max(1, each))


def told(device: torch.device) -> str:
    """How much memory there is, in words."""
    return f"only {_mb(free(device))} of {_mb(whole(device))} of memory are free"


def _mb(amount: int) -> str:
    return f"{amount / 2**20:,.0f} MB"
