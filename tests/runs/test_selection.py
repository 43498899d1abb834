"""Who takes part in a round: by size, by loss, or as a function says; the same when a run is repeated or resumed."""

import dataclasses
import sys
from collections import Counter
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from small_runs import StopAfter, final_state, lines, small

from protofed import Experiment, UserError, federate, run
from protofed.engines import Engine, Trained, nobody
from protofed.method import Mean
from protofed.runs.cohort import draw_cohort
from protofed.runs.folder import RunFolder
from protofed.runs.loop import Interrupted
from protofed.runs.selection import Selector, Turn

QUICK = ("model=mlp_digits", "clients=8", "participation=0.25", "record.enabled=false", "rounds=4")


class Sizes:
    """All that a selector asks of an engine."""

    def __init__(self, samples: list[int]) -> None:
        self.all = samples

    def samples(self, cohort: list[int]) -> list[int]:
        return [self.all[number] for number in cohort]


def selector(samples: list[int], *keys: str) -> Selector:
    plan = Experiment.load("demo", f"clients={len(samples)}", *keys)
    return Selector(plan, cast(Engine, Sizes(samples)))


def test_by_size_clients_take_part_in_proportion_to_their_samples() -> None:
    found = selector([100, 300, 0, 600], "selection.rule=size", "participation=0.25")
    often = Counter(found.cohort(round, {})[0] for round in range(2000))
    assert [often[number] / 2000 for number in range(4)] == pytest.approx([0.1, 0.3, 0.0, 0.6], abs=0.03)
    pairs = selector([1, 1, 0, 1], "selection.rule=size", "participation=0.75")
    assert all(pairs.cohort(round, {}) == [0, 1, 3] for round in range(20))  # without samples, last of all


def test_power_of_choice_takes_the_highest_losses_of_those_drawn() -> None:
    rule = ("selection.rule=power_of_choice", "participation=0.4")
    every = selector([10] * 5, *rule, "selection.candidates=5")
    losses = {"0": 0.1, "1": 0.9, "2": 0.5, "3": 0.7, "4": 0.2}
    assert all(every.cohort(round, {"losses": losses}) == [1, 3] for round in range(20))
    assert every.cohort(0, {"losses": {key: losses[key] for key in "0134"}}) == [1, 2]  # who never trained is first
    two = selector([10] * 5, *rule, "selection.candidates=2")  # no choice: as drawn
    size = selector([10] * 5, "selection.rule=size", "participation=0.4")
    assert [two.cohort(r, {"losses": losses}) for r in range(20)] == [size.cohort(r, {}) for r in range(20)]
    usual = selector([10] * 5, *rule)  # four are drawn
    best = Counter(tuple(usual.cohort(round, {"losses": losses})) for round in range(200))
    assert set(best) == {(1, 3), (1, 2), (2, 3)}


def test_losses_are_those_of_the_last_training() -> None:
    every = selector([10] * 5, "selection.rule=power_of_choice")
    loss = Mean(torch.tensor([6.0, 0.0]), torch.tensor([3.0, 0.0]))
    trained: Trained = nobody([1, 4])._replace(loss=loss)
    after = every.remembered({"losses": {"1": 9.0, "2": 1.0}}, trained, [1, 4])
    assert after == {"losses": {"1": 2.0, "2": 1.0}}  # client 4 had no samples
    assert selector([10] * 5, "selection.rule=size").remembered({}, trained, [0, 1]) == {}


@pytest.mark.parametrize("engine", ["reference", "stacked"])
def test_stopped_and_resumed_equals_never_stopped(engine: str) -> None:
    plan = small(*QUICK, f"engine={engine}", "selection.rule=power_of_choice")
    run(plan, "whole")
    with pytest.raises(Interrupted):
        run(plan, "cut", watch=StopAfter(2))
    run(plan, "cut", resume=True)
    assert final_state(Path("cut")) == final_state(Path("whole"))
    state, _ = RunFolder(Path("whole")).restore()
    assert state is not None
    assert set(state.totals["losses"]) == set(state.totals["participations"])
    if engine == "stacked":  # the same clients as on the other engine
        run(dataclasses.replace(plan, engine=dataclasses.replace(plan.engine, name="reference")), "other")
        other, _ = RunFolder(Path("other")).restore()
        assert other is not None
        assert other.totals["participations"] == state.totals["participations"]


