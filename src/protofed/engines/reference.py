"""The reference engine: one client after another. Slow, obvious, always right."""

from collections.abc import Callable, MutableMapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from protofed import local
from protofed.data.batches import Federation, Samples
from protofed.engines import Trained, nobody
from protofed.engines.resources import Clock, Needs
from protofed.engines.wire import Size, encoded_size
from protofed.errors import UserError
from protofed.method import Client, Mean, Method, Spec, Tree
from protofed.metrics import Tally, add, tally
from protofed.models.functional import FunctionalModel, fresh, state, unfit
from protofed.models.layers import matrix_convs, plain_means, plain_pools
from protofed.ops import random
from protofed.ops.optim import Optimizer
from protofed.ops.trees import all_finite, alone, deal, merge, stack

Build = Callable[[tuple[int, ...], int], nn.Module]  # input shape, classes -> a module with .body, .head and .dim
StandIn = Callable[["ReferenceEngine", Method, int, Tree, int], local.Update]


class ReferenceEngine:
    """Clients in turn, their states in a dict or in a store on disk."""

    in_turn = True
    stand_in: StandIn | None = None
    """Replaces `update` for a client's whole round, if it is set."""

    def __init__(
        self,
        federation: Federation,
        builders: Sequence[tuple[str, Build]],  # per client: the name of its model, and how to build it
        optimizer: Optimizer,
        *,
        seed: int,
        local_epochs: int,
        init: str,
        precision: str = "fp32",
        by_client: bool = False,
        paces: Callable[[int, Sequence[int]], list[float]] | None = None,
    ) -> None:
        """`by_client`: keep a round's uploads as one row per client. `paces`: the share of its steps that each of some
        clients takes in a round, if not all take all."""
        self._paces = paces
        self.federation, self.optimizer, self.precision = federation, optimizer, precision
        self.seed, self.local_epochs, self.init, self.by_client = seed, local_epochs, init, by_client
        self.clients: MutableMapping[int, Client] = {}
        self.notes: list[str] = []
        self.clock = Clock(federation.device)
        self._builders = builders
        self._models: dict[str, FunctionalModel] = {}
        self._modules: dict[str, nn.Module] = {}
        self._common: dict[str, Spec] = {}
        self.architectures: Sequence[str] = federation.of_each(self._architecture)
        self.needs = Needs(federation, self.architectures, self._models, self._modules, self._common)
        self._refuse_unfit_samples()
        self._refuse_lonely_samples()

    def _architecture(self, client: int) -> str:
        """The model's name, with the input's shape if the clients' inputs differ."""
        name, build = self._builders[client]
        shape = self.federation.shape(client)
        if len(set(self.federation.shapes)) > 1:
            name = f"{name} for {'x'.join(map(str, shape))}"
        if name not in self._models:
            spec, module = self._build(name, build, shape, random.seed(self.seed, "init", "common"))
            self._models[name] = FunctionalModel(module)
            self._modules[name] = module
            self._common[name] = spec
        return name

    def _build(self, name: str, build: Build, shape: tuple[int, ...], seed: int) -> tuple[Spec, nn.Module]:
        try:
            module: Any = fresh(lambda: build(shape, self.federation.classes), seed)
        except UserError as error:
            raise UserError(f"model.name = {name!r}: {error}") from None
        except (RuntimeError, MemoryError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"model.name = {name!r} cannot be built ({reason}). Use a smaller model.") from None
        params, buffers = self._here(state(module))
        data = self.federation
        return Spec(name, data.classes, module.dim, params, buffers, seed, data.clients, data.most_of_a_class), module

    def spec_of(self, build: Build, shape: tuple[int, ...], name: str) -> Spec:
        """The common initial state of a model, which none of these clients has to use."""
        return self._build(name, build, shape, random.seed(self.seed, "init", "common"))[0]

    def _refuse_unfit_samples(self) -> None:
        """Refuse inputs that a client's model cannot take: missing values, or tokens that it does not know."""
        for name, module in self._modules.items():
            members = self.members(name)
            parts = {self.federation.domain(i) for i in members}
            if not any(
                unfit(module, part(d).x)
                for d in parts
                for part in (self.federation.train_part, self.federation.test_part)
            ):
                continue
            for client in members:
                for part in (self.federation.train(client), self.federation.test(client)):
                    if why := unfit(module, part.x):
                        raise UserError(f"{self.federation.names[client]}: {why} ({name}).")

    def _refuse_lonely_samples(self) -> None:
        """Refuse batches that BatchNorm cannot train on: one sample whose map is one pixel."""
        for name, model in self._models.items():
            members = self.members(name)
            if model.trains_on_one(self.federation.train(members[0]).x[:1]):
                continue
            for client in members:
                if self.federation.smallest_batch(client) == 1:
                    remedy = "Use drop_last = true (settings={'drop_last': True}), or another batch_size."
                    remedy = "Leave it out." if self.federation.used(client) == 1 else remedy
                    raise UserError(
                        f"batch_size = {self.federation.batch_size} leaves {self.federation.names[client]} a batch of "
                        f"one sample, on which {name} (BatchNorm) cannot train. {remedy}"
                    )

    def members(self, architecture: str) -> list[int]:
        """The clients with this model among those that are checked before a run."""
        return [i for i in self.federation.examples if self.architectures[i] == architecture]

    def specs(self) -> list[Spec]:
        return list(self._common.values())

    def model(self, number: int) -> FunctionalModel:
        """A client's network."""
        return self._models[self.architectures[number]]

    def module(self, number: int) -> nn.Module:
        """A client's network as built."""
        return self._modules[self.architectures[number]]

    def stacked_model(self, number: int, compiled: bool) -> FunctionalModel:
        """A client's network built from layers that are fast for stacked clients, whose batches may be padded."""

        def change(module: nn.Module) -> None:
            plain_means(module)
            if self.federation.device.type == "cuda":
                matrix_convs(module, rounded=self.precision != "fp32")
            if compiled or (self.federation.device.type == "cpu" and not module.training):
                plain_pools(module)

        return FunctionalModel(self.module(number), padded=not self.federation.even, change=change)

    def rounding(self) -> torch.autocast:
        """A context in which training computes in the chosen precision; parameters and sums stay in fp32."""
        kind, asked = self.federation.device.type, self.precision == "bf16"
        return torch.autocast(kind, torch.bfloat16, enabled=asked, cache_enabled=False)

    def client(self, method: Method, number: int) -> Client:
        """A client's state: the kept one, or its initial one."""
        if number in self.clients:
            return self.clients[number]
        name = self.architectures[number]
        if self.init == "common":
            spec = self._common[name]._replace(seed=random.seed(self.seed, "client", number))
        else:
            seed = random.seed(self.seed, "init", number)
            spec, _ = self._build(name, self._builders[number][1], self.federation.shape(number), seed)
        made: Client = self._here(method.init_client(spec))
        return made

    def _here(self, tree: Tree) -> Tree:
        """The same on this engine's device."""
        if all(tensor.device == self.federation.device for tensor in tree_leaves(tree)):
            return tree
        return tree_map(lambda tensor: tensor.to(self.federation.device), tree)

    def _ids(self, cohort: Sequence[int]) -> Tensor:
        return torch.tensor(list(cohort), device=self.federation.device)

    def rate(self, round: int, cohort: Sequence[int]) -> float | Tensor:
        """The step size of these clients in a round: one for all, or one each (K,)."""
        return self.optimizer.rate(round)

    def paces(self, round: int, cohort: Sequence[int]) -> list[float]:
        """The share of its steps that each of these clients takes in a round."""
        return [1.0] * len(cohort) if self._paces is None else self._paces(round, cohort)

    def counts(self, cohort: Sequence[int]) -> Tensor:
        return self.federation.class_counts(cohort).cpu()

    def samples(self, cohort: Sequence[int]) -> list[int]:
        return [int(n) for n in self.counts(cohort).sum(1)]

    def update(self, method: Method, number: int, mine: Tree, round: int) -> local.Update:
        """One client's whole round, from what the server sent it."""
        if self.stand_in is not None:
            return self.stand_in(self, method, number, mine, round)
        return local.local_update(
            method,
            self._models[self.architectures[number]],
            self.optimizer,
            self.client(method, number),
            self.federation.local(number, round),
            lambda epoch: self.federation.epoch(number, round, epoch),
            mine,
            self.optimizer.rate(round),
            self.local_epochs,
            self.rounding,
            self.clock.part,
            pace=self.paces(round, [number])[0],
            each=self.federation.steps(number),
        )

    def train(self, method: Method, server: Tree, cohort: Sequence[int], round: int) -> Trained:
        self.federation.turn(round)
        self.federation.hold(cohort)
        if self.stand_in is None and not any(self.federation.used(number) for number in cohort):
            return nobody(cohort)
        return self.share(method, server, cohort, round)

    def share(self, method: Method, server: Tree, cohort: Sequence[int], round: int) -> Trained:
        """Train these clients. At least one client of the round, here or elsewhere, has data."""
        down = method.broadcast(server, self._ids(cohort))
        updates: list[local.Update] = []
        sent = received = Size(0, 0)
        for row, number in enumerate(cohort):
            mine = deal(down, row)
            update = self.update(method, number, mine, round)
            updates.append(update)
            sent = sent + encoded_size(update.up)
            received = received + encoded_size(mine)
        ups = [update.up for update in updates]
        return Trained(
            up=stack(ups) if self.by_client else reduce(merge, map(alone, ups)),
            clients={number: update.client for number, update in zip(cohort, updates, strict=True)},
            loss=stack([update.loss for update in updates]),
            finite=torch.stack([all_finite((update.loss, update.client.params, update.up)) for update in updates]),
            sent=sent,
            received=received,
        )

    def finish(self, method: Method, server: Tree, cohort: Sequence[int], round: int) -> Trained:
        self.federation.turn(round)
        self.federation.hold(cohort)
        down = method.broadcast(server, self._ids(cohort))
        finished, losses, received = {}, [], Size(0, 0)
        for row, number in enumerate(cohort):
            mine = deal(down, row)
            received = received + encoded_size(mine)
            finished[number], loss = self.last(method, number, mine, round)
            losses.append(loss)
        finite = torch.stack([all_finite((loss, finished[n].params)) for n, loss in zip(cohort, losses, strict=True)])
        return Trained({}, finished, stack(losses), finite, Size(0, 0), received)

    def last(self, method: Method, number: int, mine: Tree, round: int) -> tuple[Client, Mean]:
        """One client's last phases, from what the server sent it."""
        model, data = self._models[self.architectures[number]], self.federation.local(number, round)
        client, loss, _ = local.train(
            method,
            model,
            self.optimizer,
            method.last_phases(),
            method.last_receive(model, self.client(method, number), data, mine),
            lambda epoch: self.federation.epoch(number, round, epoch),
            mine,
            data.key,
            self.optimizer.rate(round),
            self.local_epochs,
            self.rounding,
        )
        return client, loss

    def ended(self) -> None:
        pass

    def labels(self, number: int, part: str) -> Tensor:
        samples, rows = self._part(number, part)
        return samples.y[rows]

    @torch.no_grad()
    def embed(self, method: Method, number: int, part: str, rows: Tensor) -> Tensor:
        model, client = self.model(number), self.client(method, number)
        samples, mine = self._part(number, part)
        chunks = torch.split(mine[rows.to(mine.device)], self.needs.together(number))
        return torch.cat([method.embed(model, client, samples.x[some]) for some in chunks])

    def _part(self, number: int, part: str) -> tuple[Samples, Tensor]:
        """All "train" or "test" samples of a client's domain, and which of them are its own."""
        data, domain = self.federation, self.federation.domain(number)
        if part == "train":
            return data.train_part(domain), data.train_rows(number)
        return data.test_part(domain), data.test_rows(number)

    def evaluate(
        self, method: Method, server: Tree, cohort: Sequence[int], on: str, who: str, confusion: str = ""
    ) -> list[Tally]:
        self.federation.hold(cohort)
        down = method.broadcast(server, self._ids(cohort))
        tallies = []
        for row, number in enumerate(cohort):
            client = method.global_client(server) if who == "global" else self.client(method, number)
            if client is None:
                raise ValueError(f"{type(method).__name__} has no global model")
            tallies.append(self.tested(method, number, client, deal(down, row), on, confusion))
        return tallies

    def tested(self, method: Method, number: int, client: Client, mine: Tree, on: str, confusion: str = "") -> Tally:
        """Counts of one client, or of the global model in its place, with what the server sent it."""
        samples = self.federation.test(number, on)
        if on == "global":
            samples = self.federation.global_test(self.federation.domain(number))
        own = self.federation.class_counts(number) > 0
        return self._count(method, number, client, samples, mine, own, confusion)

    def global_tally(self, method: Method, server: Tree, confusion: str = "") -> Tally | None:
        client = method.global_client(server)
        if client is None:
            return None
        number = 0  # a method with a global model serves one architecture, so any client's will do
        down = deal(method.broadcast(server, self._ids([number])), 0)
        own = torch.ones(self.federation.classes, dtype=torch.bool, device=self.federation.device)
        parts = [
            self._count(method, number, client, self.federation.global_test(domain), down, own, confusion)
            for domain, shape in enumerate(self.federation.shapes)
            if shape == self.federation.shape(number)
        ]
        return reduce(add, parts)

    @torch.no_grad()
    def _count(
        self, method: Method, number: int, client: Client, samples: Samples, down: Tree, own: Tensor, confusion: str
    ) -> Tally:
        model, together = self.model(number), self.needs.together(number)
        parts = [
            tally(method.predict(model, client, x, down), y, own, confusion=confusion)
            for x, y in zip(torch.split(samples.x, together), torch.split(samples.y, together), strict=True)
        ]
        return reduce(add, parts)
