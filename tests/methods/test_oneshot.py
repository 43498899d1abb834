"""One-shot heads against other implementations, under any split of the samples, and when clients come and go."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import multivariate_normal
from sklearn.covariance import oas
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis, QuadraticDiscriminantAnalysis
from sklearn.linear_model import Ridge as SkRidge
from sklearn.neighbors import NearestCentroid
from torch import Tensor
from torch.utils._pytree import tree_leaves

from protofed.config.experiment import Experiment
from protofed.errors import UserError
from protofed.method import Batch, Client, LocalData, Mean, Method, Spec, Tree
from protofed.methods import METHODS
from protofed.methods.lda import LDA
from protofed.methods.oneshot import OneShot
from protofed.methods.ridge import Ridge
from protofed.ops import random
from protofed.ops.heads import Prior, log_prior
from protofed.ops.matching import retrain
from protofed.ops.statistics import (
    class_scatters,
    drawn_embeddings,
    embedding_sums,
    enough_shrinkage,
    on_grid,
    shrunk,
    subtracted,
    symmetric,
    upper_triangle,
    usual_shrinkage,
)
from protofed.ops.trees import alone, deal, merge
from protofed.runs.folder import RunFolder
from protofed.runs.loop import run
from protofed.runs.watch import Watch

CLASSES, DIM = 4, 5
HEADS = [
    METHODS["classmeans"](),
    METHODS["classmeans"](distance="cosine"),
    METHODS["lda"](),
    METHODS["lda"].preset("fedcgs"),
    METHODS["qda"](),
    METHODS["qda"].preset("official"),
    METHODS["ridge"](),
    METHODS["ridge"].preset("fed3r"),
    METHODS["ridge"].preset("afl"),
]


class Identity:
    """A model whose embedding is the input."""

    def embed(self, client: Client, x: Tensor, at: str = "") -> Tensor:
        return x


def samples(many: int, seed: int = 0, classes: int = CLASSES) -> tuple[Tensor, Tensor]:
    """Correlated embeddings in which classes differ; class c is rarer the larger c is."""
    rng = np.random.default_rng(seed)
    y = np.minimum(rng.geometric(0.4, many) - 1, classes - 1)
    x = rng.normal(size=(many, DIM)) @ rng.normal(size=(DIM, DIM)) + 1.5 * rng.normal(size=(classes, DIM))[y] + 2
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


def local(x: Tensor, y: Tensor, size: int = 7) -> LocalData:
    """A client's data, in batches."""
    parts = zip(torch.split(x, size), torch.split(y, size), strict=True)
    batches = [Batch(a, b, torch.ones(len(b))) for a, b in parts]
    return LocalData(batches, torch.bincount(y, minlength=CLASSES).float(), random.key("test"))


def server_of(method: Method, parts: list[tuple[Tensor, Tensor]], rounds: int = 1, size: int = 7) -> Tree:
    """What the server holds after clients with these samples took part."""
    spec = Spec("toy", CLASSES, DIM, {}, {}, 0, len(parts))
    server, cohort = method.init_server(spec), torch.arange(len(parts))
    for _ in range(rounds):
        down, up = method.broadcast(server, cohort), None
        for row, (x, y) in enumerate(parts):
            mine = method.upload(Identity(), Client({}, {}), local(x, y, size), deal(down, row))[0]  # type: ignore[arg-type]
            up = alone(mine) if up is None else merge(up, alone(mine))
        server = method.aggregate(server, up, cohort)
    return server


def scores(method: Any, server: Tree, x: Tensor) -> Tensor:
    found: Tensor = method.predict(Identity(), Client({}, {}), x, method.broadcast(server, torch.tensor([0])))["head"]
    return found


def equal(left: Tree, right: Tree) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tree_leaves(left), tree_leaves(right), strict=True))


@pytest.mark.parametrize("method", HEADS, ids=repr)
@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=40, max_size=40), st.integers(0, 100), st.integers(1, 40))
def test_any_split_of_the_same_samples_gives_the_same_head(
    method: OneShot, owners: list[int], seed: int, size: int
) -> None:
    """To the bit, in whatever order and batches; clients without samples included."""
    x, y = samples(40, seed)
    owner = torch.tensor(owners)
    parts = [(x[owner == number].flip(0), y[owner == number].flip(0)) for number in range(6)]
    parts = [(a, b) for a, b in parts if len(b)]
    split, whole = server_of(method, parts, size=size), server_of(method, [(x, y)])
    assert equal(split["head"], whole["head"])
    assert equal(split["sums"], whole["sums"])


