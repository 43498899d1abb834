"""Every method once more in loops over samples, classes and clients: loss and slope, local round, upload, aggregation.

The formulas are those of the papers (and of their code, where a field says so), written sample by sample on numbers.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from protofed import local
from protofed.data.batches import Federation
from protofed.data.domain import Domain
from protofed.data.split import Split
from protofed.engines.reference import ReferenceEngine
from protofed.method import Batch, Client, Each, LocalData, Mean, Method, Params, Spec, Tree
from protofed.methods import METHODS
from protofed.methods.ditto import Ditto
from protofed.methods.dpfedcl import DPFedCL
from protofed.methods.fedavg import FedAvg
from protofed.methods.fedbabu import FedBABU
from protofed.methods.fednh import FedNH
from protofed.methods.fedper import FedPer
from protofed.methods.fedpr import FedPR
from protofed.methods.fedproto import FedProto
from protofed.methods.fedprox import FedProx
from protofed.methods.fedrep import FedRep
from protofed.methods.fedrod import FedROD
from protofed.methods.fesem import FeSEM
from protofed.methods.local import Local
from protofed.methods.mpfedcl import MPFedCL
from protofed.methods.pool import PrototypePool
from protofed.methods.spfedcl import SPFedCL
from protofed.models import Net, chain
from protofed.models.functional import FunctionalModel
from protofed.ops import random
from protofed.ops.optim import Optimizer
from protofed.ops.trees import alone, merge

Row = list[float]
Numbers = list[Tensor]  # single numbers that have a slope
Sample = tuple[Row, int]
Naive = Callable[[Params, Params], Tensor]  # a loss of params and buffers
Pool = Sequence[dict[int, list[Row]]]  # by client and class as many prototypes as there are

CLASSES, FEATURES, DIM = 5, 3, 2
KEY = random.key("by hand")
OWN, BODIES, HEADS = "personal.", ("body.",), ("head.",)


class Shift(nn.Module):
    """Adds a buffer, which is shared and averaged but not trained."""

    by: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("by", torch.zeros(DIM))

    def forward(self, z: Tensor) -> Tensor:
        return z + self.by


def tiny(shape: tuple[int, ...] = (FEATURES,), classes: int = CLASSES) -> Net:
    body = chain(fc=nn.Linear(shape[0], DIM), shift=Shift(), tanh=nn.Tanh())
    return Net(body, chain(fc=nn.Linear(DIM, classes)), DIM)


MODEL = FunctionalModel(tiny())


def wave(number: float, *shape: int) -> Tensor:
    """Known numbers between -1 and 1."""
    return torch.sin(number + 1.7 * torch.arange(math.prod(shape), dtype=torch.float64)).reshape(shape)


def weights(number: int) -> Params:
    shapes = {"body.fc.weight": (DIM, FEATURES), "body.fc.bias": (DIM,)}
    shapes |= {"head.fc.weight": (CLASSES, DIM), "head.fc.bias": (CLASSES,)}
    return {name: wave(number + i, *shape) for i, (name, shape) in enumerate(shapes.items())}


def shift(number: int) -> Params:
    return {"body.shift.by": 0.3 * wave(number + 9, DIM)}


def model_of(number: int) -> Tree:
    return {"params": weights(number), "buffers": shift(number)}


def without(tensors: Params, *prefixes: str) -> Params:
    return {name: value for name, value in tensors.items() if not any(name.startswith(p) for p in prefixes)}


def prefixed(tensors: Params, prefix: str = OWN) -> Params:
    return {prefix + name: value for name, value in tensors.items()}


# the network and the parts of losses, number by number


def dot(a: Any, b: Any) -> Any:
    return sum(x * y for x, y in zip(a, b, strict=True))


def embed(p: Params, b: Params, x: Row, at: str = "") -> Numbers:
    rows, bias, by = p[at + "body.fc.weight"], p[at + "body.fc.bias"], b[at + "body.shift.by"]
    return [torch.tanh(dot(rows[d], x) + bias[d] + by[d]) for d in range(DIM)]


def scores(p: Params, z: Sequence[Any], at: str = "") -> Numbers:
    return [dot(p[at + "head.fc.weight"][c], z) + p[at + "head.fc.bias"][c] for c in range(CLASSES)]


def surprise(logits: Sequence[Tensor], label: int) -> Tensor:
    """Minus the logarithm of the softmax at the label."""
    return torch.log(sum(torch.exp(logit) for logit in logits)) - logits[label]  # type: ignore[arg-type]


def unit(z: Sequence[Any]) -> list[Any]:
    length = dot(z, z) ** 0.5
    return [v / length for v in z]


def middle(rows: Sequence[Sequence[Any]]) -> list[Any]:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def apart(p: Params, q: Params) -> Tensor:
    """Squared distance of two models."""
    pairs = [(a, b) for name in q for a, b in zip(p[name].flatten(), q[name].flatten(), strict=True)]
    return torch.stack([(a - b) ** 2 for a, b in pairs]).sum()


def squares(z: Sequence[Any], u: Sequence[Any]) -> Any:
    return sum((a - b) ** 2 for a, b in zip(z, u, strict=True))


DISTANCES: dict[str, Callable[[Sequence[Any], Sequence[Any]], Any]] = {
    "mse": lambda z, u: squares(z, u) / DIM,
    "l2": lambda z, u: squares(z, u) ** 0.5,
}


# A batch with padding between its samples. The client lacks class 2; nobody has a prototype of class 3; padding is of
# classes that the client has (1), that it lacks (2), and that have no prototype (3), and far from everything.
REAL: list[Sample] = [
    ([0.5, -1.0, 0.3], 0),
    ([-0.7, 0.2, 1.1], 1),
    ([1.2, 0.4, -0.6], 0),
    ([0.1, 0.9, 0.8], 3),
    ([-1.1, -0.4, 0.2], 1),
    ([0.6, 0.6, -1.3], 4),
]
PADS: list[Sample] = [([50.0, -20.0, 7.0], 1), ([-9.0, 30.0, 2.0], 3), ([4.0, 4.0, -60.0], 2)]
LABELS = [label for _, label in REAL]


def batch_of(real: Sequence[Sample], pads: Sequence[Sample]) -> Batch:
    """Padding first, in the middle and last."""
    half = len(real) // 2
    rows = [(pads[0], 0), *((s, 1) for s in real[:half]), (pads[1], 0), *((s, 1) for s in real[half:]), (pads[2], 0)]
    x = torch.tensor([x for (x, _), _ in rows], dtype=torch.float64)
    y = torch.tensor([label for (_, label), _ in rows])
    return Batch(x, y, torch.tensor([float(real) for _, real in rows], dtype=torch.float64))


def counts_of(samples: Sequence[Sample]) -> Tensor:
    return torch.tensor([sum(label == c for _, label in samples) for c in range(CLASSES)], dtype=torch.float64)


BATCH = batch_of(REAL, PADS)
DATA = LocalData([BATCH], counts_of(REAL), KEY)


def over_samples(of: Callable[[Params, Params, Row, int], Tensor]) -> Naive:
    """The mean over the real samples."""
    return lambda p, b: torch.stack([of(p, b, x, label) for x, label in REAL]).sum() / len(REAL)


def plain(p: Params, b: Params) -> Tensor:
    return over_samples(lambda p, b, x, label: surprise(scores(p, embed(p, b, x)), label))(p, b)


# prototypes


def mean_of(known: dict[int, Row]) -> Mean:
    total, weight = torch.zeros(CLASSES, DIM).double(), torch.zeros(CLASSES).double()
    for c, row in known.items():
        total[c], weight[c] = torch.tensor(row, dtype=torch.float64), 1
    return Mean(total, weight)


KNOWN = {0: [0.4, -0.2], 1: [-0.8, 0.5], 2: [0.1, 0.9], 4: [0.0, 0.0]}  # the origin is a prototype too


def pulled(lam: float, distance: str) -> Naive:
    """FedProto's code and FedPR, Eq. 4: every sample to the prototype of its class."""

    def one(p: Params, b: Params, x: Row, label: int) -> Tensor:
        z = embed(p, b, x)
        loss = surprise(scores(p, z), label)
        return loss + lam * DISTANCES[distance](z, KNOWN[label]) if label in KNOWN else loss

    return over_samples(one)


