"""The stacked engine: clients of one architecture trained at once, by the same functions as one after another."""

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from protofed import local
from protofed.data.lanes import Lanes, best_width, pack
from protofed.data.stacked import LazyBatches, StackedData
from protofed.engines import Trained, memory, nobody
from protofed.engines.base import OnReference
from protofed.engines.reference import ReferenceEngine
from protofed.engines.stacks import along, deal_to, finite_rows, join, one_by_one, pick, put, rows_of, stack
from protofed.engines.step import Carried, Now, Replay, Traced, lanes_step
from protofed.engines.wire import Size, measure_down, measure_up, signature
from protofed.errors import UserError
from protofed.method import Client, Each, LocalData, Mean, Method, Phase, Tree
from protofed.metrics import Tally, add, tally
from protofed.models.functional import FunctionalModel
from protofed.ops import optim, random
from protofed.ops.trees import deal, map_nodes, merge, under

OFTEN = {"cpu": 2, "cuda": 1}  # times that a kind of step comes as it is, before it is traced or captured
TRIED = 5  # steps from which the seconds of a round are told
KEPT = 64  # traced and captured steps
DRAWN = 2**27  # dropout decisions that are drawn ahead at most
BLOCK = 2**20  # of them at a time
BUSY = {"cpu": 3e7, "cuda": 2e11}  # operations of one client that keep a device busy by themselves
CACHE = 5 * 2**19  # bytes for the largest thing that a step makes on a CPU, so that the next operation finds it there
PADDED = 1.15  # samples with padding to those without, in one pass on a CPU


class Pace(NamedTuple):
    """Roughly what a step takes, whoever trains, to choose the number of lanes by."""

    step: float  # seconds, whatever is in it
    change: float  # seconds to pass lanes on
    speed: float  # operations a second


UNSTACKED = (RuntimeError, NotImplementedError, ValueError, TypeError)  # raised by torch.vmap
PACE = {"cuda": Pace(4e-4, 5e-4, 2e13), "cpu": Pace(1e-2, 5e-4, 2e10), "compiled": Pace(1e-3, 5e-4, 4e10)}


class Group(NamedTuple):
    """Clients that are trained at once."""

    architecture: str
    places: list[int]  # in the cohort
    numbers: list[int]


