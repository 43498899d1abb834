"""What the README says works, word by word."""

import html
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from blocks import blocks, run_text, sections
from checkout import ROOT

from protofed import Experiment, run
from protofed.methods import METHODS

pytestmark = pytest.mark.docs

README = (ROOT / "README.md").read_text(encoding="utf-8")


LESS = {"run": ["clients=6", "rounds=2"], "compare": ["clients=6", "rounds=2", "--jobs", "1"]}
WORDS = 1000
IN_WORDS = {
    27: "twenty-seven",
    28: "twenty-eight",
    29: "twenty-nine",
    30: "thirty",
    33: "thirty-three",
    34: "thirty-four",
    35: "thirty-five",
}


def test_a_visitor_reads_it_in_five_minutes() -> None:
    assert len(README.split()) <= WORDS


def test_it_counts_and_names_every_method() -> None:
    plain = re.sub(r"[^a-z0-9]", "", README.lower())
    assert [name for name in METHODS if name not in plain] == []
    assert f"get {IN_WORDS[len(METHODS)]} methods" in README
    assert f"\n{len(METHODS)} methods under" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert f"39 methods against {len(METHODS)}" in (ROOT / "docs" / "pfllib-users.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("section", sections(README))
def test_the_readme_runs(section: str) -> None:
    """All commands, experiments and programs of a section, from top to bottom."""
    assert run_text(sections(README)[section], section, LESS)


def test_the_example_learns_and_beats_training_alone(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = (block.code for block in blocks(README) if block.language == "python")
    assert len(code.split("\n\n", 1)[1].splitlines()) + 2 <= 15  # imports and program
    exec(compile(code, "first.py", "exec"), {"__name__": "__main__"})
    alone, together = percentages(capsys.readouterr().out)
    assert together[0] + 10 < together[-1]
    assert max(alone) + 4 < together[-1]
    (shown,) = (block.code for block in blocks(README) if block.language == "text")
    assert np.abs(np.subtract(percentages(shown), (alone, together))).max() < 4  # other machines round differently


def test_the_picture_is_of_the_example() -> None:
    (shown,) = (block.code for block in blocks(README) if block.language == "text")
    drawn = html.unescape(re.sub(r"<[^>]+>", "", (ROOT / "docs/images/first.svg").read_text(encoding="utf-8")))
    assert percentages(drawn.replace("\xa0", " ")) == percentages(shown)
    assert not re.search(r"(?:src|href)=|url\((?!#)|@import", drawn)


def test_the_front_page_of_the_site_shows_the_same_program() -> None:
    front = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    shown = [[block.code for block in blocks(page) if "sklearn" in block.code] for page in (README, front)]
    assert shown[0] == shown[1] != []


def percentages(text: str) -> tuple[list[float], list[float]]:
    """Alone and together, line by line."""
    return tuple([float(x) for x in re.findall(rf"{name}\s+([\d.]+)%", text)] for name in ("alone", "together"))


def test_the_papers_command_runs_on_real_data(real_data: Path) -> None:
    page = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")
    (command,) = (block.code for block in blocks(page) if block.code.startswith("PROTOFED_DATA"))
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
    for link in re.findall(r"\]\((?!https:)([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:^|`)make ([a-z]+)", README, re.MULTILINE):
        assert f"\n{target}:" in makefile, target


def test_the_numbers_and_files_of_a_run_are_explained() -> None:
    glossary, files = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("glossary.md", "run-folder.md"))
    plan = Experiment.load("demo", "rounds=1", "clients=4")
    result = run(plan, "out")
    for name in ("accuracy_mean", "accuracy_head_mean", "accuracy_proto_mean", "accuracy_global_mean", "pm_v"):
        assert f"`{name}`" in glossary
        assert name in result.summary
    for path in Path("out").iterdir():
        assert path.name == ".lock" or path.name in files, path.name
