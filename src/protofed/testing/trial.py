"""A tiny federation to try a method on."""

from collections.abc import Mapping, Sequence
from functools import cached_property, reduce
from typing import Any, NamedTuple

import torch

from protofed.local import Update, local_update, train
from protofed.method import Batch, Client, LocalData, Method, Spec, Tree
from protofed.models import MODELS
from protofed.models.functional import FunctionalModel, fresh, state
from protofed.ops import random
from protofed.ops.optim import Optimizer
from protofed.ops.trees import alone, deal, merge
from protofed.testing.trees import copied

# No two of these sizes are alike, so that an axis of classes is known by its length.
CLASSES, DIM, HIDDEN, SHAPE = 7, 8, 9, (1, 3, 4)
LABELS: tuple[list[int], ...] = (
    [0] * 6 + [1] * 5 + [2] * 4 + [3] * 5,  # many samples
    [1],  # a single one
    [0] * 7,  # a single class
    [3] * 2 + [4] * 3,  # a class that no other client holds
    [],  # nothing
    [0] * 3 + [1] * 2,  # enough, but it never takes part
)
COHORT, EMPTY, NEVER = (0, 1, 2, 3), 4, 5
NOBODYS = [5, 6]  # classes without a sample
SEED, EPOCHS, BATCH, CHUNK = 1, 2, 4, 16
OPTIMIZER = Optimizer(lr=0.05, momentum=0.5)


class PlayedRound(NamedTuple):
    """One round as it was played. `before` and `given` were equal when each part of them was given."""

    server: Tree
    clients: dict[int, Client]  # of the cohort, as it began
    downs: dict[int, Tree]
    updates: dict[int, Update]
    after: Tree  # the server
    given: dict[str, Tree]  # all that the method's functions were given
    before: dict[str, Tree]  # copies of it


