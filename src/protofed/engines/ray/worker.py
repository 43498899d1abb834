"""One of several stacked engines that share a round: its requests and answers, encoded by `wire`."""

import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_map

from protofed.engines import Trained
from protofed.engines.stacked.engine import StackedEngine
from protofed.engines.stacked.groups import ClientGroup
from protofed.engines.stacked.threads import alone_on_its_core
from protofed.engines.stacks import rows_of
from protofed.engines.wire import Size, decode, encode, signature
from protofed.method import Client, Mean, Method, Tree
from protofed.metrics import Correct, Tally, of_one_length
from protofed.ops.trees import stack

Packed = np.ndarray  # bytes of an encoded tree, which Ray transfers without copying
States = list[tuple[list[int], Packed]]  # clients whose states have the same form, and these states, stacked


class Made(NamedTuple):
    """What a worker builds from an experiment on its machine."""

    engine: StackedEngine
    method: Method
    data: str  # hash of the data and the partition


class Job(NamedTuple):
    """A share of a round for one worker."""

    work: str  # "train", "finish" (the last phases), "evaluate", "global" (its model's tally) or "trial"
    groups: list[tuple[str, list[int]]]  # architecture and numbers of the stacked clients
    known: list[int]  # clients whose states the worker should keep; it drops all others
    states: States  # of clients it lacks; a client in neither has not taken part yet
    options: dict[str, Any]  # other arguments of the engine's function


def pack_trees(tree: Tree) -> Packed:
    return np.frombuffer(encode(tree, whole=True), dtype=np.uint8)


def unpack_trees(packed: Packed, device: torch.device) -> Tree:
    return tree_map(lambda tensor: tensor.to(device), decode(packed.tobytes()))


def pack_states(states: Mapping[int, Client]) -> States:
    alike: dict[Any, list[int]] = {}
    for number, client in states.items():
        alike.setdefault(signature(client), []).append(number)
    return [(numbers, pack_trees(stack([states[number] for number in numbers]))) for numbers in alike.values()]


def unpack_states(packed: States, device: torch.device) -> dict[int, Client]:
    found: dict[int, Client] = {}
    for numbers, states in packed:
        found |= dict(zip(numbers, rows_of(unpack_trees(states, device), copy=len(numbers) > 1), strict=True))
    return found


def pack_trained(trained: Trained) -> dict[str, Any]:
    tree = {"up": trained.up, "loss": trained.loss, "finite": trained.finite}
    sizes = {"sent": tuple(trained.sent), "received": tuple(trained.received)}
    return {"tree": pack_trees(tree), "clients": pack_states(trained.clients), **sizes}


def unpack_trained(packed: Mapping[str, Any], device: torch.device) -> Trained:
    tree = unpack_trees(packed["tree"], device)
    sizes = Size(*packed["sent"]), Size(*packed["received"])
    return Trained(tree["up"], unpack_states(packed["clients"], device), Mean(*tree["loss"]), tree["finite"], *sizes)


def pack_tallies(tallies: Sequence[Tally]) -> Packed:
    return pack_trees(
        {kind: tuple(correct) for kind, correct in stack(of_one_length(tallies)).items()} if tallies else {}
    )


def unpack_tallies(packed: Packed) -> list[Tally]:
    tree = unpack_trees(packed, torch.device("cpu"))
    return rows_of({kind: Correct(*parts) for kind, parts in tree.items()}, copy=False) if tree else []


class RayWorker:
    """Holds the whole experiment and does a share of each round."""

    made: Made

    def where(self) -> str:
        """The machine's name."""
        return platform.node()

    def start(
        self, make: Callable[[int, int], Made], threads: int, shares: int, compiled: bool | None
    ) -> tuple[str, str, str]:
        """Set it up; returns the machine, the device and the hash of its data."""
        self.made = make(threads, shares)
        self.states: dict[int, Client] = {}
        if compiled is not None:
            self.use(compiled)
        return platform.node(), str(self.made.engine.device), self.made.data

    def use(self, compiled: bool) -> None:
        """Compile training steps, or do not."""
        if compiled != self.made.engine.compiled:
            self.made.engine.use(compiled)

    def do(self, server: Packed, job: Job) -> dict[str, Any]:
        """Do a share of a round."""
        alone_on_its_core()
        engine, method, _ = self.made
        groups, cohort = _placed(job.groups)
        self.states = {number: self.states[number] for number in job.known} | unpack_states(job.states, engine.device)
        engine.clients = self.states
        told = unpack_trees(server, engine.device)
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


def _placed(groups: Sequence[tuple[str, list[int]]]) -> tuple[list[ClientGroup], list[int]]:
    """Groups with their clients' places in the combined cohort."""
    placed: list[ClientGroup] = []
    cohort: list[int] = []
    for architecture, numbers in groups:
        placed.append(ClientGroup(architecture, list(range(len(cohort), len(cohort) + len(numbers))), numbers))
        cohort += numbers
    return placed, cohort
