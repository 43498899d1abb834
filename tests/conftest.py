"""What the tests share."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import marks
import pytest
import torch
from hypothesis import settings
from PIL import Image

from protofed.engines.stacked.cache import OFTEN
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


sys.addaudithook(marks.check)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that wait for processes come first, so that side by side none of them is left alone in the end.

    Such a test depends on what else the machine does. If it fails, it runs once more, and the summary says RERUN.
    """
    ranks: dict[Path, int] = {}
    for item in items:
        names = {mark.name for mark in item.iter_markers()}
        rank = next((i for i, mark in enumerate(marks.MARKS) if mark in names), len(marks.MARKS))
        ranks[item.path] = min(rank, ranks.get(item.path, rank))
        if names & marks.PROCESSES:
            item.add_marker(pytest.mark.flaky(reruns=1))
    items.sort(key=lambda item: ranks[item.path])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    marks.now = {mark.name for mark in item.iter_markers()}
    if "browser" in getattr(item, "fixturenames", ()) and "browser" not in marks.now:  # another test may start it
        raise AssertionError("A test that uses the browser needs the marker browser.")


def pytest_sessionfinish() -> None:
    marks.now = None


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


@pytest.fixture(scope="session", autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is noted as the user's own code is noted for these tests alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROTOFED_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(autouse=True)
def _own_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs in an empty folder of its own, so that none writes into the checkout."""
    monkeypatch.chdir(tmp_path_factory.mktemp("here"))


DRAWING = [
    (module, name, getattr(module, name))
    for module, name in ((run_pictures, "draw_run"), (run_pictures, "draw_clients"), (run_pictures, "draw_split"))
]


@pytest.fixture(scope="session", autouse=True)
def _no_pictures() -> Iterator[None]:
    """Most of a small run's time goes into its pictures: they are a pixel, but for tests that ask for `pictures`."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name, _ in DRAWING:
            patch.setattr(module, name, lambda *words: Image.new("1", (1, 1)).save(words[-1]))
        yield


@pytest.fixture(scope="session", autouse=True)
def _steps_as_they_are() -> Iterator[None]:
    """Half of a small run's time goes into tracing its steps: they run as they are, but for tests that ask for
    `traced`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OFTEN, "cpu", sys.maxsize)
        yield


TRACED = OFTEN["cpu"]


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are traced when they have run a few times, as they are for users."""
    monkeypatch.setitem(OFTEN, "cpu", TRACED)


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
