"""FedPAC: statistics, mixtures of heads and the body's loss, against loops and a general solver."""

from typing import Any

import numpy as np
import pytest
import ragged
import torch
import torch.nn.functional as F
from scipy.optimize import minimize

from protofed.method import Batch, Client, LocalData, Mean, Params, Spec
from protofed.methods.fedpac import FedPAC, mixtures
from protofed.models import Net, chain
from protofed.models.functional import FunctionalModel, state
from protofed.ops import random
from protofed.ops.simplex import best_mixtures, onto_simplex
from protofed.ops.trees import alone, deal, merge

KEY = random.key("fedpac")
NET = Net(chain(fc=torch.nn.Linear(3, 2), tanh=torch.nn.Tanh()), chain(fc=torch.nn.Linear(2, 4)), 2)
MODEL: Any = FunctionalModel(NET)
PARAMS = {n: torch.sin(torch.arange(p.numel()) + i).reshape(p.shape) for i, (n, p) in enumerate(state(NET)[0].items())}
SPEC = Spec("tiny", 4, 2, PARAMS, {}, seed=5)
X, Y = torch.tensor([[0.3, -1, 2], [1, 1, 0], [0, 2, 1], [5, 5, 5]]), torch.tensor([1, 3, 1, 0])
BATCH = Batch(X, Y, torch.tensor([1.0, 1, 1, 0]))  # the last one is padding
DATA = LocalData([BATCH], torch.tensor([0.0, 2, 0, 1]), KEY)


def embedded(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ params["body.fc.weight"].T + params["body.fc.bias"])


def test_a_clients_statistics_by_hand() -> None:
    method = FedPAC()
    other = Client({name: value + 1 for name, value in PARAMS.items()}, {})
    client = method.receive(MODEL, other, DATA, first_down(method))
    assert torch.equal(client.params["body.fc.weight"], PARAMS["body.fc.weight"]), "the body is the server's"
    assert torch.equal(client.params["head.fc.weight"], other.params["head.fc.weight"]), "the head is its own"
    z = embedded(PARAMS, X[:3]).double().numpy()
    share = {1: 2 / 3, 3: 1 / 3}
    means = {1: (z[0] + z[2]) / 2, 3: z[1]}
    squares = {1: (z[0] @ z[0] + z[2] @ z[2]) / 2, 3: z[1] @ z[1]}
    spread = sum(share[k] * squares[k] - share[k] ** 2 * means[k] @ means[k] for k in share) / 3
    assert float(client.memory["spread"]) == pytest.approx(spread, rel=1e-5)
    for k in range(4):
        expected = share.get(k, 0.0) * means.get(k, np.zeros(2))
        assert client.memory["means"][k].tolist() == pytest.approx(expected.tolist(), rel=1e-5)


def test_a_single_sample_counts_once() -> None:
    method = FedPAC()
    data = LocalData([BATCH._replace(mask=torch.tensor([0.0, 1, 0, 0]))], torch.tensor([0.0, 0, 0, 1]), KEY)
    client = method.receive(MODEL, method.init_client(SPEC), data, first_down(method))
    torch.testing.assert_close(client.memory["means"][3], embedded(PARAMS, X[1]))
    assert float(client.memory["spread"]) == pytest.approx(0.0, abs=1e-6)
    up, _ = method.upload(MODEL, client, data, first_down(method))
    assert float(up["head"].rows["there"]) == 1.0


def first_down(method: FedPAC) -> Any:
    return deal(method.broadcast(method.init_server(SPEC), torch.tensor([0])), 0)


