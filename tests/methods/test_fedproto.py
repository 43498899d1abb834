"""FedProto against loops over samples, classes and clients, written in plain Python numbers."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protofed.data.batches import Federation
from protofed.data.domain import Domain
from protofed.data.split import Split
from protofed.engines.reference import ReferenceEngine
from protofed.errors import UserError
from protofed.local import local_update
from protofed.method import Batch, Client, LocalData, Mean, Spec
from protofed.methods.fedproto import FedProto
from protofed.methods.local import Local
from protofed.models import Net, chain
from protofed.models.functional import FunctionalModel, fresh, state
from protofed.ops import random
from protofed.ops.optim import Optimizer
from protofed.ops.trees import alone, merge

FEATURES, DIM, CLASSES = 3, 2, 4
KEY = random.key("fedproto")
NOBODY = torch.tensor([0])


def linear_net() -> Net:
    return Net(chain(fc=nn.Linear(FEATURES, DIM)), chain(fc=nn.Linear(DIM, CLASSES)), DIM)


def norm_net() -> Net:
    body = chain(fc=nn.Linear(FEATURES, 5), bn=nn.BatchNorm1d(5), relu=nn.ReLU(), out=nn.Linear(5, DIM))
    return Net(body, chain(fc=nn.Linear(DIM, CLASSES)), DIM)


def noisy_net() -> Net:
    body = chain(fc=nn.Linear(FEATURES, 8), bn=nn.BatchNorm1d(8), drop=nn.Dropout(0.5), out=nn.Linear(8, DIM))
    return Net(body, chain(drop=nn.Dropout(0.5), fc=nn.Linear(DIM, CLASSES)), DIM)


def built(build=linear_net, seed: int = 0) -> tuple[Net, FunctionalModel, Client]:
    module = fresh(build, seed)
    return module, FunctionalModel(module), Client(*state(copy.deepcopy(module)))


def batch_of(y: list[int], seed: int = 0, dtype=torch.float32) -> Batch:
    x = torch.randn(len(y), FEATURES, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return Batch(x, torch.tensor(y), torch.ones(len(y), dtype=dtype))


def data_of(batches: list[Batch], seen=()) -> LocalData:
    y = torch.cat([b.y for b in batches])
    return LocalData(batches, torch.bincount(y, minlength=CLASSES).float(), KEY, seen)


def server_of(rows: dict[int, list[float]], dtype=torch.float32) -> Mean:
    total, weight = torch.zeros(CLASSES, DIM, dtype=dtype), torch.zeros(CLASSES, dtype=dtype)
    for c, row in rows.items():
        total[c], weight[c] = torch.tensor(row, dtype=dtype), 1
    return Mean(total, weight)


# the loss


def naive_loss(p: dict[str, list], x: list, y: list[int], prototypes: dict[int, list[float]], lam: float) -> float:
    """Cross entropy plus lam times the squared distance to the own prototype, divided by D, averaged over samples."""
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
        if label in prototypes:
            summed += lam * sum((a - b) ** 2 for a, b in zip(z, prototypes[label], strict=True)) / DIM
    return summed / len(y)


def naive_gradient(p: dict[str, list], *args) -> dict[str, list]:
    """Central differences, number by number."""
    step = 1e-5

    def slope(holder: list, i: int) -> float:
        kept = holder[i]
        values = []
        for moved in (kept + step, kept - step):
            holder[i] = moved
            values.append(naive_loss(p, *args))
        holder[i] = kept
        return (values[0] - values[1]) / (2 * step)

    return {
        name: [[slope(row, i) for i in range(len(row))] for row in value]
        if isinstance(value[0], list)
        else [slope(value, i) for i in range(len(value))]
        for name, value in p.items()
    }


@pytest.mark.parametrize("lam", [0.0, 0.1, 1.0, 7.5])
@pytest.mark.parametrize(
    "known",
    [
        {},  # the first round
        {0: [0.5, -2.0], 2: [3.0, 1.0]},  # 1 and 3 are unknown: no pull, but they count in the mean
        {0: [1.0, 1.0], 1: [0.0, 0.0], 2: [-1.0, 2.0], 3: [4.0, 4.0]},  # a prototype at the origin is a prototype
        {3: [9.0, 9.0]},  # none of the batch
    ],
    ids=["first round", "some", "all", "others"],
)
def test_loss_and_gradient(lam: float, known: dict[int, list[float]]) -> None:
    _, model, client = built()
    params = {name: value.double() for name, value in client.params.items()}
    batch = batch_of([0, 1, 2, 0, 1], dtype=torch.float64)
    down = server_of(known, torch.float64)
    method = FedProto(lam=lam)

    def loss(p: dict[str, Tensor]) -> Tensor:
        return method.loss(model.training({}, KEY), Client(p, {}), batch, down)[0]

    grads, value = torch.func.grad_and_value(loss)(params)
    plain = {name: value.tolist() for name, value in params.items()}
    args = (batch.x.tolist(), batch.y.tolist(), known, lam)
    assert float(value) == pytest.approx(naive_loss(plain, *args), abs=1e-10)
    for name, expected in naive_gradient(plain, *args).items():
        np.testing.assert_allclose(grads[name].numpy(), expected, atol=1e-7, err_msg=name)


def test_the_pull_is_by_sample_and_not_by_batch_prototype() -> None:
    """Two samples on either side of their prototype are pulled, though their mean lies on it."""
    _, model, client = built()
    params = {name: torch.zeros_like(value) for name, value in client.params.items()}
    params["body.fc.weight"][0, 0] = 1  # z = (x0, 0)
    batch = Batch(torch.tensor([[2.0, 0, 0], [-2.0, 0, 0]]), torch.tensor([0, 0]), torch.ones(2))
    value, _ = FedProto(lam=1.0).loss(model, Client(params, {}), batch, server_of({0: [0.0, 0.0]}))
    assert float(value) == pytest.approx(math.log(CLASSES) + 4 / DIM)


def test_loss_reports_embeddings_only_where_asked() -> None:
    _, model, client = built()
    batch = batch_of([0, 1, 0])
    assert FedProto().loss(model, client, batch, server_of({}))[1] == ()
    seen = FedProto(source="inloop").loss(model, client, batch, server_of({}))[1]
    z = model.embed(client, batch.x)
    torch.testing.assert_close(seen.total[0], z[0] + z[2])
    torch.testing.assert_close(seen.total[1], z[1])
    assert seen.weight.tolist() == [2, 1, 0, 0]


# uploads


def naive_means(z: Tensor, y: Tensor) -> tuple[dict[int, list[float]], dict[int, int]]:
    rows: dict[int, list[list[float]]] = {}
    for vector, label in zip(z.tolist(), y.tolist(), strict=True):
        rows.setdefault(label, []).append(vector)
    means = {c: [sum(column) / len(mine) for column in zip(*mine, strict=True)] for c, mine in rows.items()}
    return means, {c: len(mine) for c, mine in rows.items()}


def check_upload(method: FedProto, up: Mean, means: dict[int, list[float]], counts: dict[int, int]) -> None:
    for c in range(CLASSES):
        weight = counts.get(c, 0)
        if method.aggregation == "mean":
            weight = min(weight, 1)
        assert float(up.weight[c]) == weight
        expected = [weight * v for v in means.get(c, [0.0] * DIM)]
        np.testing.assert_allclose(up.total[c].numpy(), expected, atol=1e-4)


def torch_round(
    module: nn.Module, epochs: list[list[Batch]], known: dict[int, list[float]], lam: float, lr: float
) -> Tensor:
    """FedProto's local training in plain PyTorch; the embeddings of the last epoch, each before its own step."""
    optimizer = torch.optim.SGD(module.parameters(), lr=lr, momentum=0.5)
    module.train()
    seen: list[Tensor] = []
    for batches in epochs:
        seen = []
        for batch in batches:
            optimizer.zero_grad()
            z, logits = module(batch.x)
            target = z.detach().clone()  # an unknown class is its own target: no pull, but counted
            for i, label in enumerate(batch.y.tolist()):
                if label in known:
                    target[i] = torch.tensor(known[label])
            (F.cross_entropy(logits, batch.y) + lam * F.mse_loss(z, target)).backward()
            optimizer.step()
            seen.append(z.detach())
    return torch.cat(seen)


