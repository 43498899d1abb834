"""Linear discriminants that mix a client's own statistics with everybody's, against loops over folds and shares."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from protofed.config.experiment import Experiment
from protofed.method import Batch, Client, LocalData, Phase, Spec, Tree
from protofed.methods.lda import LDA
from protofed.ops import random
from protofed.ops.heads import linear_scores
from protofed.ops.mixing import best_mixture, halves, mixed_head
from protofed.ops.statistics import embedding_sums, usual_shrinkage
from protofed.ops.trees import deal
from protofed.runs.folder import RunFolder
from protofed.runs.loop import run
from protofed.runs.setup import prepare

CLASSES, DIM, FLOOR = 4, 3, 1e-4
BETAS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9)
Part = tuple[np.ndarray, np.ndarray]


def samples(many: int, seed: int, apart: float) -> Part:
    """Embeddings as multiples of 2^-16, whose sums are exact; their classes lie elsewhere by `apart`."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, CLASSES - 1, many)  # nobody has the last class
    centres = np.random.default_rng(9).normal(size=(CLASSES, DIM))
    x = centres[y] + apart * rng.normal(size=(CLASSES, DIM))[y] + rng.normal(size=(many, DIM)) * [1, 2, 0.5]
    return (x * 2**16).round() / 2**16, y


def sums(part: Part) -> Tree:
    x, y = torch.from_numpy(part[0]), torch.from_numpy(part[1])
    return embedding_sums(x, Batch(x, y, torch.ones(len(y))), CLASSES, "shared")


def covariance(part: Part, within: bool, shrinkage: float) -> np.ndarray:
    x, y = part
    centre = np.stack([x[y == c].mean(0) for c in y]) if within else x.mean(0)
    freedom = len(x) - (len(set(y.tolist())) if within else 1)
    found = (x - centre).T @ (x - centre) / freedom
    if freedom < DIM:
        shrinkage = max(shrinkage, float(usual_shrinkage(torch.from_numpy(found), torch.tensor(float(freedom)))))
    return (1 - shrinkage) * found + shrinkage * np.trace(found) / DIM * np.eye(DIM)


def by_hand(everyone: Part, own: Part, beta: float, within: bool, shrinkage: float) -> tuple[np.ndarray, np.ndarray]:
    """Weight and bias of each class."""
    mixed = (1 - beta) * covariance(everyone, within, shrinkage) + beta * covariance(own, within, shrinkage)
    weight, bias = np.zeros((CLASSES, DIM)), np.full(CLASSES, -np.inf)
    for c in range(CLASSES):
        means = [part[0][part[1] == c].mean(0) for part in (own, everyone) if (part[1] == c).any()]
        if means:  # of both, or of the one that has the class
            mean = beta * means[0] + (1 - beta) * means[-1]
            weight[c] = np.linalg.solve(mixed, mean)
            bias[c] = -mean @ weight[c] / 2 + np.log((own[1] == c).mean() + FLOOR)
    return weight, bias


def entropy(head: tuple[np.ndarray, np.ndarray], part: Part) -> float:
    scores = part[0] @ head[0].T + head[1]
    return float((np.log(np.exp(scores).sum(1)) - scores[np.arange(len(scores)), part[1]]).sum())


def rows(part: Part, chosen: np.ndarray) -> Part:
    return part[0][chosen], part[1][chosen]


def joined(*parts: Part) -> Part:
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


