"""pFedFDA against loops over single samples; the mixture is found again, pair by pair, by Gauss's elimination."""

import itertools

import numpy as np
import pytest
import torch
from ragged import (
    CLASSES,
    COHORTS,
    DIM,
    EPOCHS,
    LABELS,
    MODEL,
    close,
    doubled,
    doubles,
    embedding,
    entropy,
    first_params,
    listed,
    local_data,
    newcomer,
    play,
    spec,
    trained,
)
from torch import Tensor

from protofed.method import Params
from protofed.methods.pfedfda import PFedFDA
from protofed.ops import random
from protofed.ops.trees import deal

Pairs = list[tuple[np.ndarray, int]]


def estimate(pairs: Pairs, means: np.ndarray, ball: float) -> tuple[np.ndarray, np.ndarray]:
    """Class means and covariance; a class with two samples or fewer has everybody's mean."""
    own = means.copy()
    for c in range(CLASSES):
        rows = [z for z, y in pairs if y == c]
        if len(rows) > 2:
            own[c] = sum(rows) / len(rows)
    scatter = np.zeros((DIM, DIM))
    for z, y in pairs:
        scatter += np.outer(z - own[y], z - own[y])
    return own, scatter / max(len(pairs) - 1, 1) + ball * np.eye(DIM)


