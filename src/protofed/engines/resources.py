"""What training needs from a machine: memory, counted from shapes before anything is allocated; seconds; threads."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from protofed.data.batches import Federation
from protofed.errors import UserError
from protofed.method import Client, Params, Spec, Tree
from protofed.models.functional import FunctionalModel, state
from protofed.ops import random

SHARE = 0.4  # share of all memory for training steps; the rest is for states, data and everything else
GROUP, GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")  # the control groups; those of this process
LIMIT = {  # of a group in version 2 and in version 1: its limit, what is in use, and of that what is cached of files
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
NEAR = 2**23  # bytes of states per group on a CPU: more would drop out of its cache between two uses
MOST = {"cpu": 1024, "cuda": 16384}  # samples per pass outside training: what a CPU's cache holds; plenty on a GPU
SMALL = 2**24  # models and samples up to this many bytes are run for real: shape-only tensors load torch's compiler
COUNTLESS = (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError)  # if a model needs real numbers
UNCOUNTED = 1000  # bytes that such a model allocates per input byte, roughly


def cache_folder() -> Path:
    """Where the results of long computations are kept for other runs: $PROTOFED_CACHE, else ~/.cache/protofed."""
    return Path(os.environ.get("PROTOFED_CACHE") or Path.home() / ".cache" / "protofed")


def free(device: torch.device) -> int:
    """Bytes of memory still available."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        left = total_memory(device) - torch.cuda.memory_reserved(device)  # of this process's share
        return min(torch.cuda.mem_get_info(device)[0], left) + cached
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min([*found, *(limit - used for limit, used in _limits())], default=4 * 2**30)


def _limits() -> Iterator[tuple[int, int]]:
    """The memory limits of this process's control groups and of those around them, and how much each has in use."""
    lines = GROUPS.read_text().splitlines() if GROUPS.exists() else ["0::/"]
    for _, controllers, path in (line.split(":", 2) for line in lines):
        for version in {*controllers.split(",")} & {*LIMIT}:
            root = GROUP / version
            inside = root / path.lstrip("/")
            for group in (inside, *inside.parents[: len(inside.parents) - len(root.parents)]):
                with contextlib.suppress(OSError, ValueError):  # it has no limit, or "max"
                    yield _limit(group, *LIMIT[version])


def _limit(group: Path, limit: str, used: str, cached: str) -> tuple[int, int]:
    numbers = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    files = int(numbers.get(cached, 0))  # given back when somebody needs memory
    return int((group / limit).read_text()), int((group / used).read_text()) - files


def total_memory(device: torch.device) -> int:
    """Bytes of memory in total. This does not change, so it decides how many clients are trained at once."""
    if device.type == "cuda":
        number = torch.cuda.current_device() if device.index is None else device.index
        part = torch.cuda.get_per_process_memory_fraction(number)  # below 1 if others share it
        return int(torch.cuda.get_device_properties(device).total_memory * part)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([pages, *(limit for limit, _ in _limits())])


