"""Proof of a method: `check_method(MyMethod())` plays it on a tiny federation and names the rule it breaks."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import FrozenInstanceError, asdict, fields, replace
from functools import cached_property, reduce
from inspect import get_annotations
from typing import Any, NamedTuple

import tomli_w
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.utils._pytree import MappingKey, keystr, tree_flatten_with_path, tree_leaves, tree_map

from protofed import schema
from protofed.engines.wire import decode, encode
from protofed.experiment import Experiment
from protofed.importing import path_of
from protofed.local import Update, local_update, train
from protofed.method import Batch, Client, Each, LocalData, Mean, Method, Params, Phase, Spec, Tree
from protofed.methods import METHODS
from protofed.models import MODELS
from protofed.models.functional import FunctionalModel, fresh, state
from protofed.ops import random
from protofed.ops.optim import Optimizer
from protofed.ops.trees import alone, deal, is_node, map_nodes, merge, under

# The federation. No two of these sizes are alike, so that an axis of classes is known by its length.
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


def check_method(method: Method, *, private: str | Sequence[str] | None = None) -> None:
    """Raise an AssertionError that names the first broken rule, what differed and what to do.

    What of a client's parameters is not sent under its name must not be sent at all; `private` (prefixes, such as
    "head.") claims that these are among them. Give a method whose server trains for long a copy with fewer steps.
    """
    trial = Trial(method, (private,) if isinstance(private, str) else tuple(private or ()))
    for rule in RULES:
        said = (rule.__doc__ or "").splitlines()[0]
        about = f"{type(method).__name__} breaks the rule {rule.__name__!r}: {said}"
        try:
            with torch.random.fork_rng(devices=[]):
                rule(trial)
        except Broken as broken:
            raise AssertionError(f"{about} {broken}") from broken.__cause__
        except Exception as error:
            raise AssertionError(f"{about} It raised {type(error).__name__}: {error}") from error


class Broken(Exception):
    """What differed and what to do."""


def require(holds: bool, differed: str, remedy: str) -> None:
    if not holds:
        raise Broken(f"{differed}. {remedy}")


def require_same(left: Tree, right: Tree, tolerance: float, where: str, remedy: str) -> None:
    found = difference(left, right, tolerance)
    require(not found, f"{where}{found}", remedy)


def require_finite(tree: Tree, where: str, remedy: str) -> None:
    for place, leaf in floats(tree).items():
        require(bool(torch.isfinite(leaf).all()), f"{where}{place} is not finite", remedy)


# trees


class Leaves(dict[str, Any]):
    """A tree taken apart: its leaves by their places."""


def leaves(tree: Tree) -> Leaves:
    if isinstance(tree, Leaves):
        return tree
    return Leaves({keystr(path): leaf for path, leaf in tree_flatten_with_path(tree)[0]})


def floats(tree: Tree) -> Leaves:
    return Leaves({at: x for at, x in leaves(tree).items() if isinstance(x, Tensor) and x.is_floating_point()})


def names_on(path: Sequence[Any]) -> set[str]:
    return {str(key.key) for key in path if isinstance(key, MappingKey)}


def names(tree: Tree) -> set[str]:
    """Every key of every dict that leads to a leaf."""
    return {name for path, _ in tree_flatten_with_path(tree)[0] for name in names_on(path)}


def under_names(tree: Tree, wanted: set[str]) -> Leaves:
    """The leaves that lie under one of these names."""
    return Leaves({keystr(path): leaf for path, leaf in tree_flatten_with_path(tree)[0] if names_on(path) & wanted})


def means(tree: Tree) -> list[Mean]:
    """All Means, those in an Each too."""
    nodes = tree_leaves(tree, is_leaf=is_node)
    inner = [mean for node in nodes if isinstance(node, Each) for mean in means(node.rows)]
    return [node for node in nodes if isinstance(node, Mean)] + inner


def copied(tree: Tree) -> Tree:
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, tree)


def difference(left: Tree, right: Tree, tolerance: float = 0.0) -> str:
    """Where two trees first differ, in words; nothing where they do not."""
    mine, other = leaves(left), leaves(right)
    for place in mine.keys() ^ other.keys():
        return f"{place} is in one of both only"
    for place, a in mine.items():
        b = other[place]
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            if type(a) is not type(b) or a != b:
                return f"{place} is {a!r}, not {b!r}"
        elif a.shape != b.shape or a.dtype != b.dtype:
            return f"{place} is {a.dtype} {tuple(a.shape)}, not {b.dtype} {tuple(b.shape)}"
        else:
            close = torch.isclose(a.double(), b.double(), rtol=tolerance, atol=tolerance / 10, equal_nan=True)
            if not bool(close.all()):
                at = tuple((~close).nonzero()[0].tolist())
                return f"{place}{list(at) if at else ''} is {a[at].item():.6g}, not {b[at].item():.6g}"
    return ""


def numbers(tree: Tree) -> Tensor:
    """Every number the server can read: the tensors of an upload, and the means they stand for."""
    found = [*floats(tree).values(), *(leaf for mean in means(tree) for leaf in floats(mean.value).values())]
    return torch.cat([leaf.flatten().double() for leaf in found] or [torch.zeros(0).double()])


def leaked(private: Tensor, seen: Tensor) -> bool:
    """Whether all numbers of a private tensor are among those seen, to float's precision; zeros tell nothing."""
    mine = private.flatten().double()
    mine = mine[mine != 0]
    if len(mine) < 2 or not len(seen):
        return False
    seen = seen.sort().values
    place = torch.searchsorted(seen, mine).clamp(max=len(seen) - 1)
    nearest = torch.minimum((seen[place] - mine).abs(), (seen[(place - 1).clamp(min=0)] - mine).abs())
    return bool((nearest <= 2e-7 * mine.abs()).all())


