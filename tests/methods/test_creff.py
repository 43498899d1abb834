"""CReFF against loops over samples, classes and clients, and against automatic differentiation."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protofed.data.batches import Federation
from protofed.data.domain import Domain
from protofed.data.split import Split
from protofed.engines.reference import ReferenceEngine
from protofed.engines.wire import decode, encode
from protofed.errors import UserError
from protofed.method import Batch, Client, LocalData, Mean, Method, Spec, Tree
from protofed.methods.creff import CReFF
from protofed.methods.fedavg import FedAvg
from protofed.models.functional import FunctionalModel, fresh, state
from protofed.models.mlp import Net, chain
from protofed.ops import random
from protofed.ops.matching import class_gradients, drawn, match, mismatch, retrain
from protofed.ops.optim import Optimizer
from protofed.ops.trees import alone, merge, total, under

FEATURES, DIM, CLASSES = 5, 4, 3
KEY = random.key("creff test")
SIZES = (9, 5, 7)
QUICK: dict[str, Any] = {"per_class": 6, "steps": 5, "head_epochs": 10}


def net(bias: bool = True) -> Net:
    body = chain(fc1=nn.Linear(FEATURES, 6), norm=nn.BatchNorm1d(6), relu=nn.ReLU(), fc2=nn.Linear(6, DIM))
    return Net(body, chain(drop=nn.Dropout(0.5), fc=nn.Linear(DIM, CLASSES, bias=bias)), DIM)


def spec_of(module: Any, name: str = "toy") -> Spec:
    return Spec(name, CLASSES, DIM, *state(module), 3)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def head_of(bias: bool = True, seed: int = 0) -> dict[str, Tensor]:
    head = {"weight": normal(CLASSES, DIM, seed=seed)}
    return head | {"bias": normal(CLASSES, seed=seed + 1)} if bias else head


def batch_of(y: list[int], seed: int = 0) -> Batch:
    return Batch(normal(len(y), FEATURES, seed=seed), torch.tensor(y, dtype=torch.int64), torch.ones(len(y)))


def data_of(batches: list[Batch]) -> LocalData:
    y = torch.cat([b.y[b.mask > 0] for b in batches])
    return LocalData(batches, torch.bincount(y, minlength=CLASSES).float(), KEY)


def autograd(head: dict[str, Tensor], z: Tensor, label: int) -> dict[str, Tensor]:
    """The gradient of cross entropy on samples of one class, by automatic differentiation."""
    leaves = {name: value.clone().requires_grad_() for name, value in head.items()}
    logits = z @ leaves["weight"].T + leaves.get("bias", torch.zeros(CLASSES))
    found = torch.autograd.grad(F.cross_entropy(logits, torch.full((len(z),), label)), list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


def close(left: Any, right: Any, atol: float = 1e-6) -> None:
    torch.testing.assert_close(left, right, rtol=1e-5, atol=atol)


# the gradients of the classes


@pytest.mark.parametrize("bias", [True, False])
def test_class_gradients_are_those_of_autograd(bias: bool) -> None:
    head, z, y = head_of(bias), normal(7, DIM, seed=5), [0, 2, 2, 0, 2, 0, 0]
    ones = torch.ones(7)
    parts = [class_gradients(head, z[a:b], Batch(z[a:b], torch.tensor(y[a:b]), ones[a:b])) for a, b in ((0, 3), (3, 7))]
    got = total(parts)
    assert got.weight.tolist() == [4, 0, 3]
    assert got.value.keys() == head.keys()
    for label in range(CLASSES):
        own = z[torch.tensor(y) == label]
        for name in head:
            expected = autograd(head, own, label)[name] if len(own) else torch.zeros_like(head[name])
            close(got.value[name][label], expected)


def test_a_gradient_by_hand() -> None:
    """Logits log(1), log(2), log(1): probabilities 1/4, 1/2, 1/4; the sample is (2, -1), of class 1."""
    head = {"weight": torch.zeros(3, 2), "bias": torch.tensor([1.0, 2.0, 1.0]).log()}
    batch = Batch(torch.zeros(1, 1), torch.tensor([1]), torch.ones(1))
    got = class_gradients(head, torch.tensor([[2.0, -1.0]]), batch).value
    close(got["bias"][1], torch.tensor([0.25, -0.5, 0.25]))
    close(got["weight"][1], torch.tensor([[0.5, -0.25], [-1.0, 0.5], [0.5, -0.25]]))
    assert not got["weight"][[0, 2]].any()


def padded(batch: Batch, at: list[int]) -> Batch:
    """The same samples among padding that would be noticed."""
    size = len(at) + len(batch.y)
    x, y, mask = torch.full((size, FEATURES), 50.0), torch.ones(size, dtype=torch.int64), torch.zeros(size)
    rest = torch.tensor([i for i in range(size) if i not in at])
    x[rest], y[rest], mask[rest] = batch.x, batch.y, 1.0
    return Batch(x, y, mask)


@pytest.mark.parametrize("real", [0, 2])
@pytest.mark.parametrize("at", [[5, 6], [0, 3]])
def test_padding_changes_nothing(real: int, at: list[int]) -> None:
    module = fresh(net, 0)
    model, method = FunctionalModel(module), CReFF(real=real, draws=2)
    client, down = Client(*state(module)), method.broadcast(method.init_server(spec_of(module)), torch.tensor([0]))
    batches = [batch_of([0, 1, 2, 0, 0], 1), batch_of([1, 0, 0], 2)]
    plain = method.receive(model, client, data_of(batches), down).memory["gradients"]
    wide = method.receive(model, client, data_of([padded(batches[0], at), batches[1]]), down).memory["gradients"]
    close(wide, plain)


def test_all_batches_are_counted() -> None:
    module = fresh(net, 0)
    model, method, batch = FunctionalModel(module), CReFF(), batch_of([0, 1, 2, 0, 0, 1, 1, 0])
    client, down = Client(*state(module)), method.broadcast(method.init_server(spec_of(module)), torch.tensor([0]))
    parts = [Batch(*(tensor[a:b] for tensor in batch)) for a, b in ((0, 3), (3, 8))]
    one, several = (method.receive(model, client, data_of(b), down).memory["gradients"] for b in ([batch], parts))
    close(several, one)


@pytest.mark.parametrize("times", [1, 4])
def test_draws_are_of_each_class_and_without_replacement(times: int) -> None:
    y = [0, 1, 0, 2, 0, 0, 1, 0, 0, 1, 0, 0]
    batches = [batch_of(y[:7]), batch_of(y[7:])]
    counts = torch.cat([b.mask for b in drawn(batches, 2, times, KEY)])
    assert [float(counts[torch.tensor(y) == c].sum()) for c in range(3)] == [2 * times, 2 * times, times]
    assert float(counts.max()) <= times
    again = torch.cat([b.mask for b in drawn(batches, 2, times, KEY)])
    assert torch.equal(counts, again)
    others = [torch.cat([b.mask for b in drawn(batches, 2, 1, random.key(n))]) for n in range(200)]
    share = torch.stack(others).mean(0)
    for c, expected in ((0, 2 / 8), (1, 2 / 3), (2, 1.0)):
        close(share[torch.tensor(y) == c], torch.full((y.count(c),), expected), atol=0.15)


def test_a_draw_of_everything_is_no_draw() -> None:
    batches = [batch_of([0, 1, 0, 2]), batch_of([2, 2])]
    assert torch.cat([b.mask for b in drawn(batches, 3, 1, KEY)]).tolist() == [1.0] * 6
    assert len(drawn([Batch(torch.zeros(0, 2), torch.zeros(0).long(), torch.zeros(0))], 3, 2, KEY)[0].mask) == 0


def test_draws_are_averaged() -> None:
    head, z, y = head_of(), normal(8, DIM, seed=1), torch.tensor([0, 0, 0, 0, 0, 1, 1, 1])
    batch = Batch(z, y, torch.ones(8))
    got = class_gradients(head, z, drawn([batch], 2, 3, KEY)[0]).value
    words = random.bits(random.fold(KEY, torch.arange(3)[:, None]), 8)
    for label in (0, 1):
        own = (y == label).nonzero().flatten()
        means = []
        for t in range(3):
            chosen = sorted(own.tolist(), key=lambda i, t=t: int(words[t, i]))[:2]
            means.append(autograd(head, z[chosen], label))
        for name in head:
            close(got[name][label], torch.stack([m[name] for m in means]).mean(0))


def test_clients_may_be_stacked() -> None:
    """What a client computes before training is the same under vmap."""
    head, y = head_of(), torch.tensor([[0, 1, 1, 2], [2, 2, 2, 0]])
    z, mask, keys = normal(2, 4, DIM), torch.tensor([[1.0, 1, 1, 1], [1, 1, 1, 0]]), torch.stack([KEY, KEY + 1])

    def one(z: Tensor, y: Tensor, mask: Tensor, key: Tensor) -> Mean:
        return class_gradients(head, z, drawn([Batch(z, y, mask)], 1, 2, key)[0])

    stacked = torch.vmap(one)(z, y, mask, keys)
    for row in range(2):
        close(stacked.total["weight"][row], one(z[row], y[row], mask[row], keys[row]).total["weight"])


# what clients send, and its mean


def rounds_of(method: CReFF, server: Tree, module: nn.Module, held: list[list[int]]) -> list[tuple[Tree, LocalData]]:
    model, down = FunctionalModel(module), method.broadcast(server, torch.arange(len(held)))
    found = []
    for number, y in enumerate(held):
        data = data_of([batch_of(y, seed=number + 10)])
        client = method.receive(model, Client(*state(module)), data, down)
        moved = client._replace(params={n: p + 0.1 * (number + 1) for n, p in client.params.items()})  # "training"
        up, kept = method.upload(model, moved, data, down)
        assert kept.memory == {}
        found.append((up, data))
    return found


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_two_clients_by_loops(weighting: Any) -> None:
    """Class 0 is held by both, class 1 by the first, class 2 by nobody."""
    module = fresh(net, 1)
    method = CReFF(**QUICK, weighting=weighting)
    server = method.init_server(spec_of(module))
    server["head"] = {name: -value for name, value in server["head"].items()}  # not the model's own
    held = [[0, 0, 1, 0], [0, 0]]
    ups = rounds_of(method, server, module, held)
    got = merge(*(alone(up) for up, _ in ups))
    assert got["gradients"].weight.tolist() == [2, 1, 0]
    head = {name.rsplit(".", 1)[1]: value for name, value in server["head"].items()}
    module.eval()
    own: dict[int, list[dict[str, Tensor]]] = {0: [], 1: [], 2: []}
    for _, data in ups:
        with torch.no_grad():
            z = module.body(data.batches[0].x)
        for label in set(data.batches[0].y.tolist()):
            own[label].append(autograd(head, z[data.batches[0].y == label], label))
    for label, several in own.items():
        for name in head:
            mean = sum(g[name] for g in several) / len(several) if several else torch.zeros_like(head[name])
            close(got["gradients"].value[name][label], mean)
    new = method.aggregate(server, got, torch.tensor([0, 1]))
    shares = (4 / 6, 2 / 6) if weighting == "samples" else (0.5, 0.5)
    for name, value in state(module)[0].items():
        close(new["model"]["params"][name], value + 0.1 * shares[0] + 0.2 * shares[1])
    assert torch.equal(new["features"][2], server["features"][2])  # nobody has it: not matched
    assert not torch.equal(new["features"][0], server["features"][0])
    assert torch.equal(new["key"], random.fold(server["key"], -1))  # no key that epochs of this round shuffle by


def test_if_nobody_has_data_features_and_head_stay() -> None:
    module = fresh(net, 1)
    method = CReFF(**QUICK)
    server = method.init_server(spec_of(module))
    ((up, _),) = rounds_of(method, server, module, [[]])
    new = method.aggregate(server, alone(up), torch.tensor([0]))
    for name in ("features", "head", "model"):
        torch.testing.assert_close(new[name], server[name], rtol=0, atol=0)
    assert not torch.equal(new["key"], server["key"])


def test_what_goes_down_and_what_is_started_from() -> None:
    module = fresh(net, 1)
    method = CReFF(**QUICK)
    server = method.init_server(spec_of(module))
    params = server["model"]["params"]
    assert server["head"].keys() == {"head.fc.weight", "head.fc.bias"}
    assert all(torch.equal(server["head"][name], params[name]) for name in server["head"])
    assert server["features"].shape == (CLASSES, 6, DIM)
    server["head"] = {name: value + 1 for name, value in server["head"].items()}
    down = method.broadcast(server, torch.tensor([0]))
    assert down.keys() == {"model", "head"}
    client = method.receive(FunctionalModel(module), Client(*state(module)), data_of([batch_of([0, 1])]), down)
    assert torch.equal(client.params["head.fc.weight"], params["head.fc.weight"])  # FedAvg's
    tested = method.global_client(server)
    assert torch.equal(tested.params["head.fc.weight"], params["head.fc.weight"] + 1)  # the retrained one
    assert torch.equal(tested.params["body.fc1.weight"], params["body.fc1.weight"])
    assert tested.params.keys() == params.keys()
    assert tested.buffers is server["model"]["buffers"]


def test_the_loss_is_cross_entropy() -> None:
    module = fresh(net, 1)
    client, batch = Client(*state(module)), batch_of([0, 1, 2, 1])
    model = FunctionalModel(module)
    got = CReFF().loss(model, client, batch, {})
    expected = 0.0
    for row, label in zip(model(client, batch.x)[1].tolist(), batch.y.tolist(), strict=True):
        expected += float(np.log(sum(np.exp(v) for v in row))) - row[label]
    assert float(got) == pytest.approx(expected / 4, rel=1e-5)

    def of_bias(bias: Tensor) -> Tensor:
        return CReFF().loss(model, client._replace(params=client.params | {"head.fc.bias": bias}), batch, {})

    slope = torch.func.grad(of_bias)(client.params["head.fc.bias"])
    onehot = torch.eye(3)[batch.y]
    close(slope, (model(client, batch.x)[1].softmax(1) - onehot).mean(0))


# the features


def naive_mismatch(features: Tensor, head: dict[str, Tensor], real: Mean) -> Tensor:
    """Gradients of gradients, class by class and row by row."""
    leaves = {name: value.clone().requires_grad_() for name, value in head.items()}
    loss = torch.zeros(())
    for label in range(CLASSES):
        if real.weight[label] == 0:
            continue
        logits = features[label] @ leaves["weight"].T + leaves.get("bias", torch.zeros(CLASSES))
        ce = F.cross_entropy(logits, torch.full((len(features[label]),), label))
        made = dict(zip(leaves, torch.autograd.grad(ce, list(leaves.values()), create_graph=True), strict=True))
        for name, value in made.items():
            wanted = real.value[name][label]
            rows = [(value, wanted)] if value.ndim == 1 else zip(value, wanted, strict=True)
            for a, b in rows:
                loss = loss + 1 - (a * b).sum() / (a.norm() * b.norm() + 1e-6)
    return loss


def test_short_gradients_count_for_less() -> None:
    """CReFF's code adds 1e-6 to the product of the lengths: a row of length 1e-3 has a cosine of 1/2 with itself."""
    head, rows = {"weight": torch.zeros(2, 2)}, torch.tensor([[-1e-3, 0.0], [1e-3, 0.0]])
    real = Mean({"weight": torch.stack([rows, 0 * rows])}, torch.tensor([1.0, 0.0]))
    features = torch.tensor([[[2e-3, 0.0]], [[1.0, 1.0]]])
    assert float(mismatch(features, head, real)) == pytest.approx(1.0, rel=1e-4)


