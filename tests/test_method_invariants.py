"""What holds for every method: through the reference engine, on ragged clients."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from protofed.data.domain import Domain
from protofed.data.federation import Federation
from protofed.data.split import Split
from protofed.engines.reference import ReferenceEngine
from protofed.engines.wire import decode, encode, measure
from protofed.method import Client, Each, Mean, Method
from protofed.methods import METHODS
from protofed.models import MODELS
from protofed.ops import random
from protofed.ops.optim import Optimizer
from protofed.ops.trees import under

CLASSES, ROUNDS = 4, 2
COHORT = [0, 1, 2, 3]

# What of a client's params must never be seen by the server; a method that is not here shares its model.
PRIVATE = {
    "local": ("",),
    "fedproto": ("",),
    "fedper": ("head.",),
    "fedrep": ("head.",),
    "ditto": ("personal.",),
    "fedrod": ("personal_head.",),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models of this size are slower on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def engine_of(method: Method) -> ReferenceEngine:
    """Four clients: many samples, a single one, a single class, and two classes that nobody else holds both of."""
    g = np.random.default_rng(0)
    y = np.arange(48) % CLASSES
    x = (g.normal(size=(48, 1, 4, 4)) + y[:, None, None, None]).astype(np.float32)
    domain = Domain("tiny", x, y, x[:8] + 0.1, y[:8], tuple("abcd"))
    rows = (
        np.arange(0, 16),
        np.array([17]),
        np.arange(20, 48, 4),  # class 0
        np.array([18, 19, 22, 23, 26]),
    )
    split = Split(np.zeros(4, int), rows, tuple(np.arange(8) for _ in rows))
    federation = Federation([domain], split, seed=1, batch_size=4)
    return ReferenceEngine(
        federation,
        [("mlp_digits", lambda shape, classes: MODELS["mlp_digits"](shape, classes, hidden=8, dim=6))] * 4,
        Optimizer(lr=0.05, momentum=0.5),
        seed=1,
        local_epochs=2,
        init=method.init,
    )


def play(method: Method, cohort: list[int], secret: Tensor | None = None) -> tuple[Any, list, ReferenceEngine]:
    engine = engine_of(method)
    method.check(engine.specs())
    server = method.init_server(engine.specs()[0])
    rounds = []
    for round in range(ROUNDS):
        if secret is not None:
            engine.clients = {number: hide(engine.client(method, number), secret + number) for number in cohort}
        trained = engine.train(method, server, cohort, round)
        server = method.aggregate(server, trained.up, torch.tensor(cohort))
        engine.clients = {**engine.clients, **trained.clients}
        rounds.append(trained)
    return server, rounds, engine


def hide(client: Client, secret: Tensor) -> Client:
    """Put something into a client's memory that no method knows of."""
    return client._replace(memory={**client.memory, "secret": secret}) if isinstance(client.memory, dict) else client


def floats(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


@pytest.fixture(params=METHODS)
def method(request) -> Method:
    return METHODS[request.param]()


def test_two_rounds_stay_finite(method: Method) -> None:
    server, rounds, engine = play(method, COHORT)
    for leaf in floats(server) + floats(list(engine.clients.values())) + floats([trained.up for trained in rounds]):
        assert bool(torch.isfinite(leaf).all())
    for trained in rounds:
        assert set(trained.clients) == set(COHORT)
        assert all(np.isfinite(float(loss.value)) for loss in trained.losses)
    tallies = engine.evaluate(method, server, COHORT, on="own", who="personal")
    for counted in tallies:
        assert {kind.removesuffix("_own") for kind in counted} == set(method.scores)
        assert counted[method.inference].samples.sum() == 8


def test_two_runs_are_the_same(method: Method) -> None:
    torch.manual_seed(1)
    first, _, one = play(method, COHORT)
    torch.manual_seed(2)
    second, _, other = play(method, COHORT)
    tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), first, second)
    tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), one.clients, other.clients)


@pytest.mark.parametrize("order", [[3, 2, 1, 0], [1, 3, 0, 2]])
def test_the_order_of_the_cohort_does_not_matter(method: Method, order: list[int]) -> None:
    server, rounds, engine = play(method, COHORT)
    other_server, other_rounds, other = play(method, order)
    tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5), server, other_server)
    for number in COHORT:
        tree_map(
            lambda a, b: torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5),
            engine.clients[number],
            other.clients[number],
        )
    for trained, shuffled in zip(rounds, other_rounds, strict=True):
        assert trained.sent == shuffled.sent
        assert trained.received == shuffled.received


