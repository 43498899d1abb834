"""Mutation testing of `methods/` and `ops/`: one small error at a time, and the tests that should notice it.

A process is forked for every mutant, after all libraries are loaded and before protofed is, and imports the mutated
source in place of the file. A survivor that `tests/mutants.toml` explains is no failure.
"""

import argparse
import contextlib
import gc
import importlib.util
import os
import random
import resource
import sys
import tempfile
import time
import tomllib
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any

from mutate import Mutant, choices, mutants

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "src" / "protofed"
EXPLAINED = ROOT / "tests" / "mutants.toml"
PRESET_NAMES = ("default", "paper", "official")
SECONDS = 120  # of CPU for the tests of one mutant: one that takes longer runs forever, and counts as killed

# Which tests matter for a file; those that are quick and kill most come first. {} is the method's name.
PRESETS, ROUNDS = "methods/test_presets.py::test_a_preset_is_its_fields", "methods/test_by_hand.py"
RULES = tuple(
    f"testing/test_check_method.py::test_every_method_keeps_all_rules[{{}}-{preset}]" for preset in PRESET_NAMES
)
SLOPES = tuple(
    f"methods/test_slopes.py::test_training_follows_the_slope_of_the_loss[{{}}-{preset}]" for preset in PRESET_NAMES
)
METHOD = (PRESETS, ROUNDS, "methods/test_methods.py", *RULES)
ONE_SHAPE = "methods/test_methods.py::test_what_is_averaged_must_have_one_shape"
OWN_HEADS = "methods/test_methods.py::test_heads_that_stay_at_home_may_differ"
SERVER = "methods/test_server_trained.py"
ONESHOT, PERSONAL = "methods/test_oneshot.py", "methods/test_personal_heads.py"
SPHERE = (
    "separated_prototypes_are_as_far_apart_as_can_be",
    "of_three_starts_the_best_is_taken",
    "orthogonal_prototypes_need_room",
)
SUMMED = (ONESHOT, PERSONAL)
TESTS = {
    "methods/ccvr": (PRESETS, "methods/test_ccvr.py", ONE_SHAPE, *RULES),
    "methods/creff": (PRESETS, "methods/test_creff.py"),
    "methods/fedavg": (PRESETS, "methods/test_fedavg.py", ROUNDS),
    **{f"methods/{name}": (PRESETS, SERVER, *SLOPES) for name in ("fedgh", "fedorgp", "fedtgp")},
    "methods/fedpac": (PRESETS, "methods/test_fedpac.py", ONE_SHAPE, *SLOPES),
    "methods/fedpcl": (PRESETS, "methods/test_fedpcl.py"),
    "methods/fedplvm": (PRESETS, "methods/test_fedplvm.py", ONE_SHAPE),
    "methods/fedproc": (PRESETS, "methods/test_fedproc.py", ONE_SHAPE),
    "methods/fpl": (PRESETS, "methods/test_fpl.py", ONE_SHAPE, *SLOPES),
    "methods/generated": (PRESETS, SERVER),
    "methods/i2pfl": (PRESETS, "methods/test_i2pfl.py", ONE_SHAPE),
    "methods/moon": (PRESETS, "methods/test_moon.py", ONE_SHAPE, *SLOPES),
    "methods/gpfl": (PRESETS, "methods/test_gpfl.py", ONE_SHAPE, OWN_HEADS, *RULES),
    "methods/pfedfda": (PRESETS, "methods/test_pfedfda.py", ONE_SHAPE, OWN_HEADS, *RULES),
    "methods/fednh": (PRESETS, "methods/test_scored_by.py", *METHOD[1:]),
    "methods/fedproto": (PRESETS, "methods/test_scored_by.py", ROUNDS, "methods/test_fedproto.py"),
    "methods/lda": (PRESETS, ONESHOT, PERSONAL, *RULES),
    "methods/local": (PRESETS, "methods/test_local_method.py"),
    "methods/oneshot": (ONESHOT, *(rule.format("lda") for rule in RULES)),
    **{f"methods/{name}": (PRESETS, ONESHOT, *RULES) for name in ("classmeans", "qda", "ridge")},
    "methods/pool": (PRESETS, ROUNDS, ONE_SHAPE, *(rule.format("spfedcl") for rule in RULES)),
    "ops/checks": ("methods/test_fedavg.py", "methods/test_fedproto.py", "methods/test_methods.py"),
    "ops/clustering": ("ops/test_clustering.py", ROUNDS),
    "ops/contrast": ("methods/test_fedproc.py", "methods/test_fedplvm.py", "methods/test_fpl.py"),
    "ops/distances": ("ops/test_distances.py",),
    "ops/derivatives": ("ops/test_derivatives.py", "methods/test_creff.py"),
    "ops/finch": ("methods/test_fpl.py", "methods/test_fedplvm.py"),
    **{f"ops/{name}": (*SUMMED, "methods/test_pfedfda.py", "methods/test_ccvr.py") for name in ("heads", "mixing")},
    "ops/statistics": ("ops/test_statistics.py", *SUMMED),
    "ops/server_training": (SERVER,),
    "ops/simplex": ("methods/test_fedpac.py",),
    "ops/losses": (ROUNDS,),
    "ops/matching": ("methods/test_creff.py",),
    "ops/optim": (
        "ops/test_optim.py",
        "test_local.py",
        "engines/test_engines_agree.py::test_engines_agree[fedavg-paper]",
    ),
    "ops/pool": ("ops/test_clustering.py", ROUNDS),
    "ops/prototypes": (
        "ops/test_prototypes.py",
        "methods/test_scored_by.py",
        ROUNDS,
        "methods/test_fedproto.py",
        "ops/test_distances.py",
    ),
    "ops/random": ("ops/test_random.py", "ops/test_clustering.py"),
    "ops/sharing": ("methods/test_fedavg.py", ROUNDS),
    "ops/sphere": tuple(f"methods/test_methods.py::test_{test}" for test in SPHERE),
    "ops/trees": ("test_method.py", ROUNDS, "test_local.py"),
}
LEFT_OUT = {"methods/__init__", "ops/__init__", "ops/replay"}  # the last runs on a GPU only


