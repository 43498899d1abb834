"""Every distance by hand: its numbers, its slope, where the two are equal, many rows at once, and in training."""

import itertools
import math
from typing import Any, get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import wasserstein_distance
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from protofed.data.batches import Federation
from protofed.data.domain import Domain
from protofed.data.split import Split
from protofed.engines.reference import ReferenceEngine
from protofed.engines.stacked.engine import StackedEngine
from protofed.method import Method
from protofed.methods.fedpr import FedPR
from protofed.methods.fedproto import FedProto
from protofed.models import Net, chain
from protofed.ops.distances import DISTANCES, Distance
from protofed.ops.optim import Optimizer

NAMES: tuple[Distance, ...] = get_args(Distance)
ANY = pytest.mark.parametrize("name", NAMES)

Z, P = [4.0, 1.0, 0.0], [1.0, 5.0, 0.0]  # z - p = (3, -4, 0)
HALVES, LATE = [math.log(v) for v in (1 / 2, 1 / 4, 1 / 4)], [math.log(v) for v in (1 / 4, 1 / 4, 1 / 2)]


def rows(n: int, dim: int, seed: int = 0) -> Tensor:
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def softmax(row: list[float]) -> list[float]:
    whole = sum(math.exp(v) for v in row)
    return [math.exp(v) / whole for v in row]


def slope(name: Distance, z: Tensor, p: Tensor) -> Tensor:
    return torch.func.grad(lambda z: DISTANCES[name](z, p).sum())(z)


def test_names_and_functions_are_the_same_list() -> None:
    assert set(NAMES) == set(DISTANCES)
    assert len(NAMES) == 8


@pytest.mark.parametrize(
    "name, z, p, expected",
    [
        ("mse", Z, P, (9 + 16 + 0) / 3),
        ("l1", Z, P, 3 + 4 + 0),
        ("l2", Z, P, math.sqrt(9 + 16)),
        ("squared_l2", Z, P, 9 + 16),
        ("relu_l2", Z, P, math.sqrt(9)),  # only the first coordinate exceeds its prototype
        ("relu_l2", P, Z, math.sqrt(16)),  # and seen from the other side only the second
        ("cosine", Z, P, 1 - (4 * 1 + 1 * 5 + 0) / (math.sqrt(16 + 1) * math.sqrt(1 + 25))),
        ("cosine", Z, [-v for v in Z], 2),
        ("cosine", Z, [7 * v for v in Z], 0),
        ("cosine", [0.0, 2.0], [5.0, 0.0], 1),
        # -(1/4 log 1/2 + 1/4 log 1/4 + 1/2 log 1/4): what is sought is p, what is given is z
        ("cross_entropy", HALVES, LATE, math.log(2) * (1 / 4 + 2 / 4 + 2 / 2)),
        ("cross_entropy", LATE, HALVES, math.log(2) * (2 / 2 + 2 / 4 + 1 / 4)),
        ("cross_entropy", [3.0, 3.0, 3.0], LATE, math.log(3)),
        ("earth_mover", HALVES, LATE, 1 / 4 * 2),  # a quarter goes from the first place to the third, two steps
        ("earth_mover", [0.0, 0.0, -1e3, -1e3], [-1e3, -1e3, 0.0, 0.0], 1 / 2 * 2 + 1 / 2 * 2),
    ],
)
def test_numbers(name: Distance, z: list[float], p: list[float], expected: float) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        got = DISTANCES[name](torch.tensor([z, z], dtype=dtype), torch.tensor([p, p], dtype=dtype))
        assert got.shape == (2,)
        assert got.tolist() == pytest.approx([expected] * 2, abs=tolerance)


def test_earth_mover_is_transport_on_a_line() -> None:
    """Against scipy, and against carrying the surplus of each place to the next one."""
    z, p = rows(7, 6), 2 * rows(7, 6, seed=1)
    got = DISTANCES["earth_mover"](z, p).tolist()
    for i in range(7):
        have, want = softmax(z[i].tolist()), softmax(p[i].tolist())
        carried = work = 0.0
        for a, b in zip(have, want, strict=True):
            carried += a - b
            work += abs(carried)
        assert got[i] == pytest.approx(work, abs=1e-12)
        assert got[i] == pytest.approx(wasserstein_distance(range(6), range(6), have, want), abs=1e-10)


@ANY
def test_slope_against_central_differences(name: Distance) -> None:
    z, p, step = rows(4, 5), rows(4, 5, seed=1), 1e-6
    got = slope(name, z, p)
    for i, j in itertools.product(range(4), range(5)):
        values = []
        for sign in (1, -1):
            moved = z.clone()
            moved[i, j] += sign * step
            values.append(float(DISTANCES[name](moved, p).sum()))
        assert float(got[i, j]) == pytest.approx((values[0] - values[1]) / (2 * step), abs=1e-7)


