"""What the README says works, word by word."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from blocks import ROOT, blocks, run_text, sections
from protofed import Experiment, run

README = (ROOT / "README.md").read_text(encoding="utf-8")


LESS = {
    "run": ["clients=6", "rounds=2"],
    "compare": ["clients=6", "rounds=2", "--jobs", "1"],
    "bench": ["model=mlp_digits", "clients=10", "--rounds", "1"],
    "sweep": ["rounds=1", "--jobs", "1"],
}


@pytest.mark.parametrize("section", sections(README))
def test_the_readme_runs(section: str) -> None:
    """All commands, experiments and programs of a section, from top to bottom."""
    assert run_text(sections(README)[section], section, LESS)
    if "sweep.toml" in sections(README)[section]:
        assert "fedproto, strong, lr=0.1" in Path("table.tex").read_text()


def test_the_papers_command_runs_on_real_data(real_data: Path) -> None:
    (command,) = (block.code for block in blocks(README) if block.code.startswith("PROTOFED_DATA"))
    words = shlex.split(command)[1:]
    words[2] = str(ROOT / words[2])
    done = subprocess.run(
        [sys.executable, "-m", *words, "rounds=1", "--out", "out"],
        capture_output=True, text=True, check=False, timeout=300, env={**os.environ, "PROTOFED_DATA": str(real_data)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(Path("out/summary.json").read_text())
    assert 3000 <= summary["params_up_per_round"] <= 5000  # the paper says about 4,000


def test_what_the_readme_names_is_there() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:^|`)make ([a-z]+)", README, re.MULTILINE):
        assert f"\n{target}:" in makefile, target


def test_the_numbers_of_a_run_are_explained() -> None:
    plan = Experiment.load("demo", "rounds=1", "clients=4")
    result = run(plan, "out")
    for name in ("accuracy_mean", "accuracy_head_mean", "accuracy_proto_mean", "accuracy_global_mean", "pm_v"):
        assert f"`{name}`" in README
        assert name in result.summary
    for path in Path("out").iterdir():
        assert path.name == ".lock" or path.name in README, path.name
