"""The small errors that `make mutants` makes, and the list of those that need no test."""

import sys
import tomllib
from pathlib import Path

import pytest
from checkout import ROOT

sys.path.insert(0, str(ROOT / "tools"))

from mutants import LEFT_OUT, TESTS
from mutants import tests_of as chosen_for
from mutate import choices, mutants

from protofed.methods import METHODS

SOURCES = {
    f"{path.parent.name}/{path.stem}": path.read_bytes()
    for folder in ("methods", "ops")
    for path in sorted((ROOT / "src" / "protofed" / folder).glob("*.py"))
}


def made(file: str) -> set[str]:
    """The lines that mutants of a file have in place of its own."""
    return {mutant.mutant for mutant in mutants(file, SOURCES[file], choices(list(SOURCES.values())))}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a = b + c", {"a = b - c"}),
        ("a = 3", {"a = 4", "a = 6"}),
        ("a = b > 0", {"a = b >= 0", "a = b > 1"}),
        ("a = x.detach()", {"a = x"}),
        ("a = f(x, deep=y)", {"a = f(x)"}),
        ("a = zip(x, y, strict=True)", set()),
        ("a = F.normalize(x, dim=1)", {"a = x", "a = F.normalize(x, dim=2)", "a = F.normalize(x)"}),
        ("a = f(a)", {"pass"}),
        ("a += b", {"pass"}),
        ("a = ('head.', 'scale')", {"a = ('head.',)", "a = ('scale',)", "a = (\"body.\", 'scale')"}),
        ("a = {'b': c, 'd': e}", {"a = {'b': e, 'd': c}"}),
        ("class A:\n    def embed(self): return b", {"def embed_(self): return b"}),
        ("class A:\n    lam: float = b'7'\n    def loss(self): return self.lam", {"def loss(self): return b'7'"}),
        ("a = b if c else d", {"a = b if not (c) else d"}),
        ("paper = 'Tan et al., 2022'", set()),
    ],
)
def test_errors_are_small(source: str, expected: set[str]) -> None:
    assert {mutant.mutant for mutant in mutants("toy", source.encode(), choices([]))} == expected


def test_readings_are_among_what_is_changed() -> None:
    assert 'presets = {"paper": {"weighting": "uniform"}, "official": {"weighting": "uniform"}}' in made(
        "methods/fedavg"
    )
    assert '"official": {"lam": 1.75, "anchor": "trained", "clip": "loss"},' in made("methods/ditto")
    official = '"official": {"inference": "proto", "distance": "mse", "divide": "%s", "weighting": "uniform"},'
    assert official % "everyone" in made("methods/fedpr")
    assert '"absent": "keep",' in made("methods/fedproto")


def test_every_file_has_tests_that_there_are() -> None:
    for file in SOURCES.keys() - LEFT_OUT:
        folder, _, name = file.partition("/")
        assert file in TESTS or (folder == "methods" and name in METHODS), f"{file}: say in TESTS which tests matter"
        for test in chosen_for(file):
            path, _, function = test.partition("::")
            assert f"def {function.partition('[')[0]}" in Path(path).read_text(), test


def test_every_explanation_is_of_a_mutant_that_there_is() -> None:
    others = choices(list(SOURCES.values()))
    there = {mutant.key for file, source in SOURCES.items() for mutant in mutants(file, source, others)}
    for entry in tomllib.loads((ROOT / "tests" / "mutants.toml").read_text())["explained"]:
        assert (entry["file"], entry["line"], entry["mutant"]) in there
        assert len(entry["why"]) > 20