# the federation


class Round(NamedTuple):
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
        """What there is before round one: for the server, or for a client."""
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
        """What a client knows of its data; one without any has a batch of padding."""
        samples = self.samples(number)
        batches = [padded(batch, pads) for batch in split(samples, CHUNK)] or [padded(samples, pads + 1)]
        counts = torch.bincount(samples.y, minlength=CLASSES).float()
        return LocalData(batches, counts, random.key(SEED, "train", round, number))

    def epoch(self, number: int, round: int, epoch: int, pads: int = 0) -> list[Batch]:
        """One pass over a client's samples; nothing for one without any."""
        x, y, mask = self.samples(number)
        order = random.permutation(random.key(SEED, "order", round, number, epoch), len(y))
        return [padded(batch, pads) for batch in split(Batch(x[order], y[order], mask), BATCH)]

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
        """What a client makes of itself after the last round."""
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
        """What a client gets that is alone in the cohort."""
        return deal(self.method.broadcast(server, torch.tensor([number])), 0)

    def aggregate(self, server: Tree, updates: Mapping[int, Update]) -> Tree:
        up = reduce(merge, [alone(update.up) for update in updates.values()])
        return self.method.aggregate(server, up, torch.tensor(list(updates)))

    def round(self, server: Tree, clients: Mapping[int, Client], cohort: Sequence[int], number: int) -> Round:
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
        return Round(server, clients, downs, updates, after, given, before)

    def play(self, *cohorts: Sequence[int]) -> list[Round]:
        """One round of each cohort."""
        server, clients, rounds = self.method.init_server(self.spec()), dict[int, Client](), list[Round]()
        for number, cohort in enumerate(cohorts):
            rounds.append(self.round(server, clients, cohort, number))
            server = rounds[-1].after
            clients |= {i: update.client for i, update in rounds[-1].updates.items()}
        return rounds

    @cached_property
    def rounds(self) -> list[Round]:
        """What most rules look at."""
        torch.default_generator.manual_seed(1)
        return self.play(COHORT, COHORT)


def split(samples: Batch, size: int) -> list[Batch]:
    if not len(samples.y):
        return []
    return [Batch(*part) for part in zip(*(t.split(size) for t in samples), strict=True)]


def padded(batch: Batch, more: int) -> Batch:
    """The batch and some samples that do not count: any numbers, any labels."""
    x = 3 * random.normal(random.key("padding"), more * 12).reshape(more, *SHAPE)
    y = torch.arange(CLASSES - more, CLASSES) if len(batch.y) % 2 else torch.arange(more)
    return Batch(torch.cat([batch.x, x]), torch.cat([batch.y, y]), torch.cat([batch.mask, torch.zeros(more)]))


