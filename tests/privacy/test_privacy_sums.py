"""Noise that clients add together under a secure sum: how much each adds, what is in the sum, and what is paid."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import StopAfter, final_state
from torch.utils._pytree import tree_leaves

from protofed import Experiment, UserError, run
from protofed.explain.explain import explain
from protofed.method import Mean
from protofed.ops import random
from protofed.privacy import Privacy
from protofed.privacy.accounting import spent
from protofed.privacy.graph import needed
from protofed.privacy.ledger import LEDGER, SpendingLedger
from protofed.privacy.noise import FARTHEST, seeded
from protofed.privacy.release import Layout, noised_sum
from protofed.privacy.shared import honest_answers, noised_grid, share_of_noise
from protofed.runs import releases as noising
from protofed.runs.folder import RunFolder

pytest.importorskip("dp_accounting", reason="needs dp-accounting: pip install 'protofed[privacy]'")
pytest.importorskip("cryptography", reason="needs cryptography: pip install 'protofed[secure]'")
pytest.importorskip("Crypto", reason="needs pycryptodome: pip install 'protofed[secure]'")

SMALL = (
    "clients=6", "rounds=3", "model=mlp_digits", "local_epochs=1", "engine=reference", "record.enabled=false",
    "device=cpu", "evaluate.own=0", "evaluate.gm=0", "data.normalize=half", "engine.threads=1", "partition.shots=4",
)  # fmt: skip
BUDGET = ("privacy.unit=client", "privacy.epsilon=8", "privacy.where=sum", "privacy.secure_sum=true")


def small(*overrides: str) -> Experiment:
    return Experiment.load("demo", *SMALL, *overrides)


def state_of(folder: str | Path) -> Any:
    state, _ = RunFolder(Path(folder)).restore()
    assert state is not None
    return state


def budget(**words: Any) -> Privacy:
    given = {"unit": "client", "epsilon": 1.0, "where": "sum", "secure_sum": True, **words}
    return Privacy(**given).checked()


@pytest.mark.parametrize(
    ("clients", "threshold", "dishonest", "honest"),
    [(10, 0, 1, 6), (10, 0, 0, 7), (10, 8, 3, 5), (2, 0, 1, 1), (100, 60, 20, 40)],
)
def test_a_share_is_the_noise_over_the_root_of_the_fewest_honest_answers(
    clients: int, threshold: int, dishonest: int, honest: int
) -> None:
    privacy = budget(threshold=threshold, dishonest=dishonest, clip=0.5)
    assert honest_answers(privacy, clients) == honest
    assert share_of_noise(privacy, 3.0, clients) == pytest.approx(3.0 * 0.5 / math.sqrt(honest))


@pytest.mark.parametrize("bits", [24, 32, 64])
@pytest.mark.parametrize("answers", [7, 10])
def test_the_noise_of_a_sum_that_was_opened_is_enough_without_that_of_the_dishonest(answers: int, bits: int) -> None:
    """Of ten clients, the fewest that can be summed are seven; what two of them know of the noise is taken off."""
    from protofed.privacy.simulated import SimulatedSums

    privacy, noise, rows = budget(dishonest=2, clip=0.7, bits=bits), 2.5, 150
    assert needed(0, 10) == 7
    layout = Layout(privacy, Mean(torch.zeros(rows, 200), torch.zeros(rows)))
    held = Mean(torch.randn(answers, rows, 200, generator=torch.Generator().manual_seed(1)), torch.ones(answers, rows))
    vectors = list(layout.vectors(held)[0])
    honest = honest_answers(privacy, 10)
    _, spread, singles = noised_sum(layout, vectors, noise, lambda n, many: seeded(random.key(n), many), honest)
    grid = noised_grid(privacy, noise, 10)
    sent = Mean(torch.stack(singles), torch.ones(answers))
    opened, _ = SimulatedSums(privacy, 10).sum(sent, range(answers), 0, grid.caps, grid)
    assert opened.cut == 0
    assert float(opened.up.weight) == answers
    assert torch.allclose(opened.up.total, torch.stack(singles).sum(0), atol=answers * grid.total_step(1.0))
    found = opened.up.total - torch.stack(vectors).sum(0)
    promised = noise * 0.7
    assert spread == pytest.approx(promised * math.sqrt(answers / 5))
    assert float(found.std()) == pytest.approx(spread, rel=0.03)
    known = torch.stack([one - vector for one, vector in zip(singles[:2], vectors[:2], strict=True)]).sum(0)
    left = float((found - known).std())
    assert left == pytest.approx(promised * math.sqrt((answers - 2) / 5), rel=0.03)
    assert left > 0.97 * promised
    assert float((singles[0] - vectors[0]).std()) < promised / 2  # one share alone is not enough


def test_no_number_is_cut_and_the_grid_is_much_finer_than_the_noise() -> None:
    """A number that is cut would be known better than its noise says."""
    for bits, noise, clip in ((24, 0.5, 1e-3), (32, 1e-4, 1.0), (64, 50.0, 1e6)):
        privacy = budget(bits=bits, clip=clip)
        grid, share = noised_grid(privacy, noise, 30), share_of_noise(privacy, noise, 30)
        farthest = torch.tensor([clip + FARTHEST * share, -clip - FARTHEST * share, 0.0], dtype=torch.float64)
        encoded = grid.encode(Mean(farthest, torch.ones(())))
        assert grid.decode(encoded, Mean(farthest, torch.ones(())), 1).cut == 0
        assert grid.total_step(1.0) * 8 <= share
    with pytest.raises(UserError, match=r"privacy.bits = 24 makes steps of .* too wide for noise of"):
        noised_grid(budget(bits=24), 1e-5, 30)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody stopped."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run(small(*BUDGET), folder)
    return folder


def test_a_run_pays_for_its_sums_and_says_what_each_client_added(whole: Path) -> None:
    summary = json.loads((whole / "summary.json").read_text())
    about = summary["privacy"]
    assert summary["epsilon_spent"] == spent(about["noise"], 3, 1e-5)
    assert 7.5 < summary["epsilon_spent"] <= 8
    assert (about["where"], about["releases"], about["honest_answers"]) == ("sum", 3, 4)
    assert about["share"] == pytest.approx(about["noise"] / 2)
    lines = SpendingLedger(whole / LEDGER).lines
    assert [(line.round, line.attempt, len(line.clients)) for line in lines] == [(n, 0, 6) for n in (1, 2, 3)]
    rounds = RunFolder(whole).rounds()
    assert [line["loss"] for line in rounds] == [None] * 3
    numbers = 10 * 32 + 10 + 1 + 5  # values and rows, the weight, how many were cut (none), and four checks
    assert rounds[0]["bytes_up"] == 6 * (32 + 16 + 4 * numbers + 16) + 30 * (48 + 16)


def test_a_run_that_is_stopped_releases_the_same_sum_again_for_nothing(whole: Path) -> None:
    with pytest.raises(RuntimeError):
        run(small(*BUDGET), "out", watch=StopAfter(2, RuntimeError))  # no checkpoint but the first
    run(small(*BUDGET), "out", resume=True)
    assert Path("out", LEDGER).read_bytes() == (whole / LEDGER).read_bytes()
    assert final_state(Path("out")) == final_state(whole)


def test_the_sum_is_that_of_clients_with_shares_of_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose server adds the sum of the six clients' shares differs by the grid alone."""
    plan = ("method=fedavg", "rounds=1", "privacy.unit=client", "privacy.epsilon=8", "privacy.noise=1.5")
    draw = noising.seeded
    drawn: list[torch.Tensor] = []

    def keep(key: torch.Tensor, many: int) -> torch.Tensor:
        drawn.append(draw(key, many))
        return drawn[-1]

    monkeypatch.setattr(noising, "seeded", keep)
    run(small(*plan, "privacy.where=sum", "privacy.secure_sum=true", "privacy.bits=48"), "sum")
    assert len(drawn) == 6
    monkeypatch.setattr(noising, "seeded", lambda key, many: torch.stack(drawn).sum(0) / 2)  # sqrt(4 honest answers)
    run(small(*plan, "privacy.where=server"), "server")
    pairs = list(zip(tree_leaves(state_of("sum").server), tree_leaves(state_of("server").server), strict=True))
    assert len(pairs) > 2
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in pairs)


