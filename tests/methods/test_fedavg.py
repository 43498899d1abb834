"""FedAvg against loops over samples, parameters and clients."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from protofed.data.batches import Federation
from protofed.data.domain import Domain
from protofed.data.split import Split
from protofed.engines.reference import ReferenceEngine
from protofed.errors import UserError
from protofed.method import Batch, Client, LocalData, Mean, Spec
from protofed.methods.fedavg import FedAvg
from protofed.methods.local import Local
from protofed.models import MODELS, Net, chain
from protofed.models.functional import FunctionalModel, fresh, state
from protofed.ops import random
from protofed.ops.checks import same_shapes
from protofed.ops.optim import Optimizer
from protofed.ops.trees import alone, merge

FEATURES, DIM, CLASSES = 3, 2, 4
KEY = random.key("fedavg")


def linear_net() -> Net:
    return Net(chain(fc=nn.Linear(FEATURES, DIM)), chain(fc=nn.Linear(DIM, CLASSES)), DIM)


def norm_net() -> Net:
    body = chain(fc=nn.Linear(FEATURES, 5), bn=nn.BatchNorm1d(5), relu=nn.ReLU(), out=nn.Linear(5, DIM))
    return Net(body, chain(fc=nn.Linear(DIM, CLASSES)), DIM)


def built(build=linear_net, seed: int = 0) -> tuple[FunctionalModel, Client]:
    module = fresh(build, seed)
    return FunctionalModel(module), Client(*state(copy.deepcopy(module)))


def data_of(counts: list[float]) -> LocalData:
    return LocalData([], torch.tensor(counts), KEY)


# the loss


def naive_loss(p: dict[str, list], x: list, y: list[int]) -> float:
    summed = 0.0
    for row, label in zip(x, y, strict=True):
        z = [
            sum(w * v for w, v in zip(ws, row, strict=True)) + b
            for ws, b in zip(p["body.fc.weight"], p["body.fc.bias"], strict=True)
        ]
        logits = [
            sum(w * v for w, v in zip(ws, z, strict=True)) + b
            for ws, b in zip(p["head.fc.weight"], p["head.fc.bias"], strict=True)
        ]
        summed += math.log(sum(math.exp(v) for v in logits)) - logits[label]
    return summed / len(y)


@pytest.mark.parametrize("method", [FedAvg(), FedAvg(weighting="uniform"), Local()])
def test_loss_and_gradient(method) -> None:
    model, client = built()
    params = {name: value.double() for name, value in client.params.items()}
    x = torch.randn(5, FEATURES, generator=torch.Generator().manual_seed(0)).double()
    y = [0, 3, 1, 1, 2]
    batch = Batch(x, torch.tensor(y), torch.ones(5).double())

    def loss(p: dict[str, Tensor]) -> Tensor:
        return method.loss(model.training({}, KEY), Client(p, {}), batch, {})

    grads, value = torch.func.grad_and_value(loss)(params)
    plain = {name: p.tolist() for name, p in params.items()}
    assert float(value) == pytest.approx(naive_loss(plain, x.tolist(), y), abs=1e-10)
    step = 1e-5
    for name, rows in plain.items():
        for i, row in enumerate(rows):
            holder, places = (row, range(len(row))) if isinstance(row, list) else (rows, [i])
            for j in places:
                kept = holder[j]
                holder[j] = kept + step
                above = naive_loss(plain, x.tolist(), y)
                holder[j] = kept - step
                below = naive_loss(plain, x.tolist(), y)
                holder[j] = kept
                got = grads[name][i, j] if isinstance(row, list) else grads[name][i]
                assert float(got) == pytest.approx((above - below) / (2 * step), abs=1e-7)


# aggregation


def clients_of(n: int) -> list[Client]:
    """Different models, with BatchNorm buffers that differ, too."""
    clients = []
    for i in range(n):
        _, client = built(norm_net, seed=i)
        buffers = {
            name: value + i + 1 if value.is_floating_point() else value + 10 * i
            for name, value in client.buffers.items()
        }
        clients.append(Client(client.params, buffers))
    return clients


COUNTS = [[5.0, 0, 1, 0], [0.0, 1, 0, 1], [20.0, 20, 0, 0]]


@pytest.mark.parametrize("weighting, weights", [("samples", [6, 2, 40]), ("uniform", [1, 1, 1])])
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_aggregation_number_by_number(weighting, weights: list[int], order: list[int]) -> None:
    method = FedAvg(weighting=weighting)
    model, start = built(norm_net, seed=9)
    server = method.init_server(Spec("net", CLASSES, DIM, start.params, start.buffers, 0))
    clients = clients_of(3)
    up = None
    for i in order:
        sent, kept = method.upload(model, clients[i], data_of(COUNTS[i]), server)
        assert kept is clients[i]
        up = alone(sent) if up is None else merge(up, alone(sent))
    assert isinstance(up, Mean)
    new = method.aggregate(server, up, torch.tensor(order))
    assert set(new) == {"params", "buffers"}
    assert set(new["params"]) == set(start.params)
    assert set(new["buffers"]) == {"body.bn.running_mean", "body.bn.running_var"}  # the counter is not averaged
    for part, held in (("params", [c.params for c in clients]), ("buffers", [c.buffers for c in clients])):
        for name, value in new[part].items():
            for place, got in enumerate(value.flatten().tolist()):
                numbers = [h[name].flatten().tolist()[place] for h in held]
                expected = sum(w * v for w, v in zip(weights, numbers, strict=True)) / sum(weights)
                assert got == pytest.approx(expected, abs=1e-5), name


def test_clients_start_from_the_server() -> None:
    method = FedAvg()
    model, start = built(norm_net, seed=9)
    (client,) = clients_of(1)
    client = client._replace(
        buffers=client.buffers | {"body.bn.num_batches_tracked": torch.tensor(7)}, memory={"mine": torch.ones(1)}
    )
    server = method.init_server(Spec("net", CLASSES, DIM, start.params, start.buffers, 0))
    received = method.receive(model, client, data_of(COUNTS[0]), server)
    for name, value in start.params.items():
        assert torch.equal(received.params[name], value)
    assert torch.equal(received.buffers["body.bn.running_var"], start.buffers["body.bn.running_var"])
    assert received.buffers["body.bn.num_batches_tracked"].item() == 7  # a client's own counter stays
    assert received.memory["mine"].item() == 1


def test_the_global_model_classifies_with_averaged_statistics() -> None:
    method = FedAvg()
    module = fresh(norm_net, 4)
    module(torch.randn(16, FEATURES, generator=torch.Generator().manual_seed(0)) * 3 + 1)  # moves the buffers
    params, buffers = state(module)
    server = method.init_server(Spec("net", CLASSES, DIM, params, buffers, 0))
    client = method.global_client(server)
    x = torch.randn(5, FEATURES)
    scores = method.predict(FunctionalModel(module), client, x, server)
    assert list(scores) == ["head"]
    torch.testing.assert_close(scores["head"], module.eval()(x)[1].detach())


def test_nothing_uploaded_keeps_the_server() -> None:
    for weighting in ("samples", "uniform"):
        method = FedAvg(weighting=weighting)
        model, start = built(norm_net, seed=9)
        server = method.init_server(Spec("net", CLASSES, DIM, start.params, start.buffers, 0))
        sent, _ = method.upload(model, clients_of(1)[0], data_of([0.0] * CLASSES), server)
        assert float(sent.weight) == 0
        new = method.aggregate(server, merge(alone(sent), alone(sent)), torch.tensor([0, 1]))
        for part in ("params", "buffers"):
            for name, value in server[part].items():
                assert torch.equal(new[part][name], value), name


def test_a_client_without_samples_does_not_count() -> None:
    model, start = built()
    server = FedAvg().init_server(Spec("net", CLASSES, DIM, start.params, start.buffers, 0))
    _, one = built(seed=1)
    _, idle = built(seed=2)
    for weighting in ("samples", "uniform"):
        method = FedAvg(weighting=weighting)
        ups = [
            alone(method.upload(model, c, data_of(n), server)[0]) for c, n in ((one, [3.0, 0, 0, 0]), (idle, [0.0] * 4))
        ]
        new = method.aggregate(server, merge(*ups), torch.tensor([0, 1]))
        for name, value in one.params.items():
            torch.testing.assert_close(new["params"][name], value)


# through an engine


def engine_of(rows: list[np.ndarray], build=norm_net) -> ReferenceEngine:
    g = np.random.default_rng(0)
    y = np.arange(40) % CLASSES
    x = (g.normal(size=(40, FEATURES)) + y[:, None]).astype(np.float32)
    domain = Domain("tiny", x, y, x[:8], y[:8], tuple("abcd"))
    split = Split(np.zeros(len(rows), int), tuple(rows), tuple(np.arange(8) for _ in rows))
    federation = Federation([domain], split, seed=1, batch_size=8)
    builders = [("net", lambda shape, classes: build())] * len(rows)
    return ReferenceEngine(
        federation, builders, Optimizer(lr=0.05, momentum=0.5), seed=1, local_epochs=2, init="common"
    )


def play(method, engine: ReferenceEngine, cohorts: list[list[int]]):
    server = method.init_server(engine.specs()[0])
    for round, cohort in enumerate(cohorts):
        trained = engine.train(method, server, cohort, round)
        server = method.aggregate(server, trained.up, torch.tensor(cohort))
        engine.clients = {**engine.clients, **trained.clients}
    return server


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_one_client_is_local(weighting) -> None:
    rows = [np.arange(24)]
    mine, single = engine_of(rows), engine_of(rows)
    server = play(FedAvg(weighting=weighting), mine, [[0], [0], [0]])
    play(Local(), single, [[0], [0], [0]])
    client = single.clients[0]
    for name, value in client.params.items():
        torch.testing.assert_close(server["params"][name], value, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mine.clients[0].params[name], value, rtol=1e-4, atol=1e-5)
    for name, value in client.buffers.items():
        torch.testing.assert_close(mine.clients[0].buffers[name], value, rtol=1e-4, atol=1e-5)
    assert mine.clients[0].buffers["body.bn.num_batches_tracked"].item() == 18


def test_a_round_is_the_mean_of_clients_trained_apart() -> None:
    """Every client alone with Local from the same start, then averaged by a loop."""
    rows = [np.arange(16), np.arange(16, 24), np.arange(24, 40)]
    server = play(FedAvg(), engine_of(rows), [[0, 1, 2]])
    apart = engine_of(rows)
    play(Local(), apart, [[0, 1, 2]])
    for name, value in server["params"].items():
        expected = sum(n * apart.clients[i].params[name].double() for i, n in enumerate((16, 8, 16))) / 40
        torch.testing.assert_close(value.double(), expected, rtol=1e-4, atol=1e-5)
    for name, value in server["buffers"].items():
        expected = sum(n * apart.clients[i].buffers[name].double() for i, n in enumerate((16, 8, 16))) / 40
        torch.testing.assert_close(value.double(), expected, rtol=1e-4, atol=1e-5)


def test_clients_outside_the_cohort_do_not_count() -> None:
    rows = [np.arange(16), np.arange(16, 24), np.arange(24, 40)]
    engine, other = engine_of(rows), engine_of([rows[0], np.arange(3, 9), rows[2]])
    first, second = play(FedAvg(), engine, [[0, 2]]), play(FedAvg(), other, [[0, 2]])
    assert set(engine.clients) == {0, 2}
    for name, value in first["params"].items():
        assert torch.equal(second["params"][name], value)


# architectures


def spec(name: str, net: nn.Module) -> Spec:
    params, buffers = state(net)
    return Spec(name, CLASSES, 50, params, buffers, 0)


def refusal(*specs: Spec, **fields) -> str:
    with pytest.raises(UserError) as error:
        same_shapes("fedavg", list(specs), **fields)
    text = str(error.value)
    assert "\n" not in text
    assert "fedproto" in text  # what to use instead
    return text


def test_other_shapes_are_refused_by_name() -> None:
    one, two = (spec(name, MODELS[name]((1, 28, 28), 10)) for name in ("cnn_mnist_18", "cnn_mnist_22"))
    text = refusal(one, two)
    with pytest.raises(UserError) as error:
        FedAvg().check([one, two])
    assert str(error.value) == text
    for part in ("'fedavg'", "cnn_mnist_18", "cnn_mnist_22", "body.conv2.bias", "(18,)", "(22,)"):
        assert part in text


def test_a_missing_parameter_is_named() -> None:
    small = spec("small", linear_net())
    large = spec("large", norm_net())
    for pair in ((small, large), (large, small)):
        text = refusal(*pair)
        for part in ("small", "large", "body.bn.bias", "none"):
            assert part in text


def test_the_third_is_compared_as_well() -> None:
    same, other = spec("one", linear_net()), spec("three", norm_net())
    text = refusal(same, same._replace(architecture="two"), other)
    assert "one and three" in text


def test_one_shape_is_served() -> None:
    one = spec("one", linear_net())
    FedAvg().check([one])
    FedAvg().check([one, spec("two", linear_net())])
    wide = spec("wide", Net(chain(fc=nn.Linear(FEATURES, DIM)), chain(fc=nn.Linear(DIM, 9)), DIM))
    same_shapes("fedper", [one, wide], "body.")  # only what is shared must fit
    refusal(one, wide)
    refusal(one, wide, shared=["head.", "nothing."])