def state_of(rounds: Sequence[Round]) -> dict[str, Tree]:
    """What is left of all rounds."""
    return {"server": rounds[-1].after, "clients": {i: update.client for i, update in rounds[-1].updates.items()}}


# the rules


def values(trial: Trial) -> None:
    """A method is a value: hashable, frozen, and told apart by its fields alone."""
    method, kind = trial.method, type(trial.method)
    known = {field.name for field in fields(method)}
    stray = [
        name
        for cls in kind.__mro__
        if cls not in Method.__mro__
        for name, hint in get_annotations(cls).items()
        if name not in known and "ClassVar" not in str(hint)
    ]
    decorate = f"Put @dataclass(frozen=True) on {kind.__name__}."
    require(not stray, f"{', '.join(stray)} is no field", decorate)
    for name in known:
        try:
            setattr(method, name, getattr(method, name))
        except FrozenInstanceError:
            continue
        raise Broken(f"{name} can be set. {decorate}")
    try:
        hash(method)
    except TypeError as error:
        raise Broken(f"hash() says: {error}. Let fields be numbers, strings, or tuples of these.") from error
    by_fields = replace(method) == method and kind.__dataclass_params__.eq  # type: ignore[attr-defined]
    require(by_fields, "it is not equal to a copy with equal fields alone", "Leave eq and __init__ to dataclass.")
    require(
        method.inference in method.scores,
        f"inference = {method.inference!r} is not in scores = {method.scores!r}",
        "Name all that `predict` gives in `scores`.",
    )


def toml(trial: Trial) -> None:
    """All fields survive a TOML file."""
    method, kind = trial.method, type(trial.method)
    remedy = "Let every field have a type, a default, and a value that its type and TOML allow (there is no None)."
    try:
        if kind in METHODS.values() or path_of(kind):
            back = Experiment.from_dict(tomllib.loads(Experiment(method=method).to_toml())).method
        else:
            back = kind(**schema.check("method", kind, tomllib.loads(tomli_w.dumps(asdict(method)))))
    except Exception as error:
        raise Broken(f"{type(error).__name__}: {error} {remedy}") from error
    for field in fields(method):
        old, new = getattr(method, field.name), getattr(back, field.name)
        require(old == new, f"{field.name} = {old!r} comes back as {new!r}", remedy)


def uploads(trial: Trial) -> None:
    """An upload is a tree of Mean and Each, of the same form for every client."""
    method, forms = trial.method, dict[int, Tree]()
    method.check([trial.spec()])
    down = method.broadcast(method.init_server(trial.spec()), torch.tensor(COHORT))
    for row, number in enumerate(COHORT):
        up = trial.update(number, trial.new(number), 0, deal(down, row)).up
        for path, node in tree_flatten_with_path(up, is_leaf=is_node)[0]:
            require(
                is_node(node),
                f"up{keystr(path)} is {type(node).__name__}",
                "Say what the server learns of it: a Mean is only seen summed over clients, an Each one by one.",
            )
        for place, leaf in leaves(up).items():
            require(isinstance(leaf, Tensor), f"up{place} is {type(leaf).__name__}", "Only tensors travel.")
        forms[number] = tree_map(torch.zeros_like, up)
        require_same(
            forms[number],
            forms[COHORT[0]],
            0,
            f"up of client {number} against client {COHORT[0]}, ",
            "Give absent classes rows of weight 0, not other keys and shapes.",
        )


def purity(trial: Trial) -> None:
    """Functions change nothing they are given, and draw no numbers but from keys."""
    method, remedy = trial.method, "Make a new tensor or dict in place of changing one (no `x += y`, no `x[i] = y`)."
    for start in (method.init_server, method.init_client):
        spec = trial.spec()
        before: Tree = copied(spec)
        start(spec)
        require_same(spec, before, 0, f"{start.__name__} changed its spec, ", remedy)
    for round in trial.rounds:
        require_same(round.given, round.before, 0, "a round changed what it was given, ", remedy)
    last = trial.rounds[-1]
    client, down = last.updates[0].client, trial.down(last.after, 0)
    given = {"server": last.after, "client": client, "down": down, "x": trial.samples(0).x}
    before = copied(given)
    method.predict(trial.model, client, given["x"], down)
    method.global_client(last.after)
    trial.finish(0, client, last.after)
    where = "predict, global_client or the last phases changed what they were given, "
    require_same(given, before, 0, where, remedy)
    torch.default_generator.manual_seed(2)
    again = trial.play(COHORT, COHORT)
    require_same(
        state_of(again),
        state_of(trial.rounds),
        0,
        "in two runs, with two global seeds of torch, ",
        "Draw from data.key or spec.generator() (protofed.ops.random), and never in `loss`.",
    )


