"""Compiled steps are kept on disk, where nobody else can put any."""

import subprocess
import sys
from pathlib import Path

import pytest

from protofed.engines.stacked import step

STEP = """
import torch
from torch._dynamo.utils import counters
from protofed.engines.stacked import step

def work(x, y):
    x.add_(y.sin() * 3)
    return []

x, y = torch.ones(3, 4), torch.arange(12.0).reshape(3, 4)
step.compile_flat(work, [x, y])(x, y)
print(counters["inductor"]["fxgraph_cache_hit"], torch.allclose(x, 1 + 3 * y.sin()))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PROTOFED_CACHE", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    step._compiled_code.cache_clear()
    return tmp_path / "compiled"


@pytest.mark.slow
def test_a_step_is_compiled_once_and_then_found_until_it_is_damaged(folder: Path) -> None:
    def another_process() -> str:
        return subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, check=True).stdout.strip()

    assert another_process() == "0 True"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert another_process() == "1 True"
    for path in folder.rglob("*"):
        if path.is_file():
            path.write_bytes(b"damaged")
    assert another_process().endswith("True")  # made again


def test_code_in_a_folder_that_others_can_write_to_is_not_used(folder: Path) -> None:
    assert step._compiled_code() == folder
    step._compiled_code.cache_clear()
    folder.chmod(0o777)
    other = step._compiled_code()
    assert other != folder
    assert other.stat().st_mode & 0o777 == 0o700
    step._compiled_code.cache_clear()


def test_a_home_that_cannot_be_written_to_is_no_error(folder: Path) -> None:
    folder.write_text("a file")
    assert step._compiled_code().is_dir()
    step._compiled_code.cache_clear()
