"""A budget for single samples in whole runs: behind a frozen encoder, stopped and resumed, and what is refused."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import StopAfter, Told, final_state
from torch import nn

from protofed import Federated, UserError, federate
from protofed.data.batches import Samples
from protofed.method import Mean, Method
from protofed.methods.fedproto import FedProto
from protofed.ops.statistics import class_scatters, scatter
from protofed.privacy.accounting import spent
from protofed.privacy.ledger import LEDGER, SpendingLedger
from protofed.privacy.release import COUNTED
from protofed.runs import releases as noising
from protofed.runs.folder import RunFolder
from protofed.runs.noised import layout_of
from protofed.runs.releases import Releases
from protofed.runs.watch import Watch

pytest.importorskip("dp_accounting", reason="needs dp-accounting: pip install 'protofed[privacy]'")
BUDGET = {"unit": "sample", "where": "client", "epsilon": 8.0}


class Frozen(nn.Module):
    """A public encoder with a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 5)
        self.fc = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc(torch.relu(self.a(x)))
        return out


def trained(
    out: Path, watch: Watch | None = None, method: str | Method = "fedproto", rounds: int = 3, **words: Any
) -> Federated:
    """A run over three clients with 55 samples, of which 44 are trained on."""
    torch.manual_seed(1)
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(n, 6)).astype(np.float32), rng.integers(0, 3, n)) for n in (8, 30, 17)]
    more = {"resume": words.pop("resume", False), "watch": watch, "quiet": watch is None}
    settings = {"privacy": BUDGET | words if words.get("unit") != "none" else {}, "engine": {"threads": 1}}
    return federate(Frozen(), clients, method, rounds, out=out, frozen=True, head="linear", settings=settings, **more)


