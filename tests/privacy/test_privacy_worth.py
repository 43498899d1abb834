"""Less noise where a dimension is worth more: scores, choice, groups and price, computed a second time by hand."""

import itertools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm
from small_runs import StopAfter, Told, final_state
from torch import Tensor, nn

from protofed import Federated, UserError, federate
from protofed.leaks.views import View
from protofed.method import Mean
from protofed.ops import random
from protofed.privacy import Privacy
from protofed.privacy.accounting import affordable, noise_for, spent
from protofed.privacy.ledger import LEDGER
from protofed.privacy.noise import seeded, seeded_laplace
from protofed.privacy.release import COUNTED, Layout, noised_sum
from protofed.privacy.worth import Groups, Statistics, groups_of, largest, scale_of_choice, worths
from protofed.runs import releases as noising
from protofed.runs.folder import RunFolder
from protofed.runs.watch import Watch

pytest.importorskip("dp_accounting", reason="needs dp-accounting: pip install 'protofed[privacy]'")
CLASSES, WIDTH, NOISE, CLIP = 3, 8, 1.7, 2.0


def privacy(**words: Any) -> Privacy:
    told: dict[str, Any] = {"unit": "sample", "epsilon": 1.0, "worth": 0.25, "clip": CLIP}
    return Privacy(**{**told, **words})


def layout(**words: Any) -> Layout:
    return Layout(privacy(**words), Mean(torch.zeros(CLASSES, WIDTH), torch.zeros(CLASSES)))


def samples(seed: int, many: int = 20, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, CLASSES, many)
    return scale * (rng.normal(size=(many, WIDTH)) + y[:, None] * np.linspace(0, 2, WIDTH)), y


def alone(z: np.ndarray, y: np.ndarray) -> Mean:
    """The uploads of clients with one sample each."""
    held = torch.tensor(np.eye(CLASSES)[y])
    return Mean(held[:, :, None] * torch.tensor(z)[:, None, :], held)


def chosen(seed: int, many: int = 2) -> Tensor:
    return largest(torch.tensor(np.random.default_rng(seed).random(WIDTH)), many)


@given(st.integers(0, 10_000))
def test_scores_are_the_analysis_of_variance_by_hand(seed: int) -> None:
    z, y = samples(seed)
    found = worths(layout().statistics(alone(z, y)), 1e9).numpy()
    for j in range(WIDTH):
        groups = [z[y == c, j] for c in np.unique(y)]
        between = sum(len(g) * (g.mean() - z[:, j].mean()) ** 2 for g in groups)
        within = sum(((g - g.mean()) ** 2).sum() for g in groups)
        assert found[j] == pytest.approx(between / within, rel=1e-9)
    assert worths(layout().statistics(alone(z, y)), 0.1).numpy() == pytest.approx(np.minimum(found, 0.1))


def test_scores_of_one_class_of_constants_and_of_dimensions_without_spread() -> None:
    z, _ = samples(1)
    assert not worths(layout().statistics(alone(z, np.zeros(20, int))), 0.1).any()
    z, y = samples(2)
    z[:, 0], z[:, 1] = 3.0, y
    scores = worths(layout().statistics(alone(z, y)), 0.1)
    assert scores[0] == 0
    assert scores[1] == 0.1  # no spread within classes: the limit
    added = layout().statistics(alone(z[:7], y[:7])) + layout().statistics(alone(z[7:], y[7:]))
    assert worths(added, 0.1).tolist() == pytest.approx(scores.tolist())


@given(st.integers(0, 10_000), st.floats(0.01, 10), st.floats(1e-3, 1e3))
def test_one_sample_moves_no_score_by_more_than_the_limit(seed: int, limit: float, scale: float) -> None:
    z, y = samples(seed)
    z[0] *= scale
    whole, without = (worths(layout().statistics(alone(z[k:], y[k:])), limit) for k in (0, 1))
    assert float((whole - without).abs().max()) <= limit


def test_the_largest_are_chosen() -> None:
    assert largest(torch.tensor([0.1, 0.9, -1.0, 0.5]), 2).tolist() == [False, True, False, True]


def probabilities(scores: np.ndarray, many: int, scale: float) -> dict[tuple[int, ...], float]:
    """How likely each set is the largest so many, by integrating over the largest of the others."""
    m = np.linspace(-40 * scale, 40 * scale + 1, 40_001)

    def below(x: float) -> np.ndarray:
        return np.where(m < x, 0.5 * np.exp(-np.abs(m - x) / scale), 1 - 0.5 * np.exp(-np.abs(m - x) / scale))

    found = {}
    for some in itertools.combinations(range(len(scores)), many):
        others = np.prod([below(scores[j]) for j in range(len(scores)) if j not in some], axis=0)
        above = np.prod([1 - below(scores[j]) for j in some], axis=0)
        found[some] = float((np.diff(others) * (above[1:] + above[:-1]) / 2).sum())
    return found