def pulled_means(lam: float, distance: str) -> Naive:
    """FedProto, Eqs. 7 and 8: the sum over the classes of the distances of the prototypes."""

    def loss(p: Params, b: Params) -> Tensor:
        value = plain(p, b)
        for c in sorted(set(LABELS) & set(KNOWN)):
            own = middle([embed(p, b, x) for x, label in REAL if label == c])
            value = value + lam * DISTANCES[distance](own, KNOWN[c])
        return value

    return loss


# Class 4 is known from an earlier round, nobody ever had class 3, one client sent nothing.
POOL: Pool = [
    {0: [[0.9, 0.1], [0.3, -0.8]], 1: [[-0.6, 0.7]]},  # too few of class 1
    {},
    {0: [[-0.2, 0.5], [0.7, 0.7]], 2: [[0.4, 0.4], [-0.9, 0.0]]},  # none of class 1
    {1: [[0.2, 1.0], [-0.7, -0.1]], 2: [[0.6, -0.3]]},
]
MEANS = {c: middle([u for client in POOL for u in client.get(c, [])]) for c in range(3)} | {4: [0.5, -0.5]}


def pool_of(pool: Pool, k: int) -> Mean:
    total, weight = torch.zeros(len(pool), CLASSES, k, DIM).double(), torch.zeros(len(pool), CLASSES, k).double()
    for s, client in enumerate(pool):
        for c, rows in client.items():
            for i, row in enumerate(rows):
                total[s, c, i], weight[s, c, i] = torch.tensor(row, dtype=torch.float64), 1
    return Mean(total, weight)


def contrasted(pool: Pool, k: int | None, t: float, normal: bool) -> Naive:
    """Eqs. 10 to 12; k None: as many prototypes as there are, and a class mean where there is none."""

    def one(p: Params, b: Params, x: Row, label: int) -> Tensor:
        z = embed(p, b, x)
        v = unit(z) if normal else z
        losses = []
        for client in pool:
            if not client or label not in MEANS:
                continue
            padded = {c: client.get(c, []) for c in MEANS}
            if k is not None:
                padded = {c: rows if len(rows) == k else [MEANS[c]] * k for c, rows in padded.items()}
            padded = {c: rows or [MEANS[c]] for c, rows in padded.items()}
            for i in range(len(padded[label])):
                at = {c: rows[i] if i < len(rows) else MEANS[c] for c, rows in padded.items()}
                logits = {c: dot(v, u) / t for c, u in at.items()}
                losses.append(torch.log(sum(torch.exp(logit) for logit in logits.values())) - logits[label])  # type: ignore[arg-type]
        value = surprise(scores(p, z), label)
        return value + sum(losses) / len(losses) if losses else value

    return over_samples(one)


# FedNH and FedROD

HEAD = [unit(row) for row in ([1.0, 0.2], [-0.5, 1.0], [0.3, -1.0], [-1.0, -0.4], [0.8, 0.9])]


def scaled(p: Params, b: Params) -> Tensor:
    """FedNH, Eq. 2: the cosine with every prototype, times s."""
    return over_samples(
        lambda p, b, x, label: surprise([p["scale"] * dot(w, unit(embed(p, b, x))) for w in HEAD], label)
    )(p, b)


SHARE = [max(LABELS.count(c), 1e-12) / len(LABELS) for c in range(CLASSES)]
HYPER = {
    "hyper.first.weight": wave(1, DIM, CLASSES),
    "hyper.first.bias": wave(2, DIM),
    "hyper.last.weight": wave(3, DIM * CLASSES, DIM),
    "hyper.last.bias": wave(4, DIM * CLASSES),
}


def balanced(p: Params, b: Params) -> Tensor:
    """The logarithm of the class's share is added to its logit."""

    def one(p: Params, b: Params, x: Row, label: int) -> Tensor:
        logits = scores(p, embed(p, b, x))
        return surprise([v + math.log(share) for v, share in zip(logits, SHARE, strict=True)], label)

    return over_samples(one)(p, b)


def with_own_head(head: Callable[[Params], list[Numbers]]) -> Naive:
    """The personal head adds to the generic one."""

    def one(p: Params, b: Params, x: Row, label: int) -> Tensor:
        z = embed(p, b, x)
        own = head(p)
        return surprise([v + dot(own[c], z) for c, v in enumerate(scores(p, z))], label)

    return over_samples(one)


def linear_head(p: Params) -> list[Numbers]:
    return [list(row) for row in p["personal_head.weight"]]


def hyper_head(p: Params) -> list[Numbers]:
    """C -> D, ReLU, D -> C * D; the first D numbers are the first class's."""
    hidden = [
        torch.relu(dot(w, SHARE) + v) for w, v in zip(p["hyper.first.weight"], p["hyper.first.bias"], strict=True)
    ]
    made = [dot(w, hidden) + v for w, v in zip(p["hyper.last.weight"], p["hyper.last.bias"], strict=True)]
    return [made[c * DIM : (c + 1) * DIM] for c in range(CLASSES)]


def fitted(p: Params, b: Params) -> Tensor:
    """Ditto: the personal model's cross-entropy."""
    return over_samples(lambda p, b, x, label: surprise(scores(p, embed(p, b, x, OWN), OWN), label))(p, b)


def drawn_near(anchor: str) -> Naive:
    """Ditto, Eq. 2: the personal model near what came down, or near the copy as trained here."""

    def loss(p: Params, b: Params) -> Tensor:
        own = {name.removeprefix(OWN): value for name, value in p.items() if name.startswith(OWN)}
        return 0.6 / 2 * apart(own, weights(0) if anchor == "received" else without(p, OWN))

    return loss


def near(anchor: str) -> Naive:
    return lambda p, b: fitted(p, b) + drawn_near(anchor)(p, b)


# every method's local objective


