"""Shadow runs: likelihood ratios by hand, what they find in a run, and what they prove of epsilon."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from command import protofed

from protofed import Experiment, run
from protofed.leaks import shadows, views
from protofed.leaks.attack import Options, attack_run
from protofed.leaks.encoders import World
from protofed.leaks.membership import guessed_from_others, likelihood_ratios
from protofed.leaks.scores import one_run_bound
from protofed.leaks.uploads import recomputed
from protofed.privacy.accounting import PaidSteps, spent
from protofed.privacy.ledger import LEDGER, SpendingLedger
from protofed.runs.saved import read_checkpoint
from protofed.runs.setup import prepare

SMALL = (
    "clients=4", "rounds=2", "model=mlp_digits", "local_epochs=1", "engine=reference", "record.enabled=false",
    "device=cpu", "evaluate.own=0", "evaluate.gm=0", "engine.threads=1", "partition.ways=4", "partition.spread=0",
    "partition.shots=10",
)  # fmt: skip
FEW = Options(clients=2, classes=2, steps=5, shadows=6)


def made(folder: Path, *overrides: str) -> Path:
    run(Experiment.load("demo", *SMALL, *overrides), folder)
    return folder


def test_likelihood_ratios_by_hand() -> None:
    """Sample 0 scores 4 and 2 with it, 0 and 0 without; sample 1 was never there; means over all are (4+2)/2 = 3 and
    (0+0+1+1+1+1)/6 = 2/3."""
    known = torch.tensor([[4.0, 1.0], [2.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    there = torch.tensor([[True, False], [True, False], [False, False], [False, False]])
    member, other = torch.tensor([9 / 3, 3.0]), torch.tensor([(2 / 3) / 3, (4 + 2 / 3) / 5])
    errors = [(4 - 3) ** 2, (2 - 3) ** 2, *2 * [float(other[0]) ** 2], *4 * [(1 - float(other[1])) ** 2]]
    goal = torch.tensor([3.0, 0.0])
    want = ((goal - other) ** 2 - (goal - member) ** 2) / (2 * sum(errors) / 8)
    assert torch.allclose(likelihood_ratios(known, there, goal), want)
    assert float(want[0]) > 0 > float(want[1])


def test_no_coin_that_is_guessed_says_how_to_guess_another_one() -> None:
    """Scores that say nothing of coins: guesses would be right together, or wrong, if they followed from each other."""
    generator = torch.Generator().manual_seed(0)
    known, there = torch.randn(7, 5, generator=generator), torch.rand(7, 5, generator=generator) < 0.5
    ratios, truth = guessed_from_others(known, there)
    assert truth.tolist() == there[3:].flatten().tolist()
    assert torch.equal(ratios[5:10], likelihood_ratios(known[:3], there[:3], known[4]))
    other = there.clone()
    other[3:] = ~other[3:]
    assert torch.equal(guessed_from_others(known, other)[0], ratios)
    other[0] = ~other[0]
    assert not torch.equal(guessed_from_others(known, other)[0], ratios)


def test_the_bound_of_one_run_by_hand() -> None:
    """Without a delta: the largest epsilon at which so many right guesses are as likely as 5 %."""
    assert one_run_bound(50, 100, 100, 0.0) == 0.0
    assert one_run_bound(0, 100, 100, 1e-5) == 0.0
    found = one_run_bound(90, 100, 100, 0.0)
    chance = 1 / (1 + math.exp(-found))
    tail = sum(math.comb(100, k) * chance**k * (1 - chance) ** (100 - k) for k in range(90, 101))
    assert tail == pytest.approx(0.05, rel=1e-6)
    assert one_run_bound(100, 100, 100, 0.0) == pytest.approx(math.log(0.05**0.01 / (1 - 0.05**0.01)))
    assert one_run_bound(90, 100, 1000, 1e-4) < found
    assert one_run_bound(90, 100, 1000, 1e-3) < one_run_bound(90, 100, 1000, 1e-4)


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_guesses_of_a_mechanism_that_keeps_epsilon_prove_no_more(epsilon: float) -> None:
    """Randomised response is right with probability e^eps / (1 + e^eps): of 200 runs at most some 5 % are beyond."""
    generator = torch.Generator().manual_seed(1)
    right = (torch.rand(200, 400, generator=generator) < 1 / (1 + math.exp(-epsilon))).sum(1)
    bounds = [one_run_bound(int(one), 400, 400, 0.0) for one in right]
    assert sum(bound > epsilon for bound in bounds) <= 20
    assert max(bounds) > 0.6 * epsilon  # it is not empty either


def test_shadow_runs_find_members_of_a_plain_run_and_say_so_the_same_way_again(tmp_path: Path) -> None:
    folder = made(tmp_path / "run")
    told = attack_run(folder, FEW).told
    runs = told["shadows"]
    assert (runs["runs"], runs["rounds"], runs["epsilon"]) == (6, 2, None)
    assert runs["members"] == runs["others"] == 40  # two clients, two classes, ten of each
    assert runs["auc"] > 0.55
    assert runs["tpr_at_0.01"] is None  # 40 others are too few to tell
    assert attack_run(folder, FEW).told == told
    assert json.loads((folder / "attack.json").read_text()) == told
    assert {**told, "shadows": None} == attack_run(folder, Options(clients=2, classes=2, steps=5)).told  # nothing else


def test_who_is_no_member_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same attack on an upload in which none of the samples in question is."""
    folder = made(tmp_path / "run")
    question = shadows.Shadows._question

    def others_only(self: Any, number: int) -> Any:
        asked = question(self, number)
        assert asked is not None
        train = self.world.data.train
        unseen = train((number + 1) % 4)  # another client's samples stand in for members
        same = torch.isin(unseen.y, asked.y)
        many = min(int(same.sum()), int(asked.member.sum()))
        x = torch.cat([unseen.x[same][:many], asked.x[~asked.member]])
        y = torch.cat([unseen.y[same][:many], asked.y[~asked.member]])
        return asked._replace(x=x, y=y, member=torch.arange(len(y)) < many) if many else None

    monkeypatch.setattr(shadows.Shadows, "_question", others_only)
    told = attack_run(folder, Options(clients=4, classes=4, steps=5, shadows=6)).told["shadows"]
    assert told["members"] >= 20
    assert abs(told["auc"] - 0.5) < 0.2


