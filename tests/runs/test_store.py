"""Client states on disk: the same bits come back, memory and disk stay bounded, and nothing that was saved is lost."""

import errno
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import TOOLS
from small_runs import StopAfter, final_state, small, wait_for
from torch import Tensor

from protofed import UserError, run
from protofed.engines import resources
from protofed.engines.stacked.engine import StackedEngine
from protofed.engines.wire import encode
from protofed.method import Client, Each, Mean
from protofed.report import paper, pictures
from protofed.runs import store
from protofed.runs.folder import RunFolder, State
from protofed.runs.loop import Interrupted
from protofed.runs.measured_clients import spaced
from protofed.runs.store import ClientStore
from protofed.runs.watch import Watch


def client(number: int, version: int = 0, size: int = 100) -> Client:
    """A state in which every kind of tensor and node occurs, different for every number and version."""
    g = torch.Generator().manual_seed(1000 * number + version)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    return Client(
        {"body.weight": draw(size), "head.bias": draw(3).to(torch.bfloat16)},
        {"bn.running_mean": draw(4).double(), "bn.num_batches_tracked": torch.tensor(2**40 + number)},
        {
            "seen": [draw(2) > 0, (draw(1).half(), torch.zeros(0, 3))],
            "mean": Mean(torch.tensor([[-0.0, 1.0], [2.0, 3.0]]), torch.tensor([0.0, float(version)])),
            "each": Each({"a/b": torch.tensor([float("inf"), float("nan"), -0.0])}),
        },
    )


def bits(tree: Any) -> bytes:
    return encode(tree, whole=True)


def opened(limit: int | None = None) -> tuple[RunFolder, State]:
    folder = RunFolder(Path("out"))
    return folder, State(0, {"w": torch.zeros(3)}, folder.store(limit=limit), {})


def played(state: State, states: dict[int, Client]) -> State:
    """The state after one more round."""
    state.clients.begin(state.round + 1)
    state.clients.update(states)
    return state._replace(round=state.round + 1)


def restored(limit: int | None = None) -> State:
    state, remarks = RunFolder(Path("out")).restore(limit=limit)
    assert state is not None
    assert not remarks
    return state


def same(clients: ClientStore, expected: dict[int, Client]) -> None:
    assert list(clients) == sorted(expected)
    for number, one in expected.items():
        assert bits(clients[number]) == bits(one), number


def segments() -> list[Path]:
    return sorted(Path("out/checkpoints/clients").iterdir())


def on_disk() -> int:
    return sum(path.stat().st_size for path in segments())


