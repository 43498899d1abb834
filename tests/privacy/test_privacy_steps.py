"""Steps with noise: gradients of single samples, how far one sample moves anything, and what the steps cost."""

import math
from typing import Any

import pytest
import torch
from accountants import by_convolution, by_renyi

from protofed import Experiment, UserError, local
from protofed.data.batches import Samples
from protofed.engines.reference import ReferenceEngine
from protofed.leaks.scores import epsilon_bound
from protofed.method import Batch
from protofed.ops import random
from protofed.ops.trees import deal
from protofed.privacy import accounting
from protofed.privacy.accounting import NOTHING, PaidSteps, affordable, noise_beside, spent, step_noise_for
from protofed.privacy.sgd import as_params, clipped_sum, drawn_rate, steps_in_epoch, with_noise
from protofed.runs.dpsgd import NoisySteps, gradient_sum
from protofed.runs.noised import layout_of, vector_of_samples
from protofed.runs.setup import prepare

pytest.importorskip("dp_accounting", reason="needs dp-accounting: pip install 'protofed[privacy]'")
SMALL = (
    "clients=4", "rounds=2", "model=mlp_digits", "local_epochs=1", "engine=reference", "record.enabled=false",
    "device=cpu", "evaluate.own=0", "evaluate.gm=0", "data.normalize=half", "engine.threads=1", "partition.shots=5",
    "privacy.unit=sample", "privacy.epsilon=1e11", "privacy.sgd_rate=1", "privacy.sgd_noise=1e-5", "privacy.noise=1e-5",
)  # fmt: skip
METHODS = ("fedavg", "fedproto", "fednh", "fedpr", "spfedcl")
CLIP = 0.3


def small(*overrides: str) -> Experiment:
    return Experiment.load("demo", *SMALL, *overrides)


class Play:
    """A client's round of a method whose server has learnt something."""

    def __init__(self, method: str, *more: str) -> None:
        self.experiment = small(f"method={method}", f"privacy.sgd_clip={CLIP}", *more)
        self.method = self.experiment.method
        self.engine = prepare(self.experiment).reference
        self.engine.by_client = False
        server = self.method.init_server(self.engine.specs()[0])
        self.server = self.method.aggregate(server, self.engine.train(self.method, server, range(4), 0).up, ids())
        self.down = deal(self.method.broadcast(self.server, ids()), 1)
        model, data = self.engine.model(1), self.engine.federation.local(1, 0)
        self.client = self.method.receive(model, self.engine.client(self.method, 1), data, self.down)
        self.batch = data.batches[0]

    def sum(self, batch: Batch, clip: float = CLIP) -> torch.Tensor:
        (phase,) = self.method.phases()
        key = random.key("a step")
        return gradient_sum(self.method, self.engine.model(1), phase, self.client, batch, self.down, key, clip)

    def updated(self, engine: ReferenceEngine | None = None) -> Any:
        """One whole round, of a single step in which all samples are, without noise."""
        steps = NoisySteps(self.experiment, 1e-12, "name")
        return steps.update(engine or self.engine, self.method, 1, self.down, 0)


def ids() -> torch.Tensor:
    return torch.arange(4)


@pytest.fixture(scope="module", params=METHODS)
def play(request: pytest.FixtureRequest) -> Play:
    return Play(request.param)


def test_the_gradients_of_single_samples_are_those_of_a_loop(play: Play) -> None:
    (phase,) = play.method.phases()
    rows = []
    for x, y, mask in zip(*play.batch, strict=True):
        alone = Batch(x[None], y[None], mask[None])
        found = local.slopes(play.method, play.engine.model(1), phase, play.client, alone, play.down, random.key("any"))
        rows.append(torch.cat([slope.flatten() for slope in found.grads.values()]).double())
    assert torch.allclose(play.sum(play.batch, clip=1e9), torch.stack(rows).sum(0), atol=1e-4)
    lengths = [float(torch.linalg.vector_norm(row)) for row in rows]
    assert max(lengths) > CLIP
    clipped = torch.stack([row * min(1.0, CLIP / length) for row, length in zip(rows, lengths, strict=True)])
    assert torch.allclose(play.sum(play.batch), clipped.sum(0), atol=1e-4)
    whole = local.slopes(
        play.method, play.engine.model(1), phase, play.client, play.batch, play.down, random.key("any")
    )
    mean = torch.cat([slope.flatten() for slope in whole.grads.values()]).double()
    assert torch.allclose(torch.stack(rows).mean(0), mean, atol=1e-4)  # the same method as without noise