@pytest.mark.parametrize("method", HEADS, ids=repr)
def test_nobody_counts_twice_and_who_leaves_is_forgotten_to_the_bit(method: OneShot) -> None:
    x, y = samples(60)
    parts = [(x[:20], y[:20]), (x[20:45], y[20:45]), (x[45:], y[45:])]
    server = server_of(method, parts)
    assert equal(server["head"], server_of(method, parts, rounds=3)["head"])
    gone = method.own_sums(Identity(), Client({}, {}), local(*parts[1]))  # type: ignore[arg-type]
    left = subtracted(server["sums"], gone)
    without = server_of(method, [parts[0], parts[2]])
    assert equal(left, without["sums"])
    assert equal(method.head(left), without["head"])
    assert not equal(method.head(left), server["head"])


def test_a_client_is_asked_for_its_sums_until_the_server_has_them() -> None:
    """An answer that was lost on its way is sent again, and one that arrived is not."""
    method, cohort = METHODS["lda"](), torch.tensor([2, 0])
    server = method.init_server(Spec("toy", CLASSES, DIM, {}, {}, 0, 3))
    x, y = samples(20)
    up = alone(method.upload(Identity(), Client({}, {}), local(x, y), deal(method.broadcast(server, cohort), 0))[0])
    after = method.aggregate(server, up, torch.tensor([2]))  # of the two, only client 2 was heard
    assert method.broadcast(after, torch.tensor([0, 1, 2]))["counted"].rows.tolist() == [0, 0, 1]
    again = method.upload(Identity(), Client({}, {}), local(x, y), deal(method.broadcast(after, cohort), 0))[0]
    assert all(not bool(leaf.any()) for leaf in tree_leaves(again))


def test_a_class_that_nobody_holds_is_never_chosen() -> None:
    """One with a single sample may be."""
    x, y = samples(60)
    y[y == 3] = 0
    y[5] = 3
    keep = y != 2
    for method in HEADS:
        server = server_of(method, [(x[keep], y[keep])])
        found = scores(method, server, x)
        assert bool((found[:, 2] == -torch.inf).all())
        assert bool(found[:, [0, 1, 3]].isfinite().all())
        assert server["head"]["held"].tolist() == [True, True, False, True]
        for part in server["head"].values():
            assert part.ndim == 0 or not bool(part[2].any()), "zeros, and not held"


def test_no_more_is_sent_than_a_head_needs() -> None:
    x, y = samples(20)
    wanted = [(), (), (15,), (15,), (CLASSES, 15), (CLASSES, DIM), (15,), (15,), (15,)]
    for method, shape in zip(HEADS, wanted, strict=True):
        own = method.own_sums(Identity(), Client({}, {}), local(x, y))  # type: ignore[arg-type]
        assert own["means"].total.shape == (CLASSES, DIM)
        assert own.keys() == ({"means", "second"} if shape else {"means"})
        assert not shape or own["second"].total.shape == shape
        assert not type(method).stackable, "second moments of many clients at once would take memory"
        down = method.broadcast(server_of(method, [(x, y)]), torch.tensor([0]))
        assert down.keys() == {"head", "counted"}, "sums go down for personal heads alone"


def test_how_likely_a_class_is_beforehand() -> None:
    def prior(*counts: float, kind: Prior = "counts", floor: float = 0.0) -> list[float]:
        return log_prior(torch.tensor(counts, dtype=torch.float64), kind, floor).exp().tolist()

    assert prior(1, 3, 0) == pytest.approx([1 / 4, 3 / 4, 1]), "log 0 stands for nothing"
    assert prior(1, 0) == [1, 1]
    assert prior(0, 0) == [1, 1]
    assert prior(1, 3, 0, kind="uniform") == [1, 1, 1]
    assert prior(1, 9999, 0, floor=1e-4) == pytest.approx([2e-4, 1, 1e-4])
    assert prior(0, 0, floor=1e-4) == pytest.approx([1e-4, 1e-4])


# against other implementations