@pytest.mark.parametrize("within", [True, False])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_a_mixed_head_by_hand(within: bool, beta: float) -> None:
    """The client has a class that nobody else sent, and lacks one that others have."""
    others, own = samples(60, 1, 0.0), samples(40, 2, 1.0)
    others, own = rows(others, others[1] != 0), rows(own, own[1] != 2)
    few = rows(own, np.array([np.flatnonzero(own[1] == c)[i] for c, i in ((0, 0), (1, 0), (1, 1))]))
    single = rows(others, (others[1] != 1) | (np.arange(len(others[1])) == np.flatnonzero(others[1] == 1)[0]))
    # a client that never took part is not among all
    for everyone, mine in ((others, own), (joined(others, own), own), (others, few), (single, own)):
        head = mixed_head(sums(everyone), sums(mine), beta, within, 0.1)
        weight, bias = by_hand(everyone, mine, beta, within, 0.1)
        assert head["held"].tolist() == [True, True, True, False]
        np.testing.assert_allclose(head["weight"], weight, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(head["bias"][:3], bias[:3], rtol=1e-5, atol=1e-5)
        assert head["bias"][3] == 0


def test_halves_are_of_each_class() -> None:
    x, y = samples(50, 3, 0.0)
    mask = torch.ones(50)
    mask[[4, 11]] = 0
    folds = halves(torch.from_numpy(x), torch.from_numpy(y), mask, CLASSES, random.key("halves"))
    assert len(folds) == 2
    assert sum(len(fold.y) for fold in folds) == 48
    counts = [torch.bincount(fold.y, minlength=CLASSES) for fold in folds]
    assert int((counts[0] - counts[1]).abs().max()) <= 1
    for fold in folds:
        assert torch.equal(fold.sums["means"].weight, torch.bincount(fold.y, minlength=CLASSES).double())
        assert fold.sums["second"].total.shape == (DIM * (DIM + 1) // 2,)
    found = {tuple(row) for fold in folds for row in fold.z.tolist()}
    assert found == {tuple(row) for row in x[mask.numpy() > 0].tolist()}


@pytest.mark.parametrize("within", [True, False])
def test_the_share_is_the_best_on_samples_that_are_left_out(within: bool) -> None:
    """Left out of a client's own sums and out of everybody's, in which it is."""
    found, expected, leaky = list[float](), list[float](), list[float]()
    for seed in range(8):
        others, own = samples(30, seed, 0.0), samples(24, seed + 50, 0.25 * (seed % 4))
        z, y = torch.from_numpy(own[0]), torch.from_numpy(own[1])
        folds = halves(z, y, torch.ones(len(y)), CLASSES, random.key("mixture", seed))
        everyone = joined(others, own)
        found.append(best_mixture(sums(everyone), sums(own), folds, BETAS, within, 0.1))
        worth, wrong = np.zeros(len(BETAS)), np.zeros(len(BETAS))
        for fold in folds:
            held = np.array([any((row == z).all() for z in fold.z.numpy()) for row in own[0]])
            rest, part = rows(own, ~held), rows(own, held)
            for place, beta in enumerate(BETAS):
                worth[place] += entropy(by_hand(joined(others, rest), rest, beta, within, 0.1), part)
                wrong[place] += entropy(by_hand(everyone, rest, beta, within, 0.1), part)
        expected.append(BETAS[worth.argmin()])
        leaky.append(BETAS[wrong.argmin()])
    assert found == expected
    assert len(set(found)) > 2
    assert leaky != expected, "and it would show if they were not"


def test_a_class_that_is_only_in_the_half_left_out_decides_nothing() -> None:
    others, own = samples(40, 1, 0.0), samples(30, 2, 0.5)
    own[1][7] = CLASSES - 1  # the only sample of its class anywhere
    z, y = torch.from_numpy(own[0]), torch.from_numpy(own[1])
    folds = halves(z, y, torch.ones(len(y)), CLASSES, random.key("single"))
    plain = [fold._replace(z=fold.z[fold.y != 3], y=fold.y[fold.y != 3]) for fold in folds]
    everyone = sums(joined(others, own))
    kept = [best_mixture(everyone, sums(own), some, BETAS, True, 0.1) for some in (folds, plain)]
    assert kept[0] == kept[1]
    none = [fold._replace(z=fold.z[:0], y=fold.y[:0]) for fold in folds]
    assert best_mixture(everyone, sums(own), none, BETAS, True, 0.1) == BETAS[0], "of equally good ones the first"


def test_a_personal_head_is_made_after_the_last_round() -> None:
    spec = Spec("toy", CLASSES, DIM, {"body.w": torch.ones(2)}, {"body.b": torch.zeros(2)}, 0)
    client = LDA(personal=True).init_client(spec)
    assert (client.params, client.buffers) == (spec.params, spec.buffers)
    assert {name: (value.shape, value.dtype) for name, value in client.memory.items()} == {
        "weight": ((CLASSES, DIM), torch.float32),
        "bias": ((CLASSES,), torch.float32),
        "held": ((CLASSES,), torch.bool),
        "beta": ((), torch.float32),
    }
    assert not any(bool(value.any()) for value in client.memory.values()), "none yet"
    assert LDA(personal=True).last_phases() == (Phase(("head.",), epochs=0),), "no step, but a pass to make it in"
    assert LDA().init_client(spec) == Client(spec.params, spec.buffers)
    assert LDA().last_phases() == ()


class Identity:
    """A model whose embedding is the input."""

    def embed(self, client: Client, x: Tensor, at: str = "") -> Tensor:
        return x


def test_the_method_says_what_is_mixed() -> None:
    """Nobody has the last class, and the client lacks another one."""
    others, own = samples(60, 1, 0.0), samples(24, 7, 1.0)
    own = rows(own, own[1] != 2)
    x, y = torch.from_numpy(own[0]).float(), torch.from_numpy(own[1])
    data = LocalData([Batch(x, y, torch.ones(len(y)))], torch.bincount(y, minlength=CLASSES).float(), random.key("lda"))
    everyone, mine = sums(joined(others, own)), sums(own)
    model: Any = Identity()
    found = []
    for within, shrinkage in ((True, 0.9), (False, 0.2)):
        method = LDA(personal=True, covariance="within" if within else "total", shrinkage=shrinkage)
        down = {"head": method.head(everyone), "sums": everyone, "counted": torch.tensor(1)}
        client = method.last_receive(model, Client({}, {}), data, down)
        folds = halves(x, y, torch.ones(len(y)), CLASSES, data.key)
        beta = best_mixture(everyone, mine, folds, BETAS, within, shrinkage)
        head = mixed_head(everyone, mine, beta, within, shrinkage)
        found.append(beta)
        assert float(client.memory["beta"]) == pytest.approx(beta)
        for name, value in head.items():
            torch.testing.assert_close(client.memory[name], value, msg=name)
        torch.testing.assert_close(method.predict(model, client, x, down)["head"], linear_scores(head, x))
    assert found == [0.9, 0.25], "with the default covariance and shrinkage it would be 0"


def test_a_run_ends_with_a_head_for_each_client() -> None:
    few = ["model=mlp_digits", "method=lda", "method.personal=true", "clients=4", "rounds=2", "evaluate.gm=0"]
    plan = Experiment.load("demo", *few, "record.enabled=false", "partition.shots=6", "participation=0.5")
    result = run(plan, "out")
    state = RunFolder(result.folder).restore()[0]
    assert state is not None
    assert state.clients.keys() == set(range(4))
    engine = prepare(plan).reference
    for number, client in state.clients.items():
        held = engine.federation.class_counts(number) > 0
        assert bool(client.memory["held"][held].all()), "all of its own classes"
        assert not torch.equal(client.memory["bias"], state.server["head"]["bias"])
        x = engine.federation.test(number, "own").x
        down = deal(plan.method.broadcast(state.server, torch.tensor([number])), 0)
        got = plan.method.predict(engine.model(number), client, x, down)["head"]
        torch.testing.assert_close(
            got, linear_scores(client.memory, plan.method.embed(engine.model(number), client, x))
        )