def test_the_body_is_pulled_from_the_second_round_on() -> None:
    method, down = FedPAC(lam=3.0), first_down(FedPAC())
    client = method.receive(MODEL, method.init_client(SPEC), DATA, down)
    training = MODEL.training({}, KEY)
    plain = float(method.loss(training, client, BATCH, down))  # type: ignore[arg-type]
    assert float(method.body_loss(training, client, BATCH, down)) == plain, "nobody has sent a prototype"
    others = Mean.of(torch.full((4, 2), 0.5), torch.tensor([0.0, 0, 0.5, 0.5]))  # none of class 1: its own one is used
    down = down | {"prototypes": others}
    z = embedded(PARAMS, X[:3])
    own = (z[0] + z[2]) / 2
    pulls = [((z[0] - own) ** 2).mean(), ((z[1] - 0.5) ** 2).mean(), ((z[2] - own) ** 2).mean()]
    expected = plain + 3.0 * float(sum(pulls)) / 3
    assert float(method.body_loss(training, client, BATCH, down)) == pytest.approx(expected, rel=1e-5)
    logits = z @ PARAMS["head.fc.weight"].T + PARAMS["head.fc.bias"]
    assert plain == pytest.approx(float(F.cross_entropy(logits, Y[:3])), rel=1e-5)
    head, body = FedPAC(head_epochs=2, head_lr=0.3).phases()
    assert (head.trains, head.epochs, head.lr, head.loss) == (("head.",), 2, 0.3, None)
    assert (body.trains, body.epochs, body.lr) == (("body.",), None, None)


@pytest.mark.parametrize("smallest", [0.0, 0.25])
def test_mixtures_are_those_of_a_general_solver(smallest: float) -> None:
    rng = np.random.default_rng(0)
    spread, means = rng.random(5) * 0.3 + 0.05, rng.normal(size=(5, 4, 2)) * 0.4
    there = np.array([True, True, False, True, True])
    got = mixtures(*(torch.tensor(part) for part in (spread, means)), torch.tensor(there), smallest)
    for i in range(5):
        apart = (means[i] - means).reshape(5, -1)
        quadratic = np.diag(spread) + apart @ apart.T
        if smallest:
            values, vectors = np.linalg.eigh(quadratic)
            quadratic = vectors @ np.diag(np.where(values < smallest, 0, values)) @ vectors.T
        free = np.flatnonzero(there)
        inner = quadratic[np.ix_(free, free)]
        found = minimize(
            lambda a, q=inner: a @ q @ a,
            np.full(4, 0.25),
            bounds=[(0, 1)] * 4,
            constraints={"type": "eq", "fun": lambda a: a.sum() - 1},
            options={"ftol": 1e-14, "maxiter": 500},
        )
        assert got[i, free].tolist() == pytest.approx(found.x.tolist(), abs=2e-4)
        assert float(got[i, 2]) == 0.0, "a client without samples lends nobody its head"
        assert float(got[i].sum()) == pytest.approx(1)


def test_projection_onto_the_simplex() -> None:
    points = torch.tensor([[0.2, 0.3, 0.5], [2.0, 0.0, 0.0], [0.5, 0.5, 0.5], [1.0, 0.8, -torch.inf]])
    expected = [[0.2, 0.3, 0.5], [1, 0, 0], [1 / 3, 1 / 3, 1 / 3], [0.6, 0.4, 0]]
    torch.testing.assert_close(onto_simplex(points), torch.tensor(expected))
    nobody = best_mixtures(torch.eye(3)[None], torch.zeros(3, dtype=torch.bool), steps=3)
    assert nobody.tolist() == [[0, 0, 0]]