def absent(trial: Trial) -> None:
    """Absent classes do no harm: all stays finite, and a prototype of a class that nobody holds is not made up.

    Taken for prototypes: what has a "proto" score, and what the server keeps as `of_nobodys` says.
    """
    method, last = trial.method, trial.rounds[-1]
    remedy = "An absent class has weight 0: use Mean.value, Mean.otherwise, or clamp what you divide by."
    for where, rounds in {
        "with classes that nobody holds": trial.rounds,
        "with one client, which has one sample": trial.play((1,), (1,)),
        "with one client, which has one class": trial.play((2,), (2,)),
        "in a round that misses classes of the one before": [trial.round(last.after, {}, (2,), 2)],
    }.items():
        for round in rounds:
            require_finite(round.updates, f"{where}, client", remedy)
            require_finite(round.after, f"{where}, server", remedy)

    remedy = "Give a class that a client does not hold weight 0, and keep what was where the sum of weights is 0."
    for number, update in last.updates.items():
        missing = trial.local(number, 1).counts == 0
        for mean in means(update.up):
            if list(mean.weight.shape).count(CLASSES) == 1:
                by_class = mean.weight.movedim(mean.weight.shape.index(CLASSES), 0)
                none = not bool(by_class[missing].any())
                require(none, f"client {number} sends weight for a class that it does not hold", remedy)
    first = trial.rounds[0].server
    old, new = of_nobodys(first, trial.new(0)), of_nobodys(last.after, trial.new(0))
    for place, rows in new.items():
        was = old[place] if place in old and old[place].shape == rows.shape else torch.zeros_like(rows)
        require_same(rows, was, 1e-6, f"for a class that nobody ever held, server{place}", remedy)
    if "proto" in method.scores:
        x, client = trial.samples(0).x, last.updates[0].client
        started, now = (
            method.predict(trial.model, client, x, trial.down(server, 0))["proto"][:, NOBODYS]
            for server in (first, last.after)
        )
        unknown = bool((now[started == -torch.inf] == -torch.inf).all())
        require(unknown, "for a class that nobody ever held, the 'proto' score is not -inf any more", remedy)


def of_nobodys(server: Tree, client: Client) -> dict[str, Tensor]:
    """What the server keeps of classes without a sample, by place.

    That is, of every tensor under no name of a client's parameters that has an axis of classes and one of embeddings,
    and of the weights of Means that have an axis of classes.
    """
    found, models = {}, client.params.keys() | client.buffers.keys()
    for path, leaf in tree_flatten_with_path(server)[0]:
        place, shape = keystr(path), list(getattr(leaf, "shape", ()))
        if shape.count(CLASSES) == 1 and (DIM in shape or place.endswith(".weight")) and not names_on(path) & models:
            found[place] = leaf.index_select(shape.index(CLASSES), torch.tensor(NOBODYS))
    return found


def grouping(trial: Trial) -> None:
    """Uploads may be merged in any grouping."""
    method, last = trial.method, trial.rounds[-1]
    a, b, c, d = (alone(update.up) for update in last.updates.values())
    for name, up in {
        "(a+b)+(c+d)": merge(merge(a, b), merge(c, d)),
        "a+(b+(c+d))": merge(a, merge(b, merge(c, d))),
    }.items():
        require_same(
            method.aggregate(last.server, up, torch.tensor(COHORT)),
            last.after,  # of ((a+b)+c)+d
            1e-4,
            f"uploads merged as {name} against ((a+b)+c)+d, server",
            "Let a Mean hold sums and weights that simply add, in float32; leave means and choices to `aggregate`.",
        )