EPOCHS = [[batch_of([0, 1, 2, 0], 1), batch_of([0, 0, 1], 2)], [batch_of([2, 1, 0], 3), batch_of([0, 1, 1, 0], 4)]]
KNOWN = {0: [0.5, -0.5], 2: [2.0, 1.0]}
SGD = Optimizer(lr=0.1, momentum=0.5)


@pytest.mark.parametrize("aggregation", ["mean", "weighted", "literal"])
@pytest.mark.parametrize("source", ["clean", "inloop"])
def test_a_round_uploads_what_pytorch_gives(source, aggregation) -> None:
    method = FedProto(lam=0.7, source=source, aggregation=aggregation)
    module, model, client = built(norm_net, seed=3)
    held = [batch_of([0, 1, 2, 0], 1), batch_of([0, 0, 1], 2)]  # the fixed pass
    update = local_update(method, model, SGD, client, data_of(held), lambda e: EPOCHS[e], server_of(KNOWN), SGD.lr, 2)
    seen = torch_round(module, EPOCHS, KNOWN, 0.7, 0.1)
    for name, value in state(module)[0].items():
        torch.testing.assert_close(update.client.params[name], value, rtol=1e-4, atol=1e-5, msg=name)
    if source == "inloop":  # the last epoch's batches in training mode
        means, counts = naive_means(seen, torch.cat([b.y for b in EPOCHS[1]]))
    else:  # the trained model in evaluation mode
        with torch.no_grad():
            z = module.eval()(torch.cat([b.x for b in held]))[0]
        means, counts = naive_means(z, torch.cat([b.y for b in held]))
    assert 3 not in counts
    check_upload(method, update.up["prototypes"], means, counts)


