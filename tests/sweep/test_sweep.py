"""Sweeps: what follows from a file, what is refused, and that no cell is lost, run twice or taken down with another."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import protofed

from protofed import Experiment, UserError, run
from protofed.atomic import write_atomically
from protofed.cli import sweep as cli
from protofed.probes import ALL
from protofed.runs.folder import RunFolder
from protofed.sweep import CellOutcome, Sweep, SweepWatch, run_sweep
from protofed.sweep import run as running
from protofed.sweep import workers as processes
from protofed.sweep.plan import Cell, identity
from protofed.sweep.progress import Estimate, shortened
from protofed.sweep.run import check_cells, place, share_out
from protofed.sweep.workers import Placed

TINY = ["rounds=2", "clients=4", "partition.shots=4", "model=mlp_digits", "evaluate.pm_clients=1"]
PLAIN = [*TINY, "engine=reference"]  # half of a worker's start goes into what the stacked engine loads


def sweep(**changed: Any) -> Sweep:
    usual = {"experiment": "demo", "seeds": [0], "changes": TINY, "methods": {"local": [], "fedproto": []}}
    return Sweep.load(usual | changed)


def hashes(plan: Sweep) -> list[str]:
    return [cell.hash for cell in plan.cells()]


def finish(plan: Sweep, out: str) -> list[Path]:
    """The folders of a sweep's cells, each of which is run here, without a process of its own."""
    return [run(placed.cell.experiment, placed.folder).folder for placed in place(plan.cells(), Path(out))]


def lines(folder: Path) -> list[dict[str, Any]]:
    """What a run gave round by round, without what depends on the clock."""
    return [
        {k: v for k, v in line.items() if "seconds" not in k and k != "parts"} for line in RunFolder(folder).rounds()
    ]


# what follows from a file


def test_cells_are_methods_x_experiments_x_seeds_x_parameters() -> None:
    methods = {"local": [], "strong": ["method=fedproto", "method.lam=4"]}
    grid = {"optimizer.lr": [0.01, 0.1], "method.source": ["clean", "inloop"]}
    plan = sweep(methods=methods, seeds=[3, 1], parameters=grid)
    cells = plan.cells()
    assert len(cells) == (2 + 4) * 2  # local does not have method.source, so it is not run twice
    assert [c.labels["seed"] for c in cells[:2]] == ["3", "1"]
    strong = cells[-1]
    assert strong.labels == {
        "experiment": "demo", "method": "strong", "seed": "1", "optimizer.lr": "0.1", "method.source": "inloop",
    }  # fmt: skip
    assert (strong.experiment.method.lam, strong.experiment.method.source) == (4.0, "inloop")
    assert (strong.experiment.optimizer.lr, strong.experiment.rounds, strong.experiment.seed) == (0.1, 2, 1)
    assert len(set(hashes(plan))) == len(cells)
    assert re.fullmatch(r"demo-strong-optimizer.lr0.1-method.sourceinloop-seed-1-[0-9a-f]{12}", strong.folder)


def test_tables_and_lists_are_values_too() -> None:
    deals = [{"name": "dirichlet", "alpha": 0.1}, {"name": "dirichlet", "alpha": 5.0}]
    plan = sweep(parameters={"partition": deals, "model.name": [["mlp_digits", "cnn_digits_8"], ["cnn_digits_8"]]})
    cells = plan.cells()
    assert [cell.experiment.partition.alpha for cell in cells[:4]] == [0.1, 0.1, 5.0, 5.0]  # type: ignore[attr-defined]
    assert len(set(hashes(plan))) == len(cells)
    assert not any("\n" in cell.name for cell in cells)
    assert cells[0].labels["model.name"] == '["mlp_digits", "cnn_digits_8"]'


def test_a_dry_run_checks_too() -> None:
    Path("mine.toml").write_text('experiment = "demo"\nmethods.local = []\nchanges = ["data.name=mine"]\n')
    done = protofed("sweep", "mine.toml", "--dry-run")
    assert done.returncode == 2
    assert "1 cells, 0 done" in done.stdout
    assert "is impossible" in done.stderr
    assert not Path("runs").exists()