def count_appends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The length of every record written from now on."""
    lengths: list[int] = []
    append = store.Segments.append

    def counted(self: Any, record: bytes) -> Any:
        lengths.append(len(record))
        return append(self, record)

    monkeypatch.setattr(store.Segments, "append", counted)
    return lengths


# what is put comes back


@pytest.mark.parametrize("limit", [0, 5_000, None])
def test_states_come_back_to_the_bit_from_memory_from_disk_and_after_a_restart(limit: int | None) -> None:
    folder, state = opened(limit)
    expected = {number: client(number, version=1) for number in (7, 0, 12, 3)}
    state = played(state, expected)
    same(state.clients, expected)
    state.clients.begin(2)
    same(state.clients, expected)
    folder.save(state)
    same(state.clients, expected)
    same(restored(limit).clients, expected)


def test_the_longest_unused_leave_memory_first_and_a_newer_state_replaces_an_older() -> None:
    _, state = opened(limit=4 * 1000)  # a client takes between 400 and 500 bytes
    clients = state.clients
    state = played(state, {number: client(number) for number in range(8)})
    clients.begin(2)
    clients[0]  # used, so that 1 is now the oldest
    state = played(state, {8: client(8), 9: client(9)})
    clients.begin(3)
    held = set(clients._memory)
    assert 0 in held
    assert not {1, 2} & held
    assert 3 < len(held) < 10
    assert clients.bytes <= 4000
    state = played(state, {1: client(1, version=5)})
    same(clients, {number: client(number, 5 if number == 1 else 0) for number in range(10)})


def test_reading_does_not_change_what_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    folder, state = opened(limit=1000)
    state = played(state, {number: client(number) for number in range(20)})
    folder.save(state)
    written = count_appends(monkeypatch)
    for _ in range(2):
        assert len(list(state.clients.values())) == 20
    assert not written


def test_it_is_a_mapping_that_forgets_nobody() -> None:
    clients = opened()[1].clients
    clients[5] = client(5)
    assert 5 in clients
    assert 6 not in clients
    assert len(clients) == 1
    with pytest.raises(KeyError):
        clients[6]
    with pytest.raises(TypeError, match="never forgotten"):
        del clients[5]


def test_the_limit_is_a_part_of_what_is_free() -> None:
    assert 0 < ClientStore(Path("out")).limit <= store.MOST


# rounds are whole


def test_a_round_that_is_not_whole_is_not_saved() -> None:
    folder, state = opened()
    first = {number: client(number, 1) for number in range(4)}
    state = played(state, first)
    state.clients.begin(2)
    state.clients.update({0: client(0, 2), 1: client(1, 2)})
    assert bits(state.clients[0]) == bits(client(0, 2))
    folder.save(state)  # of round 1
    assert restored().round == 1
    same(restored().clients, first)
    folder.save(state._replace(round=2))
    same(restored().clients, first | {0: client(0, 2), 1: client(1, 2)})


@pytest.mark.parametrize("where", ["begin", "update", pytest.param("save", marks=pytest.mark.slow)])
def test_an_interruption_anywhere_leaves_a_whole_round_to_save(where: str) -> None:
    """Every line of the store and of the folder is once the last one that runs before the second Ctrl-C."""
    files = {store.__file__, store.Segments.append.__code__.co_filename, RunFolder.save.__code__.co_filename}
    states = [{number: client(number, version) for number in range(5)} for version in (1, 2, 3)]
    for moment in range(1, 10_000):
        folder, state = RunFolder(Path(f"out{moment}")), None
        state = State(0, {}, folder.store(limit=1500), {})
        state = played(state, states[0])
        folder.save(state)
        state = played(state, states[1])
        left = moment

        def trace(frame: Any, event: str, argument: Any) -> Any:
            nonlocal left
            if frame.f_code.co_filename not in files:
                return None
            left -= event == "line"
            if not left:
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace

        steps: dict[str, Callable[[], None]] = {
            "begin": lambda state=state: state.clients.begin(3),
            "update": lambda state=state: state.clients.update(states[2]),
            "save": lambda state=state, folder=folder: folder.save(state),
        }
        if where == "update":
            steps["begin"]()
        try:
            sys.settrace(trace)
            steps[where]()
            break
        except KeyboardInterrupt:
            folder.save(state)
        finally:
            sys.settrace(None)
        found, remarks = folder.restore()
        assert found is not None
        assert not remarks
        assert found.round == 2
        same(found.clients, states[1])
    assert moment > {"begin": 50, "update": 1, "save": 100}[where]


# checkpoints


def test_a_checkpoint_writes_what_changed_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    folder, state = opened()
    expected = {number: client(number) for number in range(50)}
    state = played(state, expected)
    folder.save(state)
    before = {path: path.stat() for path in segments()}
    written = count_appends(monkeypatch)
    changed = {3: client(3, 1), 40: client(40, 1)}
    state = played(state, changed)
    folder.save(state)
    assert len(written) == 2
    assert len(segments()) == 2
    for path, stat in before.items():
        assert path.stat() == stat
    same(restored().clients, expected | changed)
    written.clear()
    folder.save(state)
    assert not written
    assert len(segments()) == 2


def test_segments_that_no_checkpoint_needs_are_removed_and_the_fall_back_keeps_its_own() -> None:
    folder, state = opened()
    for version in range(1, 6):
        state = played(state, {number: client(number, version) for number in range(4)})
        folder.save(state)
        assert len(segments()) == min(version, 2)  # one for each checkpoint that is kept
    (folder.checkpoints()[0] / "state.json").write_text("{")
    found, remarks = folder.restore()
    assert found is not None
    assert len(remarks) == 1
    same(found.clients, {number: client(number, 4) for number in range(4)})


@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_a_damaged_segment_damages_the_checkpoints_that_need_it(how: str) -> None:
    folder, state = opened()
    old = {number: client(number) for number in range(4)}
    state = played(state, old)
    folder.save(state)
    state = played(state, {2: client(2, 1)})
    folder.save(state)
    newest = segments()[-1]
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    if how == "gone":
        newest.unlink()
    else:
        newest.write_bytes(content if how == "flipped" else content[:-1])
    found, remarks = folder.restore()
    assert found is not None
    assert found.round == 1
    assert "round-000002 is damaged" in remarks[0]
    assert newest.name in remarks[0]
    same(found.clients, old)
    segments()[0].write_bytes(b"")
    found, remarks = folder.restore()
    assert found is None
    assert len(remarks) == 2


def test_a_state_that_is_damaged_while_the_run_goes_on_is_named() -> None:
    folder, state = opened()
    state = played(state, {4: client(4)})
    folder.save(state)
    state = restored()
    segments()[0].write_bytes(b"x" * segments()[0].stat().st_size)
    with pytest.raises(UserError, match=r"the state of client 4 .* is damaged"):
        state.clients[4]


def test_what_no_checkpoint_knows_is_removed_and_never_used() -> None:
    folder, state = opened(limit=0)
    expected = {number: client(number) for number in range(4)}
    state = played(state, expected)
    folder.save(state)
    state = played(state, {number: client(number, 1) for number in range(4)})
    state.clients.begin(3)  # three of them are written, for want of memory
    sealed = segments()[0].with_name("00000009.bin")
    sealed.write_bytes(b"of a run that was killed before its checkpoint")
    assert any(path.name.startswith(".") for path in segments())
    state = restored()
    folder.go_back(state)
    assert [path.name for path in segments()] == ["00000001.bin"]
    same(state.clients, expected)


def test_outdated_records_are_left_behind_and_none_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round brings a client that never changes again, so that no segment is ever wholly outdated by itself."""
    monkeypatch.setattr(store, "WASTE", 20_000)
    folder, state = opened(limit=3_000)
    expected = {number: client(number) for number in range(60)}
    state = played(state, expected)
    folder.save(state)
    once = on_disk()
    most = 0
    for round in range(1, 80):
        often = range(round % 3, 60, 3)
        cohort = {number: client(number, round) for number in (*often, 60 + round)}
        expected |= cohort
        state = played(state, cohort)
        folder.save(state)
        most = max(most, on_disk())
    same(state.clients, expected)
    same(restored().clients, expected)
    assert most < 10 * once  # 28 times as much was written, and 2.3 times as much is in use


