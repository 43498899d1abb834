"""Run folders that were made before a key came: they are what they were, and go on as they began."""

import tomllib
from pathlib import Path

import pytest
import tomli_w
from small_runs import StopAfter, final_state, small

from protofed import Experiment, UserError, run
from protofed.report.gather import gather
from protofed.runs.loop import Interrupted
from protofed.runs.saved import read_checkpoint
from protofed.runs.trust import trusted_experiment

OLD = ("method=fednh", "model=cnn_digits", "participation=0.5", "method.scored_by=newest")


def older(folder: str) -> Path:
    """A run folder as it was made when FedNH had no `scored_by`, and clients were scored with the newest prototypes."""
    path = Path(folder, "experiment.toml")
    tables = tomllib.loads(path.read_text())
    assert tables["method"].pop("scored_by") == "newest"
    path.write_text(tomli_w.dumps(tables))
    return path


@pytest.mark.parametrize("engine", ["reference", "stacked"])
def test_an_older_run_of_fednh_goes_on_as_it_began(engine: str) -> None:
    plan = small(*OLD, f"engine={engine}", "rounds=4")
    run(plan, "whole")
    with pytest.raises(Interrupted, match="after round 2 of 4"):
        run(plan, "cut", watch=StopAfter(2))
    path = older("cut")
    assert read_checkpoint("cut").experiment.method == plan.method
    run(trusted_experiment(path), "cut", resume=True)
    assert final_state(Path("cut")) == final_state(Path("whole"))


def test_an_older_run_of_fednh_is_not_taken_for_one_of_today() -> None:
    run(small(*OLD, "rounds=1"), "old")
    older("old")
    (found,) = gather(["old"]).runs
    assert found.settings["method.scored_by"] == "newest"
    with pytest.raises(UserError, match=r"method\.scored_by 'newest' -> 'downloaded' \(there -> now\)"):
        run(small("method=fednh", "model=cnn_digits", "participation=0.5", "rounds=1"), "old", resume=True)
    fresh = Experiment.load("demo", "method=fednh")
    assert fresh.to_dict()["method"]["scored_by"] == "downloaded", "only folders of runs are older"
