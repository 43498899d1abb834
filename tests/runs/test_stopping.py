"""A run ends early by its validation samples: at the right round, the same when resumed, on every engine."""

from pathlib import Path
from typing import Any

import pytest
from small_runs import StopAfter, Told, final_state, lines, small

from protofed import Experiment, UserError, run
from protofed.runs.folder import RunFolder
from protofed.runs.loop import Interrupted
from protofed.runs.setup import prepare
from protofed.runs.stopping import Stopper

EARLY = ("rounds=40", "model=mlp_digits", "partition.shots=12", "evaluate.validation=0.25", "stopping.patience=3")


def ends(accuracies: list[float | None], *keys: str) -> int | None:
    """After which round a run with these accuracies ends; None: it does not."""
    plan = Experiment.load("demo", "evaluate.validation=0.2", *keys)
    stopper = Stopper(plan, None)
    totals: dict[str, Any] = {}
    for number, accuracy in enumerate(accuracies, 1):
        line = {"round": number} if accuracy is None else {"round": number, "validation_mean": accuracy}
        totals |= stopper.remembered(totals, line)
        if stopper.why(number, totals):
            return number
    return None


def test_patience_by_hand() -> None:
    rising = [0.1, 0.2, 0.3, 0.4]
    assert ends(rising, "stopping.patience=2") is None
    assert ends([*rising, 0.4, 0.4, 0.5], "stopping.patience=2") == 6  # equal is not better
    assert ends([*rising, 0.4, 0.41, 0.41], "stopping.patience=2") is None
    assert ends([0.1, 0.2, 0.22, 0.24, 0.26], "stopping.patience=3", "stopping.min_gain=0.05") is None  # 0.26 is
    assert ends([0.1, 0.2, 0.22, 0.24, 0.3], "stopping.patience=2", "stopping.min_gain=0.05") == 4
    assert ends([None, 0.5, None, None], "stopping.patience=2") == 4  # rounds count, measured or not
    assert ends([0.5] * 30) is None


@pytest.mark.parametrize("engine", ["reference", "stacked"])
def test_stopped_early_the_end_is_measured_and_a_resumed_run_ends_at_the_same_round(engine: str) -> None:
    plan, told = small(*EARLY, f"engine={engine}"), Told()
    result = run(plan, "whole", watch=told)
    found = lines(Path("whole"))
    last, accuracies = result.summary["rounds"], [line["validation_mean"] for line in found]
    assert last == len(found) < 40
    best = accuracies.index(max(accuracies)) + 1
    assert last == best + 3
    assert [note for note in told.notes if note.startswith(f"stopped after round {last} of 40: no better accuracy on")]
    assert len(result.clients) == 6
    with pytest.raises(Interrupted):
        run(plan, "cut", watch=StopAfter(last - 1))
    run(plan, "cut", resume=True)
    assert final_state(Path("cut")) == final_state(Path("whole"))
    with pytest.raises(Interrupted):  # all rounds are done, only the end is missing
        run(plan, "late", watch=StopAfter(last))
    run(plan, "late", resume=True)
    assert final_state(Path("late")) == final_state(Path("whole"))
    RunFolder(Path("whole")).check_rounds(plan.rounds)  # what reports ask of a finished run


def test_the_rounds_before_the_end_are_those_of_a_run_without_it() -> None:
    run(small(*EARLY), "early")
    whole = small(*EARLY, "stopping.patience=0")
    assert "stopping" not in whole.to_dict()
    with pytest.raises(Interrupted):
        run(whole, "whole", watch=StopAfter(len(lines(Path("early")))))
    early, other = (RunFolder(Path(name)).restore()[0] for name in ("early", "whole"))
    assert early is not None
    assert other is not None
    assert lines(Path("early")) == lines(Path("whole"))
    assert set(early.totals) - set(other.totals) == {"best"}


def test_last_phases_follow_an_early_end() -> None:
    run(small(*EARLY, "method=fedbabu"), "out")
    assert RunFolder(Path("out")).summary()["rounds"] < 40
    state, _ = RunFolder(Path("out")).restore()
    assert state is not None
    assert state.totals["finished"]


def test_a_global_model_may_decide() -> None:
    run(small(*EARLY, "method=fedavg", "stopping.by=global"), "out")
    accuracies = [line["validation_global_mean"] for line in lines(Path("out"))]
    assert len(accuracies) == accuracies.index(max(accuracies)) + 4
    plan = small(*EARLY, "stopping.by=global")
    with pytest.raises(UserError, match=r"stopping.by = 'global', but fedproto has no global model\. Use 'personal'"):
        Stopper(plan, plan.method.init_server(prepare(plan).engine.specs()[0]))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            ["stopping.patience=3"],
            r"evaluate.validation = 0 measures none between rounds\. Use evaluate.validation = 0.1",
        ),
        (
            ["stopping.patience=3", "evaluate.validation=0.2", "evaluate.own=0"],
            r"evaluate.own = 0 measures none between rounds\. Use evaluate.own = 1, or leave",
        ),
        (["stopping.min_gain=0.1"], "no effect without stopping.patience"),
        (
            ["stopping.patience=3", "evaluate.validation=0.2", "privacy.unit=client", "privacy.epsilon=8"],
            r"which no noise of \[privacy\] covers\. Leave it out",
        ),
    ],
)
def test_what_cannot_decide_is_refused(keys: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Experiment.load("demo", *keys)