def test_a_sweep_never_writes_over_its_own_file() -> None:
    Path("sweep.toml").write_text('# mine\nexperiment = "demo"\nmethods.local = []\n')
    plan = Sweep.load("sweep.toml", *TINY)
    finish(plan, ".")
    run_sweep(plan, ".", jobs=1)
    assert Path("sweep.toml").read_text().startswith("# mine")
    assert Path("cells.json").is_file()
    told: list[str] = []
    watch = SweepWatch()
    watch.note = told.append  # type: ignore[method-assign]
    run_sweep(sweep(methods={"local": []}), ".", jobs=1, watch=watch)
    assert Path("sweep.toml").read_text().startswith("# mine"), "nor over that of another sweep"
    assert told == ["sweep.toml was written by hand, and stays as it is"]
    for seeds in ([0], [0, 1]):  # but over what it wrote itself
        plan = sweep(methods={"local": []}, seeds=seeds)
        finish(sweep(methods={"local": []}, seeds=seeds[-1:]), "out")
        run_sweep(plan, "out", jobs=1)
        assert Sweep.load("out/sweep.toml").seeds == tuple(seeds)


OWN = """
from protofed.methods import METHODS
class Mine(METHODS["local"]):
    pass
"""


def test_a_sweep_says_when_ones_own_code_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(".")
    Path("mymethods_of_a_sweep.py").write_text(OWN)
    plan = sweep(methods={"mymethods_of_a_sweep:Mine": []})
    told: list[str] = []
    watch = SweepWatch()
    watch.note = told.append  # type: ignore[method-assign]
    finish(plan, "out")
    assert [o.status for o in run_sweep(plan, "out", jobs=1, watch=watch)] == ["kept"]
    assert not any("has changed" in note for note in told)
    Path("mymethods_of_a_sweep.py").write_text(OWN + "# now it is another one\n")
    assert [o.status for o in run_sweep(plan, "out", jobs=1, watch=watch)] == ["kept"]
    assert told[-1].startswith("the file of mymethods_of_a_sweep:Mine has changed since 1 finished cell of it.")


def test_a_damaged_cell_is_named_with_what_to_do() -> None:
    plan = sweep(methods={"local": []})
    ((_, folder),) = place(plan.cells(), Path("out"))
    folder.mkdir(parents=True)
    (folder / "experiment.toml").write_text("rounds = ")
    with pytest.raises(UserError, match=rf"cannot be read.*To run this cell again, remove {folder}\."):
        run_sweep(plan, "out", jobs=1)
    Path("mine.toml").write_text(plan.to_toml(Path()))
    Path(folder, "summary.json").write_text("{")
    Path(folder, "experiment.toml").write_text(plan.cells()[0].experiment.to_toml())
    done = protofed("sweep", "mine.toml", "--dry-run", "--out", "out")
    assert done.returncode == 2
    assert done.stdout.startswith("damaged")
    assert "1 cells, 0 done" in done.stdout


def test_all_damaged_cells_are_named_at_once() -> None:
    plan = sweep(seeds=list(range(4)))
    placed = place(plan.cells(), Path("out"))
    for _, folder in placed:
        folder.mkdir(parents=True)
        (folder / "experiment.toml").write_text("rounds = ")
    with pytest.raises(UserError) as caught:
        run_sweep(plan, "out", jobs=1)
    assert str(caught.value).count("To run this cell again") == 5
    assert str(caught.value).endswith("And 3 more.")


def test_a_finished_cell_without_its_rounds_is_named() -> None:
    plan = sweep(methods={"local": []})
    (folder,) = finish(plan, "out")
    (folder / "rounds.jsonl").unlink()
    with pytest.raises(UserError, match=r"ends at round 0 of 2, although the run is finished\. To run this cell again"):
        run_sweep(plan, "out", jobs=1)