@pytest.mark.parametrize("many", [1, 2])
@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_the_choice_costs_what_its_noise_says(many: int, epsilon: float) -> None:
    """Of neighbours, no set of dimensions is likelier by more than e^epsilon; and it is not paid for twice over."""
    limit = 0.1
    scale = scale_of_choice(privacy(worth_limit=limit), many, epsilon)
    assert scale == pytest.approx(2 * many * limit / epsilon)
    rng, worst = np.random.default_rng(0), 0.0
    for trial in range(8):
        one, other = rng.random((2, 4)) * limit
        if trial == 0:
            one, other = np.where(np.arange(4) < many, 0, limit), np.where(np.arange(4) < many, limit, 0)
        a, b = probabilities(one, many, scale), probabilities(other, many, scale)
        assert sum(a.values()) == pytest.approx(1, abs=1e-4)
        worst = max(worst, *(abs(math.log(a[some] / b[some])) for some in a))
    assert epsilon / 2 < worst <= epsilon * 1.001


def test_laplace_noise_is_laplace_and_follows_from_its_key() -> None:
    drawn = seeded_laplace(random.key(3), 200_000)
    assert float(drawn.mean()) == pytest.approx(0, abs=0.02)
    assert float(drawn.abs().mean()) == pytest.approx(1, abs=0.02)  # the scale
    assert float((drawn.abs() > 2).double().mean()) == pytest.approx(math.exp(-2), abs=0.005)
    assert torch.equal(drawn, seeded_laplace(random.key(3), 200_000))
    assert not torch.equal(drawn, seeded_laplace(random.key(4), 200_000))


def test_groups_by_hand() -> None:
    """A fifth of 10 dimensions: clips sqrt(.2) and sqrt(.8), prices .8 and .2, so noises .5 and 2."""
    groups = groups_of(privacy(worth=0.2), 10)
    assert groups.sizes == (2, 8)
    assert groups.clips == pytest.approx((math.sqrt(0.2), math.sqrt(0.8)))
    assert groups.prices == pytest.approx((0.8, 0.2))
    assert groups.noises == pytest.approx((0.5, 2.0))
    # In the paper's words: 1 / sigma_A^2 + 1 / sigma_B^2 <= 1 / sigma_ref^2, with sigma = sigma_ref / sqrt(w).
    reference = 3.0
    assert sum(1 / (reference / math.sqrt(w)) ** 2 for w in groups.prices) <= 1 / reference**2 * (1 + 1e-12)
    assert Groups((5, 5)).noises == pytest.approx((1, 1))
    assert Groups((6, 4)).noises[0] > 1  # more than half would get more noise


@given(st.integers(0, 10_000), st.floats(1e-2, 1e2))
def test_one_sample_moves_each_group_by_its_clip_at_most_and_costs_what_one_release_would(
    seed: int, scale: float
) -> None:
    """The price of Gaussian noise is the sum of (change / deviation)^2 over all numbers, whatever the sample."""
    here, mask = layout(), chosen(seed)
    vectors, _ = here.vectors(alone(*samples(seed, scale=scale)), mask)
    values = vectors[:, : here.values].reshape(len(vectors), CLASSES, WIDTH)
    bound = CLIP * math.sqrt(1 - COUNTED)
    for which, share in ((mask, 2 / 8), (~mask, 6 / 8)):
        assert float(values[:, :, which].flatten(1).norm(dim=1).max()) <= bound * math.sqrt(share) * (1 + 1e-12)
    assert float(vectors.norm(dim=1).max()) <= CLIP * (1 + 1e-12)
    price = (vectors / (NOISE * CLIP * here.unevenness(mask))).square().sum(1)
    assert float(price.max()) <= 1 / NOISE**2 * (1 + 1e-9)
    long, _ = here.vectors(alone(*samples(seed, scale=1e6)), mask)
    full = (long / (NOISE * CLIP * here.unevenness(mask))).square().sum(1)
    assert full.tolist() == pytest.approx([1 / NOISE**2] * len(full))  # nothing is wasted