def real_gradients(head: dict[str, Tensor]) -> Mean:
    """Of two classes; the third is not there."""
    z = normal(40, DIM, seed=7).abs() + torch.arange(40)[:, None] % 2
    return class_gradients(head, z, Batch(z, torch.arange(40) % 2, torch.ones(40)))


@pytest.mark.parametrize("bias", [True, False])
def test_a_step_on_the_features_is_that_of_autograd(bias: bool) -> None:
    head, features = head_of(bias), normal(CLASSES, 6, DIM, seed=3)
    real = real_gradients(head)
    leaf = features.clone().requires_grad_()
    loss = naive_mismatch(leaf, head, real)
    close(mismatch(features, head, real), loss.detach())
    (slope,) = torch.autograd.grad(loss, leaf)
    with torch.no_grad():
        got = match(features, head, real, 1, 0.7)
    close(got, features - 0.7 * slope)
    assert torch.equal(got[2], features[2])
    assert not got.requires_grad


def test_steps_on_the_features_lower_the_mismatch() -> None:
    head, features = head_of(), normal(CLASSES, 20, DIM, seed=3)
    real = real_gradients(head)
    losses = [float(mismatch(match(features, head, real, steps, 0.1), head, real)) for steps in (0, 10, 100, 400)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.5 * losses[0]


def test_features_are_matched_under_the_retrained_head() -> None:
    """By hand: one step on two features (1, 0) and (0, 1) of class 0, next to a class that nobody holds.

    Under the retrained head class 0 has the probabilities 3/4 and 1/2, so that the gradients' rows are -+(1/8, 1/4);
    real are -+(1, 1). Under FedAvg's heads, before and after this round, they would be 1/2 and 1/2, or 1/2 and 5/6.
    """
    log3, lr, k = math.log(3), 0.1, 8 / math.sqrt(10)
    retrained, before, after = (
        {"head.fc.weight": torch.tensor([row, [0.0, 0.0]])} for row in ([log3, 0.0], [0.0, 0.0], [0.0, math.log(5)])
    )
    rows = torch.tensor([[-1.0, -1.0], [1.0, 1.0]])
    real = Mean({"weight": torch.stack([rows, torch.zeros(2, 2)])}, torch.tensor([1.0, 0.0]))
    server = {
        "model": {"params": before, "buffers": {}},
        "features": torch.eye(2).expand(2, 2, 2),
        "head": retrained,
        "key": KEY,
    }
    up = {"model": Mean({"params": after, "buffers": {}}, torch.tensor(1.0)), "gradients": real}
    new = CReFF(per_class=2, steps=1, feature_lr=lr, head_epochs=1).aggregate(server, up, torch.tensor([0]))
    expected = torch.eye(2) + lr * k * torch.tensor([[0.1 - 0.075 * log3, -0.05], [0.2 + 0.05 * log3, -0.1]])
    close(new["features"][0], expected)
    assert torch.equal(new["features"][1], torch.eye(2))
    assert torch.equal(new["model"]["params"]["head.fc.weight"], after["head.fc.weight"])


def test_each_round_has_the_head_of_the_round_before() -> None:
    module, method = fresh(net, 1), CReFF(**QUICK)
    first = method.init_server(spec_of(module))
    states = [first]
    for _ in range(3):
        ups = [alone(up) for up, _ in rounds_of(method, states[-1], module, [[0, 0, 1, 0], [2, 0]])]
        up = merge(*ups)
        states.append(method.aggregate(states[-1], up, torch.tensor([0, 1])))
        old, new = states[-2:]
        heads = [{name.rsplit(".", 1)[1]: value for name, value in s["head"].items()} for s in (old, new, first)]
        right, *wrong = (match(old["features"], head, up["gradients"], 5, 0.1) for head in heads)
        close(new["features"], right)
        assert not torch.allclose(right, wrong[0], atol=1e-4)
        assert old is first or not torch.allclose(right, wrong[1], atol=1e-4)


# the new head


def blobs(seed: int = 0) -> Tensor:
    return 0.3 * normal(CLASSES, 30, DIM, seed=seed) + 3 * torch.eye(CLASSES, DIM)[:, None]


@pytest.mark.parametrize(("batch_size", "bias"), [(32, True), (0, True), (7, False)])
def test_the_new_head_separates_what_is_separate(batch_size: int, bias: bool) -> None:
    head = retrain(blobs(), bias, 100, batch_size, 0.01 if batch_size else 0.3, KEY)
    assert head["weight"].shape == (CLASSES, DIM)
    assert ("bias" in head) == bias
    scores = blobs(1) @ head["weight"].T + head.get("bias", torch.zeros(CLASSES))
    assert torch.equal(scores.argmax(-1), torch.arange(CLASSES)[:, None].expand(CLASSES, 30))


@pytest.mark.parametrize(("batch_size", "bias"), [(32, True), (0, False)])
def test_the_new_head_is_that_of_torchs_sgd(batch_size: int, bias: bool) -> None:
    features, layer = blobs(), nn.Linear(DIM, CLASSES, bias=bias)
    start = retrain(features, bias, 0, batch_size, 0.05, KEY)
    assert all(float(value.abs().max()) <= DIM**-0.5 for value in start.values())
    assert float(start["weight"].std()) == pytest.approx(DIM**-0.5 / 3**0.5, rel=0.4)
    layer.load_state_dict(start)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    z, y = features.flatten(0, 1), torch.arange(CLASSES).repeat_interleave(30)
    for epoch in range(3):
        for rows in random.permutation(random.fold(KEY, epoch), 90).split(batch_size or 90):
            optimizer.zero_grad()
            F.cross_entropy(layer(z[rows]), y[rows]).backward()
            optimizer.step()
    got = retrain(features, bias, 3, batch_size, 0.05, KEY)
    close(got, {name: value.detach() for name, value in layer.named_parameters()}, atol=1e-5)


@pytest.mark.parametrize("has", [True, False])
def test_the_bias_is_kept_or_dropped(has: bool) -> None:
    module = fresh(lambda: net(has), 1)
    heads = {}
    for bias in ("keep", "drop"):
        method = CReFF(**QUICK, bias=bias)  # type: ignore[arg-type]
        server = method.init_server(spec_of(module))
        up = merge(*(alone(up) for up, _ in rounds_of(method, server, module, [[0, 0, 1, 0], [2, 0]])))
        new = method.aggregate(server, up, torch.tensor([0, 1]))
        assert {n: v.shape for n, v in new["head"].items()} == {n: v.shape for n, v in server["head"].items()}
        made = retrain(new["features"], has or bias == "drop", 10, 32, 0.01, server["key"])
        close(new["head"]["head.fc.weight"], made["weight"])
        heads[bias] = new["head"]
    assert torch.equal(heads["keep"]["head.fc.weight"], heads["drop"]["head.fc.weight"]) == has
    if has:
        assert heads["keep"]["head.fc.bias"].all()
        assert not heads["drop"]["head.fc.bias"].any()


# which models can be served


@pytest.mark.parametrize("bias", [True, False])
def test_linear_heads_are_served(bias: bool) -> None:
    CReFF().check([spec_of(net(bias)), spec_of(net(bias))])
    CReFF().check([spec_of(Net(chain(fc=nn.Linear(FEATURES, DIM)), nn.Linear(DIM, CLASSES, bias=bias), DIM))])


@pytest.mark.parametrize(
    ("head", "found"),
    [
        (chain(fc1=nn.Linear(DIM, 8), relu=nn.ReLU(), fc2=nn.Linear(8, CLASSES)), r"head.fc1.weight \(8, 4\)"),
        (chain(fc1=nn.Linear(DIM, CLASSES, bias=False), fc2=nn.Linear(CLASSES, CLASSES)), r"head.fc2.bias \(3,\)"),
        (chain(norm=nn.BatchNorm1d(DIM, affine=False), fc=nn.Linear(DIM, CLASSES)), "head.norm.running_mean"),
        (chain(same=nn.Identity()), "no parameters"),
    ],
)
def test_other_heads_are_refused(head: nn.Module, found: str) -> None:
    with pytest.raises(UserError, match=rf"one linear layer, but the head of deep has .*{found}.*such as cnn_mnist"):
        CReFF().check([spec_of(Net(chain(fc=nn.Linear(FEATURES, DIM)), head, DIM), "deep")])


def test_different_models_are_refused() -> None:
    with pytest.raises(UserError, match="'creff' needs one architecture"):
        CReFF().check([spec_of(net(True)), spec_of(net(False), "other")])


@pytest.mark.parametrize("reading", ["paper", "official"])
def test_both_readings(reading: str) -> None:
    method = CReFF.preset(reading, **QUICK)
    assert (method.feature_lr, method.real, method.bias, method.weighting) == {
        "paper": (0.1, 32, "keep", "samples"),
        "official": (0.01, 64, "drop", "uniform"),
    }[reading]
    play(method, 1)


# through an engine


def engine(method: Method) -> ReferenceEngine:
    rng = np.random.default_rng(0)
    y = np.arange(sum(SIZES)) % 3
    x = (rng.normal(size=(len(y), FEATURES)) + y[:, None]).astype(np.float32)
    domain = Domain("toy", x, y, x, y, ("a", "b", "c"))
    ends = np.cumsum((0, *SIZES))
    rows = tuple(np.arange(a, b) for a, b in itertools.pairwise(ends))
    split = Split(np.zeros(3, np.int64), rows, rows)
    federation = Federation([domain], split, seed=1, batch_size=3, drop_last=True, normalize="none")
    optimizer = Optimizer(lr=0.05, momentum=0.5)
    builders = [("toy", lambda shape, classes: net())] * 3
    return ReferenceEngine(federation, builders, optimizer, seed=1, local_epochs=2, init=method.init)


def play(method: Method, rounds: int = 2, cohort: tuple[int, ...] = (0, 1, 2)) -> tuple[ReferenceEngine, Tree]:
    one = engine(method)
    method.check(one.specs())
    server = method.init_server(one.specs()[0])
    for r in range(rounds):
        trained = one.train(method, server, cohort, r)
        assert bool(trained.finite.all())
        server = method.aggregate(server, trained.up, torch.tensor(cohort))
        one.clients = {**one.clients, **trained.clients}
    return one, server


def test_two_rounds_through_the_engine() -> None:
    method = CReFF(per_class=20)
    one, server = play(method)
    average, plain = play(FedAvg())
    close(server["model"], plain)  # the retrained head touches no training
    for number in range(3):
        close(one.clients[number], average.clients[number])
    own = under(server["model"]["params"], "head.")
    assert not any(torch.allclose(own[name], value) for name, value in server["head"].items())
    counted = one.global_tally(method, server)
    assert counted is not None
    assert counted["head"].samples.sum() == sum(SIZES)
    torch.testing.assert_close(decode(encode(server)), server, rtol=0, atol=0)


def test_every_number_of_a_reading_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = dict[str, tuple[Any, ...]]()

    def watched(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: (asked.__setitem__(name, given), work(*given))[1]

    for work in (drawn, match, retrain):
        monkeypatch.setattr(f"protofed.methods.creff.{work.__name__}", watched(work.__name__, work))
    play(CReFF(per_class=6, steps=2, feature_lr=0.7, head_epochs=3, head_lr=0.2, head_batch=5, real=2, draws=4), 1)
    assert asked["drawn"][1:3] == (2, 4)
    assert asked["match"][3:] == (2, 0.7)
    assert asked["retrain"][2:5] == (3, 5, 0.2)
    asked.clear()
    play(CReFF(**QUICK), 1)
    assert "drawn" not in asked, "without `real`, all samples are taken"


def test_the_same_again_whatever_the_order_and_without_autograd() -> None:
    method = CReFF(**QUICK, real=2, draws=3)
    torch.manual_seed(1)
    _, first = play(method)
    torch.manual_seed(2)
    with torch.no_grad():
        _, second = play(method)
    torch.testing.assert_close(second, first, rtol=0, atol=0)
    _, shuffled = play(method, cohort=(2, 0, 1))
    torch.testing.assert_close(shuffled, first, rtol=1e-4, atol=1e-5)
    assert not torch.equal(play(method, 1)[1]["key"], first["key"])