@ANY
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_where_both_are_equal(name: Distance, dtype: torch.dtype) -> None:
    z = rows(6, 4).to(dtype)
    lowest = torch.zeros(6, dtype=dtype)
    if name == "cross_entropy":  # the entropy of softmax(p) is its least value
        lowest = torch.tensor([-sum(q * math.log(q) for q in softmax(row)) for row in z.tolist()], dtype=dtype)
    torch.testing.assert_close(DISTANCES[name](z, z), lowest, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(slope(name, z, z.clone()), torch.zeros_like(z), atol=1e-6, rtol=0)
    for seed in range(1, 6):  # nowhere is it lower
        assert bool((DISTANCES[name](z + rows(6, 4, seed).to(dtype), z) >= lowest - 1e-6).all())


@ANY
@pytest.mark.parametrize("z, p", [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0), (1e4, -1e4)], ids=["z=0", "p=0", "both", "far"])
def test_numbers_stay_finite(name: Distance, z: float, p: float) -> None:
    ramp = torch.tensor([[1.0, 2.0, -3.0, 0.5]])
    for value in (DISTANCES[name](z * ramp, p * ramp), slope(name, z * ramp, p * ramp)):
        assert bool(torch.isfinite(value).all())


@ANY
def test_many_rows_at_once(name: Distance) -> None:
    """Row by row, all together, and stacked under vmap give the same numbers and slopes."""
    z, p = rows(6, 4), rows(6, 4, seed=1)
    p[0] = z[0]
    distance = DISTANCES[name]
    alone = torch.stack([distance(a, b) for a, b in zip(z, p, strict=True)])
    slopes = torch.stack([torch.func.grad(distance)(a, b) for a, b in zip(z, p, strict=True)])
    clients = z.reshape(2, 3, 4), p.reshape(2, 3, 4)
    for got in (distance(z, p), torch.vmap(distance)(z, p), torch.vmap(distance)(*clients).flatten()):
        torch.testing.assert_close(got, alone)
    for got in (
        slope(name, z, p),
        torch.vmap(torch.func.grad(distance))(z, p),
        torch.vmap(torch.func.grad(lambda a, b: distance(a, b).sum()))(*clients).flatten(0, 1),
    ):
        torch.testing.assert_close(got, slopes)


# in training


def engine() -> ReferenceEngine:
    """Three clients: several samples of two classes, a single sample, and classes of which one is nobody else's."""
    y = np.array([0, 1, 0, 1, 0, 2, 3, 3, 1, 3])
    x = (np.random.default_rng(0).normal(size=(10, 3)) + y[:, None]).astype(np.float32)
    parts = (np.arange(5), np.array([5]), np.arange(6, 10))
    split = Split(np.zeros(3, int), parts, parts)
    federation = Federation([Domain("toy", x, y, x, y, tuple("abcde"))], split, seed=1, batch_size=4)

    def build(shape: tuple[int, ...], classes: int) -> nn.Module:
        body = chain(fc1=nn.Linear(3, 6), relu1=nn.ReLU(), fc2=nn.Linear(6, 4), relu2=nn.ReLU())
        return Net(body, chain(fc=nn.Linear(4, classes)), 4)

    return ReferenceEngine(federation, [("toy", build)] * 3, Optimizer(lr=0.05), seed=1, local_epochs=1, init="common")


def play(method: Method, rounds: int = 3) -> tuple[Any, ReferenceEngine]:
    one, cohort = engine(), [0, 1, 2]
    server = method.init_server(one.specs()[0])
    for round in range(rounds):
        trained = one.train(method, server, cohort, round)
        assert bool(trained.finite.all())
        server = method.aggregate(server, trained.up, torch.tensor(cohort))
        one.clients = {**one.clients, **trained.clients}
    return server, one


@ANY
def test_methods_train_with_it(name: Distance) -> None:
    for pulled, free in (
        (FedProto(distance=name), FedProto(lam=0.0)),
        (FedProto(distance=name, pull="prototype", source="inloop"), FedProto(lam=0.0)),
        (FedPR(distance=name), FedPR(lam=0.0)),
    ):
        server, one = play(pulled)
        numbers = [leaf for leaf in tree_leaves((server, one.clients)) if leaf.is_floating_point()]
        assert all(bool(torch.isfinite(leaf).all()) for leaf in numbers)
        alone = play(free)[1].clients[0].params["body.fc2.weight"]
        assert not torch.allclose(one.clients[0].params["body.fc2.weight"], alone, atol=1e-7)  # and it does pull


ROUNDED = ("l1", "l2", "relu_l2", "earth_mover")  # whose slope has length 1 however near a prototype is