NOISY = ("data.normalize=half", "privacy.unit=sample", "privacy.epsilon=8", "privacy.where=client")
STEPS = (*NOISY, "rounds=1", "privacy.sgd_rate=0.25", "privacy.sgd_noise=8", "privacy.noise=10")


def test_what_shadow_runs_prove_does_not_exceed_what_is_claimed(tmp_path: Path, monkeypatch: Any) -> None:
    """And with hardly any of the noise of class sums they notice."""
    pytest.importorskip("dp_accounting", reason="needs dp-accounting: pip install 'protofed[privacy]'")
    monkeypatch.setattr("protofed.leaks.attack.audited", lambda *words: None)  # another attack, which takes a while
    folder = made(tmp_path / "run", *STEPS)
    options = Options(clients=2, classes=4, steps=1, shadows=8)
    found = attack_run(folder, options).told["shadows"]["epsilon"]
    assert found["claimed"] == spent(10.0, 1, 1e-5, PaidSteps(4, 0.25, 8.0)) < 0.6
    assert 0 <= found["lower_bound"] <= found["claimed"]
    noised = views.noised_sum

    def next_to_none(layout: Any, vectors: Any, noise: float, *rest: Any) -> Any:
        return noised(layout, vectors, noise / 400, *rest)

    monkeypatch.setattr(views, "noised_sum", next_to_none)
    proved = attack_run(folder, options).told["shadows"]["epsilon"]
    assert proved["lower_bound"] > proved["claimed"] == found["claimed"]
    assert proved["right"] > found["right"]


def test_the_command_says_what_shadow_runs_found(tmp_path: Path) -> None:
    folder = made(tmp_path / "run")
    done = protofed("attack", str(folder), "--clients", "1", "--classes", "2", "--steps", "2", "--shadows", "3")
    assert "members by 3 shadow runs of each client: AUC 0." in " ".join(done.stdout.split())


def test_with_noise_a_shadow_trains_on_nothing_that_depends_on_all_coins(tmp_path: Path) -> None:
    """One sample left over makes a batch of one, which BatchNorm cannot take; with noise it is not there, and another
    sample for company would make a coin move two."""
    pytest.importorskip("dp_accounting", reason="needs dp-accounting: pip install 'protofed[privacy]'")
    sizes = []
    for name, words in (("plain", ()), ("noisy", STEPS)):
        saved = read_checkpoint(made(tmp_path / name, *words, "batch_size=2"))
        prepared = prepare(saved.experiment)
        clients = recomputed(saved, prepared.reference)
        world, view = World.of_run(saved, prepared), views.View(saved, prepared.reference, clients, 0)
        played = shadows.Shadows(world, view, clients, 4, 4, 0, "own")
        question = played._question(clients.numbers[0])
        assert question is not None
        key = torch.tensor([1, 2])
        heads = torch.zeros(len(question.y), dtype=torch.bool)
        sizes.append([len(played._samples(question, heads | (torch.arange(len(heads)) < n), key).y) for n in (1, 2, 3)])
    assert sizes == [[2, 2, 4], [1, 2, 3]]


def test_a_clip_that_followed_the_clients_is_that_of_the_round_that_is_attacked(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason="needs dp-accounting: pip install 'protofed[privacy]'")
    words = ("privacy.unit=client", "privacy.epsilon=8", "privacy.where=client", "privacy.clip_quantile=0.5")
    saved = read_checkpoint(made(tmp_path / "run", "data.normalize=half", *words))
    engine = prepare(saved.experiment).reference
    view = views.View(saved, engine, recomputed(saved, engine), 0)
    lines = SpendingLedger(tmp_path / "run" / LEDGER).lines
    assert view.layout is not None
    assert view.privacy.clip == view.layout.privacy.clip == lines[1].clip != lines[0].clip
    assert views.promise_of(saved, kept=False).clip == lines[1].next_clip  # attacked is what would be sent next