def test_without_a_rule_cohorts_and_checkpoints_are_as_before() -> None:
    plan = small(*QUICK)
    run(plan, "out")
    state, _ = RunFolder(Path("out")).restore()
    assert state is not None
    drawn = Counter(str(number) for round in range(4) for number in draw_cohort(plan, round))
    assert state.totals["participations"] == drawn
    assert "losses" not in state.totals
    assert "selection" not in plan.to_dict()


OWN = """
def choose(turn):
    assert set(turn.losses) == set(turn.rounds), turn
    assert len(turn.clients) == 8 and turn.size == 2 and min(turn.samples.values()) > 0
    seen = sorted(turn.clients, key=lambda number: (turn.rounds.get(number, 0), number))
    return seen[:1 + turn.round]

def twice(turn):
    return [1, 1]

def nobody(turn):
    return []

def stranger(turn):
    return [1, 99]

def broken(turn):
    return turn.nothing

text = "no function"
"""


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("choosing.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.delitem(sys.modules, "choosing", raising=False)


@pytest.mark.usefixtures("own")
def test_a_function_of_ones_own_chooses_and_is_asked_the_same_after_resuming() -> None:
    plan = small(*QUICK, "selection.rule=choosing:choose")
    run(plan, "whole")
    assert [line["clients"] for line in lines(Path("whole"))] == [1, 2, 3, 4]
    state, _ = RunFolder(Path("whole")).restore()
    assert state is not None
    assert sorted(state.totals["participations"].values()) == [1] * 6 + [2] * 2  # those that were there least
    with pytest.raises(Interrupted):
        run(plan, "cut", watch=StopAfter(3))
    run(plan, "cut", resume=True)
    assert final_state(Path("cut")) == final_state(Path("whole"))
    assert RunFolder(Path("whole")).environment()["own"].keys() == {"choosing:choose"}


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("twice", r"'choosing:twice' chose a client twice in round 1\. It should return different numbers from"),
        ("nobody", "'choosing:nobody' chose nobody in round 1"),
        ("stranger", "'choosing:stranger' chose client 99, which may not take part in round 1"),
        ("broken", "calling it for round 1 raises AttributeError: .*nothing.*choosing.py line 18"),
        ("text", "'choosing:text' is str, not a function that chooses clients"),
        ("missing", "choosing has no missing"),
    ],
)
def test_a_function_that_does_not_choose_is_said_in_one_line(rule: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        run(small(*QUICK, f"selection.rule=choosing:{rule}"), "out")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["selection.rule=sizes"], "selection.rule = 'sizes' is unknown. Did you mean 'size'"),
        (
            ["selection.candidates=3"],
            "selection.candidates = 3 is for selection.rule = 'power_of_choice', and it is 'r",
        ),
        (
            ["selection.rule=size", "privacy.unit=client", "privacy.epsilon=8"],
            "selection.rule = 'size' looks at clients' samples or losses, which no noise of",
        ),
        (["selection.rule=power_of_choice", "privacy.secure_sum=true"], "privacy.secure_sum hides them. Use"),
    ],
)
def test_rules_that_cannot_be_are_refused(keys: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Experiment.load("demo", *keys)


def test_federate_takes_a_function_and_its_run_goes_on_with_it_only() -> None:
    g = np.random.default_rng(0)
    y = np.tile(np.arange(3), 8)
    clients = {name: ((g.normal(size=(24, 6)) + y[:, None]).astype(np.float32), y) for name in ("a", "b", "c")}
    asked: list[Turn] = []

    def in_turn(turn: Turn) -> list[int]:
        asked.append(turn)
        return [turn.round % 3]

    given: dict[str, Any] = {"rounds": 3, "out": "out", "quiet": True, "method": "fedavg"}
    federate("mlp_table", clients, selection=in_turn, **given)
    assert [turn.round for turn in asked] == [0, 1, 2]
    assert len({turn.seed for turn in asked}) == 3
    assert [client["rounds"] for client in RunFolder(Path("out")).clients()] == [1, 1, 1]
    assert RunFolder(Path("out")).experiment_dict()["selection"] == {"rule": "memory:in_turn"}
    with pytest.raises(UserError, match="handed in by a script, and only that script can hand it in again"):
        federate("mlp_table", clients, selection="memory:in_turn", **given | {"out": "other"})
    with pytest.raises(UserError, match=r"selection is int\. Give the name of a rule, or a function"):
        federate("mlp_table", clients, selection=3, **given | {"out": "third"})  # type: ignore[arg-type]