class Part(NamedTuple):
    """A stretch of local training."""

    loss: Naive
    trains: tuple[str, ...] = ("",)
    epochs: int | None = None
    plain: bool = False  # without momentum and weight decay
    clip: bool = True
    pull: Naive | None = None  # its slope is added after clipping


@dataclass
class Case:
    name: str
    method: Method
    down: Tree
    parts: Sequence[Part]
    params: Params = field(default_factory=dict)  # beside those of the model
    buffers: Params = field(default_factory=dict)
    memory: Tree = field(default_factory=dict)
    taken: Params = field(default_factory=lambda: weights(0))  # what of `down` replaces a client's own

    @property
    def client(self) -> Client:
        return Client(weights(1) | self.params, shift(1) | self.buffers, self.memory)


FULL: Tree = model_of(0)
BODY: Tree = {"params": without(weights(0), "head."), "buffers": shift(0)}
MEMORY = {"share": torch.tensor(SHARE, dtype=torch.float64)}
PERSONAL = {"personal_head.weight": wave(6, CLASSES, DIM)}
PROTOTYPES = {"model": FULL, "prototypes": mean_of(KNOWN)}
SCALE = {"scale": torch.tensor(1.5, dtype=torch.float64)}
NH: Tree = {
    "body": {"params": BODY["params"] | {"scale": torch.tensor(2.5, dtype=torch.float64)}, "buffers": shift(0)},
    "prototypes": torch.tensor(HEAD, dtype=torch.float64),
}
TWICE = {"params": prefixed(weights(2)), "buffers": prefixed(shift(2))}
COPY, ALL = Part(plain, ("body.", "head.")), [Part(plain)]


def pool_down(k: int, pool: Pool) -> Tree:
    return {"model": FULL, "pool": pool_of(pool, k), "means": mean_of(MEANS)}


def prox(p: Params, b: Params) -> Tensor:
    return plain(p, b) + 0.7 / 2 * apart(p, weights(0))


def fedproto(name: str, method: FedProto, loss: Naive) -> Case:
    return Case(f"fedproto {name}", method, mean_of(KNOWN), [Part(loss)], taken={})


def fedrod(name: str, method: FedROD, own: Part, params: Params, shared: Params) -> Case:
    down = FULL | {"params": weights(0) | shared}
    generic = Part(balanced, ("body.", "head."))
    return Case(f"fedrod {name}", method, down, [generic, own], params, memory=MEMORY, taken=down["params"])


def ditto_clipped(anchor: Any) -> Case:
    """FedNH's code: the cross-entropy's gradient is clipped, and the pull is added to it."""
    own = Part(fitted, (OWN,), plain=True, pull=drawn_near(anchor))
    return Case(f"ditto {anchor} clipped", Ditto(lam=0.6, anchor=anchor, clip="loss"), FULL, [COPY, own], **TWICE)


def fednh(name: str, method: FedNH, *trains: str) -> Case:
    return Case(f"fednh {name}", method, NH, [Part(scaled, trains)], SCALE, taken=NH["body"]["params"])


def pooled(name: str, method: PrototypePool, pool: Pool, k: int | None) -> Case:
    loss = contrasted(pool, k, method.temperature, method.unit)
    return Case(name, method, pool_down(method.slots, pool), [Part(loss)])


CASES = [
    Case("local", Local(), {}, ALL, taken={}),
    Case("fedavg", FedAvg(), FULL, ALL),
    Case("fedprox", FedProx(mu=0.7), FULL, [Part(prox)]),
    Case("fedper", FedPer(), BODY, ALL, taken=BODY["params"]),
    Case("fedrep", FedRep(head_epochs=3), BODY, [Part(plain, HEADS, 3), Part(plain, BODIES)], taken=BODY["params"]),
    Case("fesem", FeSEM(), FULL, ALL),
    Case("ditto", Ditto(lam=0.6), FULL, [COPY, Part(near("received"), (OWN,), plain=True)], **TWICE),
    Case("ditto momentum", Ditto(lam=0.6, plain=False), FULL, [COPY, Part(near("received"), (OWN,))], **TWICE),
    Case(
        "ditto trained",
        Ditto(lam=0.6, anchor="trained", personal_epochs=3),
        FULL,
        [COPY, Part(near("trained"), (OWN,), 3, plain=True)],
        **TWICE,
    ),
    ditto_clipped("received"),
    ditto_clipped("trained"),
    Case("fedbabu", FedBABU(), FULL, [Part(plain, BODIES)]),
    fedrod("linear", FedROD(), Part(with_own_head(linear_head), ("personal_head.",), plain=True), PERSONAL, {}),
    fedrod("momentum", FedROD(plain=False), Part(with_own_head(linear_head), ("personal_head.",)), PERSONAL, {}),
    fedrod(
        "hyper",
        FedROD(personal="hyper", clip_personal=False),
        Part(with_own_head(hyper_head), ("hyper.",), plain=True, clip=False),
        {name: value + 0.2 for name, value in HYPER.items()},
        HYPER,
    ),
    fedproto("mse", FedProto(lam=0.8), pulled(0.8, "mse")),
    fedproto("l2", FedProto(distance="l2"), pulled(1.0, "l2")),
    fedproto("means mse", FedProto(lam=0.8, pull="prototype", source="inloop"), pulled_means(0.8, "mse")),
    fedproto("means l2", FedProto(pull="prototype", distance="l2"), pulled_means(1.0, "l2")),
    fednh("trained scale", FedNH(), "body.", "scale"),
    fednh("fixed scale", FedNH(train_scale=False), "body."),
    Case("fedpr mse", FedPR(), PROTOTYPES, [Part(pulled(1.0, "mse"))]),
    Case("fedpr l2", FedPR(lam=0.5, distance="l2"), PROTOTYPES, [Part(pulled(0.5, "l2"))]),
    pooled("mpfedcl", MPFedCL(), POOL, 2),
    pooled("mpfedcl raw", MPFedCL(unit=False, temperature=0.5), POOL, 2),
    pooled("spfedcl", SPFedCL(), [{c: rows[:1] for c, rows in client.items()} for client in POOL], 1),
    pooled("dpfedcl", DPFedCL(most=3, temperature=0.2), POOL, None),
]
PLAIN = Optimizer(lr=0.1)
FULLY = Optimizer(lr=0.1, momentum=0.5, weight_decay=0.02, clip=0.1)  # every case's gradients are longer than that
EACH_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def chosen(params: Params, prefixes: tuple[str, ...]) -> Params:
    return {name: value for name, value in params.items() if any(name.startswith(prefix) for prefix in prefixes)}


def naive_slope(loss: Naive, params: Params, buffers: Params, trains: tuple[str, ...]) -> tuple[float, Params]:
    moving = {name: value.clone().requires_grad_() for name, value in chosen(params, trains).items()}
    value = loss(params | moving, buffers)
    grads = torch.autograd.grad(value, list(moving.values()), allow_unused=True)
    slopes = {n: torch.zeros_like(v) if g is None else g for (n, v), g in zip(moving.items(), grads, strict=True)}
    return float(value.detach()), slopes


def same(got: Params, expected: Params, tolerance: float = 1e-9) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(got[name], value, atol=tolerance, rtol=1e-7), name