def head_of(means: np.ndarray, covariance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    square = (1 - 1e-4) * covariance + 1e-4 * np.trace(covariance) / DIM * np.eye(DIM)
    weight = np.stack([np.linalg.solve(square, mean) for mean in means])
    return weight, np.array([-w @ m / 2 for w, m in zip(weight, means, strict=True)])


def prior_of(client: int) -> np.ndarray:
    share = np.array([sum(y == c for _, y in listed(client)) for c in range(CLASSES)], float)
    share = share / max(share.sum(), 1) + 1e-4
    return np.log(share / share.sum())


def blend(own: tuple, everyone: tuple, a: float, b: float) -> tuple[np.ndarray, np.ndarray]:
    return a * own[0] + (1 - a) * everyone[0], b * own[1] + (1 - b) * everyone[1]


def mixture(method: PFedFDA, pairs: Pairs, client: int, round: int, everyone: tuple) -> tuple[np.ndarray, np.ndarray]:
    """The best pair of shares, and the Gaussian that they make."""
    many = {c: sum(y == c for _, y in pairs) for c in range(CLASSES)}
    known = [(z, y) for z, y in pairs if many[y] >= 2]
    data = local_data(client, round)
    y, mask = torch.cat([b.y for b in data.batches]), torch.cat([b.mask for b in data.batches])
    counted = torch.tensor([many[int(label)] >= 2 for label in y]) & (mask > 0)
    half = (random.ranks(random.fold(data.key, -2), y, counted) % 2)[counted].tolist()
    found = {}
    for a, b in itertools.product(method.betas, method.betas):
        if method.single and a != b:
            continue
        worth = 0.0
        for number in range(2):
            rest = [pair for pair, side in zip(known, half, strict=True) if side != number]
            test = [pair for pair, side in zip(known, half, strict=True) if side == number]
            weight, bias = head_of(*blend(estimate(rest, everyone[0], method.ball), everyone, a, b))
            for z, label in test:
                scores = weight @ z + bias + prior_of(client)
                worth += float(entropy(torch.tensor(scores), label)) / len(test)
        found[a, b] = worth
    best = min(found.values())
    a, b = next(pair for pair, worth in found.items() if worth <= best + 1e-4)
    return blend(estimate(pairs, everyone[0], method.ball), everyone, a, b)


def bodies(p: Params) -> Params:
    return {n: v for n, v in p.items() if n.startswith("body.")}


def pairs_of(p: Params, client: int) -> Pairs:
    return [(embedding(p, x).numpy(), y) for x, y in listed(client)]


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("reading", ["paper", "official"])
def test_rounds_in_loops(reading: str, single: bool) -> None:
    method = PFedFDA.preset(reading, single=single, betas=(0.0, 0.3, 0.8, 1.0))
    played = play(method)
    first = played.servers[0]["gaussian"].values()
    everyone, body = tuple(part.numpy() for part in first), bodies(first_params())
    np.testing.assert_array_equal(everyone[1], np.eye(DIM))
    heads = {}
    for round, cohort in enumerate(COHORTS):
        weight, bias = (torch.tensor(part) for part in head_of(*everyone))
        sent = []
        for number in cohort:
            prior = torch.tensor(prior_of(number))

            def loss(
                p: Params, batch: list[tuple[Tensor, int]], w: Tensor = weight, b: Tensor = bias + prior
            ) -> Tensor:
                return torch.stack([entropy(w @ embedding(p, x) + b, y) for x, y in batch]).mean()

            p = trained(body, number, loss, ("body.",), EPOCHS)
            mixed = mixture(method, pairs_of(p, number), number, round, everyone)
            heads[number] = head_of(*mixed)
            sent.append((len(listed(number)), p, mixed))
        whole = sum(n for n, _, _ in sent)
        body = {name: sum(n * p[name] for n, p, _ in sent) / whole for name in body}  # type: ignore[misc]
        everyone = tuple(sum(n * m[i] for n, _, m in sent) / whole for i in range(2))
    for name, value in body.items():
        close(played.server["body"]["params"][name], value, name)
    for part, value in zip(played.server["gaussian"].values(), everyone, strict=True):
        close(part, torch.tensor(value), "Gaussian")
    x = torch.stack([x for x, _ in listed(0)])
    down = deal(method.broadcast(played.server, torch.tensor([0])), 0)
    for number in (0, 1, 3):
        client, (weight, bias) = played.clients[number], heads[number]
        z = np.stack([embedding(client.params, row).numpy() for row in x])
        expected = z @ weight.T + bias + prior_of(number)
        close(method.predict(MODEL, client, x, down)["head"], torch.tensor(expected), f"client {number}")


def test_after_the_last_round_a_client_mixes_on_the_newest_body() -> None:
    method = PFedFDA(betas=(0.0, 0.5, 1.0))
    played = play(method)
    down = deal(method.broadcast(played.server, torch.tensor([0])), 0)
    (phase,) = method.last_phases()
    assert phase.epochs == 0
    for number in (0, 2):
        with doubles():
            client = method.last_receive(MODEL, played.clients[number], local_data(number, 9), down)
        body = played.server["body"]["params"]
        for name, value in body.items():
            close(client.params[name], value)
        everyone = tuple(part.numpy() for part in played.server["gaussian"].values())
        weight, bias = head_of(*mixture(method, pairs_of(body, number), number, 9, everyone))
        close(client.memory["head"]["weight"], torch.tensor(weight))
        close(client.memory["head"]["bias"], torch.tensor(bias + prior_of(number)))


def test_without_samples_everybodys_head_is_used() -> None:
    method = PFedFDA(betas=(0.0, 1.0))
    played = play(method)
    x = torch.stack([x for x, _ in listed(0)])
    down = deal(method.broadcast(played.server, torch.tensor([4])), 0)
    weight, bias = head_of(*(part.numpy() for part in played.server["gaussian"].values()))
    for client in (newcomer(method), played.clients[4]):
        z = np.stack([embedding(client.params, row).numpy() for row in x])
        close(method.predict(MODEL, client, x, down)["head"], torch.tensor(z @ weight.T + bias))
    assert not LABELS[4]


def test_everybodys_statistics_alone_make_one_head_for_all_but_the_prior() -> None:
    method = PFedFDA(betas=(0.0,))
    played = play(method)
    close(played.server["gaussian"], doubled(played.servers[0]["gaussian"]))
    one, other = (played.clients[number].memory for number in (0, 2))
    close(one["head"]["weight"], other["head"]["weight"])
    close(one["head"]["bias"] - one["prior"], other["head"]["bias"] - other["prior"])
    assert spec().dim == DIM