def test_each_group_has_the_noise_that_it_says() -> None:
    """Two of eight dimensions: sqrt(1/3) and sqrt(3) times noise * clip; which rows are there: 1 time."""
    here, masks = layout(), [chosen(1), chosen(2)]
    vectors = [torch.zeros(here.size, dtype=torch.float64)] * 2
    uneven = [here.unevenness(mask) for mask in masks]
    drawn = []
    for trial in range(1500):
        _, spread, singles = noised_sum(
            here, vectors, NOISE, lambda who, many, t=trial: seeded(random.key(t, who), many), uneven=uneven
        )
        drawn.append(torch.stack(singles))
    assert spread == pytest.approx(NOISE * CLIP * math.sqrt(2))
    deviation = torch.stack(drawn).std(0) / (NOISE * CLIP)
    for client, mask in enumerate(masks):
        each = deviation[client, : here.values].reshape(CLASSES, WIDTH).mean(0)
        assert each[mask].tolist() == pytest.approx([3**-0.5] * 2, rel=0.05)
        assert each[~mask].tolist() == pytest.approx([3**0.5] * 6, rel=0.05)
        assert float(deviation[client, here.values :].mean()) == pytest.approx(1, rel=0.05)


def gaussian_delta(noise: float, epsilon: float) -> float:
    """Of one release with this noise, by the formula of Balle and Wang (2018)."""
    a, b = 1 / (2 * noise), epsilon * noise
    return float(norm.cdf(a - b) - math.exp(epsilon) * norm.cdf(-a - b))


@pytest.mark.parametrize(("noise", "times", "choice"), [(4.0, 1, 0.1), (2.0, 1, 0.5), (8.0, 3, 0.1), (1.0, 1, 0.05)])
def test_the_choice_is_composed_with_the_noise_as_by_the_exact_formula(noise: float, times: int, choice: float) -> None:
    """The worst mechanism of that epsilon is randomised response, which says the truth with probability
    e^c / (1 + e^c): a composition with it has delta(e) = sum of p(l) * delta_gauss(e - l) over its losses l."""
    found, delta = spent(noise, times, 1e-5, choice=choice), 0.0
    truth = math.exp(choice) / (1 + math.exp(choice))
    for lies in range(times + 1):
        likely = math.comb(times, lies) * truth ** (times - lies) * (1 - truth) ** lies
        delta += likely * gaussian_delta(noise / math.sqrt(times), found - (times - 2 * lies) * choice)
    assert delta == pytest.approx(1e-5, rel=0.05)
    assert spent(noise, times, 1e-5) < found <= spent(noise, times, 1e-5) + times * choice + 1e-9


def test_the_noise_for_a_budget_with_choices_keeps_it_and_is_hardly_more_than_needed() -> None:
    noise = noise_for(1.0, 1e-5, 2, 0.05)
    assert spent(noise, 2, 1e-5, choice=0.05) <= 1 < spent(noise * 0.995, 2, 1e-5, choice=0.05)
    assert noise > noise_for(1.0, 1e-5, 2)
    assert affordable(noise, 1.0, 1e-5, choice=0.05) == 2
    assert spent(0.1, 5, 1e-5, choice=10.0) == pytest.approx(50 + spent(0.1, 5, 1e-5))  # beyond the exact accountant


class Frozen(nn.Module):
    """A public encoder with a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 10)
        self.fc = nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc(torch.relu(self.a(x)))
        return out


def trained(
    out: Path, watch: Watch | None = None, method: str = "fedproto", rounds: int = 3, **words: Any
) -> Federated:
    """A run over three clients with 55 samples, the last of which has one class."""
    torch.manual_seed(1)
    rng = np.random.default_rng(0)
    clients = [
        (rng.normal(size=(n, 6)).astype(np.float32), rng.integers(0, c, n)) for n, c in ((8, 3), (30, 3), (17, 1))
    ]
    more = {"resume": words.pop("resume", False), "watch": watch, "quiet": watch is None}
    engine = {"threads": 1, "name": words.pop("engine", "auto")}
    budget = {"unit": "sample", "where": "client", "epsilon": 8.0, "worth": 0.2, **words}
    settings = {"privacy": budget, "engine": engine}
    return federate(Frozen(), clients, method, rounds, out=out, frozen=True, head="linear", settings=settings, **more)


def test_a_run_pays_for_choices_and_sums_and_says_so(tmp_path: Path) -> None:
    watch = Told()
    trained(tmp_path / "out", watch)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    about = summary["privacy"]
    assert about["choice"] == pytest.approx(0.1 * 8 / 3)
    assert summary["epsilon_spent"] == spent(about["noise"], 3, 1e-5, choice=about["choice"])
    assert 7.9 < summary["epsilon_spent"] <= 8
    lines = [json.loads(line) for line in (tmp_path / "out" / LEDGER).read_text().splitlines()]
    assert [line["choice"] for line in lines] == [about["choice"]] * 3
    said = (
        "2 of 10 dimensions get 0.5 times this noise, and the others 2 times; the noise of the choice is 15 times the"
    )
    assert any(said in note for note in watch.notes)


@pytest.mark.parametrize("engine", ["reference", "stacked"])
def test_a_run_that_is_stopped_pays_once_and_ends_the_same(engine: str, tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", engine=engine).folder
    with pytest.raises(RuntimeError):
        trained(tmp_path / "out", StopAfter(2, RuntimeError), engine=engine)  # no checkpoint but the first
    again = trained(tmp_path / "out", resume=True, engine=engine).folder
    assert (again / LEDGER).read_bytes() == (whole / LEDGER).read_bytes()
    assert final_state(again) == final_state(whole)


def test_no_choice_and_no_noise_is_drawn_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in another round, not by another client, and not where a released round is done again with other samples."""
    drawn: dict[str, list[Tensor]] = {"seeded": [], "seeded_laplace": []}
    sums = noising.vector_of_samples

    def listening(name: str) -> Callable[[Tensor, int], Tensor]:
        real = getattr(noising, name)

        def draw(key: Tensor, many: int) -> Tensor:
            drawn[name].append(real(key, many))
            return drawn[name][-1]

        return draw

    for name in drawn:
        monkeypatch.setattr(noising, name, listening(name))

    def other(*words: Any) -> Any:
        found = sums(*words)
        return found._replace(vector=found.vector * 0.99)

    with pytest.raises(RuntimeError):
        trained(tmp_path / "out", StopAfter(2, RuntimeError), noise=3.0)
    monkeypatch.setattr(noising, "vector_of_samples", other)
    trained(tmp_path / "out", resume=True, noise=3.0)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    lines = [json.loads(line) for line in (tmp_path / "out" / LEDGER).read_text().splitlines()]
    assert [(line["round"], line["attempt"]) for line in lines] == [(1, 0), (2, 0), (1, 1), (2, 1), (3, 0)]
    assert summary["epsilon_spent"] == spent(3.0, 5, 1e-5, choice=summary["privacy"]["choice"]) <= 8
    for found in drawn.values():  # rounds 1 and 2 draw their first noise again, to see whether it is the same release
        assert len(found) == 7 * 3
        assert len({tuple(noise.tolist()) for noise in found}) == 5 * 3