def whole(method: OneShot, x: Tensor, y: Tensor) -> Tensor:
    return scores(method, server_of(method, [(x[:30], y[:30]), (x[30:], y[30:])]), x)


def test_lda_is_that_of_scikit_learn_and_of_the_formula() -> None:
    x, y = samples(300)
    z, n = x.double().numpy(), 300
    found = whole(METHODS["lda"](shrinkage=0.0), x, y)
    theirs = LinearDiscriminantAnalysis(solver="lsqr").fit(z, y.numpy())
    np.testing.assert_array_equal(found.argmax(1).numpy(), theirs.predict(z))
    means = np.stack([z[y == c].mean(0) for c in range(CLASSES)])
    apart = z - means[y]
    for kind, covariance in (
        ("within", apart.T @ apart / (n - CLASSES)),
        ("total", (z - z.mean(0)).T @ (z - z.mean(0)) / (n - 1)),
    ):
        for by in (0.0, 0.3):
            ball = np.trace(covariance) / DIM * np.eye(DIM)
            weight = means @ np.linalg.inv((1 - by) * covariance + by * ball)
            bias = np.log(np.bincount(y) / n) - (weight * means).sum(1) / 2
            made = whole(METHODS["lda"](covariance=kind, shrinkage=by), x, y)
            np.testing.assert_allclose(made.numpy(), z @ weight.T + bias, rtol=2e-3, atol=2e-3)
    even = whole(METHODS["lda"](prior="uniform"), x, y) - whole(METHODS["lda"](), x, y)
    np.testing.assert_allclose(even[0].numpy(), np.log(1 / np.bincount(y) * n), rtol=1e-3, atol=1e-3)


def test_qda_is_that_of_scikit_learn() -> None:
    """Scikit-learn divides by n where we divide by n - 1, which its prediction hardly shows."""
    z, found = samples(400)[0].double().numpy(), whole(METHODS["qda"](shrinkage=0.0), *samples(400)).numpy()
    y = samples(400)[1].numpy()
    theirs = QuadraticDiscriminantAnalysis().fit(z, y).predict(z)
    assert (found.argmax(1) == theirs).mean() > 0.98
    wanted = [
        multivariate_normal(z[y == c].mean(0), np.cov(z[y == c].T)).logpdf(z) + np.log((y == c).mean())
        for c in range(CLASSES)
    ]
    constant = DIM / 2 * np.log(2 * np.pi)
    np.testing.assert_allclose(found, np.stack(wanted, 1) + constant, rtol=2e-3, atol=5e-3)
    even = whole(METHODS["qda"](shrinkage=0.0, prior="uniform"), *samples(400)).numpy() - found
    np.testing.assert_allclose(even[0], np.log(400 / np.bincount(y)), rtol=1e-3, atol=1e-3)


