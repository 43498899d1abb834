"""One of several stacked engines that share a round: what it is asked and what it answers, in bytes of `wire`."""

import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_map

from protofed.engines import Trained
from protofed.engines.groups import Group
from protofed.engines.stacked import StackedEngine
from protofed.engines.stacks import rows_of, stack
from protofed.engines.threads import alone_on_its_core
from protofed.engines.wire import Size, decode, encode, signature
from protofed.method import Client, Mean, Method, Tree
from protofed.metrics import Correct, Tally

Packed = np.ndarray  # bytes of an encoded tree, which Ray moves without copying
States = list[tuple[list[int], Packed]]  # clients whose states have one form, and these states, stacked


class Made(NamedTuple):
    """What a worker makes of an experiment on its machine."""

    engine: StackedEngine
    method: Method
    data: str  # hash of the data and of who has what


class Job(NamedTuple):
    """A share of a round for one worker."""

    work: str  # "train", "finish" (the last phases), "evaluate", "global" (its model's tally) or "trial"
    groups: list[tuple[str, list[int]]]  # architecture and numbers of clients that are stacked
    known: list[int]  # clients whose states the worker still has; all others it forgets
    states: States  # of clients it does not have; whoever is in neither has not taken part yet
    options: dict[str, Any]  # what else the engine's function takes


def pack(tree: Tree) -> Packed:
    return np.frombuffer(encode(tree, whole=True), dtype=np.uint8)


def unpack(packed: Packed, device: torch.device) -> Tree:
    return tree_map(lambda tensor: tensor.to(device), decode(packed.tobytes()))


def pack_states(states: Mapping[int, Client]) -> States:
    alike: dict[Any, list[int]] = {}
    for number, client in states.items():
        alike.setdefault(signature(client), []).append(number)
    return [(numbers, pack(stack([states[number] for number in numbers]))) for numbers in alike.values()]


def unpack_states(packed: States, device: torch.device) -> dict[int, Client]:
    found: dict[int, Client] = {}
    for numbers, states in packed:
        found |= dict(zip(numbers, rows_of(unpack(states, device), copy=len(numbers) > 1), strict=True))
    return found


def pack_trained(trained: Trained) -> dict[str, Any]:
    tree = {"up": trained.up, "loss": trained.loss, "finite": trained.finite}
    sizes = {"sent": tuple(trained.sent), "received": tuple(trained.received)}
    return {"tree": pack(tree), "clients": pack_states(trained.clients), **sizes}


def unpack_trained(packed: Mapping[str, Any], device: torch.device) -> Trained:
    tree = unpack(packed["tree"], device)
    sizes = Size(*packed["sent"]), Size(*packed["received"])
    return Trained(tree["up"], unpack_states(packed["clients"], device), Mean(*tree["loss"]), tree["finite"], *sizes)


def pack_tallies(tallies: Sequence[Tally]) -> Packed:
    return pack({kind: tuple(correct) for kind, correct in stack(tallies).items()} if tallies else {})


def unpack_tallies(packed: Packed) -> list[Tally]:
    tree = unpack(packed, torch.device("cpu"))
    return rows_of({kind: Correct(*parts) for kind, parts in tree.items()}, copy=False) if tree else []


class Worker:
    """Has the whole experiment, and does a share of each round."""

    made: Made

    def where(self) -> str:
        """The machine."""
        return platform.node()

    def start(
        self, make: Callable[[int, int], Made], threads: int, shares: int, compiled: bool | None
    ) -> tuple[str, str, str]:
        """Make it ready; returns the machine, the device and the hash of its data."""
        self.made = make(threads, shares)
        self.states: dict[int, Client] = {}
        if compiled is not None:
            self.use(compiled)
        return platform.node(), str(self.made.engine.device), self.made.data

    def use(self, compiled: bool) -> None:
        """Compile training steps, or not."""
        if compiled != self.made.engine.compiled:
            self.made.engine.use(compiled)

    def do(self, server: Packed, job: Job) -> dict[str, Any]:
        """A share of a round."""
        alone_on_its_core()
        engine, method, _ = self.made
        groups, cohort = _placed(job.groups)
        self.states = {number: self.states[number] for number in job.known} | unpack_states(job.states, engine.device)
        engine.clients = self.states
        told = unpack(server, engine.device)
        answer: dict[str, Any]
        if job.work == "trial":
            answer = {"seconds": engine.trial(method, told, **job.options)}
        elif job.work == "global":
            found = engine.global_tally(method, told, **job.options)
            answer = {"tallies": pack_tallies([] if found is None else [tree_map(torch.Tensor.cpu, found)])}
        elif job.work == "evaluate":
            tallies = engine.evaluate(method, told, cohort, **job.options, groups=groups)
            answer = {"tallies": pack_tallies(tallies)}
        else:
            work = engine.share if job.work == "train" else engine.finish_share
            trained = work(method, told, cohort, groups, **job.options)
            self.states = trained.clients
            answer = pack_trained(trained)
        notes, engine.notes[:] = list(engine.notes), []
        return answer | {"notes": notes, "clock": engine.clock.take()}


def _placed(groups: Sequence[tuple[str, list[int]]]) -> tuple[list[Group], list[int]]:
    """Groups with their places in the cohort that they make together."""
    placed: list[Group] = []
    cohort: list[int] = []
    for architecture, numbers in groups:
        placed.append(Group(architecture, list(range(len(cohort), len(cohort) + len(numbers))), numbers))
        cohort += numbers
    return placed, cohort
