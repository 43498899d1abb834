"""The stacked engine: clients of one architecture trained at once, by the same functions as one after another."""

import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map

from protofed import local
from protofed.data.federation import CHUNK
from protofed.data.stacked import TOGETHER, Plan, StackedData
from protofed.engines import Trained, nobody
from protofed.engines.graph import Replay, signature
from protofed.engines.reference import ReferenceEngine
from protofed.engines.stacks import cut, deal_to, finite_rows, first, join, pick, row_of, stack
from protofed.engines.wire import Size, measure_down, measure_up
from protofed.method import Client, Each, Mean, Method, Phase, Spec, Tree
from protofed.metrics import Correct, Tally, add, tally
from protofed.models.functional import FunctionalModel
from protofed.ops import optim, random
from protofed.ops.trees import map_nodes, merge, under

GRAPHS = 64  # captured steps that are kept


class Group(NamedTuple):
    """Clients that are trained at once."""

    architecture: str
    places: list[int]  # in the cohort
    numbers: list[int]


class Carried(NamedTuple):
    """What one training step of M clients hands to the next."""

    client: Client
    moments: optim.Moments
    loss: Tensor  # (M,) sums over samples
    samples: Tensor  # (M,)
    seen: Tree


class StackedEngine:
    """Clients of one architecture together; what cannot be stacked is left to the reference engine."""

    def __init__(self, reference: ReferenceEngine, *, chunk: int = 0, workers: int = 1) -> None:
        self.reference, self.chunk = reference, chunk
        self.workers = workers if reference.federation.device.type == "cpu" else 1
        self.federation, self.optimizer = reference.federation, reference.optimizer
        self.architectures = reference.architectures
        self._data: dict[str, StackedData] = {}
        self._models: dict[tuple[str, int], FunctionalModel] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._replays: dict[Any, Replay | None] = {}

    @property
    def clients(self) -> MutableMapping[int, Client]:
        return self.reference.clients

    @clients.setter
    def clients(self, clients: MutableMapping[int, Client]) -> None:
        self.reference.clients = clients

    def specs(self) -> list[Spec]:
        return self.reference.specs()

    def counts(self, cohort: Sequence[int]) -> Tensor:
        return self.reference.counts(cohort)

    def why_not(self, method: Method) -> str | None:
        """What keeps a method's clients from being stacked, in words."""
        if not method.stackable:
            return f"{type(method).__name__} works on the host, client by client"
        return None

    # training

    def train(self, method: Method, server: Tree, cohort: Sequence[int], round: int) -> Trained:
        if not any(self.federation.used(number) for number in cohort):
            return nobody(cohort)
        if self.why_not(method):
            return self.reference.train(method, server, cohort, round)
        return self._run(method, server, cohort, round, last=False)

    def finish(self, method: Method, server: Tree, cohort: Sequence[int], round: int) -> Trained:
        if self.why_not(method):
            return self.reference.finish(method, server, cohort, round)
        return self._run(method, server, cohort, round, last=True)

    def _run(self, method: Method, server: Tree, cohort: Sequence[int], round: int, last: bool) -> Trained:
        down = method.broadcast(server, self._ids(cohort))
        groups = self._groups(cohort)
        states = {number: self.reference.client(method, number) for number in cohort}  # new ones draw, one by one
        parts = self._each(lambda group: self._train_group(method, group, states, down, round, last), groups)
        order = torch.tensor([i for group in groups for i in group.places], device=self.federation.device).argsort()
        up = map_nodes(
            lambda n: Each(tree_map(lambda t: t[order], n.rows)) if isinstance(n, Each) else n,
            reduce(merge, [part.up for part in parts]),
        )
        merged = [number for group in groups for number in group.numbers]
        losses = dict(zip(merged, (loss for part in parts for loss in part.losses), strict=True))
        return Trained(
            up=up,
            clients={number: client for part in parts for number, client in part.clients.items()},
            losses=[losses[number] for number in cohort],
            finite=torch.cat([part.finite for part in parts])[order],
            sent=reduce(Size.__add__, [part.sent for part in parts]),
            received=reduce(Size.__add__, [part.received for part in parts]),
        )

    def _groups(self, cohort: Sequence[int]) -> list[Group]:
        """Clients of one architecture, those with the most samples first, dealt evenly to the workers."""
        by_name: dict[str, list[int]] = {}
        for place in sorted(range(len(cohort)), key=lambda place: -self.federation.used(cohort[place])):
            by_name.setdefault(self.architectures[cohort[place]], []).append(place)
        groups = []
        for name, places in by_name.items():
            parts = -(-len(places) // (self.chunk or len(places)))
            parts = min(len(places), -(-parts // self.workers) * self.workers)
            groups += [Group(name, places[i::parts], [cohort[p] for p in places[i::parts]]) for i in range(parts)]
        return groups

    def _each(self, work: Callable[[Group], Any], groups: Sequence[Group]) -> list[Any]:
        """The work on every group, several at a time on a CPU: torch lets go of Python's lock while it computes."""
        if self.workers == 1 or len(groups) == 1:
            return [work(group) for group in groups]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.workers, initializer=torch.set_num_threads, initargs=(1,))
        return list(self._pool.map(work, groups))

    def _model(self, group: Group) -> FunctionalModel:
        """A network for this thread: a module in use by one thread cannot be called by another."""
        name = (group.architecture, threading.get_ident())
        if name not in self._models:
            self._models[name] = self.reference.padded_model(group.numbers[0])
        return self._models[name]

    def _samples(self, architecture: str) -> StackedData:
        if architecture not in self._data:
            members = [i for i, name in enumerate(self.architectures) if name == architecture]
            self._data[architecture] = StackedData(self.federation, members)
        return self._data[architecture]

    def _ids(self, cohort: Sequence[int]) -> Tensor:
        return torch.tensor(list(cohort), device=self.federation.device)

    def _train_group(
        self, method: Method, group: Group, states: Mapping[int, Client], down: Tree, round: int, last: bool
    ) -> Trained:
        model, samples = self._model(group), self._samples(group.architecture)
        mine, dims = deal_to(down, group.places)
        client = stack([states[number] for number in group.numbers])
        data = samples.local(group.numbers, round)
        receive = method.last_receive if last else method.receive
        client = vmap(partial(receive, model), in_dims=(0, 0, dims))(client, data, mine)
        phases = method.last_phases() if last else method.phases()
        client, loss, seen = self._train(method, group, phases, client, mine, dims, data.key, round)
        up: Tree = {}
        if not last:
            upload = vmap(partial(method.upload, model), in_dims=(0, 0, dims))
            up, client = upload(client, data._replace(seen=seen), mine)
        summed = map_nodes(lambda n: n if isinstance(n, Each) else tree_map(lambda t: t.sum(0), n), up)
        many = len(group.numbers)
        copy = many < len(self.architectures)  # a view would keep the others of its round alive
        return Trained(
            up=summed,
            clients={number: row_of(client, row, copy) for row, number in enumerate(group.numbers)},
            losses=[Mean(total, weight) for total, weight in zip(loss.total, loss.weight, strict=True)],
            finite=finite_rows((loss.total, client.params, up), many),
            sent=measure_up(up, many),
            received=measure_down(pick(down, group.places), many),
        )

    def _train(
        self,
        method: Method,
        group: Group,
        phases: Sequence[Phase],
        client: Client,
        down: Tree,
        dims: Tree,
        key: Tensor,
        round: int,
    ) -> tuple[Client, Mean, Tree]:
        """All phases of all clients: what `local.train` does for one."""
        samples, device = self._samples(group.architecture), key.device
        key, order = random.fold(key, -1), samples.keys("order", round, group.numbers)
        own_steps = torch.tensor([samples.steps(i) for i in group.numbers], device=device)[:, None]
        plans: dict[int, Plan] = {}
        zero = torch.zeros(len(group.numbers), device=device)
        carried = Carried(client, optim.Moments({}, {}, zero), zero, zero, ())
        for phase in phases:
            trained = under(carried.client.params, phase.trains)
            if not trained:
                local.refuse_empty(method, phase)
            moments = vmap(lambda p, plain=phase.plain: optim.init(self.optimizer, p, plain))(trained)
            carried = carried._replace(moments=moments)
            rate = torch.tensor(self.optimizer.rate(round) if phase.lr is None else phase.lr, device=device)
            step = self._stepper(method, phase, group, samples.black(group.numbers), down, dims, rate)
            for epoch in range(self.reference.local_epochs if phase.epochs is None else phase.epochs):
                if epoch not in plans:
                    plans[epoch] = samples.epoch(group.numbers, order, epoch)
                plan = plans[epoch]
                carried = carried._replace(seen=())
                keys = [random.fold(key, own_steps * epoch + s) for s in range(len(plan.rows))]
                carried = step(carried, plan, keys)
        return carried.client, Mean(carried.loss, carried.samples), carried.seen

    def _stepper(
        self, method: Method, phase: Phase, group: Group, black: Tensor, down: Tree, dims: Tree, rate: Tensor
    ) -> Callable[[Carried, Plan, list[Tensor]], Carried]:
        """Runs all steps of an epoch: one after another, or by replaying a captured one."""
        samples, model = self._samples(group.architecture), self._model(group)

        def one(carried: Tree, batch: Tree, key: Tensor, down: Tree, rate: Tensor, every: bool) -> Tree:
            client, moments, loss, n, _ = carried
            made = local.train_step(method, model, self.optimizer, phase, client, moments, batch, down, key, rate)
            size = batch.mask.sum()
            if every:
                return Carried(made.client, made.moments, loss + made.loss * size, n + size, made.seen)
            active = size > 0  # a client that has done all its steps stays as it is
            client, moments = tree_map(
                lambda new, old: torch.where(active, new, old), (made.client, made.moments), (client, moments)
            )
            seen = tree_map(lambda t: torch.where(active, t, torch.zeros_like(t)), made.seen)
            return Carried(client, moments, loss + torch.where(active, made.loss, 0) * size, n + size, seen)

        def step(
            carried: Carried, plan: Plan, key: Tensor, black: Tensor, down: Tree, rate: Tensor, every: bool = False
        ) -> Carried:
            """One step of all; `every` says that all of them have one to take."""
            batch = samples.batch(plan, black)
            before = carried.seen
            stepped = vmap(partial(one, every=every), in_dims=(0, 0, 0, dims, None))
            made: Carried = stepped(carried._replace(seen=()), batch, key, down, rate)
            return made._replace(seen=tree_map(torch.add, before, made.seen) if before != () else made.seen)

        def run(carried: Carried, plan: Plan, keys: list[Tensor]) -> Carried:
            """Clients come in the order of their steps; those that are done are laid aside when they are many."""
            done: list[Tree] = []
            here = len(group.numbers)
            for number, key in enumerate(keys):
                active = sum(samples.steps(i) > number for i in group.numbers)
                if not active:
                    break  # nobody in this group has any data
                if active < 0.8 * here:
                    carried, rest = cut(carried, active)
                    done.append(rest)
                    here = active
                batch, at, filling = first((plan.step(number), key, black), here)
                dealt = down if dims is None else first(down, here, dims)
                carried = step(carried, batch, at, filling, dealt, rate, every=active == here)
            return join([carried, *reversed(done)])

        if self.federation.device.type != "cuda":
            return run
        form = (group.architecture, method, phase, dims is None)

        def replayed(carried: Carried, plan: Plan, keys: list[Tensor]) -> Carried:
            inputs = (carried, plan.step(0), keys[0], black, down, rate)
            name = (form, signature(inputs))
            if name not in self._replays:  # the first time as it is: it may not come again
                self._replays[name] = None
                return run(carried, plan, keys)
            replay = self._replays[name]
            if replay is None:
                if len(self._replays) > GRAPHS:
                    return run(carried, plan, keys)
                replay = self._replays[name] = Replay(step, inputs)
            return replay(carried, [(plan.step(i), keys[i]) for i in range(len(keys))], (black, down, rate))

        return replayed

    # evaluation

    def evaluate(self, method: Method, server: Tree, cohort: Sequence[int], on: str, who: str) -> list[Tally]:
        if self.why_not(method):
            return self.reference.evaluate(method, server, cohort, on, who)
        down = method.broadcast(server, self._ids(cohort))
        groups, whole = self._groups(cohort), method.global_client(server) if who == "global" else None
        if who == "global" and whole is None:
            raise ValueError(f"{type(method).__name__} has no global model")
        states = {number: whole or self.reference.client(method, number) for number in cohort}
        counted = self._each(lambda group: self._evaluate_group(method, group, states, whole, down, on), groups)
        found: dict[int, Tally] = {}
        for group, tallies in zip(groups, counted, strict=True):
            found |= dict(zip(group.places, tallies, strict=True))
        return [found[place] for place in range(len(cohort))]

    @torch.no_grad()
    def _evaluate_group(
        self,
        method: Method,
        group: Group,
        states: Mapping[int, Client],
        whole: Client | None,
        down: Tree,
        on: str,
    ) -> list[Tally]:
        model, samples = self._model(group), self._samples(group.architecture)
        mine, dims = deal_to(down, group.places)
        client = whole or stack([states[number] for number in group.numbers])
        rows, sizes = samples.test_rows(group.numbers) if on == "own" else samples.global_rows(group.numbers)
        own = self.federation.counts[group.numbers] > 0
        mask = torch.arange(rows.shape[1], device=rows.device) < sizes[:, None]

        def count(client: Client, x: Tensor, y: Tensor, mask: Tensor, own: Tensor, down: Tree) -> Tally:
            return tally(method.predict(model, client, x, down), y, own, mask)

        counted = vmap(count, in_dims=(None if whole else 0, 0, 0, 0, 0, dims))
        wide = max(1, min(CHUNK, TOGETHER // len(group.numbers)))
        parts = [
            counted(client, samples.test.x[r], samples.test.y[r], m, own, mine)
            for r, m in zip(rows.split(wide, 1), mask.split(wide, 1), strict=True)
        ]
        total = {kind: Correct(*(t.cpu() for t in counted)) for kind, counted in reduce(add, parts).items()}
        return [
            {kind: Correct(c.right[row], c.samples[row]) for kind, c in total.items()}
            for row in range(len(group.numbers))
        ]

    def global_tally(self, method: Method, server: Tree) -> Tally | None:
        return self.reference.global_tally(method, server)