def alone_with_a_class(one: type[ReferenceEngine] | type[StackedEngine], epochs: int = 1) -> Any:
    """Two clients without a class in common, each with all its samples in one batch: its prototypes are its own."""
    y = np.arange(22) % 4
    x = (np.random.default_rng(1).normal(size=(22, 7)) + y[:, None]).astype(np.float32)
    parts = tuple(np.flatnonzero(np.isin(y, held)) for held in ((0, 1), (2, 3)))
    federation = Federation(
        [Domain("toy", x, y, x, y, tuple("abcd"))], Split(np.zeros(2, int), parts, parts), seed=1, batch_size=64
    )

    def build(shape: tuple[int, ...], classes: int) -> nn.Module:
        body = chain(fc1=nn.Linear(7, 33), relu1=nn.ReLU(), fc2=nn.Linear(33, 17))
        return Net(body, chain(fc=nn.Linear(17, classes)), 17)

    builders, how = [("toy", build)] * 2, Optimizer(lr=0.1)
    made = ReferenceEngine(federation, builders, how, seed=1, local_epochs=epochs, init="common")
    return made if one is ReferenceEngine else StackedEngine(made)


def trained(one: Any, method: Method, rounds: int = 4) -> list[Tensor]:
    """Two clients' bodies after some rounds."""
    server = method.init_server(one.specs()[0])
    for round in range(rounds):
        done = one.train(method, server, [0, 1], round)
        server = method.aggregate(server, done.up, torch.arange(2))
        one.clients = {**one.clients, **done.clients}
    return [one.clients[number].params["body.fc2.weight"] for number in range(2)]


@pytest.mark.parametrize("name", ROUNDED)
def test_engines_agree_where_a_batch_is_all_that_its_prototype_comes_from(name: Distance) -> None:
    """The distance is 0 up to rounding: no engine is pulled anywhere, so that all do what a client does alone."""
    method = FedProto(pull="prototype", distance=name)
    expected = trained(alone_with_a_class(ReferenceEngine), FedProto(lam=0.0))
    for kind in (ReferenceEngine, StackedEngine):
        for got, wanted in zip(trained(alone_with_a_class(kind), method), expected, strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-6, rtol=0)
    first, second = (trained(alone_with_a_class(kind, epochs=3), method) for kind in (ReferenceEngine, StackedEngine))
    torch.testing.assert_close(second, first, atol=1e-5, rtol=0)  # from the second step on there is a way back
    assert not torch.allclose(first[0], trained(alone_with_a_class(ReferenceEngine, 3), FedProto(lam=0.0))[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "name, length", [*itertools.product(["l1", "l2", "relu_l2"], [1.0, 100.0]), ("earth_mover", 1.0)]
)
def test_a_distance_that_is_only_rounding_has_no_gradient(name: str, length: float, dtype: torch.dtype) -> None:
    """Doubles round 2^29 times less, so that of doubles a distance of 1e-5 is none."""
    near, far = (1e-6, 1e-2) if dtype == torch.float32 else (1e-15, 1e-6)
    p = length * F.normalize(torch.rand(4, 6, generator=torch.Generator().manual_seed(0)).to(dtype))
    for apart, slope in ((0.0, False), (near, False), (far, True)):
        z = (p + apart * length * torch.tensor([1.0, -1, 1, -1, 1, -1], dtype=dtype)).requires_grad_()
        value = DISTANCES[name](z, p)
        (gradient,) = torch.autograd.grad(value.sum(), z)
        assert bool((gradient.norm(dim=1) > 1e-3).all()) == slope
        assert slope or not gradient.any()
        assert bool((value > 0).all()) == (apart > 0), "only the gradient is left out, not the value"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["l1", "l2", "relu_l2", "cosine", "earth_mover"])
def test_below_which_distance_there_is_no_gradient(name: str, dtype: torch.dtype) -> None:
    """1e-5, times the prototype's length where that is above 1; of doubles 2^29 times less."""
    near = 1e-5 * (1.0 if dtype == torch.float32 else 2.0**-29)
    p = torch.tensor([[0.0, 0.0], [0.6, 0.8], [3.0, 4.0]], dtype=dtype)
    lengths = torch.tensor([1.0, 1.0, 5.0], dtype=dtype)
    if name == "cosine":  # the embedding's own length
        p, lengths = p + 1, lengths * 0 + 1
    if (
        name == "earth_mover"
    ):  # no length: it compares shares, of which each of two moves by a quarter of the difference
        p, lengths = p * 0, lengths * 0 + 4
    for factor, slope in ((0.8, False), (1.2, True)):
        apart = torch.stack([factor * near * lengths, 0 * lengths], 1)
        z = (apart if name == "cosine" else p + apart).requires_grad_()
        (gradient,) = torch.autograd.grad(DISTANCES[name](z, p).sum(), z)
        assert gradient.any(1).tolist() == [slope] * 3


def test_an_embedding_of_length_0_has_no_direction_to_be_turned_in() -> None:
    z, p = torch.zeros(1, 3, requires_grad=True), torch.ones(1, 3)
    value = DISTANCES["cosine"](z, p)
    assert value.item() == 1
    assert not torch.autograd.grad(value.sum(), z)[0].any()