def test_a_grid_does_not_undo_what_a_label_stands_for() -> None:
    strong = {"fedproto": [], "strong": ["method=fedproto", "method.lam=4", "model.name=mlp_digits"], "local": []}
    for key, values in {"method.lam": [0.1], "model": ["cnn_digits"]}.items():
        with pytest.raises(UserError, match=rf"methods.strong says '{key}.*which parameters.{key} would undo"):
            sweep(methods=strong, parameters={key: values})
    weak = {"fedproto": [], "local": []}
    assert len(sweep(methods=weak, parameters={"method.lam": [0.1, 1.0]}).cells()) == 3
    with pytest.raises(UserError, match="a value twice"):
        sweep(parameters={"optimizer.lr": [1, 1.0]})


def test_a_folder_for_the_runs_is_no_file() -> None:
    Path("mine.toml").write_text(sweep().to_toml(Path()))
    done = protofed("sweep", "mine.toml", "--dry-run", "--out", "mine.toml")
    assert done.returncode == 2
    assert "mine.toml is a file" in done.stderr


@pytest.mark.parametrize(
    ("word", "where"),
    [
        ("optimizer.lr=0.9", "parameters.optimizer.lr"),
        ("method.lam=9", "methods.strong"),
        ("model=cnn_digits", "methods.strong"),
    ],
)
def test_what_the_file_says_for_some_cells_is_not_changed_for_all_without_a_word(word: str, where: str) -> None:
    raw = {
        "experiment": "demo",
        "methods": {"local": [], "strong": ["method=fedproto", "method.lam=4", "model.name=mlp_digits"]},
        "parameters": {"optimizer.lr": [0.1, 0.2]},
    }
    assert len(Sweep.load(raw, "rounds=2").cells()) == 4
    with pytest.raises(UserError, match=f"the sweep's {where} sets .* too, and would win"):
        Sweep.load(raw, word)


def test_a_long_label_leaves_room_for_the_bar() -> None:
    assert shortened("demo, local, seed 0", 20) == "demo, local, seed 0"
    assert shortened("demo, a label that is long, seed 0", 20) == "demo, a l…ng, seed 0"


def test_a_hash_is_of_the_experiment_not_of_its_names() -> None:
    (plain,) = hashes(sweep(methods={"fedproto": []}))
    renamed = sweep(methods={"mine": ["method=fedproto"]}, changes=[*TINY[1:], "rounds=2"])
    assert hashes(renamed) == [plain]
    assert hashes(sweep(methods={"fedproto": []}, changes=[*TINY, "optimizer.clip=0.0", "engine.threads=0"])) == [plain]
    for change in ("optimizer.lr=0.051", "method.lam=1.01", "model.dim=16", "partition.ways=4", "engine.ordered=true"):
        assert hashes(sweep(methods={"fedproto": []}, changes=[*TINY, change])) != [plain], change


def test_a_key_that_comes_later_changes_no_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Experiment.load("demo", *TINY)
    before, usual = identity(plan), Experiment.to_dict
    monkeypatch.setattr(Experiment, "to_dict", lambda self: usual(self) | {"later": {"key": 1}})
    assert identity(plan) == before


def test_experiments_are_found_beside_the_sweep_and_the_kept_file_says_the_same() -> None:
    Path("plans").mkdir()
    Path("plans/mine.toml").write_text('rounds = 3\n[method]\nname = "local"\n')
    Path("plans/s.toml").write_text(
        'experiment = ["mine.toml", "demo"]\nmethods = ["local", "fedproto"]\n[parameters]\noptimizer.lr = [0.1]\n'
    )
    plan = Sweep.load("plans/s.toml", "batch_size=4")
    assert [c.labels["experiment"] for c in plan.cells()] == ["mine", "mine", "demo", "demo"]
    assert {c.experiment.batch_size for c in plan.cells()} == {4}
    Path("out").mkdir()
    Path("out/sweep.toml").write_text(plan.to_toml(Path("out")))
    assert hashes(Sweep.load("out/sweep.toml")) == hashes(plan)


