"""FedGH, FedTGP and FedORGP: what the server trains on the clients' prototypes, against loops over single numbers."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.errors import UserError
from protofed.method import Batch, Client, Each, LocalData, Mean, Method, Spec
from protofed.methods.fedgh import FedGH
from protofed.methods.fedorgp import FedORGP
from protofed.methods.fedtgp import FedTGP, margin
from protofed.methods.generated import GeneratedPrototypes, generate
from protofed.ops import random
from protofed.ops.server_training import Vectors, descend, linear_layer, ordered_by_key

CLASSES, DIM = 4, 2
COHORT = torch.tensor([7, 2, 5])
HEAD = {
    "head.fc.weight": torch.tensor([[0.5, -1], [1, 0.2], [0, 0.3], [-0.4, 0]]),
    "head.fc.bias": torch.zeros(CLASSES),
}
SPEC = Spec("toy", CLASSES, DIM, {"body.w": torch.zeros(1), **HEAD}, {}, seed=3)
KEY = random.key("server")


def prototypes() -> Mean:
    """Three clients; nobody has class 3, and the second client lacks class 0."""
    value = torch.arange(3 * CLASSES * DIM, dtype=torch.float64).reshape(3, CLASSES, DIM).sin()
    weight = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 0], [1, 1, 0, 0]], dtype=torch.float64)
    return Mean.of(value, weight)


def sent(rows: Mean) -> list[tuple[list[float], int]]:
    """Every prototype that a client has, with its class."""
    return [
        (rows.total[client, label].tolist(), label)
        for client in range(len(rows.weight))
        for label in range(CLASSES)
        if rows.weight[client, label] > 0
    ]


@dataclass
class Identity:
    """A network that embeds a sample as itself, and whose head is the client's."""

    def __call__(self, client: Client, x: Tensor, at: str = "") -> tuple[Tensor, Tensor]:
        return x, self.classify(client, x)

    def embed(self, client: Client, x: Tensor, at: str = "") -> Tensor:
        return x

    def classify(self, client: Client, z: Tensor, at: str = "") -> Tensor:
        return z @ client.params["head.fc.weight"].to(z.dtype).T + client.params["head.fc.bias"].to(z.dtype)


MODEL: Any = Identity()


def test_vectors_do_not_depend_on_the_order_of_the_rows() -> None:
    rows = prototypes()
    first = ordered_by_key(rows, COHORT, KEY)
    turned = torch.tensor([2, 0, 1])
    again = ordered_by_key(Mean(rows.total[turned], rows.weight[turned]), COHORT[turned], KEY)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert first.weight.tolist() == [1] * 7 + [0] * 5, "the missing ones come last"
    found = sorted((z, y) for z, y, w in zip(first.z.tolist(), first.y.tolist(), first.weight, strict=True) if w)
    assert found == sorted(sent(rows))
    other = ordered_by_key(rows, COHORT, random.fold(KEY, 1))
    assert not torch.equal(first.z, other.z), "another key, another order"
    renamed = ordered_by_key(rows, COHORT + 1, KEY)
    assert not torch.equal(first.z, renamed.z), "the order is the clients', not the rows'"


def test_batches_are_taken_one_after_another() -> None:
    """With a loss whose slope is the sum of a batch's vectors, a step adds their mean; missing ones do not count."""
    rows = prototypes()
    seen: list[Vectors] = []

    def loss(params: Any, z: Tensor, y: Tensor) -> Tensor:
        seen.append(Vectors(z, y, torch.ones(len(y))))
        return z @ params["at"]

    start = {"at": torch.zeros(DIM, dtype=torch.float64)}
    moved = descend(start, loss, rows, COHORT, epochs=2, batch_size=5, lr=0.5, key=KEY)["at"]
    expected = torch.zeros(DIM, dtype=torch.float64)
    for epoch in range(2):
        order = ordered_by_key(rows, COHORT, random.fold(KEY, epoch))
        for part in (slice(0, 5), slice(5, 7)):
            expected -= 0.5 * order.z[part].mean(0)
    torch.testing.assert_close(moved, expected)
    assert [len(batch.y) for batch in seen] == [5, 5, 2, 5, 5, 2]
    nobody = Mean(rows.total * 0, rows.weight * 0)
    assert torch.equal(descend(start, loss, nobody, COHORT, 1, 5, 0.5, KEY)["at"], start["at"])


def softmax(values: list[float]) -> list[float]:
    shares = [math.exp(v) for v in values]
    return [s / sum(shares) for s in shares]