@EACH_CASE
def test_loss_and_slope(case: Case) -> None:
    phases = case.method.phases()
    assert len(phases) == len(case.parts)
    for phase, part in zip(phases, case.parts, strict=True):
        client = case.client
        loss_of = phase.loss or case.method.loss

        def loss(trained: Params) -> Tensor:
            training = MODEL.training(client.buffers, KEY)  # noqa: B023
            value = loss_of(training, client._replace(params=client.params | trained), BATCH, case.down)  # noqa: B023
            return value[0] if isinstance(value, tuple) else value

        got, value = torch.func.grad_and_value(loss)(chosen(client.params, phase.trains))
        expected, slopes = naive_slope(part.loss, client.params, client.buffers, part.trains)
        assert float(value) == pytest.approx(expected, rel=1e-9)
        same(got, slopes)
        assert any(bool(slope.any()) for slope in slopes.values())


def descend(client: Client, parts: Sequence[Part], lr: float, epochs: int, how: Optimizer = PLAIN) -> Params:
    """Gradient descent, one batch an epoch."""
    params = dict(client.params)
    for part in parts:
        speed = dict[str, Tensor]()
        for _ in range(epochs if part.epochs is None else part.epochs):
            slopes = naive_slope(part.loss, params, client.buffers, part.trains)[1]
            length = math.sqrt(sum(float((slope**2).sum()) for slope in slopes.values()))
            if how.clip and part.clip and length > how.clip:
                slopes = {name: slope * how.clip / length for name, slope in slopes.items()}
            if part.pull:
                more = naive_slope(part.pull, params, client.buffers, part.trains)[1]
                slopes = {name: slope + more[name] for name, slope in slopes.items()}
            if not part.plain:
                slopes = {name: slope + how.weight_decay * params[name] for name, slope in slopes.items()}
                slopes = {n: s + how.momentum * speed[n] if speed else s for n, s in slopes.items()}
            speed = slopes
            params |= {name: params[name] - lr * slope for name, slope in slopes.items()}
    return params


@EACH_CASE
@pytest.mark.parametrize("how", [PLAIN, FULLY], ids=["plain", "fully"])
def test_a_local_round(case: Case, how: Optimizer) -> None:
    """What is received, what is trained in which order and how, and what is kept."""
    update = local.local_update(case.method, MODEL, how, case.client, DATA, lambda epoch: [BATCH], case.down, 0.1, 2)
    taken = shift(0) if case.taken else {}
    start = case.client._replace(params=case.client.params | case.taken, buffers=case.client.buffers | taken)
    same(update.client.params, descend(start, case.parts, 0.1, 2, how), 1e-8 if how is PLAIN else 3e-6)
    same(update.client.buffers, start.buffers)


@pytest.mark.parametrize(
    "name, method, trains, epochs, lr",
    [
        ("fedrep", FedRep(last_head_epochs=3), ("head.",), 3, 0.1),
        ("fedbabu", FedBABU(tune_epochs=2, tune_lr=0.4), ("",), 2, 0.4),
        ("fedbabu", FedBABU(tune_epochs=2, start="stale"), ("",), 2, 0.1),
    ],
)
def test_after_the_last_round(name: str, method: Method, trains: tuple[str, ...], epochs: int, lr: float) -> None:
    case = next(case for case in CASES if case.name == name)
    client = method.last_receive(MODEL, case.client, DATA, case.down)
    stale = isinstance(method, FedBABU) and method.start == "stale"
    started = case.client if stale else Client(case.client.params | case.taken, shift(0))
    same(client.params, started.params)
    got, _, _ = local.train(
        method, MODEL, Optimizer(lr=0.1), method.last_phases(), client, lambda e: [BATCH], case.down, KEY, 0.1, 7
    )
    same(got.params, descend(started, [Part(plain, trains, epochs)], lr, 7))


def test_padding_alone_gives_no_slope() -> None:
    """A batch without a real sample leaves nothing but what does not depend on samples."""
    nothing = BATCH._replace(mask=torch.zeros_like(BATCH.mask))
    for case in CASES:
        for phase in case.method.phases():
            client, loss_of = case.client, phase.loss or case.method.loss

            def loss(trained: Params) -> Tensor:
                value = loss_of(MODEL, client._replace(params=client.params | trained), nothing, case.down)  # noqa: B023
                return value[0] if isinstance(value, tuple) else value

            slopes = torch.func.grad(loss)(chosen(client.params, phase.trains))
            expected = {name: torch.zeros_like(slope) for name, slope in slopes.items()}
            if case.name == "fedprox":
                expected = {name: 0.7 * (p - weights(0)[name]) for name, p in client.params.items()}
            elif phase.trains == (OWN,) and not phase.pull:
                anchor = client.params if case.name == "ditto trained" else weights(0)
                expected = {n: 0.6 * (client.params[n] - anchor[n.removeprefix(OWN)]) for n in slopes}
            same(slopes, expected)


# Three clients: the first lacks class 2, the second class 1, the third class 0. Nobody holds class 3, nor class 4, of
# which the server knows from an earlier round. Two groups of samples each where there are more than two.


def group(base: Row, n: int, label: int) -> list[Sample]:
    return [([v + 0.05 * math.sin(3.0 * i + j + label) for j, v in enumerate(base)], label) for i in range(n)]


HELD: list[list[Sample]] = [
    [*group([1.0, -1.0, 0.5], 2, 0), *group([-1.0, 0.5, 1.0], 3, 0), *group([0.3, 0.8, -1.0], 2, 1)],
    [*group([0.2, 1.0, 0.2], 2, 0), *group([-1.2, -0.5, 0.0], 1, 0), *group([0.9, 0.1, -1.0], 2, 2)],
    [*group([-0.4, 1.0, 0.9], 1, 1), *group([1.0, 0.4, 0.0], 3, 2), *group([-0.9, -1.0, 0.6], 2, 2)],
]
SIZES = [7, 5, 6]
COHORT = torch.tensor([4, 0, 2])
NUMBERS = (1, 2, 3)  # of the clients' models


def data_of(samples: Sequence[Sample], seen: Tree = ()) -> LocalData:
    """In two batches, both with padding, in an order that mixes the classes."""
    mixed = [*samples[::2], *samples[1::2]]
    batches = [batch_of(part, PADS) for part in (mixed[:3], mixed[3:])]
    return LocalData(batches, counts_of(samples), KEY, seen)


def client_of(number: int) -> Client:
    """One with everything that any of the methods adds to a model, apart from a second one."""
    scale = {"scale": torch.tensor(1.0 + number, dtype=torch.float64)}
    return Client(weights(number) | scale, shift(number))


def plain_client(number: int) -> Client:
    return Client(weights(number), shift(number))


def uploads(method: Method, down: Tree, make: Callable[[int], Client] = plain_client) -> list[Tree]:
    ups = []
    for samples, number in zip(HELD, NUMBERS, strict=True):
        client = make(number)
        up, kept = method.upload(MODEL, client, data_of(samples), down)
        assert kept is client
        ups.append(up)
    return ups


