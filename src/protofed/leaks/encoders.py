"""What the attacker works with: a model that embeds, the inputs it takes, and samples of the attacker's own."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from protofed.data.batches import Federation, Samples
from protofed.data.natural import Natural
from protofed.data.scaling import describe_inputs
from protofed.engines.reference import ReferenceEngine
from protofed.errors import UserError, option
from protofed.leaks.inversion import Range
from protofed.leaks.uploads import Clients
from protofed.method import Client, Method
from protofed.models.adapted import Adapted
from protofed.ops import random
from protofed.runs.saved import Saved
from protofed.runs.setup import Prepared

Whose = Literal["own", "other"]
MOST = 400  # held-out samples of a class that are used
LEAST = 4  # half of them are the attacker's, the other half are what members are told from
SMALLEST = 8  # pixels in each direction, from which on a sample is a picture


class Encoder(NamedTuple):
    """One client's encoder in the attacker's hands."""

    method: Method
    engine: ReferenceEngine
    number: int  # whose network it is
    client: Client
    frozen: nn.Module | None  # stands in front of what is trained

    def embed(self, x: Tensor) -> Tensor:
        """Embeddings (N, D) of the inputs that its client trains on."""
        return self.method.embed(self.engine.model(self.number), self.client, x)

    def embed_raw(self, x: Tensor) -> Tensor:
        """Embeddings (N, D) of what stands before a frozen encoder, if there is one."""
        return self.embed(x if self.frozen is None else self.frozen(x))


def encoder_for(saved: Saved, prepared: Prepared, clients: Clients, number: int, whose: Whose) -> Encoder:
    """The client's own model, or that of the next client with the same network."""
    engine, who = prepared.reference, number
    if whose == "other":
        place = clients.numbers.index(number)
        order = [*clients.numbers[place + 1 :], *clients.numbers[:place]]
        same = [other for other in order if engine.architectures[other] == engine.architectures[number]]
        if not same:
            raise UserError(
                f"{option('model', 'other')}: no other client of the last round has client {number}'s network "
                f"({engine.architectures[number]}). Use {option('model', 'own')}."
            )
        who = same[0]
    whole = prepared.module(number)
    frozen = whole.encoder() if isinstance(whole, Adapted) and whole.frozen else None
    if frozen is not None:
        frozen = frozen.to(engine.federation.device).requires_grad_(False)
    return Encoder(saved.experiment.method, engine, who, clients.models[who], frozen)


class World(NamedTuple):
    """The data of a run: as clients train on it, and as it was before a frozen encoder."""

    saved: Saved
    data: Federation
    raw: Federation
    prepared: Prepared

    @classmethod
    def of_run(cls, saved: Saved, prepared: Prepared) -> "World":
        data = prepared.reference.federation
        first = {name: number for number, name in reversed(list(enumerate(prepared.reference.architectures)))}
        frozen = any(isinstance(whole := prepared.module(n), Adapted) and whole.frozen for n in first.values())
        raw = saved.experiment.federation(prepared.domains, prepared.split) if frozen else data
        return cls(saved, data, raw, prepared)

    @property
    def kind(self) -> str:
        """What samples are: "pictures", "numbers", or "words", which gradients do not reach."""
        if not self.raw.blank(0, 1).is_floating_point():
            return "words"
        shape = self.raw.shape(0)
        return "pictures" if len(shape) == 3 and min(shape[1:]) >= SMALLEST and shape[0] in (1, 3) else "numbers"

    def held_out(self, number: int, label: int, seed: int) -> tuple[Tensor, Tensor]:
        """Rows of test samples of a class that no client trains on, in two halves: the attacker's own, and others.

        They are the client's own test samples where clients differ by nature, so that nobody is told a member by the
        hospital; else those of the whole test part. Rows are those of `test_of`."""
        samples = self.test_of(self.data, number)
        rows = (samples.y == label).nonzero().flatten()
        order = random.permutation(random.key(seed, "leaks", "held out", number, label), len(rows))
        rows = rows[order[:MOST].to(rows.device)]
        return rows[: len(rows) // 2], rows[len(rows) // 2 :]

    def test_of(self, data: Federation, number: int) -> Samples:
        """The test samples that nobody trains on."""
        if isinstance(self.saved.experiment.partition, Natural):
            return data.test(number)
        return data.global_test(data.domain(number))

    def rows_of(self, number: int, label: int) -> Tensor:
        """Which of a client's training samples are of a class."""
        return (self.data.train(number).y == label).nonzero().flatten()

    def values(self, number: int) -> Range:
        """Between which the raw inputs of a client lie: of pictures all values that a pixel can have, else the range of
        the attacker's samples."""
        domain = self.raw.domain(number)
        if self.kind == "pictures":
            here = self.prepared.domains[int(self.prepared.split.domain[number])]
            told = describe_inputs(here, self.saved.experiment.normalize)
            ends = (0, 255) if here.x_train.dtype == np.uint8 else told["range"]
            low, high = (self.raw.scaled(domain, np.full((1, *here.shape), end, here.x_train.dtype))[0] for end in ends)
            return Range(low.to(self.raw.device), high.to(self.raw.device))
        x = self.test_of(self.raw, number).x
        if not len(x):
            x = self.raw.global_test(domain).x
        low = torch.where(x.isnan(), torch.inf, x).amin(0)
        high = torch.where(x.isnan(), -torch.inf, x).amax(0)
        known = low <= high
        return Range(torch.where(known, low, 0.0), torch.where(known, high, 0.0))


def chosen_clients(clients: Clients, many: int, seed: int) -> list[int]:
    """Some clients of the last round, drawn by the seed."""
    order = random.permutation(random.key(seed, "leaks", "clients"), len(clients.numbers))
    return sorted(clients.numbers[place] for place in order[:many].tolist())


def largest_classes(counts: Sequence[int], many: int) -> list[int]:
    """The classes that a client has most samples of."""
    held = [label for label, count in enumerate(counts) if count > 0]
    return sorted(held, key=lambda label: (-counts[label], label))[:many]