BY_SAMPLE: dict[str, Any] = {"where": "server", "epsilon": 1e11, "noise": 1e-5, "clip": 0.5}


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of a frozen encoder whose budget is for single samples."""
    return trained(tmp_path_factory.mktemp("runs") / "frozen", rounds=1, **BY_SAMPLE)


def test_prototypes_behind_a_frozen_encoder_are_means_of_clipped_embeddings(frozen: Any) -> None:
    state, _ = RunFolder(frozen.folder).restore()
    assert state is not None
    federation = frozen._prepared.reference.federation
    x, y = (torch.cat(parts) for parts in zip(*map(federation.train, range(3)), strict=True))
    bound, length = math.sqrt(1 - COUNTED) * 0.5, torch.linalg.vector_norm(x.double(), dim=1)
    assert 0 < int((length > bound).sum()) < len(y)
    z = x.double() * (bound / length).clamp(max=1)[:, None]
    for label in range(3):
        assert torch.allclose(state.server.value[label].double(), z[y == label].mean(0), atol=1e-3)
    assert len(SpendingLedger(frozen.folder / LEDGER).lines) == 1


def test_one_sample_changes_the_sum_by_no_more_than_the_clip(frozen: Any) -> None:
    """Whatever the sample is: it reaches the sum in no other way, not through training and not through its class."""
    engine, experiment = frozen._prepared.reference, frozen._experiment
    some = Releases(experiment, engine, Path("none"), 0, lambda text: None)
    server = experiment.method.init_server(engine.specs()[0])
    layout = layout_of(experiment, engine, server)

    def summed() -> torch.Tensor:
        trained: Any = SimpleNamespace(up={}, clients={})
        return torch.stack(some._cut(layout, trained, range(3), 0, 0, server).vectors).sum(0)

    before = summed()
    for seed in range(12):
        x, y = (part.clone() for part in engine.federation.train(1))
        old = x[seed].clone(), y[seed].clone()
        x[seed] = 10.0 ** (seed % 7 - 2) * torch.randn(5, generator=torch.Generator().manual_seed(seed))
        y[seed] = seed % 3
        engine.federation.replace_train({1: Samples(x, y)})
        moved = float(torch.linalg.vector_norm(summed() - before))
        assert 0 < moved <= 2 * 0.5 * (1 + 1e-9)  # a sample is removed, and another one is added
        x[seed], y[seed] = old
        engine.federation.replace_train({1: Samples(x, y)})


@pytest.mark.parametrize("where", ["client", "server"])
def test_a_run_for_single_samples_keeps_its_budget_and_says_so(where: str, tmp_path: Path) -> None:
    result = trained(tmp_path / "out", where=where)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    about = summary["privacy"]
    assert result.folder == tmp_path / "out"
    assert 7.5 < summary["epsilon_spent"] <= 8
    assert summary["epsilon_spent"] == spent(about["noise"], 3, 1e-5)
    assert summary["delta"] == 1e-5
    assert (about["unit"], about["hides"]) == ("sample", "one sample is there, or not")
    assert len(about["signal_to_noise"]) == about["releases"] == about["releases_of_one"] == 3
    assert all(ratio > 0 for ratio in about["signal_to_noise"])


@pytest.mark.parametrize("where", ["client", "server"])
def test_a_run_that_is_stopped_pays_once_and_ends_the_same(where: str, tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", where=where).folder
    with pytest.raises(RuntimeError):
        trained(tmp_path / "out", StopAfter(2, RuntimeError), where=where)  # no checkpoint but the first
    again = trained(tmp_path / "out", resume=True, where=where).folder
    assert (again / LEDGER).read_bytes() == (whole / LEDGER).read_bytes()
    assert final_state(again) == final_state(whole)


@pytest.mark.parametrize("where", ["client", "server"])
def test_no_noise_is_used_twice(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in another round, not by another client, and not where a released round is done again with other samples."""
    drawn: list[torch.Tensor] = []
    draw, sums = noising.seeded, noising.vector_of_samples

    def seeded(key: torch.Tensor, many: int) -> torch.Tensor:
        drawn.append(draw(key, many))
        return drawn[-1]

    def other(*words: Any) -> Any:
        found = sums(*words)
        return found._replace(vector=found.vector * 0.99)

    monkeypatch.setattr(noising, "seeded", seeded)
    with pytest.raises(RuntimeError):
        trained(tmp_path / "out", StopAfter(2, RuntimeError), where=where, noise=2.5)
    monkeypatch.setattr(noising, "vector_of_samples", other)
    trained(tmp_path / "out", resume=True, where=where, noise=2.5)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    lines = [json.loads(line) for line in (tmp_path / "out" / LEDGER).read_text().splitlines()]
    assert [(line["round"], line["attempt"]) for line in lines] == [(1, 0), (2, 0), (1, 1), (2, 1), (3, 0)]
    assert summary["epsilon_spent"] == spent(2.5, 5, 1e-5) <= 8
    # Rounds 1 and 2 draw their first noise a second time, to see whether the result is the one that was released.
    each = 3 if where == "client" else 1
    different = {tuple(noise.tolist()) for noise in drawn}
    assert len(drawn) == 7 * each
    assert len(different) == 5 * each
    assert len({number for noise in different for number in noise}) == 5 * each * len(drawn[0])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"delta": 0.03}, "privacy.delta = 0.03 is not below 1 / 44, so it would allow one of the 44 samples to be"),
        ({"epsilon": 0.0}, "privacy.epsilon = 0 is not a budget"),
        ({"epsilon": 0.3, "noise": 1.0}, "privacy.epsilon = 0.3 is too small for one round"),
        ({"method": "spfedcl"}, "sends values client by client"),
        ({"method": "fedavg"}, "send nothing that could be noised"),
        ({"method": "classmeans"}, "rounds = 3 would share the privacy budget, and classmeans learns all in the first"),
        ({"method": "creff"}, "creff sends what is left of training (gradients, or method.source = 'inloop')"),
        ({"method": FedProto(source="inloop")}, "fedproto sends what is left of training"),
        ({"method": "lda", "unit": "client"}, "lda needs second moments by numbers of samples, and with privacy.unit"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_spends_nothing(words: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(said)) as found:
        trained(tmp_path / "out", **words)
    assert "\n" not in str(found.value)
    assert not (tmp_path / "out").exists()


def test_a_clip_that_leaves_nothing_of_a_sample_is_told_with_the_measured_lengths(tmp_path: Path) -> None:
    watch = Told()
    trained(tmp_path / "out", watch, clip=1e-6)
    told = [note for note in watch.notes if "clip = 1e-06 leaves less than 1% of every sample's values" in note]
    assert len(told) == 1
    assert re.search(r"which are \d+\.\d+ to \d+\.\d+ long \(median \d+\.\d+\)", told[0])


@pytest.mark.parametrize("method", ["classmeans", "lda", "qda", "ridge"])
def test_one_shot_heads_of_sums_with_hardly_any_noise_are_those_without(method: str, tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", method=method, rounds=1, unit="none")
    words = {"epsilon": 1e11, "noise": 1e-5, "clip": 50.0}
    private = trained(tmp_path / "private", method=method, rounds=1, where="server", **words)
    before, after = (RunFolder(one.folder).restore()[0] for one in (plain, private))
    assert before is not None
    assert after is not None
    for name, mean in before.server["sums"].items():
        assert torch.allclose(after.server["sums"][name].weight, mean.weight, atol=1e-2)
        assert torch.allclose(after.server["sums"][name].total, mean.total, atol=1e-2)
        assert float(mean.weight.sum()) == 44


@pytest.mark.parametrize("method", ["lda", "qda", "ridge"])
def test_second_moments_that_noise_spoils_end_no_run(method: str, tmp_path: Path) -> None:
    made = trained(tmp_path / "out", method=method, rounds=1, where="server")
    state, _ = RunFolder(made.folder).restore()
    assert state is not None
    sums, head = state.server["sums"], state.server["head"]
    covariance = class_scatters(sums)[0] if method == "qda" else scatter(sums, within=True)[0]
    assert float(torch.linalg.eigvalsh(covariance).min()) < 0
    assert all(bool(torch.isfinite(part).all()) for part in head.values())


def test_a_samples_second_moments_are_clipped_with_it(tmp_path: Path) -> None:
    """Its embedding z and the products of z are one vector, and each of them has its share of the clip."""
    made = trained(tmp_path / "out", method="lda", rounds=1, where="server", epsilon=1e11, noise=1e-5, clip=1.0)
    engine, experiment = made._prepared.reference, made._experiment
    layout = layout_of(experiment, engine)
    assert (layout.values, layout.rows, layout.most) == (3 * 5 + 15, 3 + 1, 2)
    z = torch.rand(9, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 3
    own, square = torch.eye(3, dtype=torch.float64)[torch.arange(9) % 3], z[:, :, None] * z[:, None, :]
    triangle = square[:, *torch.triu_indices(5, 5)]
    up = {"means": Mean(own[:, :, None] * z[:, None], own), "second": Mean(triangle, torch.ones(9))}
    vectors, lengths = layout.vectors(up)
    assert torch.allclose(lengths, torch.sqrt((z**2).sum(1) + (triangle**2).sum(1)))
    assert float(torch.linalg.vector_norm(vectors, dim=1).max()) <= 1 + 1e-9
    summed = layout.opened(vectors.sum(0), 1, 0.0)
    assert summed["means"].weight.tolist() == pytest.approx([3.0, 3.0, 3.0])
    assert float(summed["second"].weight) == pytest.approx(9)


@pytest.mark.parametrize("range", [64.0, 0.5])
def test_samples_under_a_secure_sum_add_up_as_far_as_the_range_goes(range: float, tmp_path: Path) -> None:
    """A client's sum is cut before it is noised, so one sample changes it by no more than the clip."""
    words = {"epsilon": 1e11, "noise": 1e-5, "clip": 50.0, "method": "classmeans", "rounds": 1}
    server = trained(tmp_path / "server", where="server", **words)
    more = {"where": "sum", "secure_sum": True, "bits": 48} | ({"range": range} if range != 64 else {})
    summed = trained(tmp_path / "sum", **words, **more)
    want, got = (RunFolder(one.folder).restore()[0] for one in (server, summed))
    assert want is not None
    assert got is not None
    if range == 64:
        assert torch.allclose(got.server["sums"]["means"].total, want.server["sums"]["means"].total, atol=1e-2)
    else:  # three clients
        assert float(got.server["sums"]["means"].total.abs().max()) <= 3 * 0.5 + 1e-2
        assert float(want.server["sums"]["means"].total.abs().max()) > 3