def test_fedgh_trains_the_head_on_class_means() -> None:
    rows, method = prototypes(), FedGH(server_epochs=3, server_batch=0, server_lr=0.3)
    server = method.init_server(SPEC)
    assert torch.equal(server["head"]["head.fc.weight"], HEAD["head.fc.weight"])
    server["head"] = {name: value.double() for name, value in server["head"].items()}
    weight = [row.tolist() for row in HEAD["head.fc.weight"].double()]
    bias = [0.0] * CLASSES
    for _ in range(3):
        slope, shift = [[0.0] * DIM for _ in range(CLASSES)], [0.0] * CLASSES
        for z, label in sent(rows):
            shares = softmax([sum(w * v for w, v in zip(weight[c], z, strict=True)) + bias[c] for c in range(CLASSES)])
            for c in range(CLASSES):
                error = (shares[c] - (c == label)) / len(sent(rows))
                shift[c] += error
                for d in range(DIM):
                    slope[c][d] += error * z[d]
        weight = [[w - 0.3 * s for w, s in zip(*pair, strict=True)] for pair in zip(weight, slope, strict=True)]
        bias = [b - 0.3 * s for b, s in zip(bias, shift, strict=True)]
    after = method.aggregate(server, {"means": Each(rows)}, COHORT)
    torch.testing.assert_close(after["head"]["head.fc.weight"], torch.tensor(weight, dtype=torch.float64))
    torch.testing.assert_close(after["head"]["head.fc.bias"], torch.tensor(bias, dtype=torch.float64))
    assert not torch.equal(after["key"], server["key"]), "another order in every round"
    small = FedGH(server_batch=2, server_lr=0.3)
    one = small.aggregate(server, {"means": Each(rows)}, COHORT)["head"]["head.fc.weight"]
    order = ordered_by_key(rows, COHORT, random.fold(server["key"], 0))
    layer = torch.nn.Linear(DIM, CLASSES, dtype=torch.float64)
    layer.load_state_dict({"weight": server["head"]["head.fc.weight"], "bias": server["head"]["head.fc.bias"]})
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.3)
    for place in range(0, 7, 2):
        optimizer.zero_grad()
        F.cross_entropy(layer(order.z[place : min(place + 2, 7)]), order.y[place : min(place + 2, 7)]).backward()
        optimizer.step()
    torch.testing.assert_close(one, layer.weight.detach())


@pytest.mark.parametrize("kind", [FedGH, FedTGP, FedORGP])
def test_embeddings_must_have_one_width(kind: type[Method]) -> None:
    kind().check([SPEC, SPEC])
    wider = {"head.fc.weight": torch.zeros(CLASSES, 3), "head.fc.bias": torch.zeros(CLASSES)}
    with pytest.raises(UserError, match=rf"'{kind.__name__.lower()}' compares embeddings"):
        kind().check([SPEC, SPEC._replace(architecture="wide", dim=3, params=wider)])


@pytest.mark.parametrize("kind", [FedTGP, FedORGP])
def test_a_client_sends_each_class_mean_once(kind: type[GeneratedPrototypes]) -> None:
    assert kind.scores == ("head", "proto")
    data = LocalData([batch()], torch.tensor([2.0, 0, 1, 0]), KEY)
    rows = kind().upload(MODEL, Client(HEAD, {}), data, Mean(torch.zeros(4, 2), torch.zeros(4)))[0]["prototypes"].rows
    assert rows.total.tolist() == [[2, 3], [0, 0], [0, -1], [0, 0]]
    assert rows.weight.tolist() == [1, 0, 1, 0]
    first, again = (kind().init_server(SPEC)["net"]["classes"] for _ in range(2))
    assert torch.equal(first, again)


def test_the_servers_batches_are_as_large_as_asked() -> None:
    rows = Mean(*(part.float() for part in prototypes()))
    nets = [
        FedTGP(server_batch=size, server_epochs=1, server_lr=0.5).aggregate(
            FedTGP().init_server(SPEC), {"prototypes": Each(rows)}, COHORT
        )["net"]["last.weight"]
        for size in (0, 2, 7)
    ]
    assert torch.equal(nets[0], nets[2])
    assert not torch.allclose(nets[0], nets[1])