def order(trial: Trial) -> None:
    """The order of clients in a cohort does not matter, but for what the server keeps of the last cohort row by row."""
    remedy = "Combine by sums, or by the clients' numbers in `cohort`, never by a row's position."
    where, last = "after two rounds with the cohort in other orders, ", (1, 3, 2, 0)
    shuffled, straight = state_of(trial.play((2, 0, 3, 1), last)), state_of(trial.rounds)
    wanted, back = leaves(straight["server"]), torch.tensor([last.index(number) for number in COHORT])

    def in_order(place: str, leaf: Any) -> Any:
        by_row = isinstance(leaf, Tensor) and leaf.shape[:1] == (len(COHORT),)
        return leaf[back] if by_row and difference(leaf, wanted.get(place), 1e-3) else leaf

    server = Leaves({place: in_order(place, leaf) for place, leaf in leaves(shuffled["server"]).items()})
    require_same(server, wanted, 1e-3, f"{where}server", remedy)
    require_same(shuffled["clients"], straight["clients"], 1e-3, f"{where}client", remedy)


def padding(trial: Trial) -> None:
    """Samples with mask 0 change neither loss, nor gradient, nor upload."""
    method, last = trial.method, trial.rounds[-1]
    remedy = "Take means by batch.mean(per_sample) and sums by batch.mask; len(batch.y) counts padding."
    for number in COHORT:
        data, down, client = trial.local(number, 1), last.downs[number], last.clients[number]
        batch = trial.epoch(number, 1, 0)[0]
        nothing = padded(batch, 2)._replace(mask=torch.zeros(len(batch.y) + 2))
        for receive, phases in (
            (method.receive, method.phases()),
            (method.last_receive, method.last_phases()),
        ):
            ready = receive(trial.model, client, data, down)
            for phase in phases:
                about = f"in the phase that trains {phase.trains}, client {number}, "
                plain, more = (step(trial, phase, ready, b, down) for b in (batch, padded(batch, 3)))
                require_same(more, plain, 3e-3, about, remedy)
                require_finite(step(trial, phase, ready, nothing, down), f"on padding alone, {about}", remedy)
        update = trial.update(number, client, 1, down, pads=3)
        for part in Update._fields:
            new, old = getattr(update, part), getattr(last.updates[number], part)
            require_same(new, old, 1e-2, f"in a whole round of client {number}, {part}", remedy)


def step(trial: Trial, phase: Phase, client: Client, batch: Batch, down: Tree) -> Tree:
    """Loss, what it reports, and gradient."""
    loss_of = phase.loss or trial.method.loss

    def objective(trained: Params) -> tuple[Tensor, tuple[Tensor, Tree]]:
        model = trial.model.training(client.buffers, random.key("step"))
        loss = loss_of(model, client._replace(params=client.params | trained), batch, down)
        value, seen = loss if isinstance(loss, tuple) else (loss, ())
        return value, (value, seen)

    gradient, (value, seen) = grad(objective, has_aux=True)(under(client.params, phase.trains))
    return {"loss": value, "seen": seen, "gradient": gradient}


def stacking(trial: Trial) -> None:
    """Two clients at once give what each gives alone, unless `stackable` is False."""
    if not trial.method.stackable:
        return
    method, last, pair = trial.method, trial.rounds[-1], (0, 3)
    remedy = "Decide by torch.where, not by if or float(); or set stackable = False."
    datas = [trial.local(number, 1) for number in pair]
    whole = [Batch(*map(torch.cat, zip(*data.batches, strict=True))) for data in datas]
    most = max(len(batch.y) for batch in whole)
    even = [padded_to(batch, most) for batch in whole]
    datas = [data._replace(batches=[batch]) for data, batch in zip(datas, even, strict=True)]

    def all_of_it(client: Client, data: LocalData, down: Tree) -> Tree:
        client = method.receive(trial.model, client, data, down)
        steps = [step(trial, phase, client, data.batches[0], down) for phase in method.phases()]
        up, client = method.upload(trial.model, client, data._replace(seen=steps[-1]["seen"]), down)
        return steps, up, client, method.predict(trial.model, client, data.batches[0].x, down)

    inputs = [(last.clients[n], data, last.downs[n]) for n, data in zip(pair, datas, strict=True)]
    alone_ = [all_of_it(*mine) for mine in inputs]
    try:
        together = vmap(all_of_it)(*tree_map(lambda *leaves: torch.stack(leaves), *inputs))
    except RuntimeError as error:
        raise Broken(f"torch.vmap says: {str(error).splitlines()[0]} {remedy}") from error
    for row, number in enumerate(pair):
        mine = tree_map(lambda t, row=row: t[row], together)
        require_same(mine, alone_[row], 1e-3, f"of client {number}, stacked and alone, ", remedy)