class StackedEngine(OnReference):
    """Clients of one architecture together; what cannot be stacked is left to the reference engine."""

    def __init__(
        self,
        reference: ReferenceEngine,
        *,
        chunk: int = 0,
        workers: int = 1,
        compiled: bool = False,
        ordered: bool = False,
        typical: Sequence[int] = (),
        shares: int = 1,
    ) -> None:
        """`ordered`: sums over clients in the order of the cohort, whatever the groups; `typical`: the clients of a
        round, by which the number of lanes is chosen; without them, those of the first round; `shares`: engines like
        this one that a round is spread over."""
        self.reference, self.chunk, self.compiled, self.typical = reference, chunk, compiled, typical
        self.ordered = ordered
        self.notes: list[str] = []  # what the user should be told
        self._refused: str | None = None  # why clients cannot be stacked, if known
        self._trial: list[float] | None = None  # seconds of training, where only some steps are taken to find out
        self.federation, self.optimizer = reference.federation, reference.optimizer
        self.device = self.federation.device
        self.workers = workers if self.device.type == "cpu" else 1
        self.parts = self.workers * shares  # groups of one architecture, at least
        self.architectures = reference.architectures
        self._data: dict[str, StackedData] = {}
        self._models: dict[tuple[str, int], FunctionalModel] = {}
        self._widths: dict[str, int] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._steps: dict[Any, Any] = {}
        self._taken: dict[Any, int] = {}
        self._seen: dict[Any, Tree] = {}
        self._works = self._judges = False  # training, and tests, have been done so once
        self._looks: dict[Method, bool] = {}  # whether a method's upload looks at the samples
        self._together: dict[tuple[int, ...], tuple[list[Client], Client]] = {}
        self._draws: dict[str, dict[str, torch.Size]] = {}
        self.clock = reference.clock
        self._busy = 1  # threads that train at once
        if any(reference.model(number).recurrent for number in range(len(self.architectures))):
            self._refused = "recurrent layers (LSTM, GRU)"

    def why_not(self, method: Method) -> str | None:
        """What keeps a method's clients from being stacked, in words."""
        if not method.stackable:
            return f"{type(method).__name__} works on the host, client by client"
        return self._refused

    def _refuse(self, why: str) -> None:
        self._refused = why
        self.notes.append(f"one client after another, not stacked: {why}")

    # training

    def train(self, method: Method, server: Tree, cohort: Sequence[int], round: int) -> Trained:
        if not any(self.federation.used(number) for number in cohort):
            return nobody(cohort)
        return self.summed(self.share(method, server, cohort, self.groups(cohort), round))

    def share(
        self, method: Method, server: Tree, cohort: Sequence[int], groups: Sequence[Group], round: int
    ) -> Trained:
        """Local training of a cohort in these groups; where sums are ordered, its uploads are not summed yet."""
        while self.why_not(method) is None:
            try:
                trained = self._run(method, server, cohort, groups, round, last=False)
                self._works = True
                return trained
            except torch.OutOfMemoryError:
                self._narrow()
            except UNSTACKED as error:
                if self._works:
                    raise
                self._refuse(f"torch.vmap cannot take {_operation(error)}")
        if not self.ordered:
            return self.reference.share(method, server, cohort, round)
        alone = [self.reference.share(method, server, [number], round) for number in cohort]
        return self.joined([part._replace(up=_as_row(part.up)) for part in alone], range(len(cohort)))

    def trial(self, method: Method, server: Tree, cohort: Sequence[int]) -> float:
        """Seconds of training that a round takes, roughly, from a few steps; nothing comes of them."""
        for _ in range(1 + OFTEN[self.device.type]):  # what comes often is traced or captured
            self._trial = []
            try:
                self.train(method, server, cohort, 0)
                found = sum(self._trial) / self.parts
            finally:
                self._trial = None
        return found

    def guess(self, rounds: int) -> float:
        """Seconds of training that so many rounds take, very roughly, from sizes alone."""
        seconds = 0.0
        for group in self.groups(self.typical):
            pace, width = self._pace, self._width(group)
            steps = sum(-(-self.federation.used(i) // self.federation.batch_size) for i in group.numbers)
            each = self.reference.flops(group.numbers[0]) * self.federation.batch_size / pace.speed
            seconds += steps * self.reference.local_epochs * (pace.step / width + each)
        return rounds * seconds / self.parts

    def use(self, compiled: bool) -> None:
        """From now on compile training steps, or not."""
        self.compiled = compiled
        for kept in (self._models, self._widths, self._steps, self._taken, self._seen):
            kept.clear()

    @property
    def _pace(self) -> Pace:
        return PACE["cuda" if self.device.type == "cuda" else "compiled" if self.compiled else "cpu"]

    def _narrow(self) -> None:
        """Fewer lanes, where there was too little memory for so many."""
        widest = max(self._widths.values(), default=1)
        if widest == 1:
            raise UserError(
                f"training one client at a time takes more memory than there is: {memory.told(self.device)}. "
                "Use a smaller model or batch_size."
            )
        self.chunk = widest // 2
        self.notes.append(f"too little memory for {widest} clients at once; going on with {self.chunk}")
        for kept in (self._widths, self._steps, self._taken, self._seen, self._together):
            kept.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def finish(self, method: Method, server: Tree, cohort: Sequence[int], round: int) -> Trained:
        return self.finish_share(method, server, cohort, self.groups(cohort), round)

    def finish_share(
        self, method: Method, server: Tree, cohort: Sequence[int], groups: Sequence[Group], round: int
    ) -> Trained:
        """The last phases of a cohort in these groups."""
        if self.why_not(method):
            return self.reference.finish(method, server, cohort, round)
        return self._run(method, server, cohort, groups, round, last=True)

    def _run(
        self, method: Method, server: Tree, cohort: Sequence[int], groups: Sequence[Group], round: int, last: bool
    ) -> Trained:
        down = method.broadcast(server, self._ids(cohort))
        states = {number: self.reference.client(method, number) for number in cohort}  # new ones draw, one by one
        self._busy = min(self.workers, len(groups))
        parts = self._each(lambda group: self._train_group(method, group, states, down, round, last), groups)
        return self.joined(parts, [place for group in groups for place in group.places])

    def joined(self, parts: Sequence[Trained], places: Sequence[int]) -> Trained:
        """What parts of a cohort give together, in the order of the cohort: their clients have these places in it."""
        order = self._ids(places).argsort()
        return Trained(
            up=self._merged([part.up for part in parts], order),
            clients={number: client for part in parts for number, client in part.clients.items()},
            loss=along(order, join([part.loss for part in parts])),
            finite=torch.cat([part.finite for part in parts])[order],
            sent=reduce(Size.__add__, [part.sent for part in parts]),
            received=reduce(Size.__add__, [part.received for part in parts]),
        )

    def _merged(self, ups: Sequence[Tree], order: Tensor) -> Tree:
        """The uploads of all parts together: what is seen client by client in the order of the cohort, and the rest
        summed, or in that order too, to be summed."""
        if self.ordered:
            return tree_map(lambda *parts: torch.cat(parts)[order], *ups)
        return map_nodes(
            lambda n: Each(tree_map(lambda t: t[order], n.rows)) if isinstance(n, Each) else n, reduce(merge, ups)
        )

    def summed(self, trained: Trained) -> Trained:
        """The same with all uploads summed, one by one where that was asked for."""
        return trained._replace(up=_one_by_one(trained.up)) if self.ordered else trained

    def groups(self, cohort: Sequence[int]) -> list[Group]:
        """Clients of one architecture, those with the most samples first, dealt evenly to the workers."""
        by_name: dict[str, list[int]] = {}
        for place in sorted(range(len(cohort)), key=lambda place: -self.federation.used(cohort[place])):
            by_name.setdefault(self.architectures[cohort[place]], []).append(place)
        groups = []
        for name, places in by_name.items():
            fits = self.reference.states_that_fit(cohort[places[0]])
            parts = min(len(places), max(self.parts, -(-len(places) // fits)))
            dealt: list[list[int]] = [[] for _ in range(parts)]
            loads = [0] * parts
            for place in places:  # each to the group that has least to do
                group = loads.index(min(loads))
                dealt[group].append(place)
                loads[group] += self.federation.used(cohort[place]) + 1
            groups += [Group(name, some, [cohort[place] for place in some]) for some in dealt]
        return groups

    def _each(self, work: Callable[[Any], Any], groups: Sequence[Any]) -> list[Any]:
        """The work on every group, several at a time on a CPU: torch lets go of Python's lock while it computes."""
        if self.workers == 1 or len(groups) == 1:
            return [work(group) for group in groups]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.workers, initializer=alone_on_its_core)
        return list(self._pool.map(work, groups))

    def _model(self, group: Group) -> FunctionalModel:
        """A network for this thread: a module in use by one thread cannot be called by another."""
        name = (group.architecture, threading.get_ident())
        if name not in self._models:
            self._models[name] = self.reference.padded_model(group.numbers[0], self.compiled)
        return self._models[name]

    def _samples(self, architecture: str) -> StackedData:
        with self._lock:
            if architecture not in self._data:
                members = [i for i, name in enumerate(self.architectures) if name == architecture]
                self._data[architecture] = StackedData(self.federation, members)
            return self._data[architecture]

    def _ids(self, cohort: Sequence[int]) -> Tensor:
        return torch.tensor(list(cohort), device=self.device)

    def _width(self, group: Group) -> int:
        """Lanes for this architecture: the same in every round, so that a step has the same shape."""
        with self._lock:
            name = group.architecture
            if name not in self._widths:
                groups = [g for g in self.groups(self.typical) if g.architecture == name] or [group]
                steps = [[-(-self.federation.used(i) // self.federation.batch_size) for i in g.numbers] for g in groups]
                pace = self._pace
                each = self.reference.flops(group.numbers[0]) * self.federation.batch_size / pace.speed
                width = max(best_width(n, pace.step, each, pace.change) for n in steps)
                at_once = self.parts if self.device.type == "cpu" else 1
                fits = self.reference.lanes_that_fit(group.numbers[0]) // at_once
                if self.device.type == "cpu":
                    each_lane = self.reference.largest(group.numbers[0]) * self.federation.batch_size
                    fits = min(fits, CACHE // max(1, each_lane))
                self._widths[name] = max(1, min(width, self.chunk or width, fits))
            return self._widths[name]

    def _train_group(
        self, method: Method, group: Group, states: Mapping[int, Client], down: Tree, round: int, last: bool
    ) -> Trained:
        samples = self._samples(group.architecture)
        mine, dims = deal_to(down, group.places)
        client = self._stack(group, states)
        key = samples.keys("train", round, group.numbers)
        receive = method.last_receive if last else method.receive
        client = self._apply(receive, group, client, key, (), mine, dims)
        phases = method.last_phases() if last else method.phases()
        with self.clock.part("train", self._busy):
            client, loss, seen = self._train(method, group, phases, client, mine, dims, key, round)
        up: Tree = {}
        if not last:
            with self.clock.part("upload", self._busy):
                up, client = self._upload(method, group, client, key, seen, mine, dims)
        summed = up
        if not self.ordered:
            summed = map_nodes(
                lambda n: n if isinstance(n, Each) else tree_map(lambda t: t.sum(0) if len(t) > 1 else t[0], n), up
            )
        many = len(group.numbers)
        copy = 1 < many < len(self.architectures)  # a view would keep the others of its round alive
        return Trained(
            up=summed,
            clients=dict(zip(group.numbers, self._unstack(group, client, copy), strict=True)),
            loss=loss,
            finite=finite_rows((loss.total, client.params, up), many),
            sent=measure_up(up, many),
            received=measure_down(pick(down, group.places), many),
        )

    def _unstack(self, group: Group, client: Client, copy: bool) -> list[Client]:
        """Every client's state; all of them together are remembered for when they are wanted next."""
        rows: list[Client] = rows_of(client, copy)
        with self._lock:
            self._together[tuple(group.numbers)] = rows, client
            while len(self._together) > 2 * self.workers:
                del self._together[next(iter(self._together))]
        return rows

    def _stack(self, group: Group, states: Mapping[int, Client]) -> Client:
        """The states of these clients together."""
        rows, client = self._together.get(tuple(group.numbers), ((), None))
        if client is not None and all(states[n] is row for n, row in zip(group.numbers, rows, strict=True)):
            return client
        stacked: Client = stack([states[number] for number in group.numbers])
        return stacked

    def _time(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _apply(
        self,
        function: Callable[..., Any],
        group: Group,
        client: Client,
        key: Tensor,
        seen: Tree,
        down: Tree,
        dims: Tree,
    ) -> Any:
        """function(model, client, data, down) for all clients at once."""
        samples = self._samples(group.architecture)
        parts = samples.parts(group.numbers, self._at_once(group))
        model = self._model(group)

        def one(client: Client, parts: Any, counts: Tensor, key: Tensor, seen: Tree, down: Tree) -> Any:
            batches = LazyBatches(samples.train, parts)
            made = function(model, client, LocalData(batches, counts, key, seen), down)
            if function.__name__ == "upload":
                self._looks[function.__self__] = batches.looked  # type: ignore[attr-defined]
            return made

        sizes = [len(self.federation.train_rows(i)) for i in group.numbers]
        mapped = self._mapped(group, sizes)(one, in_dims=(0, 0, 0, 0, 0, dims))
        name = (group.architecture, function.__func__, function.__self__, str(dims))  # type: ignore[attr-defined]
        return self._pass(name, mapped, client, parts, self.federation.counts[group.numbers], key, seen, down)

    def _pass(self, name: Any, work: Callable[..., Tree], *inputs: Tree) -> Tree:
        """work(*inputs); on a GPU captured from the second time on that it comes in these shapes."""
        if self.device.type != "cuda":
            return work(*inputs)
        form = (name, signature(inputs))
        self._taken[form] = self._taken.get(form, 0) + 1
        if self._taken[form] > 1 and self._remember(form, lambda: Replay(work, inputs)):
            return self._steps[form].result(*inputs)
        return work(*inputs)

    def _upload(
        self,
        method: Method,
        group: Group,
        client: Client,
        key: Tensor,
        seen: Tree,
        down: Tree,
        dims: Tree,
    ) -> tuple[Tree, Client]:
        """What all clients send and keep; where they look at their samples again, some clients at a time."""
        looks = self._looks.get(method, True)
        pieces = self._pieces(group, [len(self.federation.train_rows(i)) for i in group.numbers])
        if not looks or len(pieces) == 1:
            made: tuple[Tree, Client] = self._apply(method.upload, group, client, key, seen, down, dims)
            return made
        found = []
        for piece in pieces:
            some = Group(group.architecture, [group.places[i] for i in piece], [group.numbers[i] for i in piece])
            index = self._ids(piece)
            at, mine = along(index, (client, key, seen)), along(index, down, dims)
            found.append(self._apply(method.upload, some, at[0], at[1], at[2], mine, dims))
        order = self._ids([i for piece in pieces for i in piece]).argsort()
        made = along(order, join(found))
        return made  # noqa: RET504

    def _alone(self, group: Group, sizes: Sequence[int]) -> bool:
        """Whether so many samples of one client keep the device busy by themselves."""
        return self.reference.flops(group.numbers[0]) * sum(sizes) / max(1, len(sizes)) > BUSY[self.device.type]

    def _mapped(self, group: Group, sizes: Sequence[int]) -> Callable[..., Any]:
        """How a function of one client becomes one of many."""
        return one_by_one if self._alone(group, sizes) else vmap

    def _pieces(self, group: Group, sizes: Sequence[int]) -> list[list[int]]:
        """Clients that are passed together outside of training: on a CPU those of like size, for less padding, unless
        one alone keeps it busy."""
        if self.device.type != "cpu":
            return [list(range(len(sizes)))]
        if self._alone(group, sizes):
            return [[place] for place in range(len(sizes))]
        pieces: list[list[int]] = []
        largest = real = 0
        for place in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            padded = largest * (len(pieces[-1]) + 1) if pieces else 0
            if not pieces or padded > max(1024, PADDED * (real + sizes[place])):
                pieces.append([])
                largest, real = sizes[place], 0
            pieces[-1].append(place)
            real += sizes[place]
        return [sorted(piece) for piece in pieces]

    def _at_once(self, group: Group) -> int:
        """Samples of all clients in one pass outside of training."""
        return self.reference.together(group.numbers[0])

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
        samples = self._samples(group.architecture)
        key, order = random.fold(key, -1), samples.keys("order", round, group.numbers)
        steps = [samples.steps(i) for i in group.numbers]
        many, width = len(group.numbers), self._width(group)
        client = _own(client)
        home = Carried(client, (), torch.zeros(many, device=self.device), torch.zeros(many, device=self.device), ())  # type: ignore[arg-type]
        for phase in phases:
            if not under(client.params, phase.trains):
                local.refuse_empty(method, phase)
            epochs = self.reference.local_epochs if phase.epochs is None else phase.epochs
            lanes = pack([n * epochs for n in steps], width)
            if not lanes.length:
                continue  # nobody in this group has any data
            rate = torch.tensor(self.optimizer.rate(round) if phase.lr is None else phase.lr, device=self.device)
            home = self._phase(method, phase, group, home, lanes, epochs, order, key, down, dims, rate)
        return home.client, Mean(home.loss, home.samples), home.seen

    def _phase(
        self,
        method: Method,
        phase: Phase,
        group: Group,
        home: Carried,
        lanes: Lanes,
        epochs: int,
        order: Tensor,
        key: Tensor,
        down: Tree,
        dims: Tree,
        rate: Tensor,
    ) -> Carried:
        """One phase of all clients in lanes; `home` is where they are when they are in none."""
        samples = self._samples(group.architecture)
        feed = self._feed(group, lanes, epochs, order, key)
        moves = self._moves(lanes)
        black, at = samples.black(group.numbers), self._ids(lanes.who[0].tolist())
        client = along(at, home.client)
        moments = vmap(lambda p: optim.init(self.optimizer, p, phase.plain))(under(client.params, phase.trains))
        zero = torch.zeros(len(at), device=self.device)
        carried = Carried(client, _own(moments), zero, zero.clone(), ())
        fixed = (along(at, black), along(at, down, dims), rate)
        step, carried = self._step(method, phase, group, samples, carried, feed, fixed, dims)
        home = home._replace(seen=tree_map(lambda t: t.new_zeros(len(key), *t.shape[1:]), carried.seen))
        if isinstance(step, Replay):
            carried, _, _, fixed = step.inputs
        else:
            leaves, form = tree_flatten(feed)
            times = list(zip(*(leaf.unbind(0) for leaf in leaves), strict=True))
            step = step.bind(carried, *fixed[1:]) if isinstance(step, Traced) else partial(_loose, step, carried, fixed)
        started: list[float] = []
        for now in range(lanes.length):
            if self._trial is not None:
                started.append(self._time())
                if now == min(TRIED, lanes.length - 1):
                    self._trial.append(float(min(np.diff(started), default=0.0)) * lanes.length)
                    return home
            if now in moves:
                self._leave(carried, home, *moves[now][:2])
                self._enter(carried, home, fixed, (black, down), dims, *moves[now][::2])
            if isinstance(step, Replay):
                step()
            else:
                step(_now(samples, tree_unflatten(times[now], form), fixed))
        self._leave(carried, home, *moves[lanes.length][:2])
        return home

    def _feed(self, group: Group, lanes: Lanes, epochs: int, order: Tensor, key: Tensor) -> Tree:
        """What the lanes get at every time (T, W, ...): samples, keys, dropouts, whether busy and in the last epoch."""
        samples = self._samples(group.architecture)
        plan = samples.feed(group.numbers, order, epochs, lanes)
        own = np.array([samples.steps(i) for i in group.numbers])[lanes.who]
        last = lanes.step >= own * (epochs - 1)
        who, step, busy, last = torch.from_numpy(np.stack([lanes.who, lanes.step, lanes.busy, last])).to(self.device)
        keys = random.fold(key[who], step[..., None])
        return plan, keys, self._draw(group, keys), busy.bool(), last.bool()

    def _draw(self, group: Group, keys: Tensor) -> dict[str, Tensor]:
        """What dropouts keep in all steps (T, W, B, ...), unless that is too much to hold."""
        model = self._model(group)
        with self._lock:
            if group.architecture not in self._draws:
                inputs = self.federation.blank(group.numbers[0], self.federation.batch_size)
                self._draws[group.architecture] = model.draws(inputs)
            draws = self._draws[group.architecture]
        each = sum(s.numel() for s in draws.values()) * keys.shape[1]
        if not each or each * len(keys) > DRAWN:
            return {}
        blocks = [model.draw(k, draws) for k in keys.split(max(1, BLOCK // each))]
        return {name: torch.cat([block[name] for block in blocks]) for name in draws}

    def _moves(self, lanes: Lanes) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
        """For every change its lanes, who leaves and who enters, in one transfer to the device."""
        parts = [(when, part) for when, change in lanes.changes.items() for part in change]
        whole = self._ids([number for _, part in parts for number in part])
        found: dict[int, list[Tensor]] = {}
        for (when, _), piece in zip(parts, whole.split([len(part) for _, part in parts]), strict=True):
            found.setdefault(when, []).append(piece)
        return {when: (lane, leave, enter) for when, (lane, leave, enter) in found.items()}

    @staticmethod
    def _leave(carried: Carried, home: Carried, lanes: Tensor, clients: Tensor) -> None:
        """Clients leave their lanes for home."""
        put(home.client, clients, along(lanes, carried.client))
        put(home.seen, clients, along(lanes, carried.seen))
        home.loss.index_add_(0, clients, carried.loss[lanes])
        home.samples.index_add_(0, clients, carried.samples[lanes])

    @staticmethod
    def _enter(
        carried: Carried, home: Carried, fixed: Tree, private: Tree, dims: Tree, lanes: Tensor, clients: Tensor
    ) -> None:
        """Clients enter free lanes, with all that is theirs."""
        put(carried.client, lanes, along(clients, home.client))
        put((carried.moments, carried.loss, carried.samples, carried.seen), lanes, 0)
        put(fixed[0], lanes, along(clients, private[0]))
        put(fixed[1], lanes, along(clients, private[1], dims), dims)

    def _step(
        self,
        method: Method,
        phase: Phase,
        group: Group,
        samples: StackedData,
        carried: Carried,
        feed: Tree,
        fixed: Tree,
        dims: Tree,
    ) -> tuple[Any, Carried]:
        """A step of this kind, as fast as it is worth, and what it carries, with room for what is seen."""
        plain = lanes_step(
            method, phase, self._model(group), self.optimizer, dims, self.reference.rounding, self.compiled
        )
        name = (group.architecture, method, phase, str(dims), signature((carried, fixed)))
        now = _now(samples, tree_map(lambda t: t[0], feed), fixed)
        with self._lock:
            if name not in self._seen:
                self._seen[name] = tree_map(torch.zeros_like, plain(_own(carried), now, *fixed[1:]))
            carried = carried._replace(seen=tree_map(torch.clone, self._seen[name]))
            form = (name, signature(now))
            self._taken[form] = self._taken.get(form, 0) + 1
            often = self._taken[form] > OFTEN[self.device.type]
            core: Any = plain
            if self.compiled or (often and self.device.type == "cpu"):
                core = self._remember(form, lambda: self._trace(plain, (carried, now, *fixed[1:]))) or plain
            if not often or self.device.type == "cpu":
                return core, carried
            return self._captured(form, core, samples, carried, feed, fixed) or core, carried

    def _trace(self, step: Callable[..., Any], inputs: Sequence[Tree]) -> Any:
        """The step as operations, compiled if that was asked for and works."""
        if self.compiled:
            try:
                return Traced(step, inputs, compiled=True)
            except Exception as error:  # whatever goes wrong in a compiler
                self.notes.append(f"a training step could not be compiled and runs as it is ({_first_line(error)})")
        return Traced(step, inputs, compiled=False)

    def _remember(self, name: Any, make: Callable[[], Any]) -> Any:
        """What was made under this name, made now if there is room."""
        if name not in self._steps and len(self._steps) < KEPT:
            self._steps[name] = make()
        return self._steps.get(name)

    def _captured(
        self, name: Any, core: Any, samples: StackedData, carried: Carried, feed: Tree, fixed: Tree
    ) -> Replay | None:
        """The step with its share of the feed captured, time counting up by itself."""
        length = len(feed[1])
        name = ("captured", name)
        time = torch.zeros(1, dtype=torch.int64, device=self.device)
        if name in self._steps and len(tree_leaves(self._steps[name].inputs[1])[0]) < length:
            del self._steps[name]  # it has no room for so many steps
        room = -(-length * 5 // 4)

        def step(carried: Carried, feed: Tree, time: Tensor, fixed: Tree) -> None:
            core(carried, _now(samples, tree_map(lambda t: t.index_select(0, time)[0], feed), fixed), *fixed[1:])
            time.add_(1)

        def make() -> Replay:
            long = tree_map(lambda t: torch.cat([t, t.new_zeros(room - length, *t.shape[1:])]), feed)
            return Replay(step, (carried, long, time, fixed))

        replay: Replay | None = self._remember(name, make)
        if replay is not None:
            replay.load(carried, feed, time, fixed)
        return replay

    # evaluation

    def evaluate(
        self,
        method: Method,
        server: Tree,
        cohort: Sequence[int],
        on: str,
        who: str,
        confusion: str = "",
        groups: Sequence[Group] = (),
    ) -> list[Tally]:
        if self.why_not(method):
            return self.reference.evaluate(method, server, cohort, on, who, confusion)
        down = method.broadcast(server, self._ids(cohort))
        groups, whole = groups or self.groups(cohort), method.global_client(server) if who == "global" else None
        if who == "global" and whole is None:
            raise ValueError(f"{type(method).__name__} has no global model")
        states = {number: whole or self.reference.client(method, number) for number in cohort}
        try:
            counted = self._each(
                lambda group: self._evaluate_group(method, group, states, whole, down, on, confusion), groups
            )
        except torch.OutOfMemoryError:
            raise
        except UNSTACKED as error:
            if self._judges:
                raise
            self._refuse(f"torch.vmap cannot take {_operation(error)}")
            return self.reference.evaluate(method, server, cohort, on, who, confusion)
        self._judges = True
        found: dict[int, Tally] = {}
        for group, tallies in zip(groups, counted, strict=True):
            found |= dict(zip(group.places, tallies, strict=True))
        return [found[place] for place in range(len(cohort))]

    def _evaluate_group(
        self,
        method: Method,
        group: Group,
        states: Mapping[int, Client],
        whole: Client | None,
        down: Tree,
        on: str,
        confusion: str,
    ) -> list[Tally]:
        """Clients of like size at a time, or, on the global test set, those of one domain."""
        tallies: dict[int, Tally] = {}
        if on == "global":
            domains = [self.federation.domain(i) for i in group.numbers]
            pieces = [[i for i, d in enumerate(domains) if d == domain] for domain in sorted(set(domains))]
        else:
            pieces = self._pieces(group, [len(self.federation.test_rows(i, on)) for i in group.numbers])
        together = whole or self._stack(group, states)
        for piece in pieces:
            some = Group(group.architecture, [group.places[i] for i in piece], [group.numbers[i] for i in piece])
            clients = together if whole or len(pieces) == 1 else along(self._ids(piece), together)
            counted = self._evaluate_piece(method, some, clients, whole is not None, down, on, confusion)
            tallies |= dict(zip(piece, counted, strict=True))
        return [tallies[i] for i in range(len(group.numbers))]

    @torch.no_grad()
    def _evaluate_piece(
        self, method: Method, group: Group, clients: Client, whole: bool, down: Tree, on: str, confusion: str
    ) -> list[Tally]:
        samples = self._samples(group.architecture)
        mine, dims = deal_to(down, group.places)
        own = self.federation.counts[group.numbers] > 0
        shared = None if on == "global" else 0  # the global test set is the same for all of them
        if on != "global":
            rows, sizes = samples.test_rows(group.numbers, on)
            mask = torch.arange(rows.shape[1], device=rows.device) < sizes[:, None]
        else:
            rows = samples.global_rows(group.numbers[0])
            mask = torch.ones_like(rows, dtype=torch.bool)

        wide = max(1, self._at_once(group) // len(group.numbers))
        mapped, model = self._mapped(group, [rows.shape[-1]]), self._model(group)

        def count(client: Client, x: Tensor, y: Tensor, mask: Tensor, own: Tensor, down: Tree) -> Tally:
            return tally(method.predict(model, client, x, down), y, own, mask, confusion)

        def work(client: Client, rows: Tensor, mask: Tensor, own: Tensor, down: Tree) -> Tally:
            counted = mapped(count, in_dims=(None if whole else 0, shared, shared, shared, 0, dims))
            parts = zip(rows.split(wide, -1), mask.split(wide, -1), strict=True)
            return reduce(add, [counted(client, samples.test.x[r], samples.test.y[r], m, own, down) for r, m in parts])

        name = ("evaluate", group.architecture, method, on, whole, str(dims), confusion)
        counted = self._pass(name, work, clients, rows, mask, own, mine)
        return rows_of(tree_map(torch.Tensor.cpu, counted), copy=False)

    def global_tally(
        self, method: Method, server: Tree, confusion: str = "", share: slice = slice(None)
    ) -> Tally | None:
        """The global model on all test samples that fit it, or on a share of them; None where that is nothing."""
        client = method.global_client(server)
        if client is None or self.parts == 1 or self.why_not(method):
            return self.reference.global_tally(method, server, confusion) if not share.start else None
        down = deal(method.broadcast(server, self._ids([0])), 0)
        group, own = Group(self.architectures[0], [0], [0]), torch.ones(self.federation.classes, dtype=torch.bool)
        shape, wide = self.federation.shape(0), self._at_once(group)
        tests = [self.federation.global_test(d) for d, s in enumerate(self.federation.shapes) if s == shape]
        parts = [part for x, y in tests for part in zip(x.split(wide), y.split(wide), strict=True)][share]

        @torch.no_grad()
        def count(part: tuple[Tensor, Tensor]) -> Tally:
            return tally(method.predict(self._model(group), client, part[0], down), part[1], own, confusion=confusion)

        return reduce(add, self._each(count, parts)) if parts else None


def _one_by_one(rows: Tree) -> Tree:
    """Uploads with an axis of clients summed in the order in which they lie there."""
    return map_nodes(
        lambda n: n if isinstance(n, Each) else tree_map(lambda t: reduce(torch.add, t.unbind(0)), n), rows
    )


def _as_row(up: Tree) -> Tree:
    """One client's merged upload with an axis of clients, which an Each has already."""
    return map_nodes(lambda n: n if isinstance(n, Each) else tree_map(lambda t: t[None], n), up)


def alone_on_its_core() -> None:
    """A thread computes by itself, and takes numbers too small to matter for zero: they are ten times slower."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _operation(error: Exception) -> str:
    """Which operation an error of torch.vmap is about, or what it says."""
    found = re.search(r"aten::\w+|torch\.\w+|\.item\(\)", str(error))
    return f"{found.group()} ({_first_line(error)})" if found else f"this model or method ({_first_line(error)})"


def _now(samples: StackedData, feed: Tree, fixed: Tree) -> Now:
    """What the lanes get at a time, from their feed at that time."""
    plan, keys, drawn, busy, last = feed
    return Now(samples.batch(plan, fixed[0]), keys, drawn, busy, last)


def _loose(step: Callable[..., Any], carried: Carried, fixed: Tree, now: Now) -> None:
    step(carried, now, *fixed[1:])


def _own(tree: Tree) -> Tree:
    """The same with memory of its own, to be written to."""
    return tree_map(lambda t: t.clone(memory_format=torch.contiguous_format), tree)
