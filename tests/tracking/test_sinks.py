"""What the sinks were told, read back by their own libraries; and that none of them can hurt a run."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from protofed import Experiment, run
from protofed.cli import app
from protofed.errors import UserError
from protofed.runs.folder import RunFolder
from protofed.runs.watch import Watch, Watches
from protofed.tracking import track as tracking
from protofed.tracking.sinks.sink import named_numbers
from protofed.tracking.sinks.wandb import WandB
from protofed.tracking.track import TRACK, chosen_sinks, track

HERE = all(find_spec(name) for name in ("tensorboard", "wandb", "mlflow", "sqlalchemy"))  # they take seconds to import
pytestmark = pytest.mark.skipif(not HERE, reason="needs pip install 'protofed[track]'")

PLAN = ("rounds=5", "clients=4", "evaluate.pm=0", "engine=reference")
SINKS = ("tensorboard", "wandb", "mlflow")


class Killed(Exception):
    """Stands for a kill: nothing is saved beyond the last checkpoint."""


class KillAt(Watch):
    def __init__(self, round: int) -> None:
        self.last = round

    def round(self, line: dict[str, Any]) -> None:
        if line["round"] == self.last:
            raise Killed


class Tracked(NamedTuple):
    """A run that was killed after three rounds, none of them saved, and resumed; and where MLflow has it."""

    folder: Path
    database: str
    notes: list[str]


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tracked]:
    here = tmp_path_factory.mktemp("tracked")
    folder, notes = here / "some" / "run", list[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        patch.setattr(tracking, "LAST_SECONDS", 60.0)
        for name in [key for key in os.environ if key.startswith(("WANDB_", "MLFLOW_"))]:
            patch.delenv(name)
        plan = Experiment.load("demo", *PLAN)
        sinks = track(*SINKS, say=notes.append)
        with pytest.raises(Killed):
            run(plan, folder, watch=Watches(sinks, KillAt(3)), checkpoint_seconds=1000)
        run(plan, folder, resume=True, watch=sinks)
        yield Tracked(folder, f"sqlite:///{here}/mlflow.db", notes)


def expected(folder: Path) -> dict[str, dict[int, float]]:
    """Every number by name and round, from the run's own files."""
    found: dict[str, dict[int, float]] = {}
    for line in RunFolder(folder).rounds():
        step = line.pop("round")
        for name, number in named_numbers(line).items():
            found.setdefault(name, {})[step] = number
    for name, number in named_numbers({"final": RunFolder(folder).summary()}).items():
        found[name] = {5: number}
    return found


def same(told: dict[str, list[tuple[int, float]]], folder: Path) -> None:
    """Every number once, under its name, at its round; seconds were measured anew in the rounds that ran twice."""
    wanted = expected(folder)
    assert set(told) == set(wanted)
    assert {"loss", "accuracy_mean", "bytes_up", "final/accuracy_mean"} <= set(told)
    for name, points in told.items():
        assert [step for step, _ in points] == sorted(wanted[name]), name
        if "seconds" not in name and not name.startswith("parts/"):
            assert [number for _, number in points] == pytest.approx([wanted[name][step] for step, _ in points]), name


def test_tensorboard_has_every_number_once(tracked: Tracked) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tracked.folder / "track" / "tensorboard"), purge_orphaned_data=False)
    events.Reload()
    tags = events.Tags()
    same({tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags["scalars"]}, tracked.folder)
    assert tags["tensors"] == ["experiment"]
    assert b"`method.lam`" in events.Tensors("experiment")[0].tensor_proto.string_val[0]


def test_mlflow_has_every_number_once(tracked: Tracked) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracked.database)
    experiment = client.get_experiment_by_name("protofed")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status, found.data.tags["group"]) == ("run", "FINISHED", "some")
    assert (found.data.params["method.name"], found.data.params["clients"]) == ("fedproto", "4")
    told = {name: client.get_metric_history(found.info.run_id, name) for name in found.data.metrics}
    same({name: sorted((m.step, m.value) for m in points) for name, points in told.items()}, tracked.folder)


