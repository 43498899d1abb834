"""The code blocks of a page, run from top to bottom in one folder, as a reader would.

bash: `protofed` in this process, `make` and `pip` checked against what there is, anything else by the shell.
toml and python that begin with a comment like `# sweep.toml` are written to that file; a toml without one is an
experiment and is run for a round. python blocks of a page share their names. Blocks of any other language are not for
running, and one after `<!-- run by: tests/test_x.py::test_y -->` is run there; `<!-- page run by: ... -->` says so
of all blocks of a page, as where they belong to several machines.
"""

import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from checkout import ROOT
from command import protofed

from protofed import Experiment, run

RUN = ("bash", "toml", "python")
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<code>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL)
ELSEWHERE = re.compile(r"<!-- run by: (tests/[\w/]+\.py)::(\w+) -->\s*\Z")
PAGE = re.compile(r"<!-- page run by: (tests/[\w/]+\.py)::(\w+) -->")
NAMED = re.compile(r"# ([\w./-]+\.(?:toml|py))\n")
SETTING = re.compile(r"[A-Z_]+=")


class Block(NamedTuple):
    """Some code of a page."""

    language: str
    code: str
    elsewhere: tuple[str, str] | None  # the file and the name of the test that runs it


def blocks(page: str) -> list[Block]:
    """Every block of a page, in order."""
    found = []
    for fence in FENCE.finditer(page):
        marked = PAGE.search(page) or ELSEWHERE.search(page[: fence.start()])
        words = fence["info"].split()
        code = "\n".join(line.removeprefix(fence["indent"]) for line in fence["code"].splitlines()) + "\n"
        found.append(Block(words[0] if words else "", code, (marked[1], marked[2]) if marked else None))
    return found


def sections(page: str) -> dict[str, str]:
    """The parts of a long page that have code to run, by heading: each stands for itself."""
    parts = {part.partition("\n")[0]: part for part in re.split(r"^## ", page, flags=re.MULTILINE)}
    return {name: text for name, text in parts.items() if any(block.language in RUN for block in blocks(text))}


def run_page(path: Path, less: dict[str, list[str]] | None = None) -> int:
    """Run a page's blocks here; returns how many. `less` is added to commands, so that they take less time."""
    return run_text(path.read_text(encoding="utf-8"), path.stem, less)


def run_text(text: str, label: str, less: dict[str, list[str]] | None = None) -> int:
    """Run the blocks of a text here; returns how many. `less` is added to commands, so that they take less time."""
    label = re.sub(r"\W", "_", label)
    names: dict[str, Any] = {"__name__": "__main__"}
    todo = [block for block in blocks(text) if block.language in RUN]
    for number, block in enumerate(todo):
        if block.elsewhere:
            file, test = block.elsewhere
            assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{label}: no {test} in {file}"
            continue
        try:
            _run(block, names, f"{label}_{number}", less or {})
        except Exception as error:
            error.add_note(f"in block {number + 1} of {label}:\n{block.code}")
            raise
    here = Path.cwd()
    for name, module in list(sys.modules.items()):  # the page's own files: another page may have files of these names
        if (file := getattr(module, "__file__", None)) and Path(file).parent == here:
            del sys.modules[name]
    return len(todo)


def _run(block: Block, names: dict[str, Any], label: str, less: dict[str, list[str]]) -> None:
    named = NAMED.match(block.code)
    if named:
        Path(named[1]).parent.mkdir(parents=True, exist_ok=True)
        Path(named[1]).write_text(block.code, encoding="utf-8")
    if block.language == "bash":
        for line in block.code.replace("\\\n", " ").splitlines():
            command(line, less)
    elif block.language == "toml" and not named:
        tables = tomllib.loads(block.code)
        rounds = tables.get("incremental", {}).get("tasks", 1)  # a task has one at least
        run(Experiment.from_dict({**tables, "rounds": rounds}), f"runs/{label}")
    elif block.language == "python":
        sys.path.insert(0, str(Path.cwd()))  # for files that the page has written
        importlib.invalidate_caches()
        try:
            file = Path(named[1] if named else f"{label}.py")  # a file, so that tracebacks and inspect see the source
            file.write_text(block.code, encoding="utf-8")
            exec(compile(block.code, str(file.resolve()), "exec"), names)
        finally:
            sys.path.remove(str(Path.cwd()))


def command(line: str, less: dict[str, list[str]]) -> None:
    """One line of bash."""
    words = shlex.split(line, comments=True)
    settings = {}
    while words and SETTING.match(words[0]):
        key, _, value = words.pop(0).partition("=")
        settings[key] = value
    if not words:
        return
    if words[0] == "protofed":
        done = protofed(*words[1:], *less.get(words[1], []), env={**os.environ, **settings})
        assert done.returncode == 0, f"{line}: {done.stderr}"
    elif words[0] == "make":
        assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text(encoding="utf-8"), line
    elif words[:2] == ["pip", "install"]:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
            "optional-dependencies"
        ]
        for extra in re.findall(r"\[(.*?)\]", line):
            assert set(extra.split(",")) <= set(extras), line
    else:
        here = {**os.environ, **settings, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        shown = subprocess.run(line, shell=True, capture_output=True, text=True, check=False, timeout=300, env=here)
        assert shown.returncode == 0, f"{line}: {shown.stderr}"
