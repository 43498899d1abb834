"""FPL and FINCH: clusters by hand, and the loss sample by sample."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from protofed.method import Batch, Client, Each, LocalData, Mean, Spec
from protofed.methods.fpl import FPL
from protofed.models import Net, chain
from protofed.models.functional import FunctionalModel, state
from protofed.ops import random
from protofed.ops.finch import clusters_of, finch

KEY = random.key("fpl")
NET = Net(chain(fc=torch.nn.Linear(3, 2), tanh=torch.nn.Tanh()), chain(fc=torch.nn.Linear(2, 3)), 2)
MODEL: Any = FunctionalModel(NET)
PARAMS = {n: torch.sin(torch.arange(p.numel()) + i).reshape(p.shape) for i, (n, p) in enumerate(state(NET)[0].items())}
SPEC = Spec("tiny", 3, 2, PARAMS, {}, seed=5)


def at(*degrees: float) -> np.ndarray:
    """Points in these directions; their lengths differ, which cosine does not see."""
    angles = np.radians(degrees)
    return np.stack([np.cos(angles), np.sin(angles)], 1) * np.linspace(1, 3, len(degrees))[:, None]


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        ((10,), [0]),
        ((0, 5, 90, 96), [0, 0, 1, 1]),
        ((0, 90, 5, 96), [0, 1, 0, 1]),
        ((0, 5, 10), [0, 0, 0]),  # linked at once
        # pairs at 0, 20, 100 and 120 first; of these the near ones are linked, and then all: the step before counts
        ((0, 1, 20, 21, 100, 101, 120, 121), [0, 0, 0, 0, 1, 1, 1, 1]),
    ],
)
def test_clusters_follow_first_neighbours(degrees: tuple[float, ...], expected: list[int]) -> None:
    assert finch(at(*degrees)).tolist() == expected


def test_the_servers_clusters_do_not_depend_on_the_order_of_clients() -> None:
    points = torch.from_numpy(np.stack([at(0, 50), at(5, 55), at(90, 60), at(96, 65)])).float()  # (4, 2 classes, 2)
    weight = torch.tensor([[1.0, 1], [1, 0], [1, 0], [1, 0]])
    rows, cohort = Mean.of(points, weight), torch.tensor([3, 9, 5, 7])
    got = clusters_of(rows, cohort)
    assert got.weight.tolist() == [[1, 1], [1, 0]]
    torch.testing.assert_close(got.total[0, 0], (points[0, 0] + points[1, 0]) / 2)
    torch.testing.assert_close(got.total[0, 1], (points[2, 0] + points[3, 0]) / 2)
    torch.testing.assert_close(got.total[1, 0], points[0, 1])
    turned = torch.tensor([2, 0, 3, 1])
    again = clusters_of(Mean(rows.total[turned], weight[turned]), cohort[turned])
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    nobody = clusters_of(Mean(rows.total * 0, weight * 0), cohort)
    assert not bool(nobody.weight.any())


def test_the_servers_clusters_are_in_the_order_of_their_first_client_not_of_their_sizes() -> None:
    points = torch.from_numpy(at(0, 3, 90, 93, 94)[:, None]).float()  # (5 clients, 1 class, 2)
    got = clusters_of(Mean.of(points, torch.ones(5, 1)), torch.arange(5))
    torch.testing.assert_close(got.total[0, 0], points[:2, 0].mean(0))
    torch.testing.assert_close(got.total[0, 1], points[2:, 0].mean(0))


def test_the_loss_by_hand() -> None:
    method = FPL(contrast=2.0, pull=3.0, temperature=0.4)
    client = Client(PARAMS, {})
    x, y = torch.tensor([[0.3, -1, 2], [1, 1, 0], [0, 2, 1], [5, 5, 5]]), torch.tensor([0, 1, 2, 0])
    batch = Batch(x, y, torch.tensor([1.0, 1, 1, 0]))
    total = torch.tensor([[[1.0, 0.5], [-1, 0.2]], [[0.3, 0.3], [0, 0]], [[0, 0], [0, 0]]])
    clusters = Mean(total, torch.tensor([[1.0, 1], [1, 0], [0, 0]]))  # two, one, none
    listed = [(0, [1.0, 0.5]), (0, [-1.0, 0.2]), (1, [0.3, 0.3])]
    losses = []
    for sample, label in zip(x[:3], y[:3].tolist(), strict=True):
        z = torch.tanh(sample @ PARAMS["body.fc.weight"].T + PARAMS["body.fc.bias"])
        logits = z @ PARAMS["head.fc.weight"].T + PARAMS["head.fc.bias"]
        loss = float(-F.log_softmax(logits, 0)[label])
        own = [u for c, u in listed if c == label]
        if own:
            heat = [(c, math.exp(float(F.cosine_similarity(z, torch.tensor(u), 0)) / 0.4)) for c, u in listed]
            loss += 2.0 * -math.log(sum(h for c, h in heat if c == label) / sum(h for _, h in heat))
            centre = torch.tensor(own).mean(0)
            loss += 3.0 * float(((z - centre) ** 2).mean())
        losses.append(loss)
    got, seen = method.loss(MODEL.training({}, KEY), client, batch, {"clusters": clusters})
    assert float(got) == pytest.approx(sum(losses) / 3, rel=1e-5)
    assert seen.weight.tolist() == [1, 1, 1], "class sums of the training step, without padding"
    first = method.init_server(SPEC)
    plain, _ = method.loss(MODEL.training({}, KEY), client, batch, first)
    logits = torch.tanh(x[:3] @ PARAMS["body.fc.weight"].T + PARAMS["body.fc.bias"]) @ PARAMS["head.fc.weight"].T
    expected = F.cross_entropy(logits + PARAMS["head.fc.bias"], y[:3])
    torch.testing.assert_close(plain, expected, msg="cross-entropy alone before there are prototypes")


def test_what_the_last_epoch_saw_is_sent_and_clustered() -> None:
    method, client = FPL(), Client(PARAMS, {})
    seen = Mean(torch.tensor([[4.0, 2.0], [0, 0], [3, 3]]), torch.tensor([2.0, 0, 1]))
    data = LocalData([], torch.tensor([2.0, 0, 1]), KEY, seen)
    server = method.init_server(SPEC)
    up, _ = method.upload(MODEL, client, data, server)
    assert up["prototypes"].rows.value.tolist() == [[2, 1], [0, 0], [3, 3]]
    assert up["prototypes"].rows.weight.tolist() == [1, 0, 1]
    none, _ = method.upload(MODEL, client, data._replace(seen=()), server)
    assert none["prototypes"].rows.weight.tolist() == [0, 0, 0]
    rows = Mean(*(part[None] for part in up["prototypes"].rows))
    after = method.aggregate(server, {"model": up["model"], "prototypes": Each(rows)}, torch.tensor([0]))
    assert method.prototypes(after).total[:, 0].tolist() == [[2, 1], [0, 0], [3, 3]]
    torch.testing.assert_close(after["model"]["params"]["body.fc.weight"], PARAMS["body.fc.weight"])
    assert after["clusters"].total.shape == (3, 1, 2)
    assert server["clusters"].total.shape == (3, 1, 2)
    whole = method.global_client(after)
    assert whole.params.keys() == PARAMS.keys()
    assert whole.buffers == {}
    assert float(up["model"].weight) == 3.0
    alike, _ = FPL(weighting="uniform").upload(MODEL, client, data, server)
    assert float(alike["model"].weight) == 1.0