def test_runs_that_begin_at_once_share_a_new_database(tracked: Tracked, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.setattr(tracking, "LAST_SECONDS", 60.0)  # the second waits for the first, on a busy machine for long
    notes = list[str]()
    both = [track("mlflow", say=notes.append) for _ in range(2)]
    for number, one in enumerate(both):
        folder = shutil.copytree(tracked.folder, f"run{number}", ignore=shutil.ignore_patterns("track"))
        one.opened(Path(folder))
    for one in both:
        one.end()
    assert notes == []
    client = MlflowClient(f"sqlite:///{Path('mlflow.db').resolve()}")
    experiment = client.get_experiment_by_name("protofed")
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id])
    assert {one.info.run_name: one.info.status for one in found} == {"run0": "FINISHED", "run1": "FINISHED"}


def records(path: Path) -> Iterator[Any]:
    """The messages in an offline file: a log of blocks, read by wandb's own message type."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, whole = path.read_bytes(), 7, b""
    assert content.startswith(b":W&B")
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:  # too short for a header: padding
            at += left
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        whole += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # all of it, or its last part
            yield Record.FromString(whole)
            whole = b""


def test_wandb_has_every_number_once_and_stayed_offline(tracked: Tracked) -> None:
    folders = sorted((tracked.folder / "track" / "wandb").glob("offline-run-*"))
    assert len(folders) == 2, "before and after the kill"
    told: dict[str, list[tuple[int, float]]] = {}
    ids, settings = set(), dict[str, Any]()
    for folder in folders:
        (path,) = folder.glob("*.wandb")
        for record in records(path):
            if record.HasField("run"):
                ids.add((record.run.project, record.run.run_id, record.run.display_name, record.run.run_group))
                settings |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if record.HasField("history"):
                row = {
                    "/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item
                }
                for name, value in row.items():
                    if not name.startswith("_"):
                        told.setdefault(name, []).append((row["_step"], value))
            for item in record.summary.update:
                name = "/".join(item.nested_key) or item.key
                if name.startswith("final/"):
                    told[name] = [(5, json.loads(item.value_json))]
    assert len(ids) == 1
    assert {project for project, *_ in ids} == {"protofed"}
    assert settings["method"]["name"] == "fedproto"
    same(told, tracked.folder)


def test_a_run_that_goes_well_is_quiet_and_leaves_no_process(tracked: Tracked) -> None:
    assert tracked.notes == []
    assert sorted(p.name for p in (tracked.folder / "track").iterdir()) == [
        "log.txt", "mlflow.json", "tensorboard", "tensorboard.json", "wandb", "wandb.json",
    ]  # fmt: skip


def test_numbers_are_named_as_in_the_record() -> None:
    record = {"loss": 1, "none": None, "text": "x", "parts": {"train": 0.5}, "bytes_up_by": {"counts and header": 3}}
    assert named_numbers(record) == {"loss": 1.0, "parts/train": 0.5, "bytes_up_by/counts_and_header": 3.0}
    assert named_numbers({"theory": {"holds": True, "L1": None}}) == {"theory/holds": 1.0}


class BreakDatabase(Watch):
    """Destroys MLflow's database in the third round, when it has numbers of the run."""

    def round(self, line: dict[str, Any]) -> None:
        if line["round"] == 3:
            until = time.monotonic() + 60
            while told("mlflow") < 1:
                assert time.monotonic() < until
                time.sleep(0.05)
            Path("mlflow.db").write_bytes(b"this is no database" * 1000)


def told(sink: str) -> int:
    path = Path("out/track") / f"{sink}.json"
    return int(json.loads(path.read_text())["round"]) if path.is_file() else 0