def padded_to(batch: Batch, size: int) -> Batch:
    """The batch with zeros that do not count."""
    more = size - len(batch.y)
    return Batch(*(torch.cat([t, t.new_zeros(more, *t.shape[1:])]) for t in batch))


def empty(trial: Trial) -> None:
    """A client without samples does no harm.

    Its Means weigh nothing, and what the server makes of models, under a parameter's name, is the same without it. The
    rest may depend on how many took part; it must stay finite. A cohort of such clients alone leaves the server's
    numbers as they were, but for what a Mean forgets (weight 0).
    """
    remedy = "Weight what is sent by data.counts, which is 0 here, and keep the old value where the weight is 0."
    for number, round in enumerate(trial.rounds):
        down = deal(trial.method.broadcast(round.server, torch.tensor((*COHORT, EMPTY))), len(COHORT))
        update = trial.update(EMPTY, trial.new(EMPTY), number, down)
        require_finite(update, "of an empty client, ", remedy)
        for mean in means(update.up):
            nothing = not any(bool(leaf.any()) for leaf in tree_leaves(mean))
            require(nothing, "an empty client's Mean has a weight or a total other than 0", remedy)
        after = trial.aggregate(round.server, round.updates | {EMPTY: update})
        require_finite(after, "with an empty client, server", remedy)
        averaged = names(update.up) & names(update.client)
        with_it, without = (under_names(server, averaged) for server in (after, round.after))
        require_same(with_it, without, 1e-5, "with an empty client and without it, server", remedy)

        only = trial.round(round.after, {}, (EMPTY,), number + 1).after
        require_finite(only, "with empty clients only, server", remedy)
        now, was = (floats(remembered(server, only)) for server in (only, round.after))
        require_same(now, was, 1e-6, "with empty clients only, server", remedy)
        finished = trial.finish(EMPTY, update.client, round.after)
        require_finite(finished, "of an empty client after the last phases, ", remedy)


def remembered(tree: Tree, now: Tree) -> Tree:
    """The tree without the rows of its Means that have weight 0 now."""

    def keep(node: Any, other: Any) -> Any:
        if not isinstance(node, Mean):
            return node
        if not bool(other.weight.any()):
            return ()
        known = (other.weight > 0).to(node.weight.dtype)
        return Mean(Mean.of(node.total, known).total, node.weight * known)

    return map_nodes(keep, tree, now)


def predictions(trial: Trial) -> None:
    """Every client can predict, one that never took part too, and so can the global model; prototypes have a form."""
    first, last = trial.rounds[0].server, trial.rounds[-1].after
    taught, new = trial.rounds[-1].updates[0].client, trial.new(NEVER)
    require_scores(trial, "a client before round one", trial.new(0), first, 0, known=False)
    require_scores(trial, "a client that took part", taught, last, 0)
    require_scores(trial, "a client that never took part", new, last, NEVER)
    require_scores(trial, "a client after the last phases", trial.finish(0, taught, last), last, 0)
    require_scores(trial, "a client that had the last phases only", trial.finish(NEVER, new, last), last, NEVER)
    for server, known in ((first, False), (last, True)):
        common = trial.method.global_client(server)
        if common is not None:
            require_scores(trial, "the global model", common, server, 0, known)
        require_prototypes(trial, taught, server)