def test_naive_bayes_takes_each_number_alone() -> None:
    x, y = samples(200)
    z, wanted = x.double().numpy(), []
    for c in range(CLASSES):
        own = z[y == c]
        variance = own.var(0, ddof=1)
        log = -((z - own.mean(0)) ** 2 / variance).sum(1) / 2 - np.log(variance).sum() / 2
        wanted.append(log + np.log(len(own) / len(z)))
    found = whole(METHODS["qda"].preset("official"), x, y).numpy()
    np.testing.assert_allclose(found, np.stack(wanted, 1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("gamma", [0.01, 3.0])
def test_ridge_is_that_of_scikit_learn(gamma: float) -> None:
    x, y = samples(200)
    z, onehot = x.double().numpy(), np.eye(CLASSES)[y]
    theirs = SkRidge(alpha=gamma, fit_intercept=False).fit(z, onehot)
    np.testing.assert_allclose(whole(Ridge(gamma=gamma), x, y).numpy(), theirs.predict(z), rtol=1e-3, atol=1e-4)
    ones = np.pad(z, ((0, 0), (0, 1)), constant_values=1)
    theirs = SkRidge(alpha=gamma, fit_intercept=False).fit(ones, onehot)
    found = whole(Ridge(gamma=gamma, bias=True), x, y).numpy()
    np.testing.assert_allclose(found, theirs.predict(ones), rtol=1e-3, atol=1e-4)


def test_ridge_without_a_penalty_is_least_squares_of_least_norm() -> None:
    x, y = samples(200)
    x = (x * 1024).round() / 1024
    flat = torch.cat([x, x[:, :2] @ torch.tensor([[1.0, 0.5], [0.25, -2.0]])], 1)  # two columns say nothing new
    assert torch.equal(flat.double(), on_grid(flat))
    server = METHODS["ridge"].preset("afl")
    sums = embedding_sums(flat, Batch(flat, y, torch.ones(len(y))), CLASSES, "shared")
    head = server.head(sums)
    wanted = np.linalg.lstsq(flat.double().numpy(), np.eye(CLASSES)[y], rcond=1e-9)[0]
    np.testing.assert_allclose(flat @ head["weight"].T, flat.numpy() @ wanted, atol=2e-3)


@pytest.mark.parametrize("method", [LDA(), METHODS["qda"]()], ids=repr)
def test_second_moments_that_noise_spoils_still_make_a_classifier(method: OneShot) -> None:
    """Noise that is longer than what embeddings differ by within a class: a covariance is far below zero somewhere."""
    generator, dim = torch.Generator().manual_seed(0), 30
    y = torch.arange(CLASSES).repeat_interleave(100)
    x = 0.3 * torch.randn(len(y), dim, generator=generator) + torch.eye(CLASSES, dim)[y] * 2
    sums = embedding_sums(x, Batch(x, y, torch.ones(len(y))), CLASSES, method.second)
    noise = 10 * torch.randn(sums["second"].total.shape, generator=generator).double()
    spoilt = sums | {"second": Mean(sums["second"].total + noise, sums["second"].weight)}
    assert float(torch.linalg.eigvalsh(symmetric(spoilt["second"].total, dim)).min()) < 0
    found = method.scores_of(method.head(spoilt), x).argmax(1)
    assert float((found == y).double().mean()) > 0.9


def test_class_means_are_those_of_scikit_learn() -> None:
    x, y = samples(200)
    theirs = NearestCentroid().fit(x.numpy(), y.numpy())
    np.testing.assert_array_equal(whole(METHODS["classmeans"](), x, y).argmax(1).numpy(), theirs.predict(x.numpy()))
    means = torch.stack([x[y == c].mean(0) for c in range(CLASSES)])
    wanted = torch.nn.functional.cosine_similarity(x[:, None], means, dim=-1)
    found = whole(METHODS["classmeans"](distance="cosine"), x, y)
    torch.testing.assert_close(found / x.norm(dim=1, keepdim=True), wanted, rtol=1e-3, atol=1e-4)
    prototypes = METHODS["classmeans"]().prototypes(server_of(METHODS["classmeans"](), [(x, y)]))
    torch.testing.assert_close(prototypes.value[:, 0], means, rtol=1e-3, atol=1e-4)


def test_the_usual_shrinkage_is_that_of_scikit_learn() -> None:
    x = samples(30)[0].double()
    centred = x - x.mean(0)
    covariance = centred.T @ centred / len(x)
    wanted, by = oas(centred.numpy(), assume_centered=True)
    found = usual_shrinkage(covariance, torch.tensor(30.0))
    assert float(found) == pytest.approx(by)
    np.testing.assert_allclose(shrunk(covariance, found).numpy(), wanted)


def test_shrinkage_is_as_asked_or_as_much_more_as_few_samples_need() -> None:
    long = torch.diag(torch.tensor([10.0, 1.0, 0.1, 0.1, 0.1]))
    few, enough = torch.tensor(DIM - 1.0), torch.tensor(float(DIM))
    usual = float(usual_shrinkage(long, few))
    assert 0.1 < usual < 0.9
    assert [float(enough_shrinkage(long, few, asked)) for asked in (0.0, 0.01)] == [usual, usual]
    assert float(enough_shrinkage(long, few, 0.95)) == pytest.approx(0.95)
    assert float(enough_shrinkage(long, enough, 0.01)) == pytest.approx(0.01)


def test_triangles_come_back_whole() -> None:
    square = torch.arange(25.0).reshape(5, 5)
    square = torch.stack([square + square.T, square @ square.T])
    assert upper_triangle(square).shape == (2, 15)
    assert torch.equal(symmetric(upper_triangle(square), 5), square)


def test_padding_and_batches_do_not_count() -> None:
    x, y = samples(20)
    mask = torch.ones(20)
    mask[::3] = 0
    keep = mask > 0
    for second in ("shared", "diagonal", "full"):
        padded = embedding_sums(x, Batch(x, y, mask), CLASSES, second)
        plain = embedding_sums(x[keep], Batch(x[keep], y[keep], torch.ones(int(keep.sum()))), CLASSES, second)
        assert equal(padded, plain)


# few samples


def test_fewer_samples_than_dimensions_shrink_enough_and_say_so() -> None:
    x, y = samples(5)
    for method in (METHODS["lda"](shrinkage=0.0), METHODS["lda"].preset("fedcgs")):
        head = server_of(method, [(x, y)])["head"]
        assert 0 < float(head["shrinkage"]) <= 1
        assert bool(scores(method, server_of(method, [(x, y)]), x)[:, y.unique()].isfinite().all())
        told = method.remarks(Spec("toy", CLASSES, DIM, {}, {}, 0), 5)
        assert "singular" in told[0]
        assert "is at least method.shrinkage = 0" in told[0]
        assert "shrinkage = 0.3" in type(method)(shrinkage=0.3).remarks(Spec("toy", CLASSES, DIM, {}, {}, 0), 5)[0]
    many = samples(200)
    assert float(server_of(METHODS["lda"](shrinkage=0.25), [many])["head"]["shrinkage"]) == 0.25
    assert METHODS["lda"]().remarks(Spec("toy", CLASSES, DIM, {}, {}, 0), 200) == ()
    for used, told in ((CLASSES + DIM - 1, True), (CLASSES + DIM, False)):  # each class's mean takes one
        assert bool(METHODS["lda"]().remarks(Spec("toy", CLASSES, DIM, {}, {}, 0), used)) == told
    assert "shrinkage = 0.3" in METHODS["qda"](shrinkage=0.3).remarks(Spec("toy", CLASSES, DIM, {}, {}, 0), 12)[0]
    assert METHODS["qda"](covariance="diagonal").remarks(Spec("toy", CLASSES, DIM, {}, {}, 0), 12) == ()


def test_a_class_with_one_sample_has_the_covariance_of_all() -> None:
    x, y = samples(100)
    y[y == 3] = 0
    y[5] = 3
    head = server_of(METHODS["qda"](shrinkage=0.0), [(x, y)])["head"]
    sums = embedding_sums(x, Batch(x, y, torch.ones(100)), CLASSES, "full")
    own, freedom = class_scatters(sums)
    pooled = (own * freedom[:, None, None]).sum(0) / freedom.sum()
    white = head["whiten"][3].double()
    torch.testing.assert_close(white @ pooled @ white.T, torch.eye(DIM).double(), rtol=1e-3, atol=1e-3)
    assert float(head["shrinkage"][3]) == 0, "all samples together are enough"
    plain = server_of(METHODS["qda"](covariance="diagonal", shrinkage=0.25), [(x, y)])["head"]
    ball = pooled.diagonal().mean()
    spread = 0.75 * pooled.diagonal() + 0.25 * ball
    torch.testing.assert_close(plain["whiten"][3].double() ** -2, spread, rtol=1e-4, atol=1e-4)
    assert plain["shrinkage"].tolist() == [0.25] * CLASSES, "a diagonal is never singular"


def test_a_class_with_two_samples_has_its_own_covariance() -> None:
    """All of it along one line; shrinkage makes it invertible."""
    x, y = samples(100)
    y[y == 3] = 0
    y[[5, 6]] = 3
    head = server_of(METHODS["qda"](shrinkage=0.0), [(x, y)])["head"]
    z = on_grid(x)
    line = (z[5] - z[6]) / (z[5] - z[6]).norm()
    spread = torch.outer(line, line) * ((z[5] - z[6]) ** 2).sum() / 2
    by = float(usual_shrinkage(spread, torch.tensor(1.0)))
    assert float(head["shrinkage"][3]) == pytest.approx(by)
    white = head["whiten"][3].double()
    got = torch.linalg.inv(white.T @ white)
    torch.testing.assert_close(got, shrunk(spread, by), rtol=1e-3, atol=1e-3)
    few = server_of(METHODS["qda"](shrinkage=0.0), [(x[[5, 6, 0]], torch.tensor([0, 0, 1]))])["head"]
    assert float(few["shrinkage"][1]) == pytest.approx(by)
    torch.testing.assert_close(few["whiten"][1], few["whiten"][0], msg="the only covariance that there is")
    seven = server_of(METHODS["qda"](shrinkage=0.0), [(x[:8], torch.tensor([0] * 7 + [1]))])["head"]
    assert seven["shrinkage"].tolist() == [0] * CLASSES, "seven samples are enough, also for the class that has one"


def test_where_samples_of_a_class_are_alike_a_millionth_makes_its_covariance_invertible() -> None:
    x, y = samples(100)
    x[y == 1, 2] = 0.5  # in one dimension
    x[y == 3] = x[y == 3][0]  # in all
    head = server_of(METHODS["qda"](covariance="diagonal", shrinkage=0.0), [(x, y)])["head"]
    own = on_grid(x)[y == 1].var(0)
    assert float(own[2]) == 0
    torch.testing.assert_close(head["whiten"][1].double() ** -2, own + 1e-6 * own.mean(), rtol=1e-4, atol=0)
    torch.testing.assert_close(head["whiten"][3], torch.full((DIM,), 1e6))


# personal heads


def personal(method: LDA, server: Tree, x: Tensor, y: Tensor) -> Client:
    client = method.init_client(Spec("toy", CLASSES, DIM, {}, {}, 0))
    down = deal(method.broadcast(server, torch.tensor([0])), 0)
    return method.last_receive(Identity(), client, local(x, y), down)  # type: ignore[arg-type]


def test_a_personal_head_mixes_as_much_as_helps() -> None:
    """A client whose classes lie elsewhere takes its own statistics; one like all others takes everybody's."""
    method, (x, y) = METHODS["lda"](personal=True), samples(400)
    odd = torch.where((y == 0)[:, None], x + 8, x - 8)[:120].flip(1)
    server = server_of(method, [(x, y), (odd, y[:120])])
    apart = personal(method, server, odd, y[:120])
    alike = personal(method, server_of(method, [(x, y)]), x[:40], y[:40])
    assert float(apart.memory["beta"]) >= 0.5
    assert float(alike.memory["beta"]) < 0.5
    down = method.broadcast(server, torch.tensor([1]))
    mine = method.predict(Identity(), apart, odd, down)["head"].argmax(1) == y[:120]  # type: ignore[arg-type]
    others = scores(method, server, odd).argmax(1) == y[:120]
    assert float(mine.float().mean() - others.float().mean()) > 0.15


def test_with_no_share_of_its_own_a_personal_head_differs_in_the_prior_alone() -> None:
    method, (x, y) = METHODS["lda"](personal=True, betas=(0.0,)), samples(200)
    server = server_of(method, [(x, y)])
    client = personal(method, server, x[:50], y[:50])
    torch.testing.assert_close(client.memory["weight"], server["head"]["weight"], rtol=1e-4, atol=1e-5)
    shift = client.memory["bias"] - server["head"]["bias"]
    wanted = (torch.bincount(y[:50], minlength=CLASSES) / 50 + 1e-4).log() - (torch.bincount(y) / 200).log()
    torch.testing.assert_close(shift, wanted.float(), rtol=1e-3, atol=1e-3)


def test_who_has_no_samples_keeps_the_head_of_all() -> None:
    method, (x, y) = METHODS["lda"](personal=True), samples(50)
    server = server_of(method, [(x, y)])
    client = personal(method, server, x[:0], y[:0])
    assert torch.equal(method.predict(Identity(), client, x, method.broadcast(server, torch.tensor([0])))["head"],
                       scores(method, server, x))  # fmt: skip


# refusals


def test_encoders_must_be_alike() -> None:
    one = Spec("lite0", CLASSES, DIM, {"head.w": torch.zeros(2)}, {}, 0)
    with pytest.raises(UserError, match=r"'lda' adds up embeddings of all clients.*lite0, lite1"):
        METHODS["lda"]().check([one, one._replace(architecture="lite1")])
    with pytest.raises(UserError, match=r"method.init = 'per_client' gives every client an encoder of its own"):
        METHODS["ridge"](init="per_client").check([one])
    METHODS["lda"]().check([one, one])


# CCVR


def test_virtual_embeddings_have_the_moments_of_their_class() -> None:
    x, y = samples(300)
    keep = y != 2
    sums = embedding_sums(x[keep], Batch(x[keep], y[keep], torch.ones(int(keep.sum()))), CLASSES, "full")
    z = drawn_embeddings(sums, sums["means"].weight > 0, 20_000, random.key("ccvr"))
    assert z.shape == (3, 20_000, DIM)
    for place, c in enumerate((0, 1, 3)):
        own = x[y == c].numpy()
        np.testing.assert_allclose(z[place].mean(0), own.mean(0), atol=0.1)
        np.testing.assert_allclose(np.cov(z[place].T.numpy()), np.cov(own.T), rtol=0.1, atol=0.15)


def test_a_head_can_be_trained_on_from_one_that_there_is() -> None:
    """One step on all features of two of three classes, by hand."""
    features = torch.tensor([[[1.0, 0.0]], [[0.0, 2.0]]])
    start = {"weight": torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]]), "bias": torch.tensor([0.0, 0.1, 0.2])}
    got = retrain(features, True, 1, 0, 0.5, random.key("x"), start, torch.tensor([0, 2]))
    z, y = features[:, 0], torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    error = (z @ start["weight"].T + start["bias"]).softmax(1) - y
    torch.testing.assert_close(got["weight"], start["weight"] - 0.5 * error.T @ z / 2)
    torch.testing.assert_close(got["bias"], start["bias"] - 0.5 * error.mean(0))
    plain = retrain(features, False, 1, 0, 0.5, random.key("x"), {"weight": start["weight"]}, torch.tensor([0, 2]))
    assert set(plain) == {"weight"}