def test_clean_prototypes_see_no_dropout() -> None:
    module, model, client = built(noisy_net, seed=1)
    client = client._replace(buffers={k: v + 1 if v.is_floating_point() else v for k, v in client.buffers.items()})
    batches = [batch_of([0, 0, 1, 3], 1), batch_of([3, 3, 0], 2)]
    up, kept = FedProto(aggregation="weighted").upload(model, client, data_of(batches), server_of({}))
    module.load_state_dict({**client.params, **client.buffers})
    with torch.no_grad():
        z = module.eval()(torch.cat([b.x for b in batches]))[0]
    check_upload(FedProto(aggregation="weighted"), up["prototypes"], *naive_means(z, torch.cat([b.y for b in batches])))
    assert kept is client  # the model stays where it is


def test_inloop_prototypes_see_dropout() -> None:
    _, model, client = built(noisy_net, seed=1)
    epochs = [[batch_of([0, 0, 1, 3], 1)]]
    ups = [
        local_update(
            FedProto(source=source), model, SGD, client, data_of(epochs[0]), lambda e: epochs[e], server_of({}), 1e-9, 1
        ).up["prototypes"]
        for source in ("clean", "inloop")
    ]
    assert torch.equal(ups[0].weight, ups[1].weight)
    assert not torch.allclose(ups[0].total, ups[1].total, atol=1e-2)


def test_padding_is_in_no_prototype() -> None:
    _, model, client = built()
    batch = batch_of([0, 1, 1])
    wide = Batch(
        torch.cat([batch.x, torch.full((2, FEATURES), 1e3)]),
        torch.tensor([0, 1, 1, 0, 2]),
        torch.tensor([1.0, 1, 1, 0, 0]),
    )
    for aggregation in ("mean", "weighted"):
        method = FedProto(aggregation=aggregation)
        a = method.upload(model, client, data_of([batch]), server_of({}))[0]["prototypes"]
        b = method.upload(model, client, data_of([batch])._replace(batches=[wide]), server_of({}))[0]["prototypes"]
        torch.testing.assert_close(a, b)


# aggregation


class Table:
    """A model whose embeddings are its inputs."""

    def __call__(self, client: Client, x: Tensor, at: str = "") -> tuple[Tensor, Tensor]:
        return x, torch.zeros(len(x), CLASSES)

    def embed(self, client: Client, x: Tensor, at: str = "") -> Tensor:
        return x

    def classify(self, client: Client, z: Tensor, at: str = "") -> Tensor:
        return torch.zeros(len(z), CLASSES)


def upload_of(method: FedProto, samples: dict[int, list[list[float]]], server: Mean):
    """What a client with these embeddings by class sends."""
    x = torch.tensor([z for rows in samples.values() for z in rows])
    y = torch.tensor([c for c, rows in samples.items() for _ in rows])
    batch = Batch(x, y, torch.ones(len(y)))
    return alone(method.upload(Table(), Client({}, {}), data_of([batch]), server)[0])


# Class 0: client A has three samples with mean (2, 4), client B one at (6, 0). Class 2: client B alone.
A = {0: [[1.0, 4.0], [2.0, 3.0], [3.0, 5.0]], 1: [[1.0, 1.0]]}
B = {0: [[6.0, 0.0]], 2: [[5.0, 7.0], [7.0, 9.0]]}


