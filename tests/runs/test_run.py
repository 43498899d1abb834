"""A run is a folder: complete, repeatable, resumable, and never half lost."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from small_runs import SMALL, StopAfter, Told, final_state, lines, small, start, wait_for

from protofed import Experiment, UserError, run
from protofed.engines.stacked import cache
from protofed.method import Client
from protofed.methods import METHODS
from protofed.methods.fedproto import FedProto
from protofed.runs.cohort import draw_cohort
from protofed.runs.folder import RunFolder
from protofed.runs.loop import Interrupted
from protofed.runs.watch import Watch


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing happened to; to be copied before it is changed."""
    return run(small(), tmp_path_factory.mktemp("whole") / "out").folder


@pytest.mark.usefixtures("pictures")
def test_a_run_leaves_everything_a_reader_needs() -> None:
    result = run(small(), "out")
    names = {p.name for p in Path("out").iterdir()}
    assert names >= {
        "experiment.toml", "partition.npz", "partition.png", "rounds.jsonl", "clients.jsonl", "summary.json",
        "accuracy.png", "clients.png", "environment.json", "checkpoints", "classes.json", "confusion.npz", "views.npz",
    }  # fmt: skip
    needed = {
        "method", "rounds", "seed", "accuracy_mean", "accuracy_std", "accuracy_worst10", "accuracy_head_mean",
        "accuracy_proto_mean", "global_accuracy", "pm_v", "pm_l", "params_up_per_round", "bytes_up", "bytes_down",
        "seconds",
    }  # fmt: skip
    assert set(result.summary) >= needed
    assert result.summary["global_accuracy"] is None  # FedProto has no global model
    assert len(result.rounds) == 3
    assert len(result.clients) == 6
    assert Experiment.from_dict(tomllib.loads(Path("out/experiment.toml").read_text())) == small()
    assert not list(Path("out").rglob("*.pkl"))
    assert not list(Path("out").rglob(".*.partial"))
    accuracies = [client["accuracy"] for client in result.clients]
    assert result.summary["accuracy_mean"] == pytest.approx(np.mean(accuracies))
    assert result.summary["accuracy_std"] == pytest.approx(np.std(accuracies))
    assert result.summary["accuracy_worst10"] == pytest.approx(min(accuracies))
    for picture in ("partition.png", "accuracy.png", "clients.png"):
        with Image.open(Path("out") / picture) as drawn:
            assert min(drawn.size) > 300
    # FedProto counts what the paper counts
    held = sum(len(client["classes"]) for client in result.clients)
    assert result.summary["params_up_per_round"] == held * 32
    assert result.summary["bytes_up"] == sum(line["bytes_up"] for line in result.rounds)


def test_fedavg_has_a_global_model_and_local_sends_nothing() -> None:
    average = run(small("method=fedavg", "model=cnn_digits"), "avg").summary
    assert 0 <= average["global_accuracy"] <= 1
    assert average["accuracy_proto_mean"] is None
    assert average["params_up_per_round"] == 6 * 4890
    alone = run(small("method=local"), "alone").summary
    assert (alone["bytes_up"], alone["bytes_down"], alone["params_up_per_round"]) == (0, 0, 0)
    assert alone["global_accuracy"] is None


@pytest.mark.parametrize("method", ["fedproto", "fesem", "fedrep", "ditto", "creff", "dpfedcl"])
def test_the_same_seed_gives_the_same_bits_also_in_two_parts_and_another_seed_does_not(method: str) -> None:
    threads = 2 if method in ("fedproto", "fesem") else 1
    quick = {"creff": ["method.head_epochs=3", "method.steps=3"], "fedrep": ["method.head_epochs=2"]}.get(method, [])
    plan = small(f"method={method}", "model=cnn_digits", "participation=0.5", f"engine.threads={threads}", *quick)
    torch.manual_seed(1)
    run(plan, "a")
    torch.manual_seed(2)  # nobody else's random numbers matter
    np.random.seed(3)
    with pytest.raises(Interrupted, match="after round 2 of 3"):  # all methods, after the first: test_presets.py
        run(plan, "cut", watch=StopAfter(2))
    run(plan, "cut", resume=True)
    assert final_state(Path("cut")) == final_state(Path("a"))
    run(dataclasses.replace(plan, seed=1, rounds=1), "c")
    one, other = final_state(Path("a")), final_state(Path("c"))
    both = [name for name in one if name.startswith("client ") and name in other]
    assert both
    assert all(one[name] != other[name] for name in both)


@pytest.mark.usefixtures("traced")
def test_traced_steps_give_the_same_bits(whole: Path) -> None:
    with mock.patch.object(cache, "Traced", wraps=cache.Traced) as traced:
        run(small(), "out")
    assert traced.call_count == 3  # one for each architecture, in the last round
    assert final_state(Path("out")) == final_state(whole)