def test_a_client_of_fedgh_starts_from_the_servers_head_and_keeps_its_body() -> None:
    method = FedGH()
    client = Client({"body.w": torch.ones(1), **{n: v + 1 for n, v in HEAD.items()}}, {})
    data = LocalData([batch()], torch.tensor([2.0, 0, 1, 0]), KEY)
    down = method.broadcast(method.init_server(SPEC), COHORT)
    assert down.keys() == {"head"}
    got = method.receive(MODEL, client, data, down)
    assert torch.equal(got.params["head.fc.weight"], HEAD["head.fc.weight"])
    assert torch.equal(got.params["body.w"], torch.ones(1))
    up, kept = method.upload(MODEL, got, data, down)
    assert kept is got
    means = up["means"].rows
    torch.testing.assert_close(means.value[0], torch.tensor([2.0, 3.0]))
    assert means.weight.tolist() == [1, 0, 1, 0], "a class counts once, whatever its samples"
    expected = -math.log(softmax([0.5 - 2, 1 + 0.4, 0.6, -0.4])[0])
    alone = Batch(torch.tensor([[1.0, 2.0]]), torch.tensor([0]), torch.ones(1))
    assert float(method.loss(MODEL, got, alone, down)) == pytest.approx(expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("reading", ["paper", "official"])
def test_fedgh_scores_with_the_head_a_client_trained_or_with_the_newest(reading: str) -> None:
    method = FedGH.preset(reading)
    own = {name: value + torch.arange(value.numel()).reshape(value.shape) for name, value in HEAD.items()}
    down = method.broadcast(method.init_server(SPEC), COHORT)
    got = method.predict(MODEL, Client(own, {}), batch().x, down)["head"]
    head = own if reading == "paper" else HEAD
    torch.testing.assert_close(got, batch().x @ head["head.fc.weight"].T + head["head.fc.bias"])


def batch() -> Batch:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [0.0, -1.0], [9.0, 9.0]])
    return Batch(x, torch.tensor([0, 0, 2, 0]), torch.tensor([1.0, 1, 1, 0]))  # the last one is padding


@pytest.mark.parametrize("method", [FedTGP(lam=3.0), FedORGP(align=3.0)], ids=["fedtgp", "fedorgp"])
def test_clients_are_pulled_towards_what_the_server_made(method: Method) -> None:
    client = Client(HEAD, {})
    down = Mean.of(torch.tensor([[1.0, 0.0], [0.0, 3.0], [2.0, 2.0], [5.0, 5.0]]), torch.tensor([1.0, 1, 0, 0]))
    losses = []
    for x, label in (((1.0, 2.0), 0), ((3.0, 4.0), 0), ((0.0, -1.0), 2)):
        logits = (torch.tensor(x) @ HEAD["head.fc.weight"].T).tolist()
        loss = -math.log(softmax(logits)[label])
        if label == 0:  # class 2 has no prototype
            apart = ((x[0] - 1) ** 2 + x[1] ** 2) / 2 if isinstance(method, FedTGP) else 1 - x[0] / math.hypot(*x)
            loss += 3.0 * apart
        losses.append(loss)
    got = method.loss(MODEL, client, batch(), down)
    assert float(got) == pytest.approx(sum(losses) / 3, rel=1e-5)  # type: ignore[arg-type]
    said = method.predict(MODEL, client, batch().x[:1], down)
    torch.testing.assert_close(said["head"], batch().x[:1] @ HEAD["head.fc.weight"].T)
    proto = said["proto"][0]
    expected = [-2.0, -1.0] if isinstance(method, FedTGP) else [1 / 5**0.5, 2 / 5**0.5]
    assert proto.tolist() == pytest.approx([*expected, -math.inf, -math.inf])


def test_the_margin_is_the_largest_gap_up_to_the_threshold() -> None:
    means = torch.tensor([[0.0, -5.0], [3.0, -5.0], [0.0, 5.0], [0.0, 0.0]])
    rows = Mean(torch.stack([means, means]) * torch.tensor([1.0, 1, 1, 0])[:, None], torch.tensor([[1.0, 1, 1, 0]] * 2))
    assert float(margin(rows, 100.0)) == pytest.approx(10.0), "of 3, 3 and 10; class 3 is nobody's"
    assert float(margin(rows, 4.0)) == 4.0
    fewer = Mean(rows.total[:1], rows.weight[:1])
    assert float(margin(fewer, 100.0)) == pytest.approx(10.0), "of what a single client has"
    one = Mean(rows.total * torch.tensor([1.0, 0, 0, 0])[:, None], rows.weight * torch.tensor([1.0, 0, 0, 0]))
    assert float(margin(one, 100.0)) == 0.0, "a single class has no gap"