def combined(method: Method, server: Tree, ups: Sequence[Tree]) -> Tree:
    return method.aggregate(server, reduce(merge, map(alone, ups)), COHORT)


def embedded(number: int, c: int, normal: bool = False) -> list[Row]:
    """A client's embeddings of a class."""
    p, b = weights(NUMBERS[number]), shift(NUMBERS[number])
    rows = [[float(v) for v in embed(p, b, x)] for x, label in HELD[number] if label == c]
    return [unit(row) for row in rows] if normal else rows


def near_rows(got: Tensor, expected: Any, tolerance: float = 1e-10) -> None:
    wanted = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(got.double(), wanted, atol=tolerance, rtol=1e-7)


# models

SHARING: list[tuple[str, Method, str, tuple[str, ...], bool]] = [  # where it lies, what is private, by samples or alike
    ("fedavg", FedAvg(), "", (), True),
    ("fedprox", FedProx(weighting="uniform"), "", (), False),
    ("fedper", FedPer(), "shared", ("head.",), True),
    ("fedper more", FedPer(private=("head.", "body.fc."), weighting="uniform"), "shared", ("head.", "body.fc."), False),
    ("fedrep", FedRep(), "shared", ("head.",), False),
    ("fedrep samples", FedRep(weighting="samples"), "shared", ("head.",), True),
    ("ditto", Ditto(), "", (OWN,), False),
    ("ditto samples", Ditto(weighting="samples"), "", (OWN,), True),
    ("fedbabu", FedBABU(), "", ("head.",), False),
    ("fedbabu samples", FedBABU(weighting="samples"), "", ("head.",), True),
    ("fedrod linear", FedROD(), "", ("personal_head.",), False),
    ("fedrod hyper", FedROD(personal="hyper", weighting="samples"), "", ("personal_head.",), True),
    ("fednh", FedNH(), "body", ("head.",), False),
    ("fednh samples", FedNH(weighting="samples"), "body", ("head.",), True),
    ("fedpr", FedPR(), "model", (), True),
    ("fedpr uniform", FedPR(weighting="uniform"), "model", (), False),
    ("mpfedcl", MPFedCL(), "model", (), True),
    ("spfedcl", SPFedCL(weighting="uniform"), "model", (), False),
    ("dpfedcl", DPFedCL(), "model", (), True),
]


def whole_client(name: str, number: int) -> Client:
    """A client with all that its method adds to a model."""
    client = plain_client(number)
    more: Params = {}
    if name.startswith("ditto"):
        more = prefixed(weights(number + 5))
        client = client._replace(buffers=client.buffers | prefixed(shift(number + 5)))
    elif name.startswith("fedrod"):
        more = HYPER if name.endswith("hyper") else PERSONAL
        more = {key: value + number for key, value in more.items()}
    elif name.startswith("fednh"):
        more = {"scale": torch.tensor(1.0 + number, dtype=torch.float64)}
    return client._replace(params=client.params | more)


@pytest.mark.parametrize("name, method, part, private, by_samples", SHARING, ids=[row[0] for row in SHARING])
def test_models_sent_and_averaged(
    name: str, method: Method, part: str, private: tuple[str, ...], by_samples: bool
) -> None:
    first = whole_client(name, 0)
    server = method.init_server(Spec("tiny", CLASSES, DIM, weights(0), shift(0), 0, clients=5))
    old = {"params": without(first.params, *private), "buffers": without(first.buffers, *private)}
    if name.startswith("fedbabu"):
        old["params"] = first.params  # the fixed head stays with the server
    if part:
        server[part] = old
    else:
        server = old
    if "prototypes" in server and isinstance(server["prototypes"], Tensor):
        server["prototypes"] = server["prototypes"].double()
    down = method.broadcast(server, COHORT)
    ups = uploads(method, down, lambda number: whole_client(name, number))
    factors = SIZES if by_samples else [1, 1, 1]
    place = part if part and part != "shared" else ""
    for number, factor, up in zip(NUMBERS, factors, ups, strict=True):
        sent = up[place] if place else up
        assert isinstance(sent, Mean)
        assert sent.weight.tolist() == factor
        mine = whole_client(name, number)
        same(sent.total["params"], {n: factor * v for n, v in without(mine.params, *private).items()})
        same(sent.total["buffers"], {n: factor * v for n, v in without(mine.buffers, *private).items()})
    new = combined(method, server, ups)
    got = new[part] if part else new
    clients = [whole_client(name, number) for number in NUMBERS]
    for kind in ("params", "buffers"):
        assert got[kind].keys() == old[kind].keys()
        for key, value in got[kind].items():
            if name.startswith("fedbabu") and key.startswith("head."):
                assert torch.equal(value, old[kind][key])
                continue
            rows = [getattr(client, kind)[key] * f for client, f in zip(clients, factors, strict=True)]
            near_rows(value, (rows[0] + rows[1] + rows[2]) / sum(factors))
    tested = method.global_client(new)
    assert tested is not None
    if part == "shared":  # with the head that everyone began with
        same(new["first"]["params"], weights(0))
        got = {kind: model_of(0)[kind] | got[kind] for kind in got}
    same(tested.params, got["params"])
    same(tested.buffers, got["buffers"])


def test_local_sends_nothing() -> None:
    ups = uploads(Local(), {})
    assert ups == [{}, {}, {}]
    assert combined(Local(), {}, ups) == {}


# FeSEM


def centres_at(*numbers: int) -> Tree:
    return {
        kind: {name: torch.stack([model_of(n)[kind][name] for n in numbers]) for name in model_of(0)[kind]}
        for kind in ("params", "buffers")
    }


def mixed(parts: Sequence[tuple[float, Tensor]]) -> Tensor:
    value = torch.zeros_like(parts[0][1])
    for weight, tensor in parts:
        value = value + weight * tensor
    return value / sum(weight for weight, _ in parts)


@pytest.mark.parametrize("method", [FeSEM(), FeSEM(compare="head.fc.bias"), FeSEM(weighting="uniform")])
def test_fesem_expects_and_maximises(method: FeSEM) -> None:
    at = (0, 6, 4)
    centres = centres_at(*at)
    server = {"centres": centres, "members": torch.tensor([0, 1, 2, 0, 1])}
    ups = uploads(method, {})
    factors = SIZES if method.weighting == "samples" else [1, 1, 1]
    for number, factor, up in zip(NUMBERS, factors, ups, strict=True):
        assert isinstance(up["model"], Each)
        assert isinstance(up["weight"], Each)
        same(up["model"].rows["params"], weights(number))
        same(up["model"].rows["buffers"], shift(number))
        assert float(up["weight"].rows) == factor
    new = combined(method, server, ups)
    members = [0, 1, 2, 0, 1]
    groups: list[list[int]] = [[], [], []]
    for place, (number, client) in enumerate(zip(NUMBERS, COHORT.tolist(), strict=True)):
        far = [float(apart(weights(number), chosen(weights(m), (method.compare,)))) for m in at]
        members[client] = far.index(min(far))
        groups[members[client]].append(place)
    assert new["members"].tolist() == members
    assert groups == ([[0, 1], [], [2]] if method.compare else [[0], [], [1, 2]])  # the second centre is left alone
    for m, kind in itertools.product(range(3), ("params", "buffers")):
        for name, old in centres[kind].items():
            parts = [(float(factors[i]), model_of(NUMBERS[i])[kind][name]) for i in groups[m]]
            near_rows(new["centres"][kind][name][m], mixed(parts) if parts else old[m])