def test_a_run_leaves_the_global_random_state_and_threads_alone() -> None:
    torch.manual_seed(5)
    before, threads = torch.random.get_rng_state(), torch.get_num_threads()
    run(small(), "out")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.get_num_threads() == threads


def test_cohorts_depend_on_seed_and_round_alone() -> None:
    plan = small("clients=100", "participation=0.1")
    cohorts = [draw_cohort(plan, r) for r in range(200)]
    assert all(len(set(c)) == 10 for c in cohorts)
    assert cohorts == [draw_cohort(dataclasses.replace(plan, method=METHODS["local"]()), r) for r in range(200)]
    often = np.bincount(np.concatenate(cohorts), minlength=100)
    assert often.min() >= 5  # mean 20
    assert often.max() <= 40
    assert draw_cohort(small("participation=0.01"), 0) != []


def test_different_inputs_share_prototypes() -> None:
    """16x16 grey beside 28x28 colour: only the embedding width must agree."""
    rng = np.random.default_rng(0)
    Path("d").mkdir()
    for name, shape in (("grey", (16, 16)), ("colour", (28, 28, 3))):
        y = np.repeat(np.arange(3), 20)
        x = rng.integers(0, 99, (60, *shape), dtype=np.uint8) + (50 * y).astype(np.uint8).reshape(-1, *[1] * len(shape))
        np.savez(f"d/{name}.npz", x_train=x, y_train=y, x_test=x[::2], y_test=y[::2])
    Path("e.toml").write_text(
        'rounds = 2\nclients = 4\n[model]\nname = "cnn_mnist"\n[data]\nname = ["grey", "colour"]\n'
        '[partition]\nname = "domain"\n'
    )
    result = run(Experiment.load("e.toml"), "out", data_dir="d")
    assert [c["architecture"] for c in result.clients[:2]] == ["cnn_mnist for 1x16x16", "cnn_mnist for 3x28x28"]
    assert result.summary["pm_v"] is not None
    with pytest.raises(UserError, match="needs one architecture"):
        run(Experiment.load("e.toml", "method=fedavg"), "avg", data_dir="d")


def test_batchnorm_runs_and_is_averaged_under_fedavg() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 255, (48, 32, 32, 3), dtype=np.uint8), np.arange(48) % 4
    np.savez("tiny.npz", x_train=x, y_train=y, x_test=x[:8], y_test=y[:8])
    Path("e.toml").write_text(
        'rounds = 1\nclients = 2\nbatch_size = 8\n[method]\nname = "fedavg"\n[model]\nname = "resnet18_s22"\n'
        '[data]\nname = "tiny.npz"\n[partition]\nname = "iid"\n'
    )
    result = run(Experiment.load("e.toml"), "out")
    state, _ = RunFolder(result.folder).restore()
    assert state is not None
    mean = torch.stack([c.buffers["body.bn1.running_mean"] for c in state.clients.values()]).mean(0)
    torch.testing.assert_close(state.server["buffers"]["body.bn1.running_mean"], mean)
    assert result.summary["params_up_per_round"] == 2 * sum(p.numel() for p in state.server["params"].values())
    with pytest.raises(UserError, match=r"batch_size = 23 leaves client 0 a batch of one sample.*drop_last"):
        run(Experiment.load("e.toml", "batch_size=23"), "again")
    run(Experiment.load("e.toml", "batch_size=23", "drop_last=true"), "dropped")


# stopping and going on


@pytest.mark.slow
def test_killed_at_any_moment_and_resumed_equals_never_killed() -> None:
    overrides = ("rounds=14", "participation=0.7", "model=cnn_digits")
    plan = small(*overrides)
    run(plan, "whole", checkpoint_seconds=0)
    folder = RunFolder(Path("cut"))
    kills = 0
    for moment in (0.0, 0.02, 0.07):  # after the next round's line appears, so in the midst of writing
        done = len(folder.rounds())
        process = start("cut", *overrides)
        if wait_for(lambda done=done: len(folder.rounds()) > done + 1, process):
            time.sleep(moment)
        process.kill()
        kills += process.wait() == -signal.SIGKILL
    assert kills >= 2
    run(plan, "cut", resume=True, checkpoint_seconds=0)
    assert final_state(Path("cut")) == final_state(Path("whole"))
    assert not list(Path("cut").rglob(".*.partial"))