@pytest.mark.parametrize("engine", ["reference", "stacked"])
def test_with_hardly_any_noise_a_sum_is_as_good_as_without(engine: str) -> None:
    plan = ("privacy.unit=client", "privacy.epsilon=1e11", "privacy.clip=100.0", "privacy.noise=1e-4",
            "privacy.where=sum", "privacy.secure_sum=true", "privacy.bits=48")  # fmt: skip
    run(small("rounds=2", f"engine={engine}", "engine.compile=never"), "plain")
    run(small("rounds=2", f"engine={engine}", "engine.compile=never", *plan), "sum")
    assert torch.allclose(state_of("sum").server.value, state_of("plain").server.value, atol=0.05)
    assert torch.equal(state_of("sum").server.weight, state_of("plain").server.weight)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["privacy.secure_sum=false"], "privacy.where = 'sum' needs a secure sum: without it the server sees every"),
        (["privacy.where=server"], "privacy.where = 'server' does not go with privacy.secure_sum"),
        (["privacy.where=client"], "privacy.where = 'client' does not go with privacy.secure_sum"),
        (["privacy.dishonest=5"], "privacy.dishonest = 5 leaves nobody to add noise: a sum may have only 5 clients"),
        (["privacy.range=8"], "privacy.range = 8 has no effect with privacy.unit = 'client'"),
        (["privacy.threshold=7"], "privacy.threshold = 7, but a round has 6 clients"),
        (["method=spfedcl"], "spfedcl sends something that the server must see client by client"),
        (["privacy.bits=24", "privacy.epsilon=1e11", "privacy.noise=1e-5"], "privacy.bits = 24 makes steps of"),
        (["privacy.secure_sum=false", "privacy.where=client", "privacy.dishonest=2"], "privacy.dishonest = 2 has no"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_spends_nothing(words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)) as found:
        run(small(*BUDGET, *words), "out")
    assert "\n" not in str(found.value)
    assert not Path("out").exists()


def test_explain_says_how_the_server_sees_a_noised_sum() -> None:
    told = explain(small(*BUDGET, "rounds=1"))
    seen = {group["seen"] for group in told["up"]["groups"]}
    assert seen == {"only in the sum over at least 5 clients, noised, epsilon 8 for the run (by shares of 4 of them)"}
    run(small(*BUDGET, "rounds=1"), "run")
    assert told["up"]["bytes"]["round"] == RunFolder(Path("run")).rounds()[0]["bytes_up"]
    lines = told["private"]["server_learns"]
    assert "each client adds a share of the noise under the secure sum" in lines[1]