def test_one_sample_moves_the_sum_of_a_step_by_no_more_than_the_clip(play: Play) -> None:
    whole = play.sum(play.batch)
    for row in range(len(play.batch.y)):
        left = torch.arange(len(play.batch.y)) != row
        moved = float(torch.linalg.vector_norm(whole - play.sum(Batch(*(part[left] for part in play.batch)))))
        assert 0 < moved <= CLIP * (1 + 1e-5)
    draw = torch.Generator().manual_seed(3)
    for power in range(-2, 5):
        x, y = play.batch.x.clone(), play.batch.y.clone()
        x[2], y[2] = 10.0**power * torch.randn(x[2].shape, generator=draw), (y[2] + power) % 10
        assert float(torch.linalg.vector_norm(whole - play.sum(Batch(x, y, play.batch.mask)))) <= 2 * CLIP * (1 + 1e-5)


def test_a_sample_reaches_what_a_client_sends_and_keeps_by_its_step_alone(play: Play) -> None:
    """A whole round: nothing is computed from samples but sums of clipped gradients, not even how many there are."""
    federation = play.engine.federation
    before = play.updated()
    old = federation.train(1)
    draw = torch.Generator().manual_seed(4)
    for power in (-1, 0, 3):
        x, y = old.x.clone(), old.y.clone()
        x[0], y[0] = 10.0**power * torch.randn(x[0].shape, generator=draw), (y[0] + 1) % 10
        for changed, most in ((Samples(x, y), 2), (Samples(old.x[1:], old.y[1:]), 1)):
            federation.replace_train({1: changed})
            after = play.updated()
            federation.replace_train({1: old})
            names = before.client.params
            moved = torch.cat([(after.client.params[n] - p).flatten() for n, p in names.items()])
            rate, batch = play.experiment.optimizer.lr, play.experiment.batch_size
            assert 0 < float(torch.linalg.vector_norm(moved)) <= most * CLIP * rate / batch * (1 + 1e-3)
            left, right = (torch.utils._pytree.tree_leaves((one.client.memory, one.loss)) for one in (before, after))
            assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
            weights = [
                one.up["model"].weight for one in (before, after) if isinstance(one.up, dict) and "model" in one.up
            ]
            assert len(set(map(float, weights))) <= 1


def test_one_sample_moves_class_sums_by_no_more_than_the_clip() -> None:
    """Under a model that is trained: it is known already, whatever the sample."""
    play = Play("fedproto", "privacy.clip=0.7")
    layout, federation = layout_of(play.experiment, play.engine, play.server), play.engine.federation
    trained = {1: play.client}

    def summed() -> torch.Tensor:
        return vector_of_samples(layout, play.experiment, play.engine, 1, 0, play.server, trained)[0]

    before, old = summed(), federation.train(1)
    x, y = old.x.clone(), old.y.clone()
    x[0], y[0] = 100.0, (y[0] + 1) % 10
    for changed, most in ((Samples(x, y), 2), (Samples(old.x[1:], old.y[1:]), 1)):
        federation.replace_train({1: changed})
        assert 0 < float(torch.linalg.vector_norm(summed() - before)) <= most * 0.7 * (1 + 1e-6)
        federation.replace_train({1: old})


def test_a_gradient_that_is_not_finite_counts_as_zero() -> None:
    grads = {"a": torch.tensor([[3.0, 0.0], [math.inf, 1.0], [math.nan, 0.0]]), "b": torch.tensor([4.0, 1.0, 1.0])}
    assert clipped_sum(grads, 2.5).tolist() == pytest.approx([1.5, 0, 2])


