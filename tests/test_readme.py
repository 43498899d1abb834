"""What the README says works, word by word."""

import json
import os
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from command import protofed
from protofed import Experiment, run

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


COMMANDS = [
    line.split("  #")[0].strip()
    for block in blocks("bash")
    for line in block.splitlines()
    if line.startswith(("protofed", "PROTOFED_DATA"))
]
SWEEP = [c for c in COMMANDS if c.startswith("protofed sweep") or "runs/sweep" in c]  # in this order, in one folder


LESS = {  # added to a command, so that it takes as little time as it can
    "run": ["clients=6", "rounds=2"],
    "compare": ["clients=6", "rounds=2", "--jobs", "1"],
    "bench": ["model=mlp_digits", "clients=10", "--rounds", "1"],
    "sweep": ["rounds=1", "--jobs", "1"],
}


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("protofed") and c not in SWEEP])
def test_commands_run(command: str) -> None:
    words = shlex.split(command, comments=True)[1:]
    done = protofed(*words, *LESS.get(words[0], []))
    assert done.returncode == 0, done.stderr


def test_the_papers_command_runs_on_real_data(real_data: Path) -> None:
    (command,) = (c for c in COMMANDS if c.startswith("PROTOFED_DATA"))
    words = shlex.split(command)[2:]
    words[1] = str(ROOT / words[1])
    done = protofed(
        *words, "rounds=1", "evaluate.pm=0", "--out", "out", env={**os.environ, "PROTOFED_DATA": str(real_data)}
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(Path("out/summary.json").read_text())
    assert 3000 <= summary["params_up_per_round"] <= 5000  # the paper says about 4,000


def test_the_experiment_runs() -> None:
    text = blocks("toml")[0]
    plan = Experiment.from_dict({**tomllib.loads(text), "rounds": 2})
    assert run(plan, "out").summary["accuracy_mean"] > 0


def test_the_sweep_runs_and_its_tables_are_written() -> None:
    Path("sweep.toml").write_text(next(text for text in blocks("toml") if text.startswith("# sweep.toml")))
    for command in SWEEP:
        test_commands_run(command)
    assert "fedproto, strong, lr=0.1" in Path("table.tex").read_text()


def test_the_python_runs() -> None:
    for code in blocks("python"):
        exec(code.replace("rounds=10", "rounds=2"), {"__name__": __name__})


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