BAD = {
    "an unknown key": ({"seed": [1]}, ["unknown key seed", "'seeds'"]),
    "no method": ({"methods": {}}, ["no methods"]),
    "a label of two lines": ({"methods": {"two\nlines": ["method=local"]}}, ["'two\\nlines'", "one line"]),
    "an empty label": ({"methods": {"": ["method=local"]}}, ["''", "one line"]),
    "a wrong label": ({"methods": {"fedprot": []}}, ["'fedprot'", "Did you mean 'fedproto'?"]),
    "a label that is another method": ({"methods": {"local": ["method=fedproto"]}}, ["'local'", "fedproto"]),
    "no experiment": ({"experiment": []}, ["no experiment"]),
    "a missing experiment": ({"experiment": "nowhere"}, ["nowhere", "seed 0"]),
    "a seed twice": ({"seeds": [1, 1]}, ["seeds = [1, 1]"]),
    "a seed that is none": ({"seeds": [0.5]}, ["seeds = [0.5]"]),
    "a seed among the changes": ({"changes": ["seed=3"]}, ["'seed=3'"]),
    "a method among the changes": ({"changes": ["method=local"]}, ["'method=local'"]),
    "a parameter nobody has": ({"parameters": {"method.nope": [1]}}, ["method.nope", "local, fedproto"]),
    "a parameter without values": ({"parameters": {"rounds": []}}, ["rounds = []"]),
    "a parameter that is no list": ({"parameters": {"rounds": 3}}, ["rounds = 3", "list"]),
    "a parameter twice": (
        {"parameters": {"optimizer": {"lr": [0.1]}, "optimizer.lr": [0.2]}}, ["optimizer.lr is there twice"],
    ),
    "a parameter twice, in quotes first": (
        {"parameters": {"optimizer.lr": [0.2], "optimizer": {"lr": [0.1]}}}, ["optimizer.lr is there twice"],
    ),
    "a value twice": ({"parameters": {"rounds": [3, 3]}}, ["rounds = [3, 3]", "twice"]),
    "a value out of range": (
        {"parameters": {"optimizer.lr": [0.1, -1]}}, ["demo, local, optimizer.lr=-1, seed 0", "optimizer.lr = -1"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_makes_no_sense_is_refused(case: str) -> None:
    changed, parts = BAD[case]
    with pytest.raises(UserError) as caught:
        run_sweep(sweep(**changed), "out")
    for part in parts:
        assert part in str(caught.value)
    assert not Path("out").exists()


def test_an_impossible_cell_is_named_before_the_first_starts() -> None:
    plan = sweep(experiment="demo", changes=TINY[:3], methods={"local": [], "fedavg": []}, seeds=[0, 1])
    with pytest.raises(UserError, match=r"demo, fedavg, seed 0 is impossible: .*needs one architecture"):
        run_sweep(plan, "out")
    plan = sweep(parameters={"partition.shots": [4, 100]})
    with pytest.raises(
        UserError, match=r"shots=100, seed 0 is impossible: .*training samples.*So are 1 more: .*fedproto"
    ):
        run_sweep(plan, "out")
    assert not Path("out").exists()


def test_data_is_loaded_and_dealt_once_for_all_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[Any] = []
    load, split = running.load, running.prepare_split
    monkeypatch.setattr(running, "load", lambda *a: counted.append("load") or load(*a))
    monkeypatch.setattr(running, "prepare_split", lambda *a: counted.append("split") or split(*a))
    plan = sweep(seeds=[0, 1], parameters={"optimizer.lr": [0.01, 0.1], "evaluate.validation": [0.0, 0.2]})
    check_cells([Placed(cell, Path("x")) for cell in plan.cells()], [], None, SweepWatch())
    assert sorted(counted) == ["load", *["split"] * 4]  # one for each seed and validation part


# running


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[CellOutcome]]:
    """A sweep of four cells on two processes."""
    out = tmp_path_factory.mktemp("sweep") / "out"
    return out, run_sweep(sweep(seeds=[0, 1], changes=PLAIN), out, jobs=2, probes=ALL)


@pytest.mark.slow
def test_every_cell_is_a_run_folder(done: tuple[Path, list[CellOutcome]]) -> None:
    out, outcomes = done
    assert [o.status for o in outcomes] == ["done"] * 4
    assert [o.cell.name for o in outcomes] == [f"demo, {m}, seed {s}" for m in ("local", "fedproto") for s in (0, 1)]
    for outcome in outcomes:
        assert outcome.folder.name.endswith(f"-{outcome.cell.hash}")
        assert outcome.result is not None
        assert outcome.result.summary == RunFolder(outcome.folder).summary()
        assert (outcome.folder / "partition.png").is_file()  # by a probe, in another process
    alone = run(outcomes[2].cell.experiment, "alone", cores=share_out([o.cell for o in outcomes], 2)[0].cores)
    assert lines(alone.folder) == lines(outcomes[2].folder)
    assert hashes(Sweep.load(out / "sweep.toml")) == [o.cell.hash for o in outcomes]
    environment = json.loads((outcomes[0].folder / "environment.json").read_text())
    assert environment["command"] == sys.argv  # of the sweep, not of its worker


@pytest.mark.slow
def test_what_is_finished_is_never_run_again(done: tuple[Path, list[CellOutcome]]) -> None:
    out, before = done
    stamps = {o.cell.hash: (o.folder / "summary.json").stat().st_mtime_ns for o in before}
    assert [o.status for o in run_sweep(sweep(seeds=[0, 1], changes=PLAIN), out)] == ["kept"] * 4
    mine = {"mine": ["method=fedproto"]}
    other = sweep(seeds=[1, 2], changes=PLAIN, methods=mine)  # fewer methods, another name, one more seed
    assert [o.status for o in run_sweep(other, out, jobs=2)] == ["kept", "done"]
    again = run_sweep(sweep(seeds=[0, 1, 2], changes=PLAIN, methods={"fedproto": []}), out)
    assert [o.status for o in again] == ["kept"] * 3
    for outcome in before:
        assert (outcome.folder / "summary.json").stat().st_mtime_ns == stamps[outcome.cell.hash]


def test_two_labels_of_one_experiment_are_one_run() -> None:
    cells = sweep(methods={"local": [], "alone": ["method=local"]}).cells()
    one, other = place(cells, Path("out"))
    assert [cell.labels["method"] for cell in (one.cell, other.cell)] == ["local", "alone"]
    assert one.folder == other.folder


@pytest.mark.slow
def test_a_cell_that_another_process_writes_is_waited_for_and_other_data_is_refused() -> None:
    def write(shift: int) -> None:
        y = (np.arange(80) + shift) // 10 % 4
        x = np.random.default_rng(0).normal(size=(80, 1, 8, 8)).astype(np.float32)
        np.savez("mine.npz", x_train=x, y_train=y, x_test=x, y_test=y)

    write(0)
    changes = [*PLAIN, "data.name=mine.npz", "partition.ways=2", "partition.shots=2"]
    plan = sweep(methods={"local": []}, changes=changes)
    ((_, folder),) = place(plan.cells(), Path("out"))
    released = []
    with ExitStack() as lock:
        lock.enter_context(RunFolder(folder).locked())

        class Release(SweepWatch):
            def ended(self, outcome: CellOutcome) -> None:
                released.append(outcome.status)

        threading.Timer(2, lock.close).start()
        assert [o.status for o in run_sweep(plan, "out", jobs=1, watch=Release())] == ["done"]
    assert released == ["done"]
    write(5)
    with pytest.raises(UserError, match="is finished, but the data here gives another partition"):
        run_sweep(sweep(changes=changes), "out", jobs=1)


class Murder(SweepWatch):
    """Kills the process that runs a cell, as a machine without memory does."""

    def __init__(self, label: str) -> None:
        self.label = label

    def round(self, cell: Cell, line: dict[str, Any]) -> None:
        if cell.labels["method"] == self.label:
            for pid in workers(os.getpid()):
                os.kill(pid, signal.SIGKILL)


def workers(parent: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            owner = re.search(r"^PPid:\t(\d+)", (path / "status").read_text(), re.MULTILINE)
            words = (path / "cmdline").read_bytes()
        except OSError:  # it has just ended
            continue
        if owner and int(owner[1]) == parent and b"protofed.sweep.worker" in words:
            found.append(int(path.name))
    return found


@pytest.mark.slow
def test_a_cell_that_fails_takes_no_other_down_and_is_tried_again() -> None:
    methods = {
        "nan": ["method=fedproto", "optimizer.lr=1e30"],
        "killed": ["method=local", "rounds=40"],
        "crash": ["method=fedproto"],
        "good": ["method=local"],
    }
    plan = sweep(methods=methods, changes=PLAIN)
    cells = dict(zip(methods, place(plan.cells(), Path("out")), strict=True))
    crash = RunFolder(cells["crash"].folder)
    crash.path.mkdir(parents=True)
    crash.write("experiment.toml", cells["crash"].cell.experiment.to_toml())
    crash.file("partition.npz").mkdir()  # a folder where a file should be written
    outcomes = {o.cell.labels["method"]: o for o in run_sweep(plan, "out", jobs=1, watch=Murder("killed"))}
    assert {name: o.status for name, o in outcomes.items()} == dict.fromkeys(methods, "failed") | {"good": "done"}
    assert "no longer a number" in outcomes["nan"].reason
    assert "killed (signal 9)" in outcomes["killed"].reason
    assert outcomes["crash"].reason.startswith("IsADirectoryError")
    assert "Traceback" in Path(f"{crash.path}.failed.txt").read_text()
    crash.file("partition.npz").rmdir()
    Path("s.toml").write_text(plan.to_toml(Path()))
    again = protofed("sweep", "s.toml", "--out", "out", "--jobs", "1")
    assert again.returncode == 1
    assert "3 cells to run, 1 finished before" in again.stdout
    assert "1 of 4 cells failed" in again.stderr
    assert "demo, nan, seed 0: the loss of client" in again.stderr
    assert "Traceback" not in again.stdout + again.stderr
    assert "good" in again.stdout
    assert sorted(path.name for path in Path("out").glob("*.failed.txt")) == [f"{cells['nan'].folder.name}.failed.txt"]


@pytest.mark.slow
def test_a_worker_that_dies_while_starting_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("died").mkdir()
    dying = "import os, pathlib, sys; n = len(list(pathlib.Path('died').iterdir())); "
    dying += "n < 2 and (pathlib.Path(f'died/{n}').touch(), os._exit(7)); "
    monkeypatch.setattr(processes, "WORKER", dying + processes.WORKER)
    assert [o.status for o in run_sweep(sweep(methods={"local": []}, changes=PLAIN), "out", jobs=1)] == ["done"]
    monkeypatch.setattr(processes, "WORKER", "import os; os._exit(7)")
    with pytest.raises(UserError, match="workers cannot be started: its process ended with exit code 7"):
        run_sweep(sweep(methods={"fedproto": []}), "out", jobs=1)


@pytest.mark.slow
def test_a_reason_that_cannot_be_written_ends_no_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        if path.name.endswith(".failed.txt"):
            raise OSError(28, "No space left on device")
        write_atomically(path, content)

    monkeypatch.setattr(running, "write_atomically", full)
    told: list[str] = []
    watch = SweepWatch()
    watch.note = told.append  # type: ignore[method-assign]
    methods = {"nan": ["method=fedproto", "optimizer.lr=1e30"], "local": []}
    plan = sweep(methods=methods, changes=PLAIN)
    assert [o.status for o in run_sweep(plan, "out", jobs=1, watch=watch)] == ["failed", "done"]
    assert any("No space left on device" in note for note in told)


def command() -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "protofed", "sweep", "s.toml", "--out", "out", "--jobs", "1"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.slow
def test_ctrl_c_in_the_middle_of_a_message_stops_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C speaks too, from whatever it has interrupted."""
    interrupting = """
import os, signal
from multiprocessing.connection import Connection
from protofed.sweep.worker import main

usual = Connection.send

def send(pipe, message):
    if message[0] == "round" and message[2]["round"] == 2:
        os.kill(os.getpid(), signal.SIGINT)
    usual(pipe, message)

Connection.send = send
main()
"""
    monkeypatch.setattr(processes, "WORKER", interrupting)
    plan, found = sweep(methods={"local": ["rounds=2000"]}), list[CellOutcome]()
    sweeping = threading.Thread(target=lambda: found.extend(run_sweep(plan, "out", jobs=1)), daemon=True)
    sweeping.start()
    sweeping.join(240)
    assert [outcome.status for outcome in found] == ["stopped"]
    assert 2 <= len(RunFolder(found[0].folder).rounds()) < 2000


@pytest.mark.slow
def test_ctrl_c_and_kill_9_lose_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    Path("s.toml").write_text(
        f'experiment = "demo"\nchanges = {json.dumps([*PLAIN, "rounds=30"])}\n'
        "methods.local = []\nmethods.fedproto = []\n"
    )
    first, second = (folder for _, folder in place(Sweep.load("s.toml").cells(), Path("out")))
    process = command()
    until(lambda: len(RunFolder(first).rounds()) > 2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "2 of 2 cells are left. Run the same command to continue." in out
    assert RunFolder(first).checkpoints()[0].name > "round-000002"  # the last whole round was saved

    process = command()
    until(lambda: len(RunFolder(second).rounds()) > 2)  # the first is finished
    (worker,) = workers(process.pid)
    process.kill()
    process.communicate(timeout=300)
    until(lambda: not Path(f"/proc/{worker}").exists())  # nobody is left behind
    assert RunFolder(first).finished
    assert not RunFolder(second).finished
    stamp = (first / "summary.json").stat().st_mtime_ns

    cli.sweep(Path("s.toml"), out=Path("out"), dry_run=True)
    out = capfd.readouterr().out
    assert re.search(r"^done .*local, seed 0$", out, re.MULTILINE)
    assert re.search(r"^\d+ rounds done .*fedproto, seed 0$", out, re.MULTILINE)

    assert [o.status for o in run_sweep(Sweep.load("s.toml"), "out", jobs=1)] == ["kept", "done"]
    assert (first / "summary.json").stat().st_mtime_ns == stamp
    cores = share_out(Sweep.load("s.toml").cells(), 1)[0].cores
    for path in (first, second):
        whole = run(Experiment.from_dict(RunFolder(path).experiment_dict()), f"whole-{path.name}", cores=cores)
        assert lines(path) == lines(whole.folder)


@pytest.mark.slow
def test_cells_that_are_trained_together_are_killed_and_go_on_together() -> None:
    Path("s.toml").write_text(
        f'experiment = "demo"\nseeds = [0, 1]\nchanges = {json.dumps([*TINY, "rounds=30"])}\nmethods.fedproto = []\n'
    )
    one, other = (folder for _, folder in place(Sweep.load("s.toml").cells(), Path("out")))
    process = command()
    until(lambda: len(RunFolder(other).rounds()) > 2)
    assert 0 < len(RunFolder(one).rounds()) < 30  # or else they were not at work at the same time
    (worker,) = workers(process.pid)
    os.kill(worker, signal.SIGKILL)  # nobody knows which of the two was to blame
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "2 cells that were trained together continue one by one" in out.replace("\n", " ")
    for path in (one, other):
        whole = run(Experiment.from_dict(RunFolder(path).experiment_dict()), f"whole-{path.name}", cores=1)
        for here, there in zip(lines(path), lines(whole.folder), strict=True):
            for key, value in there.items():
                assert here[key] == (pytest.approx(value, rel=1e-4) if isinstance(value, float) else value)


# packing and time


def test_cores_are_shared_out_whatever_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    cells = sweep(seeds=list(range(8)), changes=[*TINY, "device=cpu"]).cells()
    assert [s.cores for s in share_out(cells)] == [1] * 8
    assert [s.cores for s in share_out(cells[:2])] == [4, 4]
    assert [s.cores for s in share_out(cells, jobs=3)] == [2, 2, 2]
    assert [s.cores for s in share_out(cells, jobs=20)] == [1] * 20
    greedy = sweep(seeds=list(range(8)), changes=[*TINY, "device=cpu", "engine.threads=4"]).cells()
    assert len(share_out(greedy)) == 2


def test_processes_on_one_gpu_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protofed.sweep.run._gpus", lambda: ["0", "1"])
    cells = sweep(seeds=list(range(8)), changes=[*TINY, "device=auto"]).cells()
    assert [(s.gpu, s.gpu_part) for s in share_out(cells, jobs=3)] == [("0", 0.45), ("1", 0.45), ("0", 0.45)]
    assert [s.gpu_part for s in share_out(cells, jobs=2)] == [1, 1]


def test_the_time_that_is_left() -> None:
    local, proto, other = sweep(methods={"local": [], "fedproto": []}, seeds=[0]).cells() + sweep(seeds=[1]).cells()[:1]
    estimate = Estimate([local, proto, other], [], jobs=2)
    assert estimate.seconds() is None
    estimate.round(local, {"round": 1, "seconds": 10.0})
    # local: 1 round of 10 s; its other seed: 2 rounds; fedproto: 2 rounds at the usual pace; on two processes
    assert estimate.seconds() == pytest.approx((10 + 20 + 20) / 2)
    estimate.round(proto, {"round": 1, "seconds": 40.0})
    assert estimate.seconds() == pytest.approx(40)  # (10 + 20 + 40) / 2, but one cell alone still takes 40
    estimate.ended(proto)
    assert estimate.seconds() == pytest.approx(20)


def test_a_dry_run_says_how_long_the_rest_takes_and_how_that_is_known() -> None:
    Path("mine.toml").write_text(sweep(methods={"local": []}, seeds=[0, 1, 2]).to_toml(Path()))
    words = ("sweep", "mine.toml", "--out", "out", "--jobs", "1", "--dry-run")
    done = protofed(*words)
    assert done.returncode == 0, done.stderr
    assert "no cell has been run yet, so there is no estimate of the time. --trial makes one" in done.stdout
    tried = protofed(*words, "--trial")
    assert re.search(r"about [\d.]+ (s|min) for 3 cells; estimated from trials of 3 rounds of 1 kind of", tried.stdout)
    assert not Path("out").exists()
    (first,) = finish(sweep(methods={"local": []}), "out")
    lines = [json.loads(line) for line in (first / "rounds.jsonl").read_text().splitlines()]
    slow = [{**line, "seconds": seconds} for line, seconds in zip(lines, (500, 40), strict=True)]
    (first / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in slow))
    told = protofed(*words).stdout
    assert "about 3 min for 2 cells; estimated from 1 cell with rounds done\n" in told  # 2 seeds x 2 rounds x 40 s
    more = sweep(methods={"local": [], "fedproto": []}, seeds=[0, 1, 2])
    Path("mine.toml").write_text(more.to_toml(Path()))
    assert "1 kind of cells was not run yet and is taken to be as fast as the others" in protofed(*words).stdout
    refused = protofed("sweep", "mine.toml", "--trial")
    assert refused.returncode == 2
    assert "--trial is for --dry-run" in refused.stderr


@pytest.mark.slow
def test_a_summary_carries_the_labels_of_its_cell() -> None:
    plan = sweep(methods={"plain": ["method=local"]}, changes=PLAIN, parameters={"optimizer.lr": [0.5]})
    (done,) = run_sweep(plan, "out", jobs=1)
    labels = {"experiment": "demo", "method": "plain", "seed": "0", "optimizer.lr": "0.5"}
    assert json.loads((done.folder / "summary.json").read_text())["labels"] == labels
    assert done.summary is not None
    assert done.summary["labels"] == labels