@pytest.mark.parametrize(
    "aggregation, expected",
    [
        ("mean", [[4.0, 2.0], [1.0, 1.0], [6.0, 8.0], [0.0, 0.0]]),  # (2 + 6) / 2, (4 + 0) / 2
        ("weighted", [[3.0, 3.0], [1.0, 1.0], [6.0, 8.0], [0.0, 0.0]]),  # (3 * 2 + 1 * 6) / 4, (3 * 4 + 0) / 4
        ("literal", [[1.5, 1.5], [1.0, 1.0], [6.0, 8.0], [0.0, 0.0]]),  # ... once more divided by the two holders
    ],
)
def test_aggregation_by_hand(aggregation, expected: list[list[float]]) -> None:
    method = FedProto(aggregation=aggregation)
    server = method.init_server(Spec("net", CLASSES, DIM, {}, {}, 0))
    ups = [upload_of(method, samples, server) for samples in (A, B)]
    for order in ((0, 1), (1, 0)):
        new = method.aggregate(server, merge(ups[order[0]], ups[order[1]]), torch.tensor(order))
        np.testing.assert_allclose(new.value.numpy(), expected, atol=1e-6)
        assert (new.weight > 0).tolist() == [True, True, True, False]


@pytest.mark.parametrize("aggregation", ["mean", "weighted", "literal"])
def test_what_the_server_holds_is_what_goes_down(aggregation) -> None:
    """The weight of a known class is 1 in every round: prototypes are not scaled by it, and it does not grow."""
    method = FedProto(aggregation=aggregation)
    server = method.init_server(Spec("net", CLASSES, DIM, {}, {}, 0))
    for _ in range(3):
        up = merge(upload_of(method, A, server), upload_of(method, B, server))
        server = method.aggregate(server, up, torch.tensor([0, 1]))
        assert server.weight.tolist() == [1, 1, 1, 0]
        assert method.broadcast(server, torch.tensor([0, 1])) is server
        np.testing.assert_allclose(server.total.numpy(), server.value.numpy())


@pytest.mark.parametrize("aggregation", ["mean", "weighted", "literal"])
def test_three_rounds_of_changing_clients(aggregation) -> None:
    """Against a loop over clients, classes and rounds, with classes that come and go."""
    g = np.random.default_rng(0)
    for absent in ("keep", "forget"):
        method = FedProto(aggregation=aggregation, absent=absent)
        server = method.init_server(Spec("net", CLASSES, DIM, {}, {}, 0))
        known: dict[int, list[float]] = {}
        for held in ([[0, 1], [1], [1, 2]], [[0], [0, 2], [2]], [[3], [3], [3]]):
            clients = [
                {c: g.normal(size=(int(g.integers(1, 5)), DIM)).round(3).tolist() for c in classes} for classes in held
            ]
            up = None
            for samples in clients:
                one = upload_of(method, samples, server)
                up = one if up is None else merge(up, one)
            server = method.aggregate(server, up, torch.tensor([0, 1, 2]))

            if absent == "forget":
                known = {}
            for c in range(CLASSES):
                holders = [samples[c] for samples in clients if c in samples]
                if not holders:
                    continue
                n = sum(len(rows) for rows in holders)
                known[c] = []
                for d in range(DIM):
                    means = [sum(row[d] for row in rows) / len(rows) for rows in holders]
                    if aggregation == "mean":
                        known[c].append(sum(means) / len(holders))
                    else:
                        value = sum(len(rows) / n * m for rows, m in zip(holders, means, strict=True))
                        known[c].append(value / len(holders) if aggregation == "literal" else value)
            assert (server.weight > 0).tolist() == [c in known for c in range(CLASSES)]
            for c in range(CLASSES):
                np.testing.assert_allclose(server.value[c].numpy(), known.get(c, [0.0] * DIM), atol=1e-5)


@pytest.mark.parametrize("absent, kept", [("keep", True), ("forget", False)])
def test_absent_classes(absent, kept: bool) -> None:
    method = FedProto(absent=absent)
    server = server_of({0: [9.0, 9.0], 3: [-1.0, 2.0]})
    new = method.aggregate(server, upload_of(method, A, server), NOBODY)
    assert new.value[0].tolist() == [2, 4]  # what is new replaces the old
    assert new.value[1].tolist() == [1, 1]
    assert (float(new.weight[3]) > 0) == kept
    assert new.value[3].tolist() == ([-1, 2] if kept else [0, 0])
    assert new.weight[2] == 0


# inference