def test_heads_are_mixed_for_their_own_clients() -> None:
    """Three clients: two alike, one far away, and a fourth without samples that keeps its head."""
    method, down = FedPAC(smallest=0.0), first_down(FedPAC())
    updates = []
    for number, (x, times) in enumerate([(X, 2), (X + 0.01, 1), (-X, 1), (X * 0, 0)]):
        batch = BATCH._replace(x=x, mask=BATCH.mask * times)
        data = LocalData([batch], DATA.counts * times, KEY)
        client = method.receive(MODEL, method.init_client(SPEC), data, down)
        client = client._replace(params={n: p + number for n, p in client.params.items()})
        up, kept = method.upload(MODEL, client, data, down)
        assert kept.memory == {}
        updates.append(alone(up))
    cohort = torch.tensor([4, 8, 6, 9])
    up = merge(merge(updates[0], updates[1]), merge(updates[2], updates[3]))
    server = method.aggregate(method.init_server(SPEC), up, cohort)
    rows = up["head"].rows
    mixed = mixtures(rows["spread"], rows["means"], rows["there"] > 0, 0.0)
    assert float(mixed[0, 1]) > 0.3 > float(mixed[0, 2]), "the like one is trusted more"
    assert server["owners"].tolist() == [-1, 4, 6, 8], "nobody, and those with samples"
    assert server["heads"].weight.tolist() == [0, 1, 1, 1]
    later = torch.tensor([6, 5, 9])
    for place, who in enumerate(later.tolist()):
        got = method.receive(MODEL, method.init_client(SPEC), DATA, deal(method.broadcast(server, later), place))
        expected = PARAMS["head.fc.weight"]
        if who == 6:
            weights = mixed[2] * (mixed[2] >= method.least)
            weights = weights / weights.sum()
            expected = sum(weights[j] * (PARAMS["head.fc.weight"] + j) for j in range(4))  # type: ignore[assignment]
        torch.testing.assert_close(got.params["head.fc.weight"], expected, msg=f"client {who}")
    body = server["body"]["params"]["body.fc.weight"]
    torch.testing.assert_close(body, PARAMS["body.fc.weight"] + 0.75)  # the mean of 0, 0, 1 and 2, by samples
    torch.testing.assert_close(method.prototypes(server).value[3, 0], up["prototypes"].value[3])
    kept = FedPAC(smallest=0.0, least=0.25).aggregate(method.init_server(SPEC), up, cohort)
    large = mixed[:3] * (mixed[:3] >= 0.25)
    assert bool((large.sum(1) < 0.999).any()), "something is left out"
    expected = large / large.sum(1, keepdim=True) @ torch.cat([v.flatten(1) for v in rows["head"].values()], 1)
    torch.testing.assert_close(kept["heads"].total[[1, 3, 2]], expected)
    none = FedPAC(smallest=0.0, least=1.0).aggregate(method.init_server(SPEC), up, cohort)["owners"]
    whole = [number for number, row in zip([4, 8, 6], mixed, strict=False) if row.max() == 1]
    assert none.tolist() == [-1, *sorted(whole)], "else nothing would be mixed"
    coarse = FedPAC(smallest=100.0).aggregate(method.init_server(SPEC), up, cohort)["heads"].total
    assert not torch.allclose(coarse, server["heads"].total)
    assert not any(name.startswith("head.") for name in server["body"]["params"])
    assert isinstance(method.init_client(SPEC), Client)