def tests_of(file: str) -> list[str]:
    """The tests of a file; a method without an entry is tested as every method is."""
    name = file.partition("/")[2]
    return [f"{ROOT}/tests/{test.format(name)}" for test in TESTS.get(file, METHOD)]


class Instead:
    """Finds one module in another source than its file's."""

    def __init__(self, mutant: Mutant) -> None:
        self.name, self.path = f"protofed.{mutant.file.replace('/', '.')}", str(SOURCES / f"{mutant.file}.py")
        self.source = mutant.source

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        loader = SourceFileLoader(name, self.path)
        loader.get_code = lambda _: compile(self.source, self.path, "exec")  # type: ignore[method-assign, assignment]
        return importlib.util.spec_from_file_location(name, self.path, loader=loader)


class Sooner:
    """Plays the tests that name the mutant's method before the others, in their order otherwise."""

    def __init__(self, mutant: Mutant) -> None:
        self.name = mutant.file.partition("/")[2]

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items.sort(key=lambda item: self.name not in item.nodeid.partition("::")[2])


def play(tests: list[str], mutant: Mutant | None, temporary: str) -> int:
    """In a child: the exit code of the tests, at the first that fails."""
    import pytest

    if mutant:
        sys.meta_path.insert(0, Instead(mutant))  # type: ignore[arg-type]
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))  # nobody handles its signal: the process ends
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
    quiet = ["-x", "-q", "-p", "no:cacheprovider", "--tb=short", "-W", "ignore"]
    plugins = [Sooner(mutant)] if mutant else []
    return int(pytest.main([*tests, *quiet, f"--basetemp={temporary}/{os.getpid()}"], plugins))


def forked(tests: list[str], mutant: Mutant | None, temporary: str) -> int:
    """A child that plays the tests; its number."""
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            code = play(tests, mutant, temporary)
            if not mutant:
                Path(temporary, "loaded").write_text("\n".join(sys.modules))
        os._exit(code)
    return child


def prepare(files: list[str], temporary: str) -> None:
    """The tests pass without a mutant; then everything that they loaded is loaded here, but for protofed."""
    for number in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[number] = "1"  # processes with threads should not fork
    sys.dont_write_bytecode, sys.pycache_prefix = False, f"{temporary}/compiled"  # once for all mutants
    if os.waitpid(forked(list(dict.fromkeys(test for f in files for test in tests_of(f))), None, temporary), 0)[1]:
        sys.exit("The tests fail without a mutant.")
    for name in Path(temporary, "loaded").read_text().split("\n"):
        if name.partition(".")[0] not in ("protofed", "conftest") and not name.startswith("test_"):
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    gc.collect()
    gc.freeze()  # children look through their own objects alone


def survivors(todo: list[Mutant], jobs: int, temporary: str) -> list[Mutant]:
    """Those that no test kills, printed as they are found."""
    running, found = dict[int, Mutant](), list[Mutant]()
    queue = iter(todo)
    while True:
        while len(running) < jobs and (mutant := next(queue, None)):
            running[forked(tests_of(mutant.file), mutant, temporary)] = mutant
        if not running:
            return found
        child, status = os.wait()
        mutant = running.pop(child)
        if status == 0:
            found.append(mutant)
            print(f"{mutant.file}.py:{mutant.number}: {mutant.line}\n  survives as: {mutant.mutant}", flush=True)


def chosen(file: str, only: str) -> bool:
    return file == only or (only[-1:] in ("", "/") and file.startswith(only))


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Make small errors in methods/ and ops/ and see which no test notices."
    )
    parser.add_argument("--only", nargs="+", default=[""], help="files, such as methods/fedproto or ops/")
    parser.add_argument("--sample", type=int, help="so many mutants at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    given = parser.parse_args()
    began = time.monotonic()
    paths = sorted([*SOURCES.glob("methods/*.py"), *SOURCES.glob("ops/*.py")])
    others = choices([path.read_bytes() for path in paths])
    files = [f"{path.parent.name}/{path.stem}" for path in paths]
    files = [file for file in files if file not in LEFT_OUT and any(chosen(file, only) for only in given.only)]
    sources = {file: (SOURCES / f"{file}.py").read_bytes() for file in files}
    todo = [m for file, source in sources.items() for m in mutants(file, source, others)]
    if given.sample:
        todo = random.Random(given.seed).sample(todo, min(given.sample, len(todo)))
    print(f"{len(todo)} mutants of {len(files)} files", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        prepare(sorted({mutant.file for mutant in todo}), temporary)
        found = survivors(todo, given.jobs, temporary)
    known = {(e["file"], e["line"], e["mutant"]) for e in tomllib.loads(EXPLAINED.read_text())["explained"]}
    open_ = [mutant for mutant in found if mutant.key not in known]
    print(
        f"\n{len(todo)} mutants, {len(todo) - len(found)} killed, {len(found) - len(open_)} explained, {len(open_)} not"
    )
    print(f"{time.monotonic() - began:.0f} s")
    for mutant in open_:
        print(f"not explained: {mutant.file}.py:{mutant.number}: {mutant.line}\n  as: {mutant.mutant}")
    sys.exit(1 if open_ else 0)


if __name__ == "__main__":
    main()