def test_predict_takes_the_nearest_prototype() -> None:
    module, model, client = built(noisy_net, seed=2)
    known = {0: [0.1, 0.2], 3: [-0.5, 0.4]}
    x = batch_of([0] * 6).x
    scores = FedProto().predict(model, client, x, server_of(known))
    assert list(scores) == ["head", "proto"]
    with torch.no_grad():
        z, logits = module.eval()(x)
    torch.testing.assert_close(scores["head"], logits)
    for i, vector in enumerate(z.tolist()):
        for c in range(CLASSES):
            expected = -math.inf
            if c in known:
                expected = -sum((a - b) ** 2 for a, b in zip(vector, known[c], strict=True)) / DIM
            assert float(scores["proto"][i, c]) == pytest.approx(expected, abs=1e-5)


def test_without_prototypes_there_is_no_answer() -> None:
    _, model, client = built()
    proto = FedProto().predict(model, client, batch_of([0, 1]).x, server_of({}))["proto"]
    assert bool((proto == -math.inf).all())


def test_scores_are_named() -> None:
    assert FedProto.scores == ("head", "proto")
    assert FedProto().global_client(server_of({})) is None


# against Local


def test_lam_zero_trains_exactly_as_local() -> None:
    method = FedProto(lam=0.0)
    _, model, client = built(noisy_net, seed=5)
    args = (SGD, client, data_of(EPOCHS[0]), lambda e: EPOCHS[e])
    mine = local_update(method, model, *args, server_of(KNOWN), 0.1, 2).client
    alone = local_update(Local(), model, *args, {}, 0.1, 2).client
    for name in alone.params:
        assert torch.equal(mine.params[name], alone.params[name]), name
    for name in alone.buffers:
        assert torch.equal(mine.buffers[name], alone.buffers[name]), name


def tiny(seed: int = 0) -> tuple[Domain, Split]:
    g = np.random.default_rng(seed)
    y = np.arange(30) % CLASSES
    x = (g.normal(size=(30, FEATURES)) + y[:, None]).astype(np.float32)
    domain = Domain("tiny", x, y, x[:8], y[:8], tuple("abcd"))
    rows = (np.arange(0, 12), np.arange(12, 20), np.array([22]))
    return domain, Split(np.zeros(3, int), rows, (np.arange(4), np.arange(8), np.arange(2)))


def rounds(method, init: str, n: int = 2) -> ReferenceEngine:
    domain, split = tiny()
    federation = Federation([domain], split, seed=1, batch_size=4)
    build = [("net", lambda shape, classes: linear_net())] * 3
    engine = ReferenceEngine(federation, build, SGD, seed=1, local_epochs=2, init=init)
    server = method.init_server(engine.specs()[0])
    for round in range(n):
        trained = engine.train(method, server, [0, 1, 2], round)
        server = method.aggregate(server, trained.up, torch.arange(3))
        engine.clients = {**engine.clients, **trained.clients}
    return engine


@pytest.mark.parametrize("init", ["common", "per_client"])
def test_lam_zero_is_local_round_after_round(init: str) -> None:
    mine, alone = rounds(FedProto(lam=0.0), init), rounds(Local(), init)
    pulled = rounds(FedProto(lam=1.0), init)
    for client in range(3):
        for name, value in alone.clients[client].params.items():
            assert torch.equal(mine.clients[client].params[name], value)
    assert not torch.equal(pulled.clients[0].params["body.fc.weight"], alone.clients[0].params["body.fc.weight"])


def test_the_first_round_is_local_whatever_lam() -> None:
    first, alone = rounds(FedProto(lam=10.0), "common", 1), rounds(Local(), "common", 1)
    for client in range(3):
        for name, value in alone.clients[client].params.items():
            torch.testing.assert_close(first.clients[client].params[name], value)


def test_defaults_are_the_documented_reading() -> None:
    method = FedProto()
    assert (method.init, method.inference, method.candidates) == ("common", "proto", "own")
    assert (method.lam, method.aggregation) == (1.0, "mean")


# architectures


def spec(name: str, dim: int) -> Spec:
    return Spec(name, CLASSES, dim, {}, {}, 0)


def test_models_of_one_width_are_served() -> None:
    FedProto().check([spec("small", 50), spec("large", 50)])
    FedProto().check([spec("small", 50)])


def test_models_of_different_widths_are_refused() -> None:
    with pytest.raises(UserError) as error:
        FedProto().check([spec("cnn_mnist_18", 50), spec("cnn_mnist_20", 50), spec("mlp_digits", 32)])
    text = str(error.value)
    assert "fedproto" in text
    assert "cnn_mnist_18: 50" in text
    assert "mlp_digits: 32" in text
    assert "\n" not in text
