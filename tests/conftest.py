"""What the tests share."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from PIL import Image

from protofed.report import bubbles
from protofed.report import pictures as run_pictures

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background: tests press Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # tiny tensors: several threads are slower, and tests run side by side
# A busy machine is no failure, and the same commit has the same examples.
settings.register_profile("tests", deadline=None, derandomize=True)
settings.load_profile("tests")
number = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
CORES = sorted(os.sched_getaffinity(0)) if number and hasattr(os, "sched_getaffinity") else []
MINE = {CORES[int(number) % len(CORES)]} if CORES else set()
if CORES:  # side by side, each has a core, and its runs as many threads
    os.sched_setaffinity(0, MINE)


@pytest.fixture(scope="module")
def all_cores() -> Iterator[None]:
    """For tests of many processes, which wait for each other."""
    if CORES:
        os.sched_setaffinity(0, CORES)
    yield
    if CORES:
        os.sched_setaffinity(0, MINE)


@pytest.fixture(autouse=True)
def _same_modules() -> None:
    """Modules that a test makes begin with the same weights, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs in an empty folder of its own, so that none writes into the checkout."""
    monkeypatch.chdir(tmp_path_factory.mktemp("here"))


DRAWING = [
    (module, name, getattr(module, name))
    for module, name in ((run_pictures, "curve"), (run_pictures, "clients"), (bubbles, "draw_split"))
]


@pytest.fixture(scope="session", autouse=True)
def _no_pictures() -> Iterator[None]:
    """Most of a small run's time goes into its pictures: they are a pixel, but for tests that ask for `pictures`."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name, _ in DRAWING:
            patch.setattr(module, name, lambda *words: Image.new("1", (1, 1)).save(words[-1]))
        yield


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs draw their pictures, as they do for users."""
    for module, name, draw in DRAWING:
        monkeypatch.setattr(module, name, draw)


@pytest.fixture
def real_data() -> Path:
    """The folder of real data sets: $PROTOFED_DATA, or ../shared/data beside the checkout."""
    given = os.environ.get("PROTOFED_DATA")
    folder = Path(given) if given else Path(__file__).resolve().parents[2] / "shared" / "data"
    if not (folder / "mnist.npz").is_file():
        pytest.skip("needs real data: set PROTOFED_DATA to a folder with mnist.npz")
    return folder
