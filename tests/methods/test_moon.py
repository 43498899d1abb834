"""MOON against its formulas, sample by sample."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from protofed.method import Batch, Client, LocalData, Spec
from protofed.methods.moon import MOON
from protofed.models import Net, chain
from protofed.models.functional import FunctionalModel, state
from protofed.ops import random

KEY = random.key("moon")
NET = Net(chain(fc=torch.nn.Linear(3, 2), tanh=torch.nn.Tanh()), chain(fc=torch.nn.Linear(2, 4)), 2)
MODEL: Any = FunctionalModel(NET)
PARAMS = {n: torch.sin(torch.arange(p.numel()) + i).reshape(p.shape) for i, (n, p) in enumerate(state(NET)[0].items())}
SPEC = Spec("tiny", 4, 2, PARAMS, {}, seed=5)
BATCH = Batch(torch.tensor([[0.3, -1, 2], [1, 1, 0], [5, 5, 5]]), torch.tensor([1, 3, 0]), torch.tensor([1.0, 1, 0]))
DATA = LocalData([BATCH], torch.tensor([0.0, 1, 0, 1]), KEY)


def moved(client: Client, by: float) -> Client:
    return client._replace(
        params={n: p + by * torch.cos(torch.arange(p.numel())).reshape(p.shape) for n, p in client.params.items()}
    )


def embedded(params: dict[str, torch.Tensor], x: torch.Tensor, projection: int, at: str = "") -> torch.Tensor:
    z = torch.tanh(x @ params[f"{at}body.fc.weight"].T + params[f"{at}body.fc.bias"])
    if projection:
        for name, last in (("first", False), ("last", True)):
            z = z @ params[f"{at}projection.{name}.weight"].T + params[f"{at}projection.{name}.bias"]
            z = z if last else z.clamp(min=0)
    return z


@pytest.mark.parametrize("projection", [0, 6])
def test_the_loss_by_hand(projection: int) -> None:
    method = MOON(mu=2.0, temperature=0.4, projection=projection)
    old = moved(method.init_client(SPEC), 0.3)
    down = method.init_server(SPEC)
    start = method.receive(MODEL, old, DATA, down)
    client = start._replace(params=start.params | moved(old, -0.2).params)  # after some steps
    losses = []
    for x, label in zip(BATCH.x[:2], BATCH.y[:2].tolist(), strict=True):
        z = embedded(client.params, x, projection)
        near, far = (
            float(torch.dot(z, other) / z.norm() / other.norm()) / 0.4
            for other in (embedded(method.init_client(SPEC).params, x, projection), embedded(old.params, x, projection))
        )
        head = "projection.output" if projection else "head.fc"
        logits = z @ client.params[f"{head}.weight"].T + client.params[f"{head}.bias"]
        contrast = -math.log(math.exp(near) / (math.exp(near) + math.exp(far)))
        losses.append(float(-F.log_softmax(logits, 0)[label]) + 2.0 * contrast)
    training = MODEL.training({}, KEY)
    assert float(method.loss(training, client, BATCH, down)) == pytest.approx(sum(losses) / 2, rel=1e-5)


@pytest.mark.parametrize("projection", [0, 6])
def test_two_frozen_models_come_and_go_with_a_round(projection: int) -> None:
    method = MOON(projection=projection)
    old = moved(method.init_client(SPEC), 0.3)
    down = method.init_server(SPEC)
    client = method.receive(MODEL, old, DATA, down)
    (phase,) = method.phases()
    trained = [name for name in client.params if name.startswith(phase.trains)]
    assert not any(name.startswith(("global.", "last.")) for name in trained)
    assert any(name.startswith("projection.output" if projection else "head.") for name in trained)
    for name, value in down["params"].items():
        assert torch.equal(client.params[name], value), "training starts from the global model"
        assert torch.equal(client.params["global." + name], value)
        assert torch.equal(client.params["last." + name], old.params[name])
    up, kept = method.upload(MODEL, client, DATA, down)
    assert kept.params.keys() == method.init_client(SPEC).params.keys()
    assert up.total["params"].keys() == down["params"].keys()
    assert float(up.weight) == 2.0
    assert ("head.fc.weight" in down["params"]) == (not projection), "the model's own head is used without a projection"


def test_what_is_trained_gets_no_gradient_through_the_frozen_models() -> None:
    method = MOON(projection=0)
    client = method.receive(MODEL, moved(method.init_client(SPEC), 0.3), DATA, method.init_server(SPEC))
    leaves = {name: value.clone().requires_grad_() for name, value in client.params.items()}
    method.loss(MODEL.training({}, KEY), client._replace(params=leaves), BATCH, {}).backward()  # type: ignore[union-attr,no-untyped-call]
    touched = {name for name, value in leaves.items() if value.grad is not None and bool(value.grad.any())}
    assert touched == set(PARAMS)


def test_a_client_is_judged_by_what_it_trained() -> None:
    method = MOON(projection=6)
    client = moved(method.init_client(SPEC), 0.1)
    z = embedded(client.params, BATCH.x, 6)
    expected = z @ client.params["projection.output.weight"].T + client.params["projection.output.bias"]
    torch.testing.assert_close(method.predict(MODEL, client, BATCH.x, {})["head"], expected)
    torch.testing.assert_close(method.embed(MODEL, client, BATCH.x), z)


def test_the_projection_has_the_width_of_its_key_and_is_trained_with_the_body() -> None:
    params = MOON(projection=6).init_client(SPEC).params
    assert params["projection.last.weight"].shape == (6, 2)
    assert params["projection.output.weight"].shape == (4, 6)
    assert MOON(projection=0).init_client(SPEC).params.keys() == PARAMS.keys()
    assert [phase.trains for phase in MOON(projection=6).phases()] == [("body.", "projection.")]
    assert [phase.trains for phase in MOON(projection=0).phases()] == [("body.", "head.")]


def test_buffers_go_up_once_and_clients_count_alike_if_asked_to() -> None:
    spec = SPEC._replace(buffers={"body.seen": torch.tensor([3.0])})
    method = MOON(projection=0, weighting="uniform")
    down = method.init_server(spec)
    old = method.init_client(spec)._replace(buffers={"body.seen": torch.tensor([7.0])})
    client = method.receive(MODEL, old, DATA, down)
    assert {name: float(value) for name, value in client.buffers.items()} == {
        "body.seen": 3,
        "global.body.seen": 3,
        "last.body.seen": 7,
    }
    up, kept = method.upload(MODEL, client, DATA, down)
    assert list(kept.buffers) == list(up.total["buffers"]) == ["body.seen"]
    assert float(up.weight) == 1.0
    whole = method.global_client(method.aggregate(down, up, torch.tensor([0])))
    assert whole.params.keys() == PARAMS.keys()
    assert list(whole.buffers) == ["body.seen"]
