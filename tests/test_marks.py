"""Tests say by a marker what they start, so that `make quick` can leave them out."""

import re
import subprocess
import sys
import tomllib

import marks
import pytest
from checkout import ROOT


@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, "-m", "protofed", "list", "methods"],
        [sys.executable, "-c", "from protofed import Experiment, run; run(Experiment.load('demo'), 'out')"],
        [sys.executable, "-m", "mkdocs", "build"],
        ["flower-superlink", "--insecure"],
        ["ip", "netns", "list"],
        ["chromedriver", "--version"],
    ],
)
def test_nothing_is_started_without_a_marker(command: list[str]) -> None:
    with pytest.raises(AssertionError, match="needs the marker"):
        subprocess.run(command, check=False)


def test_other_processes_need_none() -> None:
    subprocess.run([sys.executable, "-c", "import json"], check=True)


def test_markers_are_those_that_are_registered_and_that_quick_leaves_out() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    assert {line.partition(":")[0] for line in settings["markers"]} == set(marks.MARKS)
    quick = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\nquick:")[2].partition("\n\n")[0]
    assert re.findall(r"\w+", quick.partition("not (")[2].partition(")")[0].replace(" or ", " ")) == list(marks.MARKS)


@pytest.mark.slow
def test_what_starts_processes_may_fail_once(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("flaky").kwargs == {"reruns": 1}


def test_nothing_else_may_fail(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("flaky") is None