def test_ccvr_is_fedavg_with_another_head_one_round_later() -> None:
    few = ["model=cnn_digits", "clients=3", "record.enabled=false", "evaluate.own=0", "evaluate.gm=0", "rounds=2"]
    few += ["engine.threads=1", "partition.shots=4"]
    states = {}
    for name in ("ccvr", "fedavg"):
        run(Experiment.load("demo", f"method={name}", *few), name)
        states[name] = RunFolder(Path(name)).restore()[0]
    mine, theirs = states["ccvr"].server, states["fedavg"].server
    for key, value in theirs["params"].items():
        torch.testing.assert_close(mine["model"]["params"][key], value, rtol=1e-4, atol=1e-6)
    body = [key for key in theirs["params"] if key.startswith("body.")]
    assert any(not torch.equal(mine["calibrated"]["params"][k], mine["model"]["params"][k]) for k in body)
    method = METHODS["ccvr"]()
    assert method.global_client(mine).params is mine["calibrated"]["params"]


# whole runs


def test_a_run_gives_one_head_whatever_the_partition_and_who_takes_part_when() -> None:
    """All samples in one round, or a third of the clients in each of several rounds, iid or by shares."""
    few = ["model=mlp_digits", "method=lda", "record.enabled=false", "evaluate.own=0", "evaluate.gm=0", "clients=6"]
    heads = []
    for name, more in {
        "iid": ["partition=iid", "rounds=1"],
        "skewed": ["partition=dirichlet", "partition.alpha=0.1", "rounds=1"],
        "later": ["partition=iid", "rounds=25", "participation=0.34"],
        "stacked": ["partition=iid", "rounds=1", "engine.name=stacked"],
    }.items():
        result = run(Experiment.load("demo", *few, *more), name)
        state = RunFolder(result.folder).restore()[0]
        assert state is not None
        assert int(state.server["known"].sum()) == 6
        heads.append(state.server["head"])
    for other in heads[1:]:
        for key in ("weight", "bias"):
            torch.testing.assert_close(other[key], heads[0][key], rtol=1e-5, atol=1e-6)


def test_a_run_says_that_one_round_is_enough_and_that_shrinkage_was_chosen() -> None:
    notes: list[str] = []

    class Listen(Watch):
        def note(self, text: str) -> None:
            notes.append(text)

    few = ["model=mlp_digits", "method=lda", "clients=3", "partition.shots=2", "record.enabled=false", "rounds=2"]
    run(Experiment.load("demo", *few), "out", watch=Listen())
    assert any("rounds = 1 is enough" in note for note in notes)
    assert any("is singular" in note for note in notes)