def test_what_an_interrupted_write_left_behind_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = store.Segments(Path("here"))
    segments.append(b"a" * 10)
    pwrite = os.pwrite

    def interrupted(handle: int, content: Any, offset: int) -> int:
        pwrite(handle, content, offset)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "pwrite", interrupted)
    with pytest.raises(KeyboardInterrupt):
        segments.append(b"b" * 100)
    monkeypatch.setattr(os, "pwrite", pwrite)
    place = segments.append(b"c" * 5)
    segments.seal()
    content = segments.file(place.segment).read_bytes()
    assert content == b"a" * 10 + b"c" * 5
    assert segments.sealed[place.segment] == (15, hashlib.sha256(content).hexdigest())


def test_very_many_segments_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MANY", 5)
    folder, state = opened()
    for number in range(20):
        state = played(state, {number: client(number)})
        folder.save(state)
        assert len(segments()) <= 8
    same(restored().clients, {number: client(number) for number in range(20)})


@pytest.mark.slow
def test_memory_stays_bounded_with_ten_thousand_clients() -> None:
    """400 MB of states with room for 20 MB: written, read again and saved, in a process of its own."""
    code = """
import torch
from pathlib import Path
from protofed.runs.folder import RunFolder, State
from protofed.method import Client

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

folder = RunFolder(Path("big"))
state = State(0, {}, folder.store(limit=20 * 2**20), {})
before = most = resident()
for round in range(100):
    state.clients.begin(round + 1)
    cohort = range(100 * round, 100 * round + 100)
    state.clients.update({n: Client({"w": torch.full((10_000,), float(n))}, {}) for n in cohort})
    state = state._replace(round=round + 1)
    most = max(most, resident())
folder.save(state)
most = max(most, resident())
state, _ = folder.restore(limit=20 * 2**20)
for number in range(10_000):
    assert state.clients[number].params["w"][9_999] == number
    most = max(most, resident()) if number % 100 == 0 else most
print(most - before)
"""
    if not Path("/proc/self/statm").is_file():
        pytest.skip("needs /proc to see how much memory a process takes")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 100  # MB


