"""Identities and hand-computed steps of the methods that share models."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protofed.data.domain import Domain
from protofed.data.federation import Federation
from protofed.data.split import Split
from protofed.engines.reference import ReferenceEngine
from protofed.errors import UserError
from protofed.method import Client, Each, LocalData, Mean, Method, Spec, Tree
from protofed.methods import METHODS
from protofed.methods.ditto import Ditto
from protofed.methods.fedavg import FedAvg
from protofed.methods.fedbabu import FedBABU
from protofed.methods.fednh import FedNH
from protofed.methods.fedper import FedPer
from protofed.methods.fedpr import FedPR
from protofed.methods.fedprox import FedProx
from protofed.methods.fedrep import FedRep
from protofed.methods.fedrod import FedROD
from protofed.methods.fesem import FeSEM
from protofed.methods.local import Local
from protofed.models.mlp import Net, chain
from protofed.ops.optim import Optimizer
from protofed.ops.sphere import orthogonal, separated, smallest_distance

SIZES = (9, 5, 7)


def build(shape: tuple[int, ...], classes: int) -> nn.Module:
    body = chain(fc1=nn.Linear(shape[0], 6), relu=nn.ReLU(), norm=nn.BatchNorm1d(6), fc2=nn.Linear(6, 4))
    return Net(body, chain(fc=nn.Linear(4, classes)), 4)


def engine(method: Method, momentum: float = 0.5, epochs: int = 2) -> ReferenceEngine:
    rng = np.random.default_rng(0)
    y = np.arange(sum(SIZES)) % 3
    x = (rng.normal(size=(len(y), 5)) + y[:, None]).astype(np.float32)
    domain = Domain("toy", x, y, x, y, ("a", "b", "c"))
    ends = np.cumsum((0, *SIZES))
    rows = tuple(np.arange(a, b) for a, b in itertools.pairwise(ends))
    split = Split(np.zeros(3, np.int64), rows, rows)
    federation = Federation([domain], split, seed=1, batch_size=3, drop_last=True, normalize="none")
    optimizer = Optimizer(lr=0.05, momentum=momentum, weight_decay=0.01)
    return ReferenceEngine(
        federation, [("toy", build)] * 3, optimizer, seed=1, local_epochs=epochs, init=method.init
    )  # fmt: skip


def play(method: Method, rounds: int = 3, cohort: Sequence[int] = (0, 1, 2), **options: Any) -> tuple[Any, Tree]:
    one = engine(method, **options)
    server = method.init_server(one.specs()[0])
    for r in range(rounds):
        trained = one.train(method, server, cohort, r)
        server = method.aggregate(server, trained.up, torch.tensor(cohort))
        one.clients = {**one.clients, **trained.clients}
    return one, server


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=1e-5, atol=1e-6)


def test_fedprox_without_its_term_is_fedavg() -> None:
    same(play(FedProx(mu=0.0))[1]["params"], play(FedAvg())[1]["params"])
    moved = play(FedProx(mu=1.0))[1]["params"]
    assert not torch.allclose(moved["body.fc1.weight"], play(FedAvg())[1]["params"]["body.fc1.weight"])


def test_fedper_with_nothing_private_is_fedavg() -> None:
    same(play(FedPer(private=()))[1]["shared"]["params"], play(FedAvg())[1]["params"])


def test_fesem_with_one_centre_is_fedavg() -> None:
    centres = play(FeSEM(centres=1))[1]["centres"]["params"]
    same({name: value[0] for name, value in centres.items()}, play(FedAvg())[1]["params"])


def test_fedpr_without_its_term_trains_as_fedavg() -> None:
    same(play(FedPR(lam=0.0))[1]["model"]["params"], play(FedAvg())[1]["params"])


def test_fedavg_over_one_client_is_local() -> None:
    one, server = play(FedAvg(), cohort=(1,))
    alone, _ = play(Local(init="common"), cohort=(1,))
    same(server["params"], alone.clients[1].params)
    same(one.clients[1].params, alone.clients[1].params)


def test_ditto_without_its_pull_trains_the_personal_model_as_local() -> None:
    one, server = play(Ditto(lam=0.0, plain=False))
    alone, _ = play(Local(init="common"))
    for number in range(3):
        own = {
            n.removeprefix("personal."): p for n, p in one.clients[number].params.items() if n.startswith("personal.")
        }
        same(own, alone.clients[number].params)
    same(server["params"], play(FedAvg(weighting="uniform"))[1]["params"])  # and the global one as FedAvg


@pytest.mark.parametrize("anchor", ["received", "trained"])
def test_dittos_personal_loss_by_hand(anchor: str) -> None:
    method = Ditto(lam=0.6, anchor=anchor)  # type: ignore[arg-type]
    one = engine(method)
    client = one.client(method, 0)
    shifted = {n: p + 0.1 if n.startswith("personal.") else p - 0.2 for n, p in client.params.items()}
    down = {"params": {n: p + 1.0 for n, p in client.params.items() if not n.startswith("personal.")}, "buffers": {}}
    batch = next(iter(one.federation.epoch(0, 0, 0)))
    model = one._models["toy"]
    got = method.personal_loss(model, client._replace(params=shifted), batch, down)
    expected = F.cross_entropy(model(client._replace(params=shifted), batch.x, at="personal.")[1], batch.y)
    pull = 0.0
    for name in down["params"]:
        target = down["params"][name] if anchor == "received" else shifted[name]
        for a, b in zip(shifted["personal." + name].flatten().tolist(), target.flatten().tolist(), strict=True):
            pull += (a - b) ** 2
    assert float(got) == pytest.approx(float(expected) + 0.3 * pull, rel=1e-5)


def test_fedrep_trains_the_head_first_and_the_body_against_it() -> None:
    method = FedRep(head_epochs=3)
    one = engine(method)
    first = one.client(method, 0)
    down = method.broadcast(method.init_server(one.specs()[0]), torch.tensor([0]))
    assert not any(name.startswith("head.") for name in down["params"])
    head, body = method.phases()
    assert (head.trains, head.epochs, body.trains, body.epochs) == (("head.",), 3, ("body.",), None)
    trained = one.train(method, method.init_server(one.specs()[0]), [0], 0)
    assert not torch.equal(trained.clients[0].params["head.fc.weight"], first.params["head.fc.weight"])
    assert not torch.equal(trained.clients[0].params["body.fc1.weight"], first.params["body.fc1.weight"])
    tuned = one.finish(method, method.init_server(one.specs()[0]), [0], 1).clients[0]
    assert torch.equal(tuned.params["body.fc1.weight"], first.params["body.fc1.weight"])  # as received
    assert not torch.equal(tuned.params["head.fc.weight"], first.params["head.fc.weight"])


@pytest.mark.parametrize("start", ["global", "stale"])
def test_fedbabu_keeps_the_head_until_the_end(start: str) -> None:
    method = FedBABU(start=start, tune_lr=0.0)  # type: ignore[arg-type]
    one, server = play(method)
    first = one.specs()[0].params["head.fc.weight"]
    assert torch.equal(server["params"]["head.fc.weight"], first)
    assert all(torch.equal(c.params["head.fc.weight"], first) for c in one.clients.values())
    began = method.last_receive(one._models["toy"], one.clients[0], one.federation.local(0, 3), server)
    own = one.clients[0].params["body.fc1.weight"]
    expected = server["params"]["body.fc1.weight"] if start == "global" else own
    assert torch.equal(began.params["body.fc1.weight"], expected)
    tuned = one.finish(method, server, [0, 1], 3).clients
    assert not torch.equal(tuned[0].params["head.fc.weight"], tuned[1].params["head.fc.weight"])


def test_fesem_assigns_to_the_nearest_centre_and_averages_within() -> None:
    method = FeSEM(centres=2)
    spec = Spec("toy", 2, 1, {"w": torch.zeros(2)}, {}, 0, clients=5)
    server = method.init_server(spec) | {"members": torch.tensor([0, 1, 0, 1, 1])}
    server["centres"]["params"]["w"] = torch.tensor([[0.0, 0.0], [4.0, 4.0]])
    rows = torch.tensor([[5.0, 4.0], [1.0, 0.0], [3.0, 3.0]])
    counts = torch.tensor([1.0, 2.0, 3.0])
    up = {"model": Each({"params": {"w": rows}, "buffers": {}}), "weight": Each(counts)}
    new = method.aggregate(server, up, torch.tensor([0, 3, 4]))
    assert new["members"].tolist() == [1, 1, 0, 0, 1]
    torch.testing.assert_close(new["centres"]["params"]["w"][0], torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(new["centres"]["params"]["w"][1], (1 * rows[0] + 3 * rows[2]) / 4)
    dealt = method.broadcast(new, torch.tensor([2, 0])).rows["params"]["w"]
    torch.testing.assert_close(dealt, new["centres"]["params"]["w"])


def test_fesem_does_not_collapse_while_all_centres_are_equal() -> None:
    _, server = play(FeSEM(centres=2), rounds=1)
    started = FeSEM(centres=2).init_server(engine(FeSEM()).specs()[0])["members"]
    assert server["members"].tolist() == started.tolist()


def test_fedrod_balances_by_the_clients_own_shares() -> None:
    method = FedROD()
    one = engine(method)
    data = one.federation.local(0, 0)._replace(counts=torch.tensor([6.0, 3.0, 0.0]))
    model = one._models["toy"]
    client = method.receive(model, one.client(method, 0), data, method.init_server(one.specs()[0]))
    batch = next(iter(one.federation.epoch(0, 0, 0)))
    logits = model(client, batch.x)[1]
    expected = 0.0
    for row, label in zip(logits.tolist(), batch.y.tolist(), strict=True):
        shifted = [v + np.log(p) for v, p in zip(row, (6 / 9, 3 / 9, 1e-12 / 9), strict=True)]
        expected += -shifted[label] + np.log(sum(np.exp(s) for s in shifted))
    assert float(method.loss(model, client, batch, {})) == pytest.approx(expected / len(batch.y), rel=1e-4)


@pytest.mark.parametrize("personal", ["linear", "hyper"])
def test_fedrod_shares_all_but_a_linear_personal_head(personal: str) -> None:
    method = FedROD(personal=personal)  # type: ignore[arg-type]
    one, server = play(method)
    names = set(server["params"])
    assert not any(name.startswith("personal_head.") for name in names)
    assert any(name.startswith("hyper.") for name in names) == (personal == "hyper")
    x = one.federation.test(0).x
    with torch.no_grad():
        own = method.predict(one._models["toy"], one.clients[0], x, server)["head"]
        generic = method.predict(one._models["toy"], method.global_client(server), x, server)["head"]
        z, logits = one._models["toy"](one.clients[0], x)
        torch.testing.assert_close(own, logits + z @ method._personal_head(one.clients[0]).T)
        torch.testing.assert_close(generic, one._models["toy"](method.global_client(server), x)[1])


def test_fednh_keeps_its_prototypes_at_rho_one_and_turns_them_below() -> None:
    start = FedNH().init_server(engine(FedNH()).specs()[0])["prototypes"]
    assert torch.allclose(play(FedNH(rho=1.0))[1]["prototypes"], start, atol=1e-6)
    turned = play(FedNH(rho=0.9))[1]["prototypes"]
    assert not torch.allclose(turned, start, atol=1e-3)
    torch.testing.assert_close(turned.norm(dim=1), torch.ones(3))


@pytest.mark.parametrize("alpha", ["counts", "uniform"])
def test_fednh_aggregates_by_equation_four(alpha: str) -> None:
    method = FedNH(alpha=alpha, rho=0.8)  # type: ignore[arg-type]
    old = F.normalize(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))
    means = [torch.tensor([[0.6, 0.3], [0.0, 0.0], [0.2, 0.5]]), torch.tensor([[0.1, 0.7], [0.0, 0.0], [0.0, 0.0]])]
    counts = [torch.tensor([3.0, 0.0, 2.0]), torch.tensor([1.0, 0.0, 0.0])]
    parts = []
    for mean, n in zip(means, counts, strict=True):
        parts.append(Mean.of(F.normalize(mean), n) if alpha == "counts" else Mean.of(mean, (n > 0).float()))
    body = Mean({"params": {}, "buffers": {}}, torch.tensor(2.0))
    server = {"body": {"params": {}, "buffers": {}}, "prototypes": old}
    got = method.aggregate(server, {"body": body, "prototypes": parts[0] + parts[1]}, torch.tensor([0, 1]))[
        "prototypes"
    ]
    for c in range(3):
        if all(float(n[c]) == 0 for n in counts):
            torch.testing.assert_close(got[c], old[c])  # a class that nobody holds stays
            continue
        total = torch.zeros(2)
        for mean, n in zip(means, counts, strict=True):
            unit = mean[c] / mean[c].norm() if float(n[c]) else mean[c]
            total += float(n[c]) * unit if alpha == "counts" else mean[c] / 2
        direction = total / total.norm() if alpha == "counts" else total
        new = 0.8 * old[c] + 0.2 * direction
        torch.testing.assert_close(got[c], new / new.norm())


def test_fednh_trains_the_scale_only_if_asked() -> None:
    assert float(play(FedNH(train_scale=False))[1]["body"]["params"]["scale"]) == 20
    assert float(play(FedNH())[1]["body"]["params"]["scale"]) != 20


@pytest.mark.parametrize(
    ("classes", "dim", "best"),
    [
        (2, 1, 2.0),
        (3, 2, 3**0.5),
        (10, 192, (2 + 2 / 9) ** 0.5),
        (6, 2, 1.0),
        (6, 3, 2**0.5),
        (100, 60, 2**0.5),
        (12, 3, 1.0515),
    ],
)
def test_separated_prototypes_are_as_far_apart_as_can_be(classes: int, dim: int, best: float) -> None:
    rows = separated(classes, dim, 0)
    assert rows.shape == (classes, dim)
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(classes))
    assert smallest_distance(rows) == pytest.approx(best, rel=2e-3)
    assert torch.equal(rows, separated(classes, dim, 0))


def test_orthogonal_prototypes_need_room() -> None:
    rows = orthogonal(4, 7, 3)
    torch.testing.assert_close(rows @ rows.T, torch.eye(4), atol=1e-5, rtol=0)
    with pytest.raises(UserError, match="'separated'"):
        orthogonal(8, 7, 3)


@pytest.mark.parametrize(("divide", "expected"), [("holders", 4.0), ("everyone", 8 / 3), ("samples", 5.0)])
def test_fedpr_divides_its_prototypes_as_asked(divide: str, expected: float) -> None:
    method = FedPR(divide=divide)  # type: ignore[arg-type]
    sums = [(2.0, 1.0), (18.0, 3.0), (0.0, 0.0)]  # embedding sum and count of one class at three clients
    parts = []
    for total, n in sums:
        own = Mean(torch.tensor([[total]]), torch.tensor([n]))
        parts.append(own if divide == "samples" else Mean.of(own.value, (own.weight > 0).float()))
    model = Mean({"params": {}, "buffers": {}}, torch.tensor(1.0))
    empty = Mean(torch.zeros(1, 1), torch.zeros(1))
    server = {"model": {"params": {}, "buffers": {}}, "prototypes": empty}
    up = {"model": model, "prototypes": parts[0] + parts[1] + parts[2]}
    got = method.aggregate(server, up, torch.tensor([0, 1, 2]))["prototypes"]
    assert float(got.value[0, 0]) == pytest.approx(expected)
    assert float(got.weight[0]) == 1


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("cohort", [(0,), (2, 1)])
def test_every_method_takes_partial_participation(name: str, cohort: tuple[int, ...]) -> None:
    method = METHODS[name]()
    one, server = play(method, cohort=cohort)
    leaves: Callable[[Any], list[Tensor]] = torch.utils._pytree.tree_leaves
    assert all(torch.isfinite(t).all() for t in leaves(server) if t.is_floating_point())
    tallies = one.evaluate(method, server, [0, 1, 2], on="own", who="personal")  # never sampled ones too
    assert len(tallies) == 3
    if method.global_client(server) is not None:
        assert one.global_tally(method, server) is not None


def test_what_is_private_is_not_sent() -> None:
    for method, private in (
        (FedPer(), "head."),
        (FedRep(), "head."),
        (Ditto(), "personal."),
        (FedROD(), "personal_head."),
    ):
        one = engine(method)
        trained = one.train(method, method.init_server(one.specs()[0]), [0], 0)
        assert not any(name.startswith(private) for name in trained.up.total["params"])
        assert any(name.startswith(private) for name in trained.clients[0].params)


def test_methods_are_values() -> None:
    for kind in METHODS.values():
        assert replace(kind(), init="per_client").init == "per_client"
        assert isinstance(hash(kind()), int)
    assert isinstance(Client({}, {}), Client)
    assert LocalData([], torch.zeros(1), torch.zeros(2)).seen == ()