@pytest.mark.parametrize(
    "method",
    [
        FeSEM(grouping="size", centres=2),
        FeSEM.preset("official"),
    ],
    ids=["samples", "official"],
)
def test_fesem_by_size(method: FeSEM) -> None:
    """FedProto's code: those with fewer samples than the mean, which is 6 here, and the others."""
    server = {"centres": centres_at(0, 0), "members": torch.tensor([0, 1, 0, 0, 1])}
    ups = uploads(method, {})
    assert [float(up["size"].rows) for up in ups] == SIZES
    new = combined(method, server, ups)
    assert new["members"].tolist() == [0, 1, 1, 0, 1]  # clients 4, 0 and 2 have 7, 5 and 6
    factors = [7.0, 6.0] if method.weighting == "samples" else [1.0, 1.0]
    for name, value in new["centres"]["params"].items():
        near_rows(value[0], weights(2)[name])
        near_rows(value[1], mixed([(factors[0], weights(1)[name]), (factors[1], weights(3)[name])]))


# prototypes: FedProto, FedPR, FedNH

OLD = {0: [0.9, 0.9], 4: [-0.3, 0.7]}
FEDPROTO = [
    FedProto(aggregation=aggregation, source=source, absent=absent)
    for aggregation in ("mean", "weighted", "literal")
    for source in ("clean", "inloop")
    for absent in ("keep", "forget")
]


def test_fedproto_reports_what_it_saw() -> None:
    method = FedProto(source="inloop")
    _, seen = method.loss(MODEL, plain_client(1), BATCH, mean_of(KNOWN))
    for c in range(CLASSES):
        rows = [[float(v) for v in embed(weights(1), shift(1), x)] for x, label in REAL if label == c]
        assert float(seen.weight[c]) == len(rows)
        near_rows(seen.total[c], [sum(column) for column in zip(*rows, strict=True)] if rows else [0.0] * DIM)


@pytest.mark.parametrize("method", FEDPROTO, ids=lambda m: f"{m.aggregation}-{m.source}-{m.absent}")
def test_fedproto_prototypes(method: FedProto) -> None:
    rows = {(i, c): embedded(i, c) for i in range(3) for c in range(CLASSES)}
    if method.source == "inloop":  # other numbers than those of the clean pass
        rows = {at: [[v + 0.1 for v in row] for row in mine[1:] or mine] for at, mine in rows.items()}
    ups = []
    for i, number in enumerate(NUMBERS):
        total, weight = torch.zeros(CLASSES, DIM).double(), torch.zeros(CLASSES).double()
        for c in range(CLASSES):
            for row in rows[i, c]:
                total[c] += torch.tensor(row, dtype=torch.float64)
                weight[c] += 1
        seen = Mean(total, weight) if method.source == "inloop" else ()
        up, _ = method.upload(MODEL, plain_client(number), data_of(HELD[i], seen), mean_of(OLD))
        for c in range(CLASSES):
            n = len(rows[i, c])
            factor = min(n, 1) if method.aggregation == "mean" else n
            assert float(up["prototypes"].weight[c]) == factor
            near_rows(up["prototypes"].total[c], [factor * v for v in middle(rows[i, c])] if n else [0.0] * DIM)
            if method.aggregation == "literal":
                assert float(up["holders"].weight[c]) == min(n, 1)
        assert ("holders" in up) == (method.aggregation == "literal")
        ups.append(up)
    new = combined(method, mean_of(OLD), ups)
    for c in range(CLASSES):
        held = [(len(rows[i, c]), middle(rows[i, c])) for i in range(3) if rows[i, c]]
        if not held:
            kept = c in OLD and method.absent == "keep"
            assert float(new.weight[c]) == kept
            near_rows(new.value[c], OLD[c] if kept else [0.0] * DIM)
            continue
        n = sum(size for size, _ in held)
        if method.aggregation == "mean":
            expected = [sum(mean[d] for _, mean in held) / len(held) for d in range(DIM)]
        else:  # Eq. 6 divides by the number of holders once more
            twice = len(held) if method.aggregation == "literal" else 1
            expected = [sum(size / n * mean[d] for size, mean in held) / twice for d in range(DIM)]
        assert float(new.weight[c]) == 1
        near_rows(new.value[c], expected)


@pytest.mark.parametrize(
    "method", [FedPR(divide="holders"), FedPR(divide="everyone"), FedPR(divide="samples")], ids=lambda m: m.divide
)
def test_fedpr_prototypes(method: FedPR) -> None:
    server = {"model": FULL, "prototypes": mean_of(OLD)}
    ups = uploads(method, server)
    for i, up in enumerate(ups):
        for c in range(CLASSES):
            rows = embedded(i, c)
            factor = len(rows) if method.divide == "samples" else min(len(rows), 1)
            assert float(up["prototypes"].weight[c]) == factor
            near_rows(up["prototypes"].total[c], [factor * v for v in middle(rows)] if rows else [0.0] * DIM)
    new = combined(method, server, ups)["prototypes"]
    assert new.weight.tolist() == [1, 1, 1, 0, 1]
    near_rows(new.value[3], [0.0] * DIM)
    near_rows(new.value[4], OLD[4])
    for c in range(3):
        means = [middle(embedded(i, c)) for i in range(3) if embedded(i, c)]
        assert len(means) == 2
        every = [row for i in range(3) for row in embedded(i, c)]
        expected = {
            "holders": [(a + b) / 2 for a, b in zip(*means, strict=True)],
            "everyone": [(a + b) / 3 for a, b in zip(*means, strict=True)],
            "samples": middle(every),
        }
        near_rows(new.value[c], expected[method.divide])


@pytest.mark.parametrize("method", [FedNH(rho=0.7), FedNH(rho=0.7, alpha="uniform")], ids=lambda m: m.alpha)
def test_fednh_prototypes(method: FedNH) -> None:
    ups = uploads(method, NH, client_of)
    for i, up in enumerate(ups):
        for c in range(CLASSES):
            rows = embedded(i, c, normal=True)
            expected = [0.0] * DIM
            if rows and method.alpha == "counts":
                expected = [len(rows) * v for v in unit(middle(rows))]
            elif rows:
                expected = middle(rows)
            assert float(up["prototypes"].weight[c]) == (len(rows) if method.alpha == "counts" else min(len(rows), 1))
            near_rows(up["prototypes"].total[c], expected)
    new = combined(method, NH, ups)["prototypes"]
    near_rows(new[3], HEAD[3])  # nobody holds it
    near_rows(new[4], HEAD[4])
    for c in range(3):
        held = [rows for i in range(3) if (rows := embedded(i, c, normal=True))]
        if method.alpha == "counts":
            n = sum(map(len, held))
            aim = unit([sum(len(rows) * unit(middle(rows))[d] for rows in held) / n for d in range(DIM)])
        else:
            aim = [sum(middle(rows)[d] for rows in held) / 3 for d in range(DIM)]  # |S| = 3, though two hold it
        near_rows(new[c], unit([0.7 * HEAD[c][d] + 0.3 * aim[d] for d in range(DIM)]))


