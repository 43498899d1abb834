"""docs/design.md walks one round and one upload, file by file: what it names exists, and is called in that order."""

import ast
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import federated
from checkout import ROOT
from small_runs import small

import protofed
from protofed import run
from protofed.remote.server.serve import serve

SOURCE = Path(protofed.__file__).parent
SECTION = re.search(
    r"\n## One round, file by file\n(.*?)\n## ", (ROOT / "docs/design.md").read_text(encoding="utf-8"), re.S
)
EARLIER = {"ClientWorker.answer", "RemoteEngine.train", "body_of", "Audit.add"}  # also before the step that names them
BOUNDS = {"clip_upload"}  # only if an upload is cut
CARRIER = {"GridTransport", "Fleet"}  # Flower's, which a federation in one process goes without
NOT_ALWAYS = {"Uploads.together", "Releases.noised", "noised_sum"}  # only with a robust rule, or with a budget


def walks() -> list[list[tuple[list[str], list[str]]]]:
    """Files and functions of every step, of the round and of the upload."""
    assert SECTION
    found: list[list[tuple[list[str], list[str]]]] = []
    for line in SECTION[1].splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if cells[:2] == ["step", "what there is afterwards"]:
            found.append([])
        elif len(cells) == 4 and "---" not in cells[0]:
            found[-1].append((re.findall(r"`([^`]+)`", cells[2]), re.findall(r"`([^`]+)`", cells[3])))
    return found


def defined(path: Path) -> set[str]:
    kinds = (ast.FunctionDef, ast.ClassDef)
    top = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, kinds)]
    inner = [f"{node.name}.{part.name}" for node in top for part in node.body if isinstance(part, kinds)]
    return {node.name for node in top} | set(inner)


def test_the_files_and_functions_of_the_walk_exist() -> None:
    upload = walks()[1]
    assert [len(walk) > 10 for walk in walks()] == [True, True]
    for files, functions in [*walks()[0], *upload]:
        there = set().union(*(defined(SOURCE / file) for file in files))
        assert functions
        assert set(functions) <= there, (files, functions)


def calls(wanted: set[tuple[str, str]], work: Callable[[], Any], begin: str) -> list[str]:
    """Which of these functions some work calls, in order, from the one in which it begins."""
    found: list[str] = []
    inside = False

    def look(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal inside
        code: CodeType = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(SOURCE)):
            return
        inside = inside or code.co_qualname == begin
        if inside and (Path(code.co_filename).relative_to(SOURCE).as_posix(), code.co_qualname) in wanted:
            found.append(code.co_qualname)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(before)
    return found


def named(walk: list[tuple[list[str], list[str]]]) -> set[tuple[str, str]]:
    return {(file, name) for files, names in walk for file in files for name in names}


def test_a_round_goes_the_way_of_the_walk() -> None:
    experiment = small("rounds=1", "method=fedproto", "model=cnn_digits")
    called = calls(named(walks()[0]), lambda: run(experiment, "out"), "_rounds")
    assert list(dict.fromkeys(called)) == [name for _, names in walks()[0] for name in names if name not in NOT_ALWAYS]


def test_an_upload_goes_the_way_of_the_walk() -> None:
    home = Path("federation")
    server = federated.set_up(home, federated.small("rounds=1", "method=fedproto"))
    carrier = federated.workers(home)
    called = calls(named(walks()[1]), lambda: serve(server, carrier, lambda text: None, pause=0.01), "Asking.ask")
    first = {name: place for place, name in enumerate(dict.fromkeys(called))}
    steps = [
        [name for name in names if name not in EARLIER | BOUNDS and name.partition(".")[0] not in CARRIER]
        for _, names in walks()[1]
    ]
    places = [max(first[name] for name in step) for step in steps if step]
    assert len(places) > 12
    assert places == sorted(places)