def test_with_hardly_any_noise_the_dimensions_that_matter_are_chosen_and_prototypes_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[Statistics | None, Tensor]] = []
    choose = noising.Releases._choose

    def listening(self: Any, *words: Any) -> Tensor:
        found.append((words[-1], choose(self, *words)))
        return found[-1][1]

    monkeypatch.setattr(noising.Releases, "_choose", listening)
    result = trained(
        tmp_path / "out", method="classmeans", rounds=1, epsilon=1e12, noise=1e-6, clip=100.0, worth_limit=1e6
    )
    for statistics, mask in found[:2]:
        assert statistics is not None
        assert set(mask.nonzero().flatten().tolist()) == set(worths(statistics, 1e6).topk(2).indices.tolist())
    state, _ = RunFolder(result.folder).restore()
    assert state is not None
    total = torch.stack([statistics.total for statistics, _ in found if statistics is not None]).sum(0)
    assert torch.allclose(state.server["sums"]["means"].total.double(), total.double(), atol=0.05)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"where": "server"}, "privacy.worth = 0.2 is for class sums that each client noises by itself"),
        ({"unit": "client"}, "privacy.worth = 0.2 is for class sums that each client noises by itself"),
        ({"worth": 0.6}, "privacy.worth = 0.6 is more than half of the dimensions"),
        ({"worth": 0.01}, "privacy.worth = 0.01 of 10 dimensions is 0"),
        ({"worth": 0.0, "worth_limit": 1.0}, "privacy.worth_limit = 1 has no effect"),
        ({"worth": 0.0, "worth_epsilon": 0.2}, "privacy.worth_epsilon = 0.2 has no effect"),
        ({"worth_epsilon": 1.0}, "privacy.worth_epsilon = 1"),
        ({"sgd_rate": 0.1}, "privacy.worth = 0.2 needs a frozen encoder"),
        ({"method": "lda", "rounds": 1}, "privacy.worth is defined for class sums of embeddings"),
        ({"noise": 0.3}, "privacy.epsilon = 8 is too small for one round"),
    ],
)
def test_bad_input_is_one_line_and_spends_nothing(words: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(said)) as found:
        trained(tmp_path / "out", **words)
    assert "\n" not in str(found.value)
    assert not (tmp_path / "out").exists()


def test_a_federation_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"privacy\.worth = 0\.25 works in simulations only"):
        privacy().refuse_federation()


def test_an_attack_on_noise_that_differs_by_dimension_is_refused_in_one_line() -> None:
    run: Any = SimpleNamespace(experiment=SimpleNamespace(privacy=privacy()))
    nobody: Any = None
    with pytest.raises(UserError, match=r"privacy\.worth = 0\.25\. Attack a run without it\.$") as found:
        View(run, nobody, nobody, 0)
    assert "\n" not in str(found.value)