# the pool


def best_pair(rows: list[Row]) -> list[Row]:
    """Of all ways to make two groups the one with the least squared distances."""
    if len(rows) < 2:
        return rows

    def cost(groups: tuple[list[Row], list[Row]]) -> float:
        return sum(squares(row, middle(mine)) for mine in groups for row in mine)

    ways = []
    for sides in itertools.product((0, 1), repeat=len(rows)):
        left, right = ([row for row, side in zip(rows, sides, strict=True) if side == s] for s in (0, 1))
        if left and right:
            ways.append((left, right))
    return [middle(mine) for mine in min(ways, key=cost)]


def linked(rows: list[Row], reach: float) -> list[Row]:
    """Means of the groups in which everyone has a neighbour, largest first; the mean of all if there are none."""
    groups: list[list[Row]] = []
    for row in rows:
        touching = [mine for mine in groups if any(squares(row, other) <= reach**2 for other in mine)]
        groups = [mine for mine in groups if mine not in touching] + [[row, *itertools.chain(*touching)]]
    large = sorted((mine for mine in groups if len(mine) > 1), key=len, reverse=True)
    return [middle(mine) for mine in large or [rows]] if rows else []


NAIVE_CLUSTERS: dict[type[Method], Callable[[list[Row]], list[Row]]] = {
    MPFedCL: best_pair,
    SPFedCL: lambda rows: [middle(rows)] if rows else [],
    DPFedCL: lambda rows: linked(rows, 0.15),
}


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize(
    "method",
    [MPFedCL(), MPFedCL(unit=False), SPFedCL(), SPFedCL(unit=False), DPFedCL(eps=0.15, min_samples=2, most=3)],
    ids=["mp", "mp raw", "sp", "sp raw", "dp"],
)
def test_pools(method: PrototypePool, number: int) -> None:
    """Whatever the random start of k-means, with groups that are far apart."""
    server = {"model": FULL, "pool": pool_of([{0: [[0.1, 0.1]]}], method.slots), "means": mean_of(OLD)}
    clusters = NAIVE_CLUSTERS[type(method)]
    ups, found = [], []
    for i, samples in enumerate(HELD):
        data = data_of(samples)._replace(key=random.key(number, i))
        up, _ = method.upload(MODEL, plain_client(NUMBERS[i]), data, server)
        assert isinstance(up["prototypes"], Each)
        got, mine = up["prototypes"].rows, {}
        for c in range(CLASSES):
            expected = clusters(embedded(i, c, normal=method.unit))
            mine[c] = expected
            assert got.weight[c].tolist() == [1.0] * len(expected) + [0.0] * (method.slots - len(expected))
            rows = got.total[c].tolist()
            assert rows[len(expected) :] == [[0.0] * DIM] * (method.slots - len(expected))
            if expected:
                near_rows(torch.tensor(sorted(rows[: len(expected)])), sorted(expected), 1e-6)
        found.append(mine)
        ups.append(up)
    if isinstance(method, MPFedCL):
        assert [[len(mine[c]) for c in range(CLASSES)] for mine in found] == [
            [2, 2, 0, 0, 0],
            [2, 0, 2, 0, 0],
            [0, 1, 2, 0, 0],  # a single sample of class 1
        ]
    if isinstance(method, DPFedCL):
        assert {len(rows) for mine in found for rows in mine.values()} == {0, 1, 2}
    new = combined(method, server, ups)
    for i, up in enumerate(ups):  # one row per client, in the order of the cohort
        assert torch.equal(new["pool"].total[i], up["prototypes"].rows.total)
        assert torch.equal(new["pool"].weight[i], up["prototypes"].rows.weight)
    assert new["means"].weight.tolist() == [1, 1, 1, 0, 1]
    near_rows(new["means"].value[4], OLD[4])
    near_rows(new["means"].value[3], [0.0] * DIM)
    for c in range(3):  # Eq. 9: every prototype counts once, however many samples it is made of
        near_rows(new["means"].value[c], middle([row for mine in found for row in mine[c]]), 1e-6)


# scores


def test_scores_by_hand() -> None:
    x = torch.tensor([row for row, _ in REAL], dtype=torch.float64)
    client, p, b = client_of(1), weights(1), shift(1)
    zs = [[float(v) for v in embed(p, b, row)] for row, _ in REAL]
    near_rows(
        FedNH().predict(MODEL, client, x, NH)["head"], [[dot(w, unit(z)) for w in HEAD] for z in zs]
    )  # the scale does not change the order
    own = client._replace(params=client.params | TWICE["params"], buffers=client.buffers | TWICE["buffers"])
    personal = [[float(v) for v in scores(weights(2), embed(weights(2), shift(2), row))] for row, _ in REAL]
    near_rows(Ditto().predict(MODEL, own, x, FULL)["head"], personal)
    head = [[float(v) for v in scores(p, z)] for z in zs]
    near_rows(Ditto().predict(MODEL, client, x, FULL)["head"], head)
    got = FedPR().predict(MODEL, client, x, PROTOTYPES)
    near_rows(got["head"], head)
    near_rows(got["proto"], [[-squares(z, KNOWN[c]) / DIM if c in KNOWN else -math.inf for c in range(5)] for z in zs])
    for normal in (True, False):
        expected = []
        for z in zs:
            v, row = unit(z) if normal else z, []
            for c in range(CLASSES):
                pool = [u for mine in POOL for u in mine.get(c, [])] or ([MEANS[c]] if c in MEANS else [])
                row.append(-min((math.sqrt(squares(v, u)) for u in pool), default=math.inf))
            expected.append(row)
        near_rows(MPFedCL(unit=normal).predict(MODEL, client, x, pool_down(2, POOL))["proto"], expected, 1e-7)


@EACH_CASE
def test_scores_have_their_names(case: Case) -> None:
    x = torch.tensor([row for row, _ in REAL], dtype=torch.float64)
    assert tuple(case.method.predict(MODEL, case.client, x, case.down)) == case.method.scores


def test_where_samples_are_seen() -> None:
    """Embeddings as they are compared with prototypes: of length 1 where the method makes them so, Ditto's its own."""
    x = torch.tensor([row for row, _ in REAL], dtype=torch.float64)
    client = client_of(1)
    raw = [[float(v) for v in embed(weights(1), shift(1), row)] for row, _ in REAL]
    own = client._replace(params=client.params | TWICE["params"], buffers=client.buffers | TWICE["buffers"])
    for name in set(METHODS) - {"moon", "fedpcl"}:  # whose projections have tests of their own
        method, expected = METHODS[name], raw
        if method is FedNH or issubclass(method, PrototypePool):
            expected = [unit(z) for z in raw]
        near_rows(method().embed(MODEL, client, x), expected)
    near_rows(MPFedCL(unit=False).embed(MODEL, client, x), raw)
    personal = [[float(v) for v in embed(weights(2), shift(2), row)] for row, _ in REAL]
    near_rows(Ditto().embed(MODEL, own, x), personal)