def test_training_changes_no_value_it_was_given(method: Method) -> None:
    engine = engine_of(method)
    server = method.init_server(engine.specs()[0])
    engine.clients = {number: engine.client(method, number) for number in COHORT}
    before = tree_map(torch.clone, (server, engine.clients))
    trained = engine.train(method, server, COHORT, 0)
    method.aggregate(server, trained.up, torch.tensor(COHORT))
    tree_map(
        lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True), (server, engine.clients), before
    )


def test_uploads_are_means_and_eaches(method: Method) -> None:
    """The type states what the server learns, so nothing may be outside of them."""
    _, rounds, _ = play(method, COHORT)

    def outside(tree: Any) -> list:
        if isinstance(tree, Mean | Each):
            return []
        parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else None
        return [tree] if parts is None else [found for part in parts for found in outside(part)]

    for trained in rounds:
        assert outside(trained.up) == []


def test_states_travel(method: Method) -> None:
    """What the server and the clients hold after two rounds can be saved, and comes back the same."""
    server, _, engine = play(method, COHORT)
    for tree in (server, {str(number): client for number, client in engine.clients.items()}):
        back = decode(encode(tree))
        tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), tree, back)
    cohort = torch.tensor(COHORT)
    assert measure(method.broadcast(server, cohort)).bytes >= 0


# what must not be seen


def numbers(tree: Any) -> Tensor:
    """Every number the server can read: the tensors of an upload, and the means they stand for."""
    found: list[Tensor] = []

    def look(node: Any) -> None:
        if isinstance(node, Mean):
            found.extend(floats(node.value))
        parts = node.values() if isinstance(node, dict) else node if isinstance(node, list | tuple) else ()
        for part in parts:
            look(part)

    look(tree)
    return torch.cat([leaf.flatten().double() for leaf in [*found, *floats(tree)]] or [torch.zeros(0).double()])


def leaked(private: Tensor, seen: Tensor) -> bool:
    """Whether all numbers of a private tensor are among those seen, to seven digits; zeros tell nothing."""
    mine = private.flatten().double()
    mine = mine[mine != 0]
    if len(mine) < 2 or not len(seen):
        return False
    seen = seen.sort().values
    place = torch.searchsorted(seen, mine).clamp(max=len(seen) - 1)
    nearest = torch.minimum((seen[place] - mine).abs(), (seen[(place - 1).clamp(min=0)] - mine).abs())
    return bool((nearest <= 1e-7 * mine.abs()).all())


def test_leaks_are_found() -> None:
    """The test of the test: a tensor is found alone, inside another one, and behind a weight."""
    secret = random.normal(random.key("leak"), 6).reshape(2, 3)
    for tree in (
        {"x": Each(secret)},
        [Mean(torch.stack([secret, secret + 1]), torch.ones(2))],
        Mean.of({"w": secret}, torch.tensor(3.0)),
        Each(Mean.of(secret, torch.tensor([7.0, 3.0]))),
    ):
        assert leaked(secret, numbers(tree))
    assert not leaked(secret, numbers({"x": Each(secret + 0.01)}))
    assert not leaked(secret, numbers({}))


SECRET = random.normal(random.key("secret"), 5)


@cache
def alone_ups(method: Method) -> list[tuple[int, Any, Client]]:
    """The upload of every client alone, with the state it kept, round by round."""
    found = []
    for number in COHORT:
        _, rounds, _ = play(method, [number], SECRET)
        found += [(number, trained.up, trained.clients[number]) for trained in rounds]
    return found


@pytest.mark.parametrize("name", METHODS)
def test_private_tensors_are_in_no_upload(name: str) -> None:
    for number, up, client in alone_ups(METHODS[name]()):
        seen = numbers(up)
        for private, value in under(client.params, PRIVATE.get(name, ())).items():
            assert not leaked(value, seen), f"{name} sends {private}"
        for value in [*floats(client.memory), SECRET + number]:
            assert not leaked(value, seen), f"{name} sends a client's memory"


def test_samples_are_in_no_upload(method: Method) -> None:
    federation = engine_of(method).federation
    for number, up, _ in alone_ups(method):
        seen = numbers(up)
        for x in federation.train(number).x:
            assert not leaked(x, seen)
