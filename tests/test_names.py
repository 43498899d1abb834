"""One name, one meaning: who finds a class or a function by its name need not ask which."""

import ast
from collections import defaultdict
from pathlib import Path

import protofed

ROOT = Path(protofed.__file__).parent

# Names that mean the same in every module that has them.
SAME = {
    # a command and what it calls
    "explain", "export", "init", "join", "rekey", "renew", "reproduce", "run", "start", "stop",
    "main",  # where a process begins
    "make",  # makes one of the figures
    "load",  # what a user loads: samples, and runs as data frames
}  # fmt: skip


def public_names() -> dict[str, set[str]]:
    """The modules in which each public class or function is defined at the top."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in ROOT.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].add(path.relative_to(ROOT).as_posix())
    return found


def test_a_name_means_one_thing() -> None:
    several = {name: sorted(where) for name, where in public_names().items() if len(where) > 1}
    unknown = {name: where for name, where in several.items() if name not in SAME}
    assert not unknown, "Rename one of each, or say in SAME why they mean the same"


def test_names_that_are_no_longer_shared_leave_the_list() -> None:
    several = {name for name, where in public_names().items() if len(where) > 1}
    assert several >= SAME
