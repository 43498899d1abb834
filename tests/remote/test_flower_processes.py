"""Who is dead, who is only slow, and what an operator reads about it."""

import os
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs Flower: pip install 'protofed[flower]'")

from protofed.remote.flower import processes
from protofed.remote.flower.operate import events
from protofed.remote.flower.processes import STUCK_SECONDS, Child, Pulse, private


def test_a_process_is_stuck_only_when_somebody_watched_it_being_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    now, sign = [100.0], [0]
    monkeypatch.setattr(processes.time, "monotonic", lambda: now[0])
    pulse = Pulse(lambda: sign[0])
    for _ in range(29):
        now[0] += 1.0
        assert pulse.quiet < STUCK_SECONDS
    sign[0] += 1
    now[0] += 1.0
    assert pulse.quiet == 0.0
    now[0] += 500.0  # whoever looks was stopped: the process cannot be blamed for that yet
    assert pulse.quiet < STUCK_SECONDS
    for _ in range(20):
        now[0] += 1.0
        last = pulse.quiet
    assert last >= STUCK_SECONDS
    pulse.again()
    assert pulse.quiet == 0.0


def test_what_is_written_is_for_one_user_alone(tmp_path: Path) -> None:
    old = tmp_path / "logs" / "old.log"
    old.parent.mkdir(mode=0o755)
    old.write_text("from an older version")
    old.chmod(0o644)
    umask = os.umask(0o022)
    try:
        with private(tmp_path / "logs", tmp_path / "missing"):
            (tmp_path / "new").write_text("something")
        assert os.umask(0o022) == 0o022  # as it was before
    finally:
        os.umask(umask)
    assert [path.stat().st_mode & 0o777 for path in (old.parent, old, tmp_path / "new")] == [0o700, 0o600, 0o600]


def test_a_log_that_grows_while_its_process_runs_is_put_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "LOG_BYTES", 1000)
    log, go = tmp_path / "logs" / "it.log", tmp_path / "go"
    code = "import os, sys, time; print('a' * 2000, flush=True)\n"
    code += "while not os.path.exists(sys.argv[1]): time.sleep(0.01)\nprint('b')"
    child = Child("it", [sys.executable, "-c", code, str(go)], dict(os.environ), log)
    try:
        while log.stat().st_size < 2001:
            time.sleep(0.01)
        child.put_log_aside()
        assert (log.read_text(), (tmp_path / "logs" / "it.log.1").read_text()) == ("", "a" * 2000 + "\n")
        go.touch()
        child.process.wait(10)
        child.put_log_aside()
        assert (log.read_text(), child.said()) == ("b\n", ["b"])
    finally:
        child.stop()


def test_a_status_says_in_our_words_what_happened() -> None:
    about = {"round": 6, "client": 1, "name": "north", "time": time.time()}
    own = {
        "refused": [{**about, "state": "refused", "reason": "prototypes holds NaN"}],
        "clipped": [{**about, "state": "clipped", "reason": "twice the usual"}],
        "missing": [
            {**about, "state": "lost", "reason": "no answer: its connection was lost"},
            {**about, "state": "late", "reason": "no answer within 60 s"},
            {**about, "state": "failed", "reason": "it says: its data is gone"},
            {**about, "round": 0, "state": "lost", "reason": "no answer to the greeting: it is not connected"},
        ],
    }
    assert events(own) == [
        "round 6: refused an answer of north: prototypes holds NaN",
        "round 6: clipped an answer of north: twice the usual",
        "round 6: no answer from north: its connection was lost",
        "round 6: no answer from north within 60 s",
        "round 6: north: it says: its data is gone",
        "before round 1: no answer from north to the greeting: it is not connected",
    ]
