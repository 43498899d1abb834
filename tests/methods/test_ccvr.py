"""CCVR: whose embeddings the Gaussians are of, and what the server makes of them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protofed.method import Batch, Client, LocalData, Spec, Tree
from protofed.methods.ccvr import CCVR
from protofed.models import Net, chain
from protofed.models.functional import FunctionalModel, fresh, state
from protofed.ops import random
from protofed.ops.matching import retrain
from protofed.ops.statistics import drawn_embeddings, embedding_sums
from protofed.ops.trees import alone

CLASSES, DIM = 4, 2
KEY = random.key("ccvr test")
NET = fresh(
    lambda: Net(chain(fc=nn.Linear(3, DIM), norm=nn.BatchNorm1d(DIM)), chain(fc=nn.Linear(DIM, CLASSES)), DIM), 1
)
MODEL: Any = FunctionalModel(NET)
SPEC = Spec("toy", CLASSES, DIM, *state(NET), seed=5)
Y = torch.tensor([0, 1, 3, 1, 0, 0, 0, 1])  # nobody has class 2, and of class 3 there is one
X = torch.randn(8, 3, generator=torch.Generator().manual_seed(1)) + Y[:, None]
DATA = LocalData(
    [Batch(X[:5], Y[:5], torch.ones(5)), Batch(X[5:], Y[5:], torch.ones(3))], torch.tensor([4.0, 3, 0, 1]), KEY
)
HEAD = ("head.fc.weight", "head.fc.bias")


def moved(params: dict[str, Tensor], by: float) -> dict[str, Tensor]:
    return {name: value + by if value.is_floating_point() else value for name, value in params.items()}


def played(method: CCVR, data: LocalData = DATA) -> tuple[Tree, Tree, Tree]:
    """A round of one client, which ends somewhere else than it began: the server before and after, the upload."""
    server = method.init_server(SPEC)
    server["model"] = {part: moved(server["model"][part], 0.1) for part in ("params", "buffers")}
    client = method.receive(MODEL, method.init_client(SPEC), data, method.broadcast(server, torch.tensor([0])))
    trained = Client(moved(client.params, 0.5), moved(client.buffers, 0.3))
    up, kept = method.upload(MODEL, trained, data, server["model"])
    assert kept is trained
    return server, method.aggregate(server, alone(up), torch.tensor([0])), up


def test_statistics_are_of_the_model_that_the_round_began_with() -> None:
    """All clients embed alike by it, whatever they train."""
    server, _, up = played(CCVR())
    p, b = server["model"]["params"], server["model"]["buffers"]
    z = X @ p["body.fc.weight"].T + p["body.fc.bias"]
    z = (z - b["body.norm.running_mean"]) / (b["body.norm.running_var"] + 1e-5).sqrt()
    z = z * p["body.norm.weight"] + p["body.norm.bias"]
    wanted = embedding_sums(z, Batch(z, Y, torch.ones(8)), CLASSES, "full")
    for name in ("means", "second"):
        torch.testing.assert_close(up["sums"][name].total, wanted[name].total, rtol=1e-3, atol=1e-3)
        assert up["sums"][name].weight.tolist() == [4, 3, 0, 1]


@pytest.mark.parametrize(("start", "bias"), [("averaged", True), ("averaged", False), ("fresh", True)])
def test_the_head_of_the_round_before_is_trained_on_drawn_embeddings(start: Any, bias: bool) -> None:
    method = CCVR(virtual=7, head_epochs=3, head_lr=0.2, head_batch=5, start=start)
    server, after, up = played(method)
    if not bias:
        del server["model"]["params"]["head.fc.bias"], up["model"].total["params"]["head.fc.bias"]
        after = method.aggregate(server, alone(up), torch.tensor([0]))
    params = server["model"]["params"]
    z = drawn_embeddings(up["sums"], torch.tensor([True, True, False, True]), 7, server["key"])
    first = {name.rsplit(".", 1)[1]: params[name] for name in HEAD if name in params}
    if start == "fresh":
        fresh_head = CCVR(virtual=7, head_epochs=0, start="fresh").aggregate(server, alone(up), torch.tensor([0]))
        first = {name.rsplit(".", 1)[1]: fresh_head["calibrated"]["params"][name] for name in HEAD}
        for name, value in first.items():
            assert value.shape == params[f"head.fc.{name}"].shape
            assert bool((value.abs() <= DIM**-0.5).all())
            assert bool((value > 0).any())
            assert bool((value < 0).any())
        assert float(first["weight"].abs().max()) > 0.75 * DIM**-0.5, "as torch initialises a linear layer"
        assert not torch.equal(first["weight"][:, 0], first["bias"]), "each part is drawn by itself"
    wanted = retrain(z, bias, 3, 5, 0.2, server["key"], first, torch.tensor([0, 1, 3]))
    for name, value in after["calibrated"]["params"].items():
        expected = wanted[name.rsplit(".", 1)[1]] if name in HEAD else params[name]
        torch.testing.assert_close(value, expected, msg=name)
    assert after["calibrated"]["buffers"] is server["model"]["buffers"], "the body is the one that statistics are of"
    assert not torch.equal(after["key"], server["key"])
    used = [random.fold(server["key"], epoch) for epoch in range(9)]
    assert not any(torch.equal(after["key"], key) for key in used), "no key that epochs of this round shuffle by"


def test_models_are_averaged_and_nothing_changes_without_samples() -> None:
    server, after, up = played(CCVR())
    assert float(up["model"].weight) == 8
    assert float(played(CCVR(weighting="uniform"))[2]["model"].weight) == 1
    for part in ("params", "buffers"):
        for name, value in after["model"][part].items():
            by = 0.5 if part == "params" else 0.3
            torch.testing.assert_close(value, server["model"][part][name] + by)
    none = LocalData([Batch(X[:1], Y[:1], torch.zeros(1))], torch.zeros(CLASSES), KEY)
    server, after, _ = played(CCVR(), none)
    for part in ("model", "calibrated"):
        torch.testing.assert_close(after[part], server[part])
    first = CCVR().init_server(SPEC)
    torch.testing.assert_close(first["calibrated"], first["model"])
    whole = CCVR().global_client(first | {"model": {}})
    assert (whole.params, whole.buffers) == (first["calibrated"]["params"], first["calibrated"]["buffers"])
