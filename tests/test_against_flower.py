"""The benchmark against Flower, on a trial of it."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "against_flower.py"
MISSING = [name for name in ("flwr", "ray") if importlib.util.find_spec(name) is None]


@pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} not installed: pip install 'protofed[flower]'")
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are counted in /proc")
@pytest.mark.usefixtures("all_cores")
def test_flower_and_the_plain_loop_learn_the_same_and_leave_nothing_behind(tmp_path):
    mark = f"PROTOFED_TEST={uuid4()}"
    name, value = mark.split("=")
    command = [
        sys.executable,
        SCRIPT,
        "--rounds=2",
        "--clients=4",
        f"--data-dir={tmp_path}",
        f"--json={tmp_path / 'n'}",
    ]
    done = subprocess.run(command, env=os.environ | {name: value}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    numbers = json.loads((tmp_path / "n").read_text())
    runs = numbers["runs"]
    assert "stand in" in numbers["note"]
    assert all(len(run["rounds"]) == 1 for run in runs.values())
    assert runs["Flower simulation, two actors"]["accuracy"] == runs["plain PyTorch loop"]["accuracy"]
    assert not [path for path in Path("/proc").glob("[0-9]*/environ") if mark.encode() in _read(path)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # it has ended, or is not ours
