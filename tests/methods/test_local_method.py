"""Local: training alone, and nothing is sent."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from protofed.data.batches import Federation
from protofed.data.domain import Domain
from protofed.data.split import Split
from protofed.engines.reference import ReferenceEngine
from protofed.engines.wire import Size, encoded_size
from protofed.method import Client, LocalData, Spec
from protofed.methods.local import Local
from protofed.models import Net, chain
from protofed.models.functional import FunctionalModel, fresh, state
from protofed.ops import random
from protofed.ops.optim import Optimizer

FEATURES, CLASSES = 3, 2


def small() -> Net:
    return Net(chain(fc=nn.Linear(FEATURES, 4), relu=nn.ReLU()), chain(fc=nn.Linear(4, CLASSES)), 4)


def large() -> Net:
    return Net(chain(fc=nn.Linear(FEATURES, 7), relu=nn.ReLU()), chain(fc=nn.Linear(7, CLASSES)), 7)


def engine_of(init: str = "per_client", rows=None, seed: int = 3) -> ReferenceEngine:
    g = np.random.default_rng(0)
    y = np.arange(30) % CLASSES
    x = (g.normal(size=(30, FEATURES)) + y[:, None]).astype(np.float32)
    domain = Domain("tiny", x, y, x[:6], y[:6], ("a", "b"))
    rows = rows or [np.arange(12), np.arange(12, 19), np.array([20])]
    split = Split(np.zeros(3, int), tuple(rows), tuple(np.arange(6) for _ in rows))
    federation = Federation([domain], split, seed=seed, batch_size=4, normalize="none")
    builders = [
        ("small", lambda shape, classes: small()),
        ("large", lambda shape, classes: large()),
        ("small", lambda shape, classes: small()),
    ]
    return ReferenceEngine(federation, builders, Optimizer(lr=0.1, momentum=0.5), seed=seed, local_epochs=2, init=init)


def play(engine: ReferenceEngine, cohort: list[int], rounds: int = 2) -> list:
    method = Local()
    server = method.init_server(engine.specs()[0])
    results = []
    for round in range(rounds):
        trained = engine.train(method, server, cohort, round)
        server = method.aggregate(server, trained.up, torch.tensor(cohort))
        assert server == {}
        engine.clients = {**engine.clients, **trained.clients}
        results.append(trained)
    return results


def test_nothing_is_sent_either_way() -> None:
    for trained in play(engine_of(), [0, 1, 2]):
        assert trained.sent == Size(0, 0)
        assert trained.received == Size(0, 0)
        assert trained.up == {}
    client = Client({"w": torch.ones(2)}, {})
    up, kept = Local().upload(FunctionalModel(small()), client, LocalData([], torch.ones(2), random.key(0)), {})
    assert encoded_size(up) == Size(0, 0)
    assert kept is client


def test_a_client_trains_as_in_plain_pytorch() -> None:
    """Two rounds of two epochs, with the batches that the federation deals."""
    engine = engine_of()
    start = {i: engine.client(Local(), i) for i in range(3)}
    play(engine, [0, 1, 2])
    for number, build in ((0, small), (1, large), (2, small)):
        module = build()
        module.load_state_dict(start[number].params)
        for round in range(2):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)
            for epoch in range(2):
                for batch in engine.federation.epoch(number, round, epoch):
                    optimizer.zero_grad()
                    F.cross_entropy(module(batch.x)[1], batch.y).backward()
                    optimizer.step()
        for name, value in state(module)[0].items():
            torch.testing.assert_close(engine.clients[number].params[name], value, rtol=1e-4, atol=1e-5)


def test_a_client_is_the_same_whoever_else_there_is() -> None:
    together, apart = engine_of(), engine_of(rows=[np.arange(12), np.array([25, 26]), np.array([27])])
    play(together, [0, 1, 2])
    play(apart, [0])
    assert set(apart.clients) == {0}
    for name, value in together.clients[0].params.items():
        assert torch.equal(apart.clients[0].params[name], value)


def test_losses_are_of_each_client() -> None:
    (trained, _) = play(engine_of(), [1, 2])
    assert trained.loss.weight.tolist() == [14, 2]  # samples times epochs
    assert np.isfinite(trained.loss.value.numpy()).all()


def test_initial_weights_are_each_clients_own_or_common() -> None:
    own, common = engine_of("per_client"), engine_of("common")
    name = "body.fc.weight"
    assert not torch.equal(own.client(Local(), 0).params[name], own.client(Local(), 2).params[name])
    assert torch.equal(common.client(Local(), 0).params[name], common.client(Local(), 2).params[name])
    assert torch.equal(own.client(Local(), 0).params[name], engine_of("per_client").client(Local(), 0).params[name])
    other = engine_of("per_client", seed=4)
    assert not torch.equal(own.client(Local(), 0).params[name], other.client(Local(), 0).params[name])
    assert Local().init == "per_client"


def test_any_mixture_of_models_is_served() -> None:
    params, buffers = state(fresh(small, 0))
    Local().check([Spec("small", 2, 4, params, buffers, 0), Spec("other", 9, 7, {}, {}, 0)])
    assert Local().init_server(Spec("small", 2, 4, params, buffers, 0)) == {}


def test_it_is_judged_by_its_own_classifier() -> None:
    engine = engine_of()
    play(engine, [0, 1, 2])
    tallies = engine.evaluate(Local(), {}, [0, 1, 2], on="own", who="personal")
    for number, counted in enumerate(tallies):
        assert list(counted) == ["head", "head_own"]
        x, y = engine.federation.test(number)
        module = (small, large, small)[number]()
        module.load_state_dict(engine.clients[number].params)
        guesses = module.eval()(x)[1].argmax(1).tolist()
        assert float(counted["head"].right.sum()) == sum(g == t for g, t in zip(guesses, y.tolist(), strict=True))
    assert engine.global_tally(Local(), {}) is None
    assert Local().last_phases() == ()
