"""A clip that follows a quantile of the clients' lengths: by hand, in whole runs, and what it costs."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import StopAfter, Told, final_state
from torch import Tensor

from protofed import Experiment, UserError, run
from protofed.explain.explain import explain
from protofed.method import Mean
from protofed.privacy import Privacy
from protofed.privacy.accounting import spent
from protofed.privacy.ledger import LEDGER, Released, SpendingLedger
from protofed.privacy.release import Layout, noised_sum
from protofed.runs.folder import RunFolder

dp_accounting = pytest.importorskip("dp_accounting", reason="needs dp-accounting: pip install 'protofed[privacy]'")
pld = pytest.importorskip("dp_accounting.pld")
SMALL = (
    "clients=6", "rounds=4", "model=mlp_digits", "local_epochs=1", "engine=reference", "record.enabled=false",
    "device=cpu", "evaluate.own=0", "evaluate.gm=0", "data.normalize=half", "engine.threads=1", "partition.shots=4",
    "privacy.unit=client", "privacy.epsilon=8", "privacy.where=server", "privacy.clip_quantile=0.5",
)  # fmt: skip
CLASSES, WIDTH = 3, 4


def small(*overrides: str) -> Experiment:
    return Experiment.load("demo", *SMALL, *overrides)


def ledger(folder: str | Path) -> list[Released]:
    return SpendingLedger(Path(folder) / LEDGER).lines


def layout(**words: Any) -> Layout:
    """Of prototypes."""
    told: dict[str, Any] = {"unit": "client", "epsilon": 1.0, "where": "server", "clip_quantile": 0.5, **words}
    return Layout(Privacy(**told), Mean(torch.zeros(CLASSES, WIDTH), torch.zeros(CLASSES)))


def uploads(*lengths: float) -> Mean:
    """Clients with all classes, whose values are so long."""
    value = torch.stack([torch.full((CLASSES, WIDTH), length / math.sqrt(CLASSES * WIDTH)) for length in lengths])
    return Mean(value.double(), torch.ones(len(lengths), CLASSES).double())


def no_noise(_: int, many: int) -> Tensor:
    return torch.zeros(many, dtype=torch.float64)


def test_a_mark_says_whether_values_are_longer_than_their_bound_and_is_within_the_clip() -> None:
    here = layout(clip=2.0)
    assert here.bounds[0] == pytest.approx(2 * math.sqrt(0.8 * 0.95))
    vectors, _ = here.vectors(uploads(0.5, 1.74, 1.75, 9.0))  # the bound is 1.7436
    assert vectors[:, -1].tolist() == pytest.approx([0.4472136, 0.4472136, -0.4472136, -0.4472136])  # sqrt(0.05) * 2
    lengths = torch.linalg.vector_norm(vectors, dim=1)
    assert float(lengths.max()) <= 2 * (1 + 1e-12)
    assert lengths[2].item() == pytest.approx(2)  # all of the clip is used
    assert vectors.shape == (4, CLASSES * WIDTH + CLASSES + 1)
    assert Layout(Privacy(unit="client", epsilon=1.0), Mean(torch.zeros(3, 4), torch.zeros(3))).size == 15


@pytest.mark.parametrize("clip", [0.1, 0.3, 0.9, 1.0, 1.7, 3.3, 7.7])
def test_no_rounding_takes_a_vector_with_a_mark_beyond_the_clip(clip: float) -> None:
    vectors, _ = layout(clip=clip).vectors(uploads(1e3, 1e-3))
    assert vectors.dtype == torch.float64
    assert float(torch.linalg.vector_norm(vectors[0])) == pytest.approx(clip, rel=1e-14)


@pytest.mark.parametrize(
    ("lengths", "quantile", "rate", "after"),
    [
        ((0.1, 0.1, 0.1, 0.1), 0.5, 0.2, 2 * math.exp(-0.1)),
        ((9, 9, 9, 9), 0.5, 0.2, 2 * math.exp(0.1)),
        ((0.1, 0.1, 0.1, 9), 0.5, 1.0, 2 * math.exp(-0.25)),
        ((0.1, 0.1, 0.1, 9), 0.75, 1.0, 2.0),
    ],
)
def test_the_next_clip_is_the_geometric_update_by_hand(
    lengths: tuple[float, ...], quantile: float, rate: float, after: float
) -> None:
    here = layout(clip=2.0, clip_quantile=quantile, clip_rate=rate)
    released, _, _ = noised_sum(here, list(here.vectors(uploads(*lengths))[0]), 0.0, no_noise)
    assert here.next_clip(released, 4) == pytest.approx(after)
    opened = here.opened(released, 4, 0.0)  # the mark is no row and no value
    assert opened.weight.tolist() == pytest.approx([4, 4, 4])


def test_a_share_that_noise_takes_out_of_its_range_moves_the_clip_no_farther() -> None:
    here = layout(clip=2.0)
    vector = torch.zeros(here.size, dtype=torch.float64)
    for mark, share in ((1e9, 1.0), (-1e9, 0.0), (0.0, 0.5)):
        vector[-1] = mark
        assert here.next_clip(vector, 4) == pytest.approx(2 * math.exp(-0.2 * (share - 0.5)))


@pytest.mark.parametrize("noise", [0.8, 3.0])
def test_the_mark_is_paid_for_as_an_accountant_says_of_two_releases(noise: float) -> None:
    """Values and rows with their part of the clip, and the mark with its own, each with noise of noise * clip."""
    here = layout(clip=2.0)
    parts = [math.hypot(*here.bounds), here.mark]
    events = [dp_accounting.GaussianDpEvent(noise * 2.0 / part) for part in parts]
    both = pld.PLDAccountant(value_discretization_interval=1e-3).compose(dp_accounting.ComposedDpEvent(events))
    assert spent(noise, 1, 1e-5) == pytest.approx(both.get_epsilon(1e-5), rel=0.01)
    alone = pld.PLDAccountant().compose(events[0]).get_epsilon(1e-5)
    assert alone < spent(noise, 1, 1e-5) * 0.99  # it is not for nothing


@pytest.fixture(scope="module", params=["server", "client", "sum"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[str, ...]]:
    """A run that nobody stopped, and how it is asked for."""
    words = (f"privacy.where={request.param}", *(["privacy.secure_sum=true"] * (request.param == "sum")))
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run(small(*words), folder)
    return folder, words


def test_every_round_is_released_with_the_clip_that_the_last_one_made(whole: tuple[Path, Any]) -> None:
    folder, _ = whole
    lines, summary = ledger(folder), json.loads((folder / "summary.json").read_text())
    assert lines[0].clip == 1.0
    assert [line.clip for line in lines[1:]] == [line.next_clip for line in lines[:-1]]
    assert all(line.next_clip != line.clip for line in lines)
    assert all(abs(math.log(line.next_clip / line.clip)) <= 0.2 * 0.5 * (1 + 1e-9) for line in lines)
    assert summary["privacy"]["clips"] == [line["clip"] for line in RunFolder(folder).rounds()]
    assert summary["epsilon_spent"] == spent(summary["privacy"]["noise"], 4, 1e-5) <= 8


def test_a_run_that_is_stopped_goes_on_with_the_same_clip_and_pays_once(whole: tuple[Path, Any]) -> None:
    folder, words = whole
    with pytest.raises(RuntimeError):
        run(small(*words), "out", watch=StopAfter(2, RuntimeError), checkpoint_seconds=0)
    run(small(*words), "out", resume=True)
    assert final_state(Path("out")) == final_state(folder)
    assert Path("out", LEDGER).read_bytes() == (folder / LEDGER).read_bytes()


def test_rounds_that_were_not_saved_are_released_again_with_the_clip_that_they_had(whole: tuple[Path, Any]) -> None:
    folder, words = whole
    with pytest.raises(RuntimeError):
        run(small(*words), "out", watch=StopAfter(2, RuntimeError))  # no checkpoint but the first
    run(small(*words), "out", resume=True)
    assert Path("out", LEDGER).read_bytes() == (folder / LEDGER).read_bytes()
    assert final_state(Path("out")) == final_state(folder)


def test_both_engines_follow_alike() -> None:
    for engine in ("reference", "stacked"):
        run(small(f"engine={engine}", "engine.compile=never", "method=fedavg"), engine)
    for left, right in zip(ledger("reference"), ledger("stacked"), strict=True):
        assert left.next_clip == pytest.approx(right.next_clip, rel=1e-6)


def test_with_hardly_any_noise_the_clip_comes_to_the_quantile() -> None:
    """From a clip that leaves nothing, and from one that leaves everything."""
    watch, found = Told(), []
    words = ("privacy.epsilon=1e12", "privacy.noise=1e-5", "privacy.clip_rate=1", "rounds=25", "optimizer.lr=1e-6")
    for clip in (1e-4, 300):
        run(small(*words, f"privacy.clip={clip}"), f"out{clip}", watch=watch)
        found.append(ledger(f"out{clip}")[-1].clip)
    told = next(note for note in watch.notes if "leaves less than" in note)
    low, high = (float(number) for number in re.findall(r"([\d.]+) to ([\d.]+) long", told)[0])
    for clip in found:
        assert low * 0.7 < clip * math.sqrt(0.8 * 0.95) < high * 1.4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["privacy.unit=sample"], "privacy.clip_quantile = 0.5 follows the lengths of whole clients' uploads"),
        (["privacy.unit=none"], "privacy.clip_quantile = 0.5 follows the lengths of whole clients' uploads"),
        (["privacy.clip_quantile=0", "privacy.clip_rate=1"], "privacy.clip_rate = 1 has no effect while the clip"),
        (["privacy.clip_quantile=1"], "privacy.clip_quantile = 1"),
        (["rounds=1"], "privacy.clip_quantile = 0.5 learns the clip from round to round, and rounds = 1"),
    ],
)
def test_bad_input_is_one_line_and_spends_nothing(words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)) as found:
        run(small(*words), "out")
    assert "\n" not in str(found.value)
    assert not Path("out").exists()


def test_a_federation_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"privacy\.clip_quantile = 0\.5 works in simulations only") as found:
        small("privacy.where=client").privacy.refuse_federation()
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("clip", ["-1.0", "Infinity", "0.0"])
def test_a_ledger_whose_clip_is_no_number_is_not_gone_on_with(clip: str) -> None:
    with pytest.raises(RuntimeError):
        run(small(), "out", watch=StopAfter(2, RuntimeError), checkpoint_seconds=0)
    path = Path("out", LEDGER)
    path.write_text(re.sub(r'"next_clip": [^,}]+', f'"next_clip": {clip}', path.read_text()))
    with pytest.raises(UserError, match=r"is damaged \(its clip is not a positive number\)"):
        run(small(), "out", resume=True)


def test_explain_says_what_the_clip_follows() -> None:
    said = str(explain(small()))
    assert "follows the length that 50% of the clients' values stay below" in said