def test_a_vector_becomes_parameters_again() -> None:
    like = {"a": torch.zeros(2, 3), "scale": torch.zeros(())}
    made = as_params(torch.arange(7.0, dtype=torch.float64), like)
    assert made["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert made["scale"].dtype == torch.float32
    assert float(made["scale"]) == 6


def test_noise_has_the_deviation_that_is_paid_for() -> None:
    noise = with_noise(torch.zeros(40_000, dtype=torch.float64), 0.25, random.key(1))
    assert float(noise.std()) == pytest.approx(0.25, rel=0.02)
    assert abs(float(noise.mean())) < 0.005
    assert not torch.equal(noise, with_noise(torch.zeros(40_000, dtype=torch.float64), 0.25, random.key(2)))


# batches


def test_each_sample_is_in_a_batch_by_itself_as_likely_as_the_rate_says() -> None:
    federation = prepare(small("partition.shots=40")).reference.federation
    whole = federation.train(1)
    drawn = [federation.drawn(1, random.key("batch", number), 0.1) for number in range(600)]
    sizes = torch.tensor([float(len(batch.y)) for batch in drawn])
    expected = 0.1 * len(whole.y)
    assert float(sizes.mean()) == pytest.approx(expected, rel=0.05)
    assert float(sizes.var()) == pytest.approx(0.9 * expected, rel=0.25)  # binomial, not of one size
    first = sum(any(torch.equal(x, whole.x[0]) for x in batch.x) for batch in drawn)
    assert 35 <= first <= 90
    assert all(len(federation.drawn(1, random.key(number), 1.0).y) == len(whole.y) for number in range(3))


def test_a_rate_is_what_batches_are_drawn_with() -> None:
    assert drawn_rate(1.0) == 1
    assert 0.1 <= drawn_rate(0.1) < 0.1 + 2**-23
    assert [steps_in_epoch(rate) for rate in (1.0, 0.3, 0.01)] == [1, 3, 100]


# what steps cost

CASES = [(PaidSteps(20, 0.1, 1.1), 3, 4.0), (PaidSteps(50, 0.02, 0.8), 4, NOTHING), (PaidSteps(4, 1.0, 6.0), 2, 9.0)]


@pytest.mark.parametrize(("steps", "times", "noise"), CASES)
def test_epsilon_of_steps_agrees_with_two_other_accountants(steps: PaidSteps, times: int, noise: float) -> None:
    told = spent(noise, times, 1e-5, steps)
    assert told < by_renyi(steps, times, noise, 1e-5)
    assert told == pytest.approx(by_convolution(steps, times, noise, 1e-5), rel=0.02)


def test_class_sums_are_paid_for_on_top_of_steps() -> None:
    steps = PaidSteps(20, 0.1, 1.1)
    assert spent(NOTHING, 3, 1e-5, steps) < spent(4.0, 3, 1e-5, steps)
    assert spent(4.0, 3, 1e-5) < spent(4.0, 3, 1e-5, steps)
    assert spent(4.0, 3, 1e-5, steps) == pytest.approx(spent(4.0, 1, 1e-5, steps._replace(many=60)), abs=3)
    assert spent(4.0, 3, 1e-5, steps._replace(noise=0.0)) == math.inf


def test_the_noise_of_steps_for_a_budget_keeps_it_and_is_hardly_more_than_needed() -> None:
    steps = PaidSteps(10, 0.1, 0.0)
    noise = step_noise_for(5.0, 3.0, 1e-5, 4, steps)
    assert (
        spent(5.0, 4, 1e-5, steps._replace(noise=noise))
        <= 3.0
        < spent(5.0, 4, 1e-5, steps._replace(noise=noise * 0.99))
    )
    beside = noise_beside(3.0, 1e-5, 4, steps._replace(noise=2.0))
    assert spent(beside, 4, 1e-5, steps._replace(noise=2.0)) <= 3.0
    assert spent(beside * 0.99, 4, 1e-5, steps._replace(noise=2.0)) > 3.0
    many = affordable(5.0, 3.0, 1e-5, steps._replace(noise=noise))
    assert many >= 4
    assert spent(5.0, many + 1, 1e-5, steps._replace(noise=noise)) > 3.0
    with pytest.raises(UserError, match="makes the steps of all rounds spend"):
        noise_beside(3.0, 1e-5, 4, steps._replace(noise=0.4))
    assert accounting.affordable(0.1, 1.0, 1e-5, steps._replace(noise=noise)) == 0


@pytest.mark.parametrize(("noise", "kept"), [(1.0, True), (0.25, False)])
def test_no_attacker_proves_more_than_steps_cost(noise: float, kept: bool) -> None:
    """Who knows all but one sample, and its gradient, sees all sums of a run; with a quarter of the noise it would."""
    runs, steps, clip, paid = 20_000, 12, 0.5, PaidSteps(12, drawn_rate(0.25), 1.0)
    drawn = ~random.at_least(random.key("drawn"), runs * steps, 0.25)
    sums = {
        there: with_noise(clip * drawn.double() * there, noise * clip, random.key("noise", int(there))) / clip
        for there in (True, False)
    }
    odds = {there: torch.log1p(0.25 * torch.expm1((2 * s - 1) / (2 * noise**2))) for there, s in sums.items()}
    scores = [odds[there].reshape(runs, steps).sum(1) for there in (True, False)]
    bound = epsilon_bound(*scores, 1e-5, 0.95).epsilon
    assert bound > 0.5
    assert (bound <= spent(NOTHING, 1, 1e-5, paid)) is kept