@pytest.mark.slow
def test_ctrl_c_saves_and_prints_the_command_that_resumes() -> None:
    command = [sys.executable, "-m", "protofed", "run", "demo", *SMALL, "rounds=400", "--out", "out"]
    process = subprocess.Popen(
        command,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    assert wait_for(lambda: len(RunFolder(Path("out")).rounds()) > 2, process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "Traceback" not in output
    assert "--out out --resume" in output
    assert RunFolder(Path("out")).checkpoints()


def test_a_damaged_checkpoint_falls_back_to_the_one_before_and_says_so() -> None:
    plan = small("rounds=4")
    run(plan, "whole")
    with pytest.raises(Interrupted):
        run(plan, "cut", watch=StopAfter(3), checkpoint_seconds=0)
    newest = RunFolder(Path("cut")).checkpoints()[0]
    assert newest.name == "round-000003"
    damaged = newest / "server.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    said: list[str] = []
    watch = Watch()
    watch.note = said.append  # type: ignore[method-assign]
    run(plan, "cut", resume=True, watch=watch)
    assert any("round-000003 is damaged" in text for text in said)
    assert any("after round 2" in text for text in said)
    assert final_state(Path("cut")) == final_state(Path("whole"))


def test_all_checkpoints_damaged_starts_over(whole: Path) -> None:
    plan = small()
    with pytest.raises(Interrupted):
        run(plan, "cut", watch=StopAfter(2), checkpoint_seconds=0)
    for checkpoint in RunFolder(Path("cut")).checkpoints():
        (checkpoint / "state.json").write_text("{")
    run(plan, "cut", resume=True)
    assert final_state(Path("cut")) == final_state(whole)


def test_only_the_last_checkpoints_are_kept() -> None:
    run(small("rounds=5"), "out", checkpoint_seconds=0)
    assert [p.name for p in RunFolder(Path("out")).checkpoints()] == ["round-000005", "round-000004"]


def test_a_folder_with_another_run_is_never_touched(whole: Path) -> None:
    shutil.copytree(whole, "out")
    before = {p: p.stat().st_mtime_ns for p in Path("out").rglob("*")}
    with pytest.raises(UserError, match="already holds a finished run"):
        run(small(), "out")
    with pytest.raises(UserError, match=r"method\.lam 1\.0 -> 2\.0; optimizer\.lr 0\.05 -> 0\.1 \(there -> now\)"):
        run(small("optimizer.lr=0.1", "method.lam=2"), "out", resume=True)
    Path("other").mkdir()
    Path("other/thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="holds files that are not a run"):
        run(small(), "other")
    Path("file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        run(small(), "file")
    assert before == {p: p.stat().st_mtime_ns for p in Path("out").rglob("*")}


def test_resuming_a_finished_run_gives_its_result(whole: Path) -> None:
    shutil.copytree(whole, "out")
    assert run(small(), "out", resume=True).summary == json.loads((whole / "summary.json").read_text())


def test_resuming_with_other_data_is_refused() -> None:
    with pytest.raises(Interrupted):
        run(small(), "out", watch=StopAfter(1))
    from protofed.data.split import Split

    saved = Split.load("out/partition.npz")
    Split(saved.domain, saved.train[::-1], saved.test[::-1]).save("out/partition.npz")
    with pytest.raises(UserError, match="no longer gives the partition"):
        run(small(), "out", resume=True)


@pytest.mark.slow
def test_two_processes_do_not_write_one_run() -> None:
    process = start("out", "rounds=400")
    assert wait_for(lambda: len(RunFolder(Path("out")).rounds()) > 1, process)
    try:
        with pytest.raises(UserError, match="written by another process"):
            run(small("rounds=400"), "out", resume=True)
    finally:
        process.kill()
        process.wait()


@dataclasses.dataclass(frozen=True)
class Explodes(FedProto):
    """Turns NaN for one client once prototypes have come down."""

    def loss(self, model: Any, client: Client, batch: Any, down: Any) -> Any:
        value, seen = super().loss(model, client, batch, down)
        bad = (down.weight.sum() > 0) & (batch.y == 9).any()
        return value + torch.where(bad, torch.nan, 0.0), seen


def test_a_loss_that_turns_nan_stops_the_run_and_keeps_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS.places, "explodes", f"{__name__}:Explodes")
    plan = small("method=explodes")
    holder = next(i for i, c in enumerate(run(small("rounds=1"), "look").clients) if 9 in c["classes"])
    with pytest.raises(UserError, match=rf"client {holder}\b.*in round 2\. The state after round 1 is kept"):
        run(plan, "out")
    state, _ = RunFolder(Path("out")).restore()
    assert state is not None
    assert state.round == 1
    assert all(torch.isfinite(p).all() for c in state.clients.values() for p in c.params.values())
    assert len(RunFolder(Path("out")).rounds()) == 1


def test_a_learning_rate_that_blows_up_is_said_in_one_line() -> None:
    with pytest.raises(UserError, match=r"no longer a number in round \d+"):
        run(small("optimizer.lr=1e30"), "out")


@pytest.fixture
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A file system of 500 kB, in this process's own tree."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={getattr(request, 'param', '500k')}", "tmpfs", str(disk)],
        capture_output=True,
        check=False,
    )
    if not mounted or mounted.returncode != 0:
        pytest.skip("needs the right to mount a small file system (root)")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.slow
def test_a_full_disk_stops_the_run_and_loses_nothing(small_disk: Path) -> None:
    plan = small("rounds=8", "clients=4")
    run(plan, "whole")
    out = small_disk / "out"
    with pytest.raises(Interrupted):
        run(plan, out, watch=StopAfter(3), checkpoint_seconds=0)
    filler = small_disk / "filler"
    with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
        while True:
            file.write(b"0" * 4096)
    with pytest.raises(UserError, match=r"no space is left.*resume=True"):
        run(plan, out, resume=True, checkpoint_seconds=0)
    filler.unlink()
    for picture in out.glob("*.png"):
        picture.unlink()
    shutil.copytree(out, "moved")  # to where there is room for all of it
    run(plan, "moved", resume=True)
    assert final_state(Path("moved")) == final_state(Path("whole"))


@pytest.mark.parametrize("small_disk", ["2m"], indirect=True)
@pytest.mark.slow
def test_without_room_for_checkpoints_a_run_goes_on_without(small_disk: Path) -> None:
    plan = small("rounds=8", "record.models=false", "record.enabled=false", "method=local")
    run(plan, "whole")
    out, watch = small_disk / "out", Told()
    with pytest.raises(Interrupted):
        run(plan, out, watch=StopAfter(3), checkpoint_seconds=0)
    (small_disk / "filler").write_bytes(b"0" * (shutil.disk_usage(small_disk).free - 200_000))
    run(plan, out, resume=True, watch=watch, checkpoint_seconds=0)
    said = [note for note in watch.notes if "no room for checkpoints" in note]
    assert len(said) == 1
    assert said[0].endswith("it resumes after round 3")
    assert lines(out) == lines(Path("whole"))
    assert (out / "clients.jsonl").read_bytes() == Path("whole/clients.jsonl").read_bytes()
    assert not (out / "checkpoints").exists()


def test_environment_says_what_the_run_was_made_with(whole: Path) -> None:
    said = json.loads((whole / "environment.json").read_text())
    assert said["torch"] == torch.__version__
    assert said["cpus"] == os.cpu_count()


@pytest.mark.parametrize("config", ["domains/digits4", "writers/mnist", "fedpr/mnist", "mpfedcl/mnist"])
@pytest.mark.slow
def test_shipped_settings_run_on_real_data(config: str, real_data: Path) -> None:
    plan = Experiment.load(
        config,
        "rounds=1",
        "local_epochs=1",
        "batch_size=32",
        "evaluate.gm=0",
        "clients=4" if config == "domains/digits4" else "clients=5",
        "evaluate.pm_clients=1",
    )
    result = run(plan, "out", data_dir=real_data)
    assert result.summary["accuracy_mean"] > 0.05


def test_a_last_step_that_overflows_is_found() -> None:
    with pytest.raises(UserError, match=r"no longer a number in round 1\. The state after round 0"):
        run(small("optimizer.lr=1e38", "batch_size=1000", "local_epochs=1"), "out")


def test_changed_samples_are_not_resumed() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 8, 8)).astype(np.float32), np.arange(60) % 3
    np.savez("mine.npz", x_train=x, y_train=y, x_test=x[:9], y_test=y[:9])
    plan = Experiment.load("demo", "data.name=mine.npz", "clients=4", "rounds=3", "partition=iid")
    with pytest.raises(Interrupted):
        run(plan, "out", watch=StopAfter(1))
    np.savez("mine.npz", x_train=-x, y_train=y, x_test=x[:9], y_test=y[:9])
    with pytest.raises(UserError, match="other data"):
        run(plan, "out", resume=True)


def test_the_last_phases_are_kept_counted_and_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = small("method=fedbabu", "model=cnn_digits", "method.tune_epochs=1")
    whole = run(plan, "whole")
    assert whole.summary["bytes_down"] > sum(line["bytes_down"] for line in whole.rounds)
    state, _ = RunFolder(Path("whole")).restore()
    assert state is not None
    assert not torch.equal(state.clients[0].params["head.fc.weight"], state.clients[1].params["head.fc.weight"])
    Path("whole/summary.json").unlink()  # killed just before the end: nothing is tuned twice
    run(plan, "whole", resume=True)
    again, _ = RunFolder(Path("whole")).restore()
    assert again is not None
    for number, client in state.clients.items():
        assert torch.equal(again.clients[number].params["head.fc.weight"], client.params["head.fc.weight"])


def test_clients_that_never_took_part_are_counted() -> None:
    summary = run(small("participation=0.2", "rounds=1"), "out").summary
    assert (summary["clients"], summary["clients_trained"]) == (6, 1)
