"""check_method passes on every method, and each of its rules catches a method that breaks it."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from protofed.method import Batch, Client, Each, LocalData, Mean, Method, Model, Params, Spec, Tree
from protofed.methods import METHODS
from protofed.methods.fedavg import FedAvg
from protofed.methods.fednh import FedNH
from protofed.methods.fedper import FedPer
from protofed.methods.fedproto import FedProto
from protofed.methods.fedprox import FedProx
from protofed.ops import random
from protofed.ops.losses import cross_entropy
from protofed.ops.prototypes import class_sums
from protofed.ops.sharing import send, shared
from protofed.testing import RULES, check_method
from protofed.testing.trees import leaked, readable_numbers

# What of a client's params must never be seen by the server; a method that is not here shares its model.
PRIVATE: dict[str, tuple[str, ...]] = {
    "local": ("",),
    "fedproto": ("",),
    "gpfl": ("head.",),
    "pfedfda": ("head.",),
    "fedpcl": ("",),
    "fedper": ("head.",),
    "fedrep": ("head.",),
    "ditto": ("personal.",),
    "fedrod": ("personal_head.",),
}


@pytest.fixture(autouse=True)
def _no_trace() -> Iterator[None]:
    """It draws no global random number and writes no file."""
    before = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), before)
    assert not list(Path.cwd().iterdir())


def quick(method: Method) -> Method:
    """The same formulas with fewer steps."""
    long = {f.name: 5 for f in fields(method) if type(getattr(method, f.name)) is int and getattr(method, f.name) > 50}
    return replace(method, **long)


def claim(name: str, method: Any) -> tuple[str, ...]:
    if name == "fedper":
        return method.private
    if name == "fedrod" and method.personal == "hyper":
        return ()  # the hypernetwork is shared, and there is no other personal head
    return PRIVATE.get(name, ())


checked = cache(check_method)  # many readings are the default


@pytest.mark.parametrize("reading", ["default", "paper", "official"])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_keeps_all_rules(name: str, reading: str) -> None:
    method = quick(METHODS[name]() if reading == "default" else METHODS[name].preset(reading))
    checked(method, private=claim(name, method))


def test_private_names_known_methods() -> None:
    assert PRIVATE.keys() <= METHODS.keys()


# methods of one's own


@dataclass(frozen=True)
class Moon(FedAvg):
    """Keeps a copy of what it sent, and a buffer on the server that is no prototype."""

    mu: float = 0.5
    layers: tuple[str, ...] = ("body.",)
    note: ClassVar[str] = "no field"

    def init_server(self, spec: Spec) -> Tree:
        return {"model": super().init_server(spec), "prior": torch.ones(spec.classes), "rounds": torch.tensor(0)}

    def broadcast(self, server: Tree, cohort: Tensor) -> Tree:
        return server["model"]

    def init_client(self, spec: Spec) -> Client:
        return Client(spec.params, spec.buffers, {"last": spec.params})

    def loss(self, model: Model, client: Client, batch: Batch, down: Tree) -> Tensor:
        z, logits = model(client, batch.x)
        before = model.embed(client._replace(params=client.memory["last"]), batch.x)
        return batch.mean(cross_entropy(logits, batch.y) - self.mu * F.cosine_similarity(z, before))

    def upload(self, model: Model, client: Client, data: LocalData, down: Tree) -> tuple[Tree, Client]:
        counts = Mean(data.counts, (data.counts.sum() > 0).float())
        up = {"model": send(client, data, self.weighting), "counts": counts}
        return up, client._replace(memory={"last": client.params})

    def aggregate(self, server: Tree, up: Tree, cohort: Tensor) -> Tree:
        return {
            "model": up["model"].otherwise(server["model"]),
            "prior": up["counts"].otherwise(server["prior"]),
            "rounds": server["rounds"] + 1,
        }

    def global_client(self, server: Tree) -> Client:
        return super().global_client(server["model"])


def test_a_method_outside_of_the_table_may_pass() -> None:
    check_method(Moon(mu=0.25, layers=("body.", "head.")))
    check_method(Moon(init="per_client", weighting="uniform"), private=())


# wrong methods, rule by rule


@dataclass(frozen=True)
class ListField(FedAvg):
    layers: list[str] = field(default_factory=list)


class Undecorated(FedAvg):
    mu: float = 0.5


@dataclass(frozen=True, eq=False)
class NoValue(FedAvg):
    mu: float = 0.5


@dataclass(frozen=True)
class NoneField(FedAvg):
    mu: float | None = 0.5


@dataclass(frozen=True)
class NestedField(FedAvg):
    pairs: tuple[tuple[int, int], ...] = ((1, 2),)


@dataclass(frozen=True)
class Drifting(FedAvg):
    mu: float = 0.5

    def __post_init__(self) -> None:
        object.__setattr__(self, "mu", self.mu + 1)


@dataclass(frozen=True)
class RawUpload(FedAvg):
    def upload(self, model: Model, client: Client, data: LocalData, down: Tree) -> tuple[Tree, Client]:
        return {"model": send(client, data, "samples"), "head": client.params["head.fc.bias"]}, client

    def aggregate(self, server: Tree, up: Tree, cohort: Tensor) -> Tree:
        return up["model"].otherwise(server)


@dataclass(frozen=True)
class OwnClassesOnly(RawUpload):
    def upload(self, model: Model, client: Client, data: LocalData, down: Tree) -> tuple[Tree, Client]:
        held = Each(data.counts[data.counts > 0])
        return {"model": send(client, data, "samples"), "counts": held}, client


@dataclass(frozen=True)
class PythonNumber(FedAvg):
    def upload(self, model: Model, client: Client, data: LocalData, down: Tree) -> tuple[Tree, Client]:
        return Mean(shared(client), 1.0), client  # type: ignore[arg-type]


@dataclass(frozen=True)
class CrashingLoss(FedAvg):
    def loss(self, model: Model, client: Client, batch: Batch, down: Tree) -> Tensor:
        raise KeyError("personal.")


@dataclass(frozen=True)
class InPlaceServer(FedAvg):
    def aggregate(self, server: Tree, up: Mean, cohort: Tensor) -> Tree:
        for name, value in up.value["params"].items():
            server["params"][name].copy_(value)
        return server


@dataclass(frozen=True)
class InPlaceDown(FedAvg):
    def receive(self, model: Model, client: Client, data: LocalData, down: Tree) -> Client:
        down["params"]["head.fc.bias"].mul_(0.5)
        return super().receive(model, client, data, down)


@dataclass(frozen=True)
class InPlaceClient(FedAvg):
    def predict(self, model: Model, client: Client, x: Tensor, down: Tree) -> dict[str, Tensor]:
        client.params["head.fc.bias"].zero_()
        return super().predict(model, client, x, down)


@dataclass(frozen=True)
class InPlaceSpec(FedAvg):
    def init_server(self, spec: Spec) -> Tree:
        spec.params["scale"] = torch.ones(())
        return super().init_server(spec)


@dataclass(frozen=True)
class GlobalRandom(FedAvg):
    def loss(self, model: Model, client: Client, batch: Batch, down: Tree) -> Tensor:
        return super().loss(model, client, batch._replace(x=batch.x + 0.1 * torch.rand(batch.x.shape)), down)


@dataclass(frozen=True)
class AbsentNaN(FedProto):
    def aggregate(self, server: Mean, up: Tree, cohort: Tensor) -> Mean:
        new = up["prototypes"]
        return Mean(new.total / new.weight[:, None], torch.ones_like(new.weight))


@dataclass(frozen=True)
class MadeUpScore(FedProto):
    def predict(self, model: Model, client: Client, x: Tensor, down: Mean) -> dict[str, Tensor]:
        scores = super().predict(model, client, x, down)
        return scores | {"proto": scores["head"]} if down.weight.any() else scores


@dataclass(frozen=True)
class MadeUpWeight(FedProto):
    def upload(self, model: Model, client: Client, data: LocalData, down: Mean) -> tuple[Tree, Client]:
        up, client = super().upload(model, client, data, down)
        return {"prototypes": up["prototypes"]._replace(weight=torch.ones(len(data.counts)))}, client


@dataclass(frozen=True)
class OverwrittenPrototypes(FedNH):
    def aggregate(self, server: Tree, up: Tree, cohort: Tensor) -> Tree:
        return super().aggregate(server, up, cohort) | {"prototypes": F.normalize(up["prototypes"].value)}


@dataclass(frozen=True)
class HalfPrecision(FedAvg):
    def upload(self, model: Model, client: Client, data: LocalData, down: Tree) -> tuple[Tree, Client]:
        total, weight = send(client, data, "samples")
        return Mean({part: to(total[part], torch.bfloat16) for part in total}, weight), client

    def aggregate(self, server: Tree, up: Mean, cohort: Tensor) -> Tree:
        return super().aggregate(server, Mean({p: to(up.total[p], torch.float32) for p in up.total}, up.weight), cohort)


def to(params: Params, dtype: torch.dtype) -> Params:
    return {name: value.to(dtype) for name, value in params.items()}


@dataclass(frozen=True)
class FirstRow(FedAvg):
    def upload(self, model: Model, client: Client, data: LocalData, down: Tree) -> tuple[Tree, Client]:
        return Each(shared(client)), client

    def aggregate(self, server: Tree, up: Any, cohort: Tensor) -> Tree:
        return {part: {name: rows[0] for name, rows in params.items()} for part, params in up.rows.items()}


@dataclass(frozen=True)
class ByPosition(FedAvg):
    """Gives the i-th of a cohort what the i-th of the last one sent."""

    def init_server(self, spec: Spec) -> Tree:
        return {name: value.repeat(4, *[1] * value.ndim) for name, value in spec.params.items()}

    def broadcast(self, server: Tree, cohort: Tensor) -> Tree:
        return Each({name: rows[torch.arange(len(cohort)) % len(rows)] for name, rows in server.items()})

    def receive(self, model: Model, client: Client, data: LocalData, down: Tree) -> Client:
        return client._replace(params=client.params | down)

    def upload(self, model: Model, client: Client, data: LocalData, down: Tree) -> tuple[Tree, Client]:
        return Each(client.params), client

    def aggregate(self, server: Tree, up: Any, cohort: Tensor) -> Tree:
        return up.rows

    def global_client(self, server: Tree) -> None:  # type: ignore[override]
        return None


@dataclass(frozen=True)
class MeanOverPadding(FedAvg):
    def loss(self, model: Model, client: Client, batch: Batch, down: Tree) -> Tensor:
        return cross_entropy(model(client, batch.x)[1], batch.y).mean()


@dataclass(frozen=True)
class NothingOverNothing(FedAvg):
    def loss(self, model: Model, client: Client, batch: Batch, down: Tree) -> Tensor:
        return (cross_entropy(model(client, batch.x)[1], batch.y) * batch.mask).sum() / batch.mask.sum()


@dataclass(frozen=True)
class CountsPadding(FedAvg):
    def upload(self, model: Model, client: Client, data: LocalData, down: Tree) -> tuple[Tree, Client]:
        n = torch.tensor(float(sum(len(batch.y) for batch in data.batches)))
        return Mean.of(shared(client), n), client


@dataclass(frozen=True)
class ClassSumsOfPadding(FedProto):
    def loss(self, model: Model, client: Client, batch: Batch, down: Mean) -> tuple[Tensor, Tree]:
        value, _ = super().loss(model, client, batch, down)
        everything = batch._replace(mask=torch.ones_like(batch.mask))
        return value, class_sums(model.embed(client, batch.x), everything, len(down.weight))


@dataclass(frozen=True)
class EmptyCounts(FedAvg):
    def upload(self, model: Model, client: Client, data: LocalData, down: Tree) -> tuple[Tree, Client]:
        return Mean.of(shared(client), torch.ones(())), client


@dataclass(frozen=True)
class DividesByCohort(FedAvg):
    def aggregate(self, server: Tree, up: Mean, cohort: Tensor) -> Tree:
        return {part: {n: v / len(cohort) for n, v in up.total[part].items()} for part in server}


@dataclass(frozen=True)
class EveryoneAlike(FedAvg):
    """Models seen one by one, and those of clients without samples counted like the others."""

    def upload(self, model: Model, client: Client, data: LocalData, down: Tree) -> tuple[Tree, Client]:
        return Each(shared(client)), client

    def aggregate(self, server: Tree, up: Any, cohort: Tensor) -> Tree:
        return tree_map(lambda rows: rows.mean(0), up.rows)


@dataclass(frozen=True)
class PythonIf(FedAvg):
    def loss(self, model: Model, client: Client, batch: Batch, down: Tree) -> Tensor:
        loss = batch.mean(cross_entropy(model(client, batch.x)[1], batch.y))
        return loss if float(batch.mask.sum()) > 2 else loss + 0 * loss


@dataclass(frozen=True)
class ForgetsModel(FedAvg):
    def aggregate(self, server: Tree, up: Mean, cohort: Tensor) -> Tree:
        return up.value


@dataclass(frozen=True)
class NeedsMemory(FedAvg):
    def receive(self, model: Model, client: Client, data: LocalData, down: Tree) -> Client:
        return super().receive(model, client, data, down)._replace(memory={"own": (data.counts > 0).float() / 3})

    def predict(self, model: Model, client: Client, x: Tensor, down: Tree) -> dict[str, Tensor]:
        return {"head": model(client, x)[1] + client.memory.get("own", torch.tensor(torch.nan))}

    def global_client(self, server: Tree) -> None:  # type: ignore[override]
        return None


@dataclass(frozen=True)
class NeedsKey(NeedsMemory):
    def predict(self, model: Model, client: Client, x: Tensor, down: Tree) -> dict[str, Tensor]:
        return {"head": model(client, x)[1] + client.memory["own"]}


@dataclass(frozen=True)
class OtherNames(FedAvg):
    def predict(self, model: Model, client: Client, x: Tensor, down: Tree) -> dict[str, Tensor]:
        return {"logits": model(client, x)[1]}


@dataclass(frozen=True)
class Labels(FedAvg):
    def predict(self, model: Model, client: Client, x: Tensor, down: Tree) -> dict[str, Tensor]:
        return {"head": model(client, x)[1].argmax(1)}


@dataclass(frozen=True)
class FlatPrototypes(FedProto):
    """Forgets that a class may have several prototypes."""

    def prototypes(self, server: Mean) -> Mean:
        return server


@dataclass(frozen=True)
class FlatOwnPrototypes(FedProto):
    def prototypes_of(self, client: Client, server: Mean) -> Mean:
        return server


@dataclass(frozen=True)
class NoClassKnown(FedAvg):
    def predict(self, model: Model, client: Client, x: Tensor, down: Tree) -> dict[str, Tensor]:
        return {"head": model(client, x)[1] - torch.inf}


@dataclass(frozen=True)
class PythonCounter(FedAvg):
    def init_server(self, spec: Spec) -> Tree:
        return super().init_server(spec) | {"round": 0}

    def aggregate(self, server: Tree, up: Mean, cohort: Tensor) -> Tree:
        return up.otherwise({part: server[part] for part in ("params", "buffers")}) | {"round": server["round"] + 1}


@dataclass(frozen=True)
class RowsWithoutWeight(FedProto):
    def aggregate(self, server: Mean, up: Tree, cohort: Tensor) -> Mean:
        new = super().aggregate(server, up, cohort)
        return Mean(torch.where(new.weight[:, None] > 0, new.total, 1.0), new.weight)

    def init_server(self, spec: Spec) -> Mean:
        return Mean(torch.ones(spec.classes, spec.dim), torch.zeros(spec.classes))


@dataclass(frozen=True)
class SendsMore(FedPer):
    """FedPer, and something besides."""

    def more(self, client: Client, data: LocalData) -> Tensor:
        return client.params["head.fc.weight"]

    def upload(self, model: Model, client: Client, data: LocalData, down: Tree) -> tuple[Tree, Client]:
        up, client = super().upload(model, client, data, down)
        return {"shared": up, "more": Each(self.more(client, data))}, client

    def aggregate(self, server: Tree, up: Any, cohort: Tensor) -> Tree:
        return super().aggregate(server, up["shared"], cohort)


@dataclass(frozen=True)
class SendsMemory(SendsMore):
    def init_client(self, spec: Spec) -> Client:
        return Client(spec.params, spec.buffers, {"noise": torch.randn(3, generator=spec.generator())})

    def more(self, client: Client, data: LocalData) -> Tensor:
        return torch.cat([torch.zeros(1), client.memory["noise"]])


@dataclass(frozen=True)
class SendsSample(SendsMore):
    def more(self, client: Client, data: LocalData) -> Tensor:
        return data.batches[0].x[0]


WRONG: list[tuple[Method, str, str]] = [
    (ListField(), "values", "hash() says: unhashable type: 'list'"),
    (Undecorated(), "values", "mu is not a field. Put @dataclass(frozen=True) on Undecorated."),
    (NoValue(), "values", "it is not equal to a copy with equal fields alone"),
    (Drifting(), "values", "it is not equal to a copy with equal fields alone"),
    (FedAvg(inference="proto"), "values", "inference = 'proto' is not in scores = ('head',)"),
    (NoneField(mu=None), "toml", "NoneType"),
    (NestedField(), "toml", "method.pairs = [[1, 2]] should be a valid tuple"),
    (FedProx(mu=-1.0), "toml", "method.mu = -1.0 should be greater than or equal to 0"),
    (Moon(mu=float("inf")), "toml", "method.mu = inf should be a finite number"),
    (RawUpload(), "uploads", "up['head'] is Tensor"),
    (OwnClassesOnly(), "uploads", "up of client 1 against client 0, ['counts'].rows is torch.float32 (1,), not"),
    (PythonNumber(), "uploads", "up.weight is float"),
    (CrashingLoss(), "uploads", "It raised KeyError: 'personal.' ("),
    (InPlaceServer(), "purity", "a round changed what it was given, ['server']['params']"),
    (InPlaceDown(), "purity", "a round changed what it was given, ['server']['params']['head.fc.bias']"),
    (InPlaceClient(), "purity", "['client'].params['head.fc.bias']"),
    (InPlaceSpec(), "purity", "init_server changed its spec, .params['scale'] is in one of both only"),
    (GlobalRandom(), "purity", "in two runs, with two global seeds of torch"),
    (AbsentNaN(), "absent", "with classes that nobody holds, server.total is not finite"),
    (MadeUpScore(), "absent", "the 'proto' score is not -inf any more"),
    (MadeUpWeight(), "absent", "client 0 sends weight for a class that it does not hold"),
    (OverwrittenPrototypes(), "absent", "for a class that nobody ever held, server['prototypes']"),
    (HalfPrecision(), "grouping", "uploads merged as (a+b)+(c+d) against ((a+b)+c)+d, server['params']"),
    (FirstRow(), "order", "after two rounds with the cohort in other orders, server['params']"),
    (ByPosition(), "order", "after two rounds with the cohort in other orders, "),
    (MeanOverPadding(), "padding", "in the phase that trains ('',), client 0, ['loss']"),
    (NothingOverNothing(), "padding", "on padding alone, in the phase that trains ('',), client 0, ['loss']"),
    (CountsPadding(), "padding", "in a whole round of client 0, up"),
    (ClassSumsOfPadding(), "padding", "['seen'].total"),
    (EmptyCounts(), "empty", "an empty client's Mean has a weight or a total other than 0"),
    (DividesByCohort(), "empty", "with an empty client and without it, server['params']"),
    (EveryoneAlike(), "empty", "with an empty client and without it, server['params']"),
    (PythonIf(), "stacking", "torch.vmap says: "),
    (ForgetsModel(), "empty", "with empty clients only, server"),
    (NeedsMemory(), "predictions", "'head' of a client before round one has NaN or inf"),
    (NeedsKey(), "predictions", "It raised KeyError: 'own'"),
    (OtherNames(), "predictions", "a client before round one gives ['logits'], but scores = ('head',)"),
    (Labels(), "predictions", "'head' of a client before round one has shape (20,)"),
    (FlatPrototypes(), "predictions", "prototypes gives shapes ("),
    (FlatOwnPrototypes(), "predictions", "prototypes_of gives shapes ("),
    (NoClassKnown(), "predictions", "'head' of a client that took part is -inf for all classes"),
    (PythonCounter(), "serialisation", "server before a round: only tensors travel"),
    (RowsWithoutWeight(), "serialisation", "server before a round.total[0, 0] is 0, not 1"),
    (SendsMore(), "privacy", "the numbers of head.fc.weight are in the upload of client 0"),
    (SendsMemory(), "privacy", "the numbers of memory['noise'] are in the upload of client 0"),
    (SendsSample(), "privacy", "a sample is in the upload of client 0"),
]


@pytest.mark.parametrize("method, rule, differed", WRONG, ids=[type(method).__name__ for method, _, _ in WRONG])
def test_a_broken_rule_is_named(method: Method, rule: str, differed: str) -> None:
    with pytest.raises(AssertionError) as caught:
        check_method(method)
    said = str(caught.value)
    assert said.startswith(f"{type(method).__name__} breaks the rule {rule!r}: ")
    assert differed in said
    assert said.endswith(".") or ("It raised" in said and f"({__file__}, line " in said)
    assert len(said.splitlines()) == 1


def test_every_rule_is_seen_to_catch() -> None:
    assert {rule for _, rule, _ in WRONG} == {rule.__name__ for rule in RULES}


def test_a_claim_of_privacy_is_checked_by_name() -> None:
    check_method(FedPer(), private="head.")
    with pytest.raises(AssertionError, match=r"'privacy'.* head.fc.bias, head.fc.weight is in the upload of client 0"):
        check_method(FedAvg(), private=("head.",))
    with pytest.raises(AssertionError, match=r"private = 'heads.' names no parameter. There are: body.fc1.weight"):
        check_method(FedPer(), private=("head.", "heads."))


def test_leaks_are_found() -> None:
    """A tensor is found alone, inside another one, and behind a weight."""
    secret = random.normal(random.key("leak"), 6).reshape(2, 3)
    for tree in (
        {"x": Each(secret)},
        [Mean(torch.stack([secret, secret + 1]), torch.ones(2))],
        Mean.of({"w": secret}, torch.tensor(3.0)),
        Each(Mean.of(secret, torch.tensor([7.0, 3.0]))),
    ):
        assert leaked(secret, readable_numbers(tree))
    assert not leaked(secret, readable_numbers({"x": Each(secret + 0.01)}))
    assert not leaked(secret, readable_numbers({}))
    assert not leaked(torch.zeros(4), readable_numbers({"x": Each(torch.zeros(4))}))
