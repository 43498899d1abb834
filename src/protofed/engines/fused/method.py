"""The methods of several runs as one, in which every client uses the numbers of its own run."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from protofed.method import Batch, Client, Each, LocalData, Method, Model, Params, Phase, Tree
from protofed.ops.trees import map_nodes


def numbers_of(method: Method) -> dict[str, float]:
    """The fields in which methods of one kind may differ and still be trained together."""
    values = {field.name: getattr(method, field.name) for field in fields(method)}
    return {name: value for name, value in values.items() if isinstance(value, float)}


def method_kind(method: Method) -> tuple[Any, ...]:
    """Everything else about a method, and its phases."""
    numbers = numbers_of(method)
    rest = [(field.name, getattr(method, field.name)) for field in fields(method) if field.name not in numbers]
    stages = [phase._replace(loss=None, pull=None) for phase in (*method.phases(), *method.last_phases())]
    return type(method), tuple(rest), tuple(stages)


@dataclass(frozen=True)
class FusedMethod(Method):
    """A client receives two things: what its own server sent, and the numbers of its own run."""

    template: Method | None = None
    """The method of one of the runs."""
    names: tuple[str, ...] = ()
    """The numbers in which the runs differ."""

    @classmethod
    def of(cls, methods: Sequence[Method]) -> "FusedMethod":
        """Several methods of one kind as one."""
        found = [numbers_of(method) for method in methods]
        names = tuple(name for name in found[0] if len({numbers[name] for numbers in found}) > 1)
        return cls(template=methods[0], names=names)

    def joined(self, methods: Sequence[Method], downs: Sequence[Tree], sizes: Sequence[int], device: Any) -> Tree:
        """What these servers send to cohorts of these sizes, as one row for each client."""
        rows = [broadcast_rows(down, size) for down, size in zip(downs, sizes, strict=True)]
        tree = tree_map(lambda *leaves: torch.cat(leaves), *rows)
        many = torch.tensor(sizes, device=device)
        numbers = {
            name: torch.tensor([float(getattr(method, name)) for method in methods], device=device)
            for name in self.names
        }
        return Each((tree, {name: values.repeat_interleave(many) for name, values in numbers.items()}))

    def mine(self, down: Tree) -> Method:
        """The method with the numbers that this client received."""
        assert self.template is not None
        made = copy.copy(self.template)
        for name in self.names:
            object.__setattr__(made, name, down[1][name])  # a tensor: the method's own checks expect a number
        return made

    def broadcast(self, server: Tree, cohort: Tensor) -> Tree:
        return server  # joined already

    def receive(self, model: Model, client: Client, data: LocalData, down: Tree) -> Client:
        return self.mine(down).receive(model, client, data, down[0])

    def phases(self) -> tuple[Phase, ...]:
        assert self.template is not None
        return tuple(
            phase._replace(loss=FusedLoss(self, number), pull=FusedPull(self, number) if phase.pull else None)
            for number, phase in enumerate(self.template.phases())
        )

    def loss(self, model: Model, client: Client, batch: Batch, down: Tree) -> Tensor | tuple[Tensor, Tree]:
        return self.mine(down).loss(model, client, batch, down[0])

    def upload(self, model: Model, client: Client, data: LocalData, down: Tree) -> tuple[Tree, Client]:
        return self.mine(down).upload(model, client, data, down[0])

    def predict(self, model: Model, client: Client, x: Tensor, down: Tree) -> dict[str, Tensor]:
        return self.mine(down).predict(model, client, x, down[0])

    def init_server(self, spec: Any) -> NoReturn:
        raise TypeError("each run has its own server")

    def aggregate(self, server: Tree, up: Tree, cohort: Tensor) -> NoReturn:
        raise TypeError("each run has its own server")


@dataclass(frozen=True)
class FusedLoss:
    """The loss of a phase, by each client's own method; equal for equal methods, so steps are found again."""

    method: FusedMethod
    phase: int

    def __call__(self, model: Model, client: Client, batch: Batch, down: Tree) -> Tensor | tuple[Tensor, Tree]:
        mine = self.method.mine(down)
        return (mine.phases()[self.phase].loss or mine.loss)(model, client, batch, down[0])


@dataclass(frozen=True)
class FusedPull:
    """The same for the gradient that a phase adds."""

    method: FusedMethod
    phase: int

    def __call__(self, client: Client, down: Tree) -> Params:
        pull = self.method.mine(down).phases()[self.phase].pull
        assert pull is not None
        return pull(client, down[0])


def broadcast_rows(down: Tree, many: int) -> Tree:
    """A broadcast with a row for each client."""
    return map_nodes(lambda n: n.rows if isinstance(n, Each) else tree_map(lambda t: t.expand(many, *t.shape), n), down)