def how_many_fit(each: int, device: torch.device, what: str, remedy: str) -> int:
    """How many items of this size fit in memory. Raises if none does."""
    if each > free(device):
        raise UserError(f"{what} takes about {_mb(each)}, but {memory_in_words(device)}. {remedy}")
    return max(1, int(total_memory(device) * SHARE) // max(1, each))


def memory_in_words(device: torch.device) -> str:
    """The amount of memory, for people."""
    return f"only {_mb(free(device))} of {_mb(total_memory(device))} of memory are free"


def _mb(amount: int) -> str:
    return f"{amount / 2**20:,.0f} MB"


class Needs:
    """The memory and operations that the networks of a reference engine's clients need."""

    def __init__(
        self,
        federation: Federation,
        architectures: Sequence[str],  # of each client
        models: Mapping[str, FunctionalModel],
        modules: Mapping[str, nn.Module],
        common: Mapping[str, Spec],
    ) -> None:
        self.federation, self.architectures = federation, architectures
        self._models, self._modules, self._common = models, modules, common
        self._together: dict[str, int] = {}
        self._largest: dict[str, int] = {}
        self._flops: dict[str, float] = {}
        self._lanes: dict[str, int] = {}

    def largest(self, number: int) -> int:
        """Bytes of the largest tensor that a client's network computes from one sample."""
        name = self.architectures[number]
        if name not in self._largest:
            x = self.federation.train(number).x[:1]
            x = x if len(x) else self.federation.blank(number, 1)
            self._largest[name] = 0
            with torch.no_grad(), contextlib.suppress(*COUNTLESS):
                client = Client(*state(self._modules[name]))
                small = bytes_of((client, x)) < SMALL
                _, self._largest[name] = counted_bytes(self._models[name], client, x, as_they_are=small)
        return self._largest[name]

    def together(self, number: int) -> int:
        """Samples per pass through a client's network outside training: as many as fit in memory."""
        name, device = self.architectures[number], self.federation.device
        if name not in self._together:
            remedy = "Use a smaller model or smaller inputs."
            fits = how_many_fit(3 * self.largest(number), device, f"one sample in {name}", remedy)
            self._together[name] = max(1, min(fits // 2, MOST[device.type]))
        return self._together[name]

    def lanes_that_fit(self, number: int) -> int:
        """How many clients of this network can train at once, counting everything that one's step allocates."""
        name = self.architectures[number]
        if name not in self._lanes:
            model, spec = self._models[name], self._common[name]
            x = self.federation.blank(number, self.federation.widest)

            def step(params: Params, x: Tensor) -> Tensor:
                logits: Tensor = model.training(spec.buffers, key)(Client(params, spec.buffers), x)[1]
                return logits.square().sum()

            small, key = self.federation.device.type == "cpu" and bytes_of((spec.params, x)) < SMALL, random.key(0)
            if not small:
                key, spec = on_meta(key), spec._replace(buffers=on_meta(spec.buffers))
            from protofed.ops.derivatives import grad  # a client stacks nothing, and loads no more than it needs

            try:
                made, _ = counted_bytes(grad(step), spec.params, x, as_they_are=small)
            except COUNTLESS:
                made = UNCOUNTED * self.federation.widest * bytes_of(x[:1])
            each, remedy = made + 4 * bytes_of(spec.params), "Use a smaller model or batch_size."
            self._lanes[name] = how_many_fit(each, self.federation.device, f"training one client of {name}", remedy)
        return self._lanes[name]

    def states_that_fit(self, number: int) -> int:
        """How many clients' states of this network fit in memory at once, next to everything else."""
        each, device = bytes_of(self._common[self.architectures[number]].params), self.federation.device
        room = int(total_memory(device) * SHARE) // 4
        return max(1, (min(room, NEAR) if device.type == "cpu" else room) // each)

    def flops(self, number: int) -> float:
        """Operations of a client's training step per sample, roughly: three times those of a forward pass."""
        name = self.architectures[number]
        if name not in self._flops:
            x = self.federation.blank(number, 1)
            client = Client(*state(self._modules[name]))
            hidden = self._models[name].recurrent  # its kernel shows no products
            small = bytes_of((client, x)) < SMALL and not hidden
            inputs = (client, x) if small else on_meta((client, x))
            with torch.no_grad(), contextlib.suppress(*COUNTLESS), Products() as counter:
                self._models[name](*inputs)
            self._flops[name] = 3.0 * max(counter.total, bytes_of(client.params) / 4)
        return self._flops[name]


class Clock:
    """Seconds by part. On a GPU, events in its queue measure them, so nothing waits for it in between."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._seconds: dict[str, float] = {}
        self._marks: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._lock = threading.Lock()

    def now(self) -> float:
        """The time, in seconds from some moment on."""
        return time.perf_counter()

    @contextlib.contextmanager
    def part(self, name: str, at_once: int = 1) -> Iterator[None]:
        """Count the time spent in this context for a part, when `at_once` equally busy threads do it."""
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record(stream)
            yield
            last.record(stream)
            self._marks.append((name, first, last))
            return
        started = time.perf_counter()
        yield
        self.add(name, (time.perf_counter() - started) / at_once)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds to a part."""
        with self._lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """The seconds since the last call; these parts have finished when it returns."""
        for name, first, last in self._marks:
            last.synchronize()
            self.add(name, first.elapsed_time(last) / 1000)
        found, self._seconds, self._marks = self._seconds, {}, []
        return found


@contextlib.contextmanager
def torch_settings(in_turn: bool, threads: int, precision: str) -> Iterator[None]:
    """Set up torch: threads run whole clients, not parts of one; products are rounded only if requested."""
    before = torch.get_num_threads()
    torch.set_num_threads((in_turn and threads) or 1)
    torch.set_flush_denormal(True)  # round denormal numbers to zero: they are ten times slower
    tf32 = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    round_products(precision != "fp32")
    try:
        yield
    finally:
        torch.set_num_threads(before)
        torch.set_flush_denormal(False)
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = tf32


def round_products(allowed: bool) -> None:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = allowed


class _Counting(TorchDispatchMode):
    """Sees every operation."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing to skip here, and skipping would load torch's compiler: seconds, and 100 MB


class _Bytes(_Counting):
    """Counts the bytes of all outputs of operations, and of the largest one."""

    def __init__(self) -> None:
        _Counting.__init__(self)
        self.total = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not func.is_view:
            size = sum(t.numel() * t.element_size() for t in tree_leaves(made) if isinstance(t, Tensor))
            self.total, self.largest = self.total + size, max(self.largest, size)
        return made


class Products(_Counting):
    """Counts the operations of products and convolutions, as torch's own counter does."""

    def __init__(self) -> None:
        _Counting.__init__(self)
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        count = flop_registry.get(func._overloadpacket)
        if count is None:  # products may be inside
            with self:
                parts = func.decompose(*args, **kwargs)
            return func(*args, **kwargs) if parts is NotImplemented else parts
        made = func(*args, **kwargs)
        self.total += count(*args, **kwargs, out_val=made)
        return made


def on_meta(tree: Tree) -> Tree:
    """The tree's shapes, without numbers."""
    return tree_map(_meta, tree)


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta")


def bytes_of(tree: Tree) -> int:
    """Bytes of all tensors in a tree."""
    return sum(t.numel() * t.element_size() for t in tree_leaves(tree))


def counted_bytes(work: Callable[..., Any], *inputs: Tree, as_they_are: bool = False) -> tuple[int, int]:
    """Bytes of some work's inputs and outputs, and of the largest output; from shapes, or by running it."""
    with _Bytes() as counter:
        copy = torch.clone if as_they_are else _meta
        work(*tree_map(copy, inputs))
    return counter.total, counter.largest