class Trial:
    """A method and a tiny federation: six clients, seven classes, a network without BatchNorm and dropout."""

    def __init__(self, method: Method, private: Sequence[str] = ()) -> None:
        self.method, self.private = method, private
        self.model = FunctionalModel(self._module(0))

    def _module(self, seed: int) -> Any:
        return fresh(lambda: MODELS["mlp_digits"](SHAPE, CLASSES, hidden=HIDDEN, dim=DIM), seed)

    def spec(self, number: int | None = None) -> Spec:
        """The state before round one: the server's, or a client's."""
        common = number is None or self.method.init == "common"
        params, buffers = state(self._module(0 if common else random.seed(SEED, "init", number or 0)))
        seed = SEED if number is None else random.seed(SEED, "client", number)
        return Spec("mlp_digits", CLASSES, DIM, params, buffers, seed, len(LABELS), 7)

    def new(self, number: int) -> Client:
        """A client that has not taken part yet."""
        return self.method.init_client(self.spec(number))

    def samples(self, number: int) -> Batch:
        y = torch.tensor(LABELS[number], dtype=torch.int64)
        centres = random.normal(random.key("centres"), CLASSES * 12).reshape(CLASSES, *SHAPE)
        noise = random.normal(random.key("noise", number), len(y) * 12).reshape(len(y), *SHAPE)
        return Batch(centres[y] + 0.3 * noise, y, torch.ones(len(y)))

    def local(self, number: int, round: int, pads: int = 0) -> LocalData:
        """What a client knows about its data; a client without samples has a batch of padding."""
        samples = self.samples(number)
        batches = [padded(batch, pads) for batch in in_batches(samples, CHUNK)] or [padded(samples, pads + 1)]
        counts = torch.bincount(samples.y, minlength=CLASSES).float()
        return LocalData(batches, counts, random.key(SEED, "train", round, number))

    def epoch(self, number: int, round: int, epoch: int, pads: int = 0) -> list[Batch]:
        """One pass over a client's samples; nothing for a client without samples."""
        x, y, mask = self.samples(number)
        order = random.permutation(random.key(SEED, "order", round, number, epoch), len(y))
        return [padded(batch, pads) for batch in in_batches(Batch(x[order], y[order], mask), BATCH)]

    def update(
        self, number: int, client: Client, round: int, down: Tree, data: LocalData | None = None, pads: int = 0
    ) -> Update:
        """One client's round."""
        return local_update(
            self.method,
            self.model,
            OPTIMIZER,
            client,
            data or self.local(number, round, pads),
            lambda epoch: self.epoch(number, round, epoch, pads),
            down,
            OPTIMIZER.lr,
            EPOCHS,
        )

    def finish(self, number: int, client: Client, server: Tree) -> Client:
        """A client after the last phases."""
        down, data = self.down(server, number), self.local(number, 2)
        return train(
            self.method,
            self.model,
            OPTIMIZER,
            self.method.last_phases(),
            self.method.last_receive(self.model, client, data, down),
            lambda epoch: self.epoch(number, 2, epoch),
            down,
            data.key,
            OPTIMIZER.lr,
            EPOCHS,
        )[0]

    def down(self, server: Tree, number: int) -> Tree:
        """What a client gets if it is alone in the cohort."""
        return deal(self.method.broadcast(server, torch.tensor([number])), 0)

    def aggregate(self, server: Tree, updates: Mapping[int, Update]) -> Tree:
        up = reduce(merge, [alone(update.up) for update in updates.values()])
        return self.method.aggregate(server, up, torch.tensor(list(updates)))

    def round(self, server: Tree, clients: Mapping[int, Client], cohort: Sequence[int], number: int) -> PlayedRound:
        clients = {i: clients[i] if i in clients else self.new(i) for i in cohort}
        given = {"server": server, "clients": clients, "data": {i: self.local(i, number) for i in cohort}}
        before = copied(given)
        down = self.method.broadcast(server, torch.tensor(cohort))
        downs = {i: deal(down, row) for row, i in enumerate(cohort)}
        given["down"], before["down"] = downs, copied(downs)
        updates = {i: self.update(i, clients[i], number, downs[i], given["data"][i]) for i in cohort}
        given["up"] = {i: update.up for i, update in updates.items()}
        before["up"] = copied(given["up"])
        after = self.aggregate(server, updates)
        return PlayedRound(server, clients, downs, updates, after, given, before)

    def play(self, *cohorts: Sequence[int]) -> list[PlayedRound]:
        """One round of each cohort."""
        server, clients, rounds = self.method.init_server(self.spec()), dict[int, Client](), list[PlayedRound]()
        for number, cohort in enumerate(cohorts):
            rounds.append(self.round(server, clients, cohort, number))
            server = rounds[-1].after
            clients |= {i: update.client for i, update in rounds[-1].updates.items()}
        return rounds

    @cached_property
    def rounds(self) -> list[PlayedRound]:
        """The situation that most rules look at."""
        torch.default_generator.manual_seed(1)
        return self.play(COHORT, COHORT)


def in_batches(samples: Batch, size: int) -> list[Batch]:
    if not len(samples.y):
        return []
    return [Batch(*part) for part in zip(*(torch.split(t, size) for t in samples), strict=True)]


def padded(batch: Batch, more: int) -> Batch:
    """The batch with some samples that do not count: any numbers, any labels."""
    x = 3 * random.normal(random.key("padding"), more * 12).reshape(more, *SHAPE)
    y = torch.arange(CLASSES - more, CLASSES) if len(batch.y) % 2 else torch.arange(more)
    return Batch(torch.cat([batch.x, x]), torch.cat([batch.y, y]), torch.cat([batch.mask, torch.zeros(more)]))


def state_of(rounds: Sequence[PlayedRound]) -> dict[str, Tree]:
    """What remains after all rounds."""
    return {"server": rounds[-1].after, "clients": {i: update.client for i, update in rounds[-1].updates.items()}}