def test_fedtgps_server_loss_by_hand() -> None:
    rows, method = prototypes(), FedTGP(threshold=0.05)
    made = Mean.of(torch.tensor([[0.1, 0.2], [1, 0], [0, 1], [9, 9]]).double(), torch.tensor([1.0, 1, 1, 0]).double())
    wide = float(margin(rows, 0.05))
    points = sent(rows)
    z, y = torch.tensor([z for z, _ in points]).double(), torch.tensor([y for _, y in points])
    got = method.apart(made, rows, z, y)
    for value, (point, label) in zip(got.tolist(), points, strict=True):
        lengths = [math.dist(point, made.total[c].tolist()) + wide * (c == label) for c in range(3)]
        assert value == pytest.approx(-math.log(softmax([-v for v in lengths])[label]))


def test_fedorgps_server_loss_by_hand() -> None:
    rows, method = prototypes(), FedORGP(together=2.0, orthogonal=7.0)
    made = Mean.of(torch.tensor([[0.1, 0.2], [1, 0], [0, 1], [9, 9]]).double(), torch.tensor([1.0, 1, 1, 0]).double())
    points = sent(rows)
    z, y = torch.tensor([z for z, _ in points]).double(), torch.tensor([y for _, y in points])
    for value, (point, label) in zip(method.apart(made, rows, z, y).tolist(), points, strict=True):

        def cosine(c: int, point: list[float] = point) -> float:
            other = made.total[c].tolist()
            return sum(a * b for a, b in zip(point, other, strict=True)) / math.hypot(*point) / math.hypot(*other)

        others = sum(abs(cosine(c)) for c in range(3) if c != label) / 2
        assert value == pytest.approx(2.0 * (1 - cosine(label)) + 7.0 * others)
    two = Mean(made.total, torch.tensor([1.0, 1, 0, 0]).double())
    far = FedORGP(together=0.0, orthogonal=1.0).apart(Mean.of(two.value, two.weight), rows, z[:1], torch.tensor([0]))
    assert float(far) == pytest.approx(abs(float(F.cosine_similarity(z[0], made.total[1], 0))))


@pytest.mark.parametrize("kind", [FedTGP, FedORGP])
def test_the_server_makes_prototypes_of_classes_that_someone_has_held(kind: type[GeneratedPrototypes]) -> None:
    method = kind(server_batch=0, server_lr=0.1, server_epochs=2)  # type: ignore[call-arg]
    server = method.init_server(SPEC)
    assert method.broadcast(server, COHORT).weight.tolist() == [0] * CLASSES
    rows = Mean(*(part.float() for part in prototypes()))
    after = method.aggregate(server, {"prototypes": Each(rows)}, COHORT)
    assert after["prototypes"].weight.tolist() == [1, 1, 1, 0]
    torch.testing.assert_close(after["prototypes"].total[:3], generate(after["net"])[:3])
    assert torch.equal(after["net"]["classes"][3], server["net"]["classes"][3]), "nobody has class 3"
    vectors = {"z": rows.value.flatten(0, 1), "y": torch.arange(CLASSES).repeat(3), "w": rows.weight.flatten()}
    net = {name: value.clone().requires_grad_() for name, value in server["net"].items()}
    for _ in range(2):  # by torch's own modules and optimiser
        made = Mean.of(generate(net), torch.tensor([1.0, 1, 1, 0]))
        loss = (method.apart(made, rows, vectors["z"], vectors["y"]) * vectors["w"]).sum() / vectors["w"].sum()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.optim.SGD(net.values(), lr=0.1).step()
        for value in net.values():
            value.grad = None
    for name, value in net.items():
        torch.testing.assert_close(after["net"][name], value.detach(), rtol=1e-4, atol=1e-6)
    fewer = Mean(rows.total * 0, rows.weight * 0)
    later = method.aggregate(after, {"prototypes": Each(fewer)}, COHORT)
    torch.testing.assert_close(later["prototypes"], after["prototypes"])
    assert method.prototypes(after).weight.tolist() == [[1], [1], [1], [0]]


def test_the_network_is_two_linear_layers_over_a_vector_for_each_class() -> None:
    net = FedTGP().init_server(SPEC)["net"]
    first, last = torch.nn.Linear(DIM, DIM), torch.nn.Linear(DIM, DIM)
    for layer, name in ((first, "first"), (last, "last")):
        layer.load_state_dict({"weight": net[f"{name}.weight"], "bias": net[f"{name}.bias"]})
    torch.testing.assert_close(generate(net), last(first(net["classes"]).relu()).detach())
    assert net["classes"].shape == (CLASSES, DIM)
    layer = linear_layer("it", 100, 50, torch.Generator().manual_seed(0))
    assert layer["it.weight"].shape == (50, 100)
    for values in (layer["it.weight"], layer["it.bias"]):
        assert 0.09 < float(values.abs().max()) <= 0.1
        assert float(values.min()) < -0.08