def test_which_prototypes_a_server_has() -> None:
    """One row a class, or all of the pool, or the mean of a class that the pool lacks; weight 0 where there is none."""
    known = [float(c in KNOWN) for c in range(CLASSES)]
    rows = [[KNOWN.get(c, [0.0] * DIM)] for c in range(CLASSES)]
    for method, server in ((FedProto(), mean_of(KNOWN)), (FedPR(), PROTOTYPES)):
        got = method.prototypes(server)
        near_rows(got.value, rows)
        assert got.weight.flatten().tolist() == known
    got = FedNH().prototypes(NH)
    near_rows(got.value, [[row] for row in HEAD])
    assert got.weight.tolist() == [[1.0]] * CLASSES
    got = MPFedCL().prototypes(pool_down(2, POOL))
    for c in range(CLASSES):
        expected = [u for mine in POOL for u in mine.get(c, [])] or ([MEANS[c]] if c in MEANS else [])
        near_rows(got.value[c][got.weight[c] > 0], torch.tensor(expected).reshape(-1, DIM))


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_a_client_with_a_single_sample_counts_and_one_without_does_not(weighting: Any) -> None:
    for samples in (0, 1, 2):
        data = data_of(HELD[0])._replace(counts=counts_of(HELD[0][:samples]))
        up, _ = FedAvg(weighting=weighting).upload(MODEL, plain_client(1), data, FULL)
        factor = samples if weighting == "samples" else min(samples, 1)
        assert float(up.weight) == factor
        same(up.total["params"], {name: factor * value for name, value in weights(1).items()})


def test_a_client_that_took_no_step_has_seen_no_prototypes() -> None:
    for aggregation in ("mean", "weighted", "literal"):
        method = FedProto(source="inloop", aggregation=aggregation)  # type: ignore[arg-type]
        up, _ = method.upload(MODEL, plain_client(1), data_of(HELD[0]), mean_of(KNOWN))
        assert up["prototypes"].total.shape == (CLASSES, DIM)
        assert not up["prototypes"].total.any()
        assert not up["prototypes"].weight.any()


# identities, through whole rounds of the reference engine


def engine(method: Method) -> ReferenceEngine:
    """Ragged clients: one has many classes, one a single class, one a single sample; nobody holds class 4."""
    y = np.array([0, 0, 0, 1, 1, 2, 2, 2, 1, 1, 1, 1, 1, 3, 3, 0, 2])
    x = (np.random.default_rng(0).normal(size=(len(y), FEATURES)) + 0.5 * y[:, None]).astype(np.float32)
    parts = (np.arange(8), np.arange(8, 13), np.array([13]), np.arange(14, 17))
    split = Split(np.zeros(4, int), parts, parts)
    federation = Federation([Domain("toy", x, y, x, y, tuple("abcde"))], split, seed=3, batch_size=3)
    optimizer = Optimizer(lr=0.1, momentum=0.5, weight_decay=0.01)
    return ReferenceEngine(federation, [("tiny", tiny)] * 4, optimizer, seed=3, local_epochs=2, init=method.init)


def play(method: Method, rounds: int = 3) -> tuple[Tree, ReferenceEngine]:
    one, cohorts = engine(method), ([0, 1, 2, 3], [1, 3], [3, 0, 2])
    server = method.init_server(one.specs()[0])
    for number in range(rounds):
        trained = one.train(method, server, cohorts[number % 3], number)
        server = method.aggregate(server, trained.up, torch.tensor(cohorts[number % 3]))
        one.clients = {**one.clients, **trained.clients}
    return server, one


def test_mpfedcl_with_one_cluster_is_spfedcl() -> None:
    for method in (MPFedCL(clusters=1), MPFedCL(clusters=1, steps=1)):
        (mine, one), (single, other) = play(method), play(SPFedCL())
        same(mine["model"]["params"], single["model"]["params"], 1e-5)
        for part in ("pool", "means"):
            torch.testing.assert_close(mine[part], single[part], atol=1e-5, rtol=1e-5)
        for number in range(4):
            same(one.clients[number].params, other.clients[number].params, 1e-5)


def test_dpfedcl_without_clusters_is_spfedcl() -> None:
    (mine, _), (single, _) = play(DPFedCL(min_samples=100, most=3)), play(SPFedCL())
    torch.testing.assert_close(mine["means"], single["means"], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mine["pool"].total[:, :, :1], single["pool"].total, atol=1e-5, rtol=1e-5)
    assert torch.equal(mine["pool"].weight[:, :, :1], single["pool"].weight)
    assert not bool(mine["pool"].weight[:, :, 1:].any())
    same(mine["model"]["params"], single["model"]["params"], 1e-5)


@pytest.mark.parametrize(
    "method",
    [
        FedProto(lam=0.0),
        FedProto(lam=0.0, pull="prototype", source="inloop", aggregation="literal", absent="forget"),
        FedProto(lam=0.0, pull="prototype", distance="l2"),
        FedProto(lam=0.0, distance="cosine"),
    ],
)
def test_fedproto_without_its_pull_is_local(method: FedProto) -> None:
    mine, alone_ = play(method)[1], play(Local(init="common"))[1]
    for number in range(4):
        same(mine.clients[number].params, alone_.clients[number].params, 1e-6)


@pytest.mark.parametrize("method", [FedPR(lam=0.0), FedPR(lam=0.0, distance="l2", divide="everyone")])
def test_fedpr_without_its_pull_is_fedavg(method: FedPR) -> None:
    same(play(method)[0]["model"]["params"], play(FedAvg())[0]["params"], 1e-6)


@pytest.mark.parametrize("alpha", ["counts", "uniform"])
def test_fednh_that_never_turns(alpha: Any) -> None:
    start = FedNH().init_server(engine(FedNH()).specs()[0])["prototypes"]
    torch.testing.assert_close(play(FedNH(rho=1.0, alpha=alpha))[0]["prototypes"], start, atol=1e-6, rtol=0)
    turned = play(FedNH(rho=0.5, alpha=alpha))[0]["prototypes"]
    torch.testing.assert_close(turned[4], start[4], atol=1e-6, rtol=0)  # nobody holds it
    assert all(not torch.allclose(turned[c], start[c], atol=1e-3) for c in range(4))


def test_the_pool_pulls() -> None:
    """What the identities rest on: with prototypes the loss is not FedAvg's."""
    plain_model = play(FedAvg())[0]["params"]["body.fc.weight"]
    for method in (MPFedCL(), SPFedCL(), DPFedCL(min_samples=2)):
        assert not torch.allclose(play(method)[0]["model"]["params"]["body.fc.weight"], plain_model, atol=1e-3)
        first = play(method, 1)[0]["model"]["params"]  # before there are any it is
        same(first, play(FedAvg(), 1)[0]["params"], 1e-6)