def test_sinks_that_fail_are_said_once_and_the_others_go_on(capfd: pytest.CaptureFixture[str]) -> None:
    """MLflow's database breaks in the middle, TensorBoard's folder cannot be made, W&B is well."""
    notes = list[str]()
    plan = Experiment.load("demo", *PLAN)
    with pytest.raises(Killed):
        run(plan, "out", watch=KillAt(1))
    Path("out/track").mkdir()
    Path("out/track/tensorboard").write_text("in the way")
    result = run(plan, "out", resume=True, watch=Watches(track(*SINKS, say=notes.append), BreakDatabase()))
    assert len(result.rounds) == result.summary["rounds"] == 5
    assert sorted(note.split()[0] for note in notes) == ["mlflow", "tensorboard"]
    assert all("failed (" in note and "the run continues without it" in note for note in notes)
    assert told("wandb") == 5
    assert capfd.readouterr() == ("", "")


def test_a_server_that_never_answers_costs_only_the_wait_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "LAST_SECONDS", 1.0)
    notes = list[str]()
    with socket.create_server(("127.0.0.1", 0)) as server:  # connections are taken by the system, and stay silent
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.getsockname()[1]}")
        result = run(Experiment.load("demo", *PLAN), "out", watch=track("mlflow", say=notes.append))
    assert len(result.rounds) == 5
    assert len(notes) == 1
    assert notes[0].startswith("mlflow did not take the last numbers; the run continues without it")


@pytest.mark.slow
def test_wandb_never_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Online was asked for, but nobody is logged in: said once, though there is a terminal to ask at."""
    monkeypatch.setenv("HOME", str(Path.cwd()))
    monkeypatch.setenv("NETRC", str(Path("netrc").resolve()))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    keyboard, screen = os.openpty()
    command = [sys.executable, "-m", "protofed", "run", "demo", *PLAN, "--track", "wandb", "--out", "out"]
    process = subprocess.Popen(command, stdin=screen, stdout=screen, stderr=screen, start_new_session=True)
    os.close(screen)
    seen = b""
    while True:
        try:
            seen += os.read(keyboard, 65536)
        except OSError:  # the other end is closed
            break
    os.close(keyboard)
    assert process.wait(60) == 0
    text = " ".join(seen.decode().split())
    assert text.count("note: wandb failed") == 1
    assert "wandb login" in text
    assert "W&B API key" not in text
    assert Path("out/summary.json").is_file()


@pytest.mark.slow
def test_every_run_of_a_sweep_is_tracked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRACK, "")  # restored afterwards
    Path("cells.toml").write_text(
        'experiment = "demo"\nseeds = [0, 1]\nchanges = ["rounds=1", "clients=4", "engine=reference"]\n'
    )
    with open("cells.toml", "a") as file:
        file.write("[methods]\nlocal = []\n")
    done = CliRunner().invoke(app, ["sweep", "cells.toml", "--jobs", "1", "--out", "out", "--track", "tensorboard"])
    assert done.exit_code == 0, done.output
    assert len(list(Path("out").glob("*/track/tensorboard/events*"))) == 2


def test_mistakes_are_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    done = CliRunner().invoke(app, ["run", "demo", "--track", "tensorbord", "--out", "out"])
    assert isinstance(done.exception, UserError)
    assert "Did you mean 'tensorboard'?" in str(done.exception)
    assert not Path("out").exists()
    assert chosen_sinks(["wandb, tensorboard", "wandb"]) == ["wandb", "tensorboard"]
    monkeypatch.setattr(WandB, "needs", ("a_package_that_nobody_has",))
    with pytest.raises(UserError, match=r"pip install 'protofed\[track\]'"):
        chosen_sinks(["wandb"])
    Path("a_package_that_nobody_has").mkdir()  # as wandb makes a folder 'wandb' where it runs
    monkeypatch.syspath_prepend(str(Path.cwd()))
    with pytest.raises(UserError, match="a_package_that_nobody_has missing"):
        chosen_sinks(["wandb"])
