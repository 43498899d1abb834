"""What holds for every method in the reference engine, on ragged clients; the rest is `check_method`'s."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

from protofed.data.batches import Federation
from protofed.data.domain import Domain
from protofed.data.split import Split
from protofed.engines.reference import ReferenceEngine
from protofed.engines.wire import encode, encoded_size
from protofed.method import Method
from protofed.methods import METHODS
from protofed.models import MODELS
from protofed.ops.optim import Optimizer
from protofed.ops.trees import all_finite

CLASSES, ROUNDS = 4, 2
COHORT = [0, 1, 2, 3]


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


def play(method: Method, cohort: list[int]) -> tuple[Any, list, ReferenceEngine]:
    engine = engine_of(method)
    method.check(engine.specs())
    server = method.init_server(engine.specs()[0])
    rounds = []
    for round in range(ROUNDS):
        trained = engine.train(method, server, cohort, round)
        server = method.aggregate(server, trained.up, torch.tensor(cohort))
        engine.clients = {**engine.clients, **trained.clients}
        rounds.append(trained)
    return server, rounds, engine


@pytest.fixture(params=METHODS)
def method(request) -> Method:
    return METHODS[request.param]()


def test_two_rounds_are_whole_and_can_be_measured(method: Method) -> None:
    server, rounds, engine = play(method, COHORT)
    assert not tree_leaves(server) or bool(all_finite(server))
    for trained in rounds:
        assert bool(trained.finite.all())
        assert list(trained.clients) == COHORT
        assert np.isfinite(trained.loss.value.numpy()).all()
    finished = engine.finish(method, server, COHORT, ROUNDS)
    assert bool(finished.finite.all())
    assert list(finished.clients) == COHORT
    for who in ("personal", "global") if method.global_client(server) is not None else ("personal",):
        for counted in engine.evaluate(method, server, COHORT, on="own", who=who):
            assert {kind.removesuffix("_own") for kind in counted} == set(method.scores)
            assert counted[method.inference].samples.sum() == 8


def test_the_cost_does_not_depend_on_the_order_of_the_cohort(method: Method) -> None:
    server, rounds, _ = play(method, COHORT)
    _, shuffled, _ = play(method, [1, 3, 0, 2])
    for trained, other in zip(rounds, shuffled, strict=True):
        assert trained.sent == other.sent
        assert trained.received == other.received
    down = method.broadcast(server, torch.tensor(COHORT))
    assert encoded_size(down).bytes == (len(encode(down)) if tree_leaves(down) else 0)