# runs


TINY = 3_000  # bytes in memory: less than one client takes


def start(out: str, *overrides: str) -> "subprocess.Popen[str]":
    code = (
        "import sys; from small_runs import SMALL; from protofed import Experiment, run;"
        f"run(Experiment.load('demo', *SMALL, *sys.argv[1:]), {out!r}, resume=True, checkpoint_seconds=0.5,"
        f" client_bytes={TINY})"
    )
    paths = os.pathsep.join([str(TOOLS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-c", code, *overrides],
        text=True,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
    )


@pytest.mark.slow
def test_killed_with_little_memory_and_resumed_equals_never_killed() -> None:
    overrides = ("rounds=12", "participation=0.5", "clients=12", "partition.shots=3")
    plan = small(*overrides)
    run(plan, "whole")
    folder, kills, spilled = RunFolder(Path("cut")), 0, 0

    def spill() -> list[Path]:
        return list(Path("cut/checkpoints/clients").glob(".*.partial"))

    for moment in (0.0, 0.05):
        done = len(folder.rounds())
        process = start("cut", *overrides)
        if wait_for(lambda done=done: len(folder.rounds()) > done + 2 and spill(), process):
            time.sleep(moment)
        process.kill()
        kills += process.wait() == -signal.SIGKILL
        spilled += bool(spill())
    assert kills
    assert spilled  # there was something that must not be used
    run(plan, "cut", resume=True, client_bytes=TINY)
    assert final_state(Path("cut")) == final_state(Path("whole"))
    assert not list(Path("cut").rglob(".*.partial"))


def test_much_written_for_want_of_memory_makes_a_checkpoint_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protofed.runs.checkpoints.SPILLED", 50_000)  # six clients of some 20 kB, one in memory
    run(small("rounds=4"), "out", checkpoint_seconds=1e9, client_bytes=0)
    assert [path.name for path in RunFolder(Path("out")).checkpoints()] == ["round-000004", "round-000002"]


class StopMeasuring(Watch):
    """Ctrl-C after a few clients were measured."""

    def measured(self, done: int, clients: int) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("how", ["ctrl-c", "nan"])
def test_stopped_while_every_client_is_tuned_and_resumed_equals_never_stopped(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = small("method=fedbabu", "model=cnn_digits", "clients=12", "partition.shots=3", "method.tune_epochs=1")
    run(plan, "whole")
    with monkeypatch.context() as patched:
        if how == "nan":
            finish = StackedEngine.finish

            def nan(self: Any, method: Any, server: Any, cohort: Any, round: int) -> Any:
                trained = finish(self, method, server, cohort, round)
                return trained._replace(finite=trained.finite & (cohort[0] < 10))  # the first ten are tuned

            patched.setattr(StackedEngine, "finish", nan)
        expected = (
            (UserError, "after the last round. The state after round 3") if how == "nan" else (Interrupted, "measuring")
        )
        with pytest.raises(expected[0], match=expected[1]):
            run(plan, "cut", watch=StopMeasuring() if how == "ctrl-c" else None, client_bytes=0)
    assert not list(Path("cut").rglob(".*.partial"))
    state, _ = RunFolder(Path("cut")).restore()
    assert state is not None
    assert (state.round, state.totals["finished"]) == (3, False)
    heads = [c.params["head.fc.weight"] for c in state.clients.values()]
    assert all(torch.equal(head, heads[0]) for head in heads)  # nobody's head is tuned yet
    run(plan, "cut", resume=True, client_bytes=0)
    assert final_state(Path("cut")) == final_state(Path("whole"))


@pytest.mark.parametrize("code, written", [(errno.ENOSPC, 10), (errno.EFBIG, 0)])
@pytest.mark.slow
def test_a_disk_that_fills_up_stops_the_run_and_loses_nothing(
    code: int, written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = small("rounds=5")
    run(plan, "whole")
    room = 200_000
    pwrite = os.pwrite

    def full(handle: int, content: Any, offset: int) -> int:
        nonlocal room
        room -= len(content)
        if room >= 0:
            return pwrite(handle, content, offset)
        if room > -len(content) and written:
            return pwrite(handle, content[:written], offset)  # what still fitted
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(UserError, match=r"no space is left.*resume=True"):
        run(plan, "out", checkpoint_seconds=0, client_bytes=TINY)
    state, remarks = RunFolder(Path("out")).restore()
    assert state is not None
    assert not remarks
    assert 0 < state.round < 5
    assert not list(Path("out").rglob(".*.partial"))  # its space is given back
    monkeypatch.setattr(os, "pwrite", pwrite)
    run(plan, "out", resume=True)
    assert final_state(Path("out")) == final_state(Path("whole"))


def test_checkpoints_of_an_older_protofed_are_refused_in_one_line() -> None:
    plan = small()
    with pytest.raises(Interrupted):
        run(plan, "out", watch=StopAfter(1))
    for checkpoint in RunFolder(Path("out")).checkpoints():
        (checkpoint / "state.json").write_text('{"round": 1, "totals": {}, "sha256": {"clients.safetensors": ""}}')
        (checkpoint / "state.sha256").unlink()
    toml = Path("out/experiment.toml")
    toml.write_text("".join(line for line in toml.read_text().splitlines(keepends=True) if "pm_clients" not in line))
    before = {path: path.read_bytes() for path in Path("out/checkpoints").rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"written by an older protofed.*Start again with another out="):
        run(plan, "out", resume=True)
    assert before == {path: path.read_bytes() for path in Path("out/checkpoints").rglob("*") if path.is_file()}


def test_checkpoints_that_are_all_damaged_do_not_push_out_the_new_ones() -> None:
    plan = small("rounds=4")
    with pytest.raises(Interrupted):
        run(plan, "out", watch=StopAfter(3), checkpoint_seconds=0)
    folder = RunFolder(Path("out"))
    for checkpoint in folder.checkpoints():
        (checkpoint / "state.json").write_text("{")
    with pytest.raises(Interrupted):
        run(plan, "out", resume=True, watch=StopAfter(1))
    assert [path.name for path in folder.checkpoints()] == ["round-000001", "round-000000"]
    assert not folder.restore()[1]


# measuring thousands of clients


def test_clients_measured_on_the_global_test_set_are_spaced_evenly() -> None:
    assert spaced(6, 0) == spaced(6, 6) == spaced(6, 1000) == set(range(6))
    assert spaced(6, 2) == {0, 3}
    assert len(spaced(10_000, 1000)) == 1000
    assert max(spaced(10_000, 999)) >= 9_980


def test_a_few_clients_measured_on_the_global_test_set_have_the_numbers_they_would_have_among_all() -> None:
    everyone = run(small("rounds=1"), "all")
    said: list[str] = []
    watch = Watch()
    watch.note = said.append  # type: ignore[method-assign]
    few = run(small("rounds=1", "evaluate.pm_clients=2"), "few", watch=watch)
    for key in ("pm_v", "pm_l"):
        values = [record[key] for record in few.clients]
        assert [number for number, value in enumerate(values) if value is not None] == [0, 3]
        assert values[0] == everyone.clients[0][key]
        assert values[3] == everyone.clients[3][key]
        assert few.summary[key] == pytest.approx((values[0] + values[3]) / 2)
    assert any("are over 2 of 6 clients" in text for text in said)
    assert few.summary["accuracy_mean"] == everyone.summary["accuracy_mean"]


@pytest.mark.usefixtures("pictures")
def test_ten_thousand_clients_are_not_ten_thousand_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(paper, "write_one", lambda figure, *_, **__: drawn.append(figure.panels[0].plots[""].marks[0]))
    for many in (50, 10_000):
        pictures.draw_clients([{"client": i, "accuracy": i / many} for i in range(many)], "method", Path("x.png"))
    few, many = drawn
    assert len(few.y) == 50
    assert few.y[-1] == pytest.approx(98)
    assert len(many.y) == 100
    assert many.y[-1] == pytest.approx(99.495)  # the mean of the best hundred


def test_the_memory_for_states_respects_the_limit_of_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = tmp_path / "cgroup"
    group.mkdir()
    monkeypatch.setattr(resources, "GROUP", group)
    open_room = ClientStore(tmp_path / "open").limit
    (group / "memory.max").write_text(f"{96 * 2**20}\n")
    (group / "memory.current").write_text(f"{40 * 2**20}\n")
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {8 * 2**20}\n")  # files can go
    assert ClientStore(tmp_path / "closed").limit == 64 * 2**20 // 8 < open_room
    (group / "memory.current").write_text(f"{200 * 2**20}\n")
    assert ClientStore(tmp_path / "full").limit == 0
    (group / "memory.max").write_text("max\n")
    assert ClientStore(tmp_path / "unlimited").limit > 64 * 2**20 // 8


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("version", [1, 2])
def test_the_memory_for_states_respects_the_limit_of_a_job_on_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, own: bool
) -> None:
    """Its control group is not the outermost, and the limit may be that of a group around it."""
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    root = tmp_path / "cgroup" / ("memory" if version == 1 else "")
    job = root / "slurm" / "job_7"
    (job / "step_0").mkdir(parents=True)
    listed = {1: "9:name=systemd:/\n4:cpu,memory:/slurm/job_7/step_0\n", 2: "0::/slurm/job_7/step_0\n"}
    (tmp_path / "self").write_text(listed[version])
    monkeypatch.setattr(resources, "GROUP", tmp_path / "cgroup")
    monkeypatch.setattr(resources, "GROUPS", tmp_path / "self")
    assert ClientStore(tmp_path / "open").limit > 64 * 2**20 // 8
    for group, amount in ((job, 96 * 2**20), (job / "step_0", 2**63 - 4096)):
        group = group if own else group.parent
        (group / names[0]).write_text(f"{amount}\n")
        (group / names[1]).write_text(f"{40 * 2**20}\n")
        (group / "memory.stat").write_text(f"anon 1\n{names[2]} {8 * 2**20}\n")
    assert ClientStore(tmp_path / "closed").limit == 64 * 2**20 // 8
    assert resources.total_memory(torch.device("cpu")) == 96 * 2**20
