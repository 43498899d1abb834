"""What the tests share."""

import os
import signal
from pathlib import Path

import pytest
import torch

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background: tests press Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # tiny tensors: several threads are slower, and tests run side by side


@pytest.fixture(autouse=True)
def _own_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs in an empty folder of its own, so that none writes into the checkout."""
    monkeypatch.chdir(tmp_path_factory.mktemp("here"))


@pytest.fixture
def real_data() -> Path:
    """The folder of real data sets: $PROTOFED_DATA, or ../shared/data beside the checkout."""
    given = os.environ.get("PROTOFED_DATA")
    folder = Path(given) if given else Path(__file__).resolve().parents[2] / "shared" / "data"
    if not (folder / "mnist.npz").is_file():
        pytest.skip("needs real data: set PROTOFED_DATA to a folder with mnist.npz")
    return folder