class Loops:
    """FedPAC in loops over single samples; a mixture waits for its client until that takes part again."""

    def __init__(self, method: FedPAC) -> None:
        self.method, self.first = method, ragged.newcomer(method).params
        self.body = {n: v for n, v in self.first.items() if n.startswith("body.")}
        self.prototypes: dict[int, torch.Tensor] = {}
        self.clients: dict[int, Params] = {}
        self.mixed: dict[int, Params] = {}

    def statistics(self, p: Params, number: int) -> tuple[torch.Tensor, torch.Tensor, dict[int, torch.Tensor]]:
        pairs = [(ragged.embedding(p, x), y) for x, y in ragged.listed(number)]
        means, n = ragged.class_means(pairs), max(1, len(pairs))
        spread, told = torch.zeros((), dtype=torch.float64), torch.zeros(ragged.CLASSES, ragged.DIM).double()
        for c, mean in means.items():
            square = [(z**2).sum() for z, y in pairs if y == c]
            share = len(square) / n
            spread += share * sum(square) / len(square) - share**2 * (mean**2).sum()
            told[c] = share * mean
        return spread / n, told, means

    def body_loss(self, p: Params, batch: list[Any], own: dict[int, torch.Tensor]) -> torch.Tensor:
        value = torch.zeros((), dtype=torch.float64)
        for x, y in batch:
            z = ragged.embedding(p, x)
            value = value + ragged.entropy(ragged.logits(p, z), y)
            if self.prototypes:
                value = value + self.method.lam * ((z - self.prototypes.get(y, own[y])) ** 2).mean()
        return value / len(batch)

    def plain(self, p: Params, batch: list[Any]) -> torch.Tensor:
        found = [ragged.entropy(ragged.logits(p, ragged.embedding(p, x)), y) for x, y in batch]
        return torch.stack(found).mean()

    def round(self, cohort: tuple[int, ...]) -> None:
        told, models, pairs = {}, [], []
        for number in cohort:
            p = self.clients.get(number, self.first) | self.body | self.mixed.get(number, {})
            spread, means, own = self.statistics(p, number)
            p = ragged.trained(p, number, self.plain, ("head.",), self.method.head_epochs, self.method.head_lr)
            p = ragged.trained(p, number, lambda q, batch, own=own: self.body_loss(q, batch, own), ("body.",))  # type: ignore[misc]
            self.clients[number] = p
            models.append((float(len(ragged.listed(number))), {n: p[n] for n in self.body}))
            pairs += [(ragged.embedding(p, x), y) for x, y in ragged.listed(number)]
            if ragged.listed(number):
                told[number] = spread, means
        self.body = ragged.mean_by(models, self.body)
        self.prototypes |= ragged.class_means(pairs)
        spreads, rows = (torch.stack(parts) for parts in zip(*told.values(), strict=True))
        weights = mixtures(spreads, rows, torch.ones(len(told), dtype=torch.bool), self.method.smallest)
        weights = weights * (weights >= self.method.least)
        weights = weights / weights.sum(1, keepdim=True)
        for number, row in zip(told, weights, strict=True):
            heads = [{n: v for n, v in self.clients[other].items() if n.startswith("head.")} for other in told]
            self.mixed[number] = {n: sum(a * head[n] for a, head in zip(row, heads, strict=True)) for n in heads[0]}  # type: ignore[misc]


@pytest.mark.parametrize("reading", ["paper", "official"])
def test_rounds_in_loops(reading: str) -> None:
    method = FedPAC.preset(reading, lam=0.7, head_lr=0.3)
    played, loops = ragged.play(method), Loops(method)
    for cohort in ragged.COHORTS:
        loops.round(cohort)
    for name, value in loops.body.items():
        ragged.close(played.server["body"]["params"][name], value, name)
    for c, value in loops.prototypes.items():
        ragged.close(played.server["prototypes"].value[c], value, f"class {c}")
    for number, params in loops.clients.items():
        for name, value in params.items():
            ragged.close(played.clients[number].params[name], value, f"client {number}, {name}")


def test_a_mixture_waits_for_a_client_that_is_absent() -> None:
    """Client 1 takes part in round 0 and again in round 2."""
    method = FedPAC(smallest=0.0)
    played = ragged.play(method)
    after_first, after_second = played.servers[1], played.servers[2]

    def head(server: Any, number: int) -> Mean:
        sent: Mean = deal(method.broadcast(server, torch.tensor([3, number])), 1)["head"]
        return sent

    assert float(head(after_first, 1).weight) == float(head(after_second, 1).weight) == 1.0
    assert torch.equal(head(after_second, 1).total, head(after_first, 1).total)
    assert not torch.equal(head(after_second, 0).total, head(after_first, 0).total), "client 0 took part in round 1"
    assert after_second["owners"].tolist() == [-1, 0, 1, 2, 3], "each of them once, and nobody"
    assert float(head(after_second, 4).weight) == 0.0, "it has no samples, and keeps the head it has"


def test_a_newcomer_keeps_its_own_head() -> None:
    method = FedPAC()
    server = ragged.play(method).server
    down = method.newcomer(server)
    start = ragged.newcomer(method)
    got = method.receive(ragged.MODEL, start, ragged.local_data(1, 0), down)
    assert torch.equal(got.params["head.fc.weight"], start.params["head.fc.weight"])
    assert torch.equal(got.params["body.fc.weight"], server["body"]["params"]["body.fc.weight"])