def require_scores(trial: Trial, who: str, client: Client, server: Tree, number: int, known: bool = True) -> None:
    x, declared = trial.samples(0).x, trial.method.scores
    scores = trial.method.predict(trial.model, client, x, trial.down(server, number))
    remedy = "Name all that `predict` gives in `scores`."
    require(set(scores) == set(declared), f"{who} gives {sorted(scores)}, but scores = {declared!r}", remedy)
    for name, score in scores.items():
        about, shape = f"{name!r} of {who}", tuple(score.shape)
        require(shape == (len(x), CLASSES), f"{about} has shape {shape}", f"Give (B, C), here {(len(x), CLASSES)}.")
        numbers = not bool((score.isnan() | (score == torch.inf)).any())
        require(numbers, f"{about} has NaN or inf", "Give numbers, and -inf to a class that is not known.")
        some = not known or bool(score.isfinite().any(1).all())
        require(some, f"{about} is -inf for all classes", "Let a client do with what comes down, or with what it has.")


def require_prototypes(trial: Trial, client: Client, server: Tree) -> None:
    x, prototypes = trial.samples(0).x, trial.method.prototypes(server)
    z = tuple(trial.method.embed(trial.model, client, x).shape)
    require(len(z) == 2 and z[0] == len(x), f"embed gives shape {z}", f"Give (B, D), here ({len(x)}, D).")
    if prototypes is None:
        return
    total, weight = tuple(prototypes.total.shape), tuple(prototypes.weight.shape)
    right = len(weight) == 2 and weight[0] == CLASSES and total == (*weight, z[1])
    remedy = f"Give Mean((C, K, D), (C, K)), here with C = {CLASSES} and D = {z[1]}."
    require(right, f"prototypes gives shapes {total} and {weight}", remedy)


def serialisation(trial: Trial) -> None:
    """What travels or is saved comes back as it was."""
    remedy = "Keep tensors in dicts (by strings), lists, tuples, Mean, Each and Client; rows of weight 0 hold zeros."
    for round in trial.rounds:
        down = trial.method.broadcast(round.server, torch.tensor(COHORT))
        trees = {"server before a round": round.server, "server after a round": round.after, "down": down}
        for number, update in round.updates.items():
            trees[f"down to client {number}"] = round.downs[number]
            trees[f"up of client {number}"] = update.up
            trees[f"client {number} before a round"] = round.clients[number]
            trees[f"client {number} after a round"] = update.client
        for name, tree in trees.items():
            try:
                back = decode(encode(tree))
            except (TypeError, ValueError) as error:
                raise Broken(f"{name}: {error}. {remedy}") from error
            require_same(back, tree, 0, name, remedy)
        received = {i: update._replace(up=decode(encode(update.up))) for i, update in round.updates.items()}
        require_same(trial.aggregate(round.server, received), round.after, 0, "of uploads that came back, ", remedy)


def privacy(trial: Trial) -> None:
    """What is private is in no upload, neither by name nor by value.

    By value means the numbers themselves, or times a Mean's weight; a private tensor that is changed before it is sent,
    say doubled, is not recognised.
    """
    last = trial.rounds[-1]  # in the first round, copies of common initial weights may still be alike
    for number, update in last.updates.items():
        sent, seen, params = names(update.up), numbers(update.up), update.client.params
        where = f"in the upload of client {number}"
        for prefix in trial.private:
            claimed = under(params, prefix)
            require(bool(claimed), f"private = {prefix!r} names no parameter", f"There are: {', '.join(params)}.")
            named = sorted(claimed.keys() & sent)
            require(not named, f"{', '.join(named)} is {where}", f"Leave {prefix!r} out of it.")
        for name, value in params.items():
            found = name not in sent and leaked(value, seen)
            remedy = "Do not send it; or, if it is not private, send it under its name."
            require(not found, f"the numbers of {name} are {where}", remedy)
        shared = numbers({name: value for name, value in params.items() if name in sent})
        for memory in (last.clients[number].memory, update.client.memory):
            for place, value in floats(memory).items():
                found = leaked(value, seen) and not leaked(value, shared)  # a copy of what is shared may be kept
                require(not found, f"the numbers of memory{place} are {where}", "Do not send them.")
        for x in trial.samples(number).x:
            require(not leaked(x, seen), f"a sample is {where}", "Do not send inputs.")


RULES: tuple[Callable[[Trial], None], ...] = (
    values,
    toml,
    uploads,
    purity,
    absent,
    grouping,
    order,
    padding,
    empty,
    predictions,
    serialisation,
    stacking,
    privacy,
)
