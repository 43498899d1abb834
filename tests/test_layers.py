"""Imports go one way, and heavy or optional packages are imported in one place each."""

import ast
import json
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from checkout import ROOT as CHECKOUT

import protofed
from protofed.cli import lazy

ROOT = Path(protofed.__file__).parent

# Every module and package of protofed: each may import those before it, and no other.
ORDER = (
    "version", "errors", "importing", "atomic", "method", "ops", "privacy", "methods", "models", "data", "metrics",
    "local", "engines", "config", "robust", "runs", "leaks", "joining", "export", "explain", "tracking", "sweep",
    "testing", "report", "papers", "probes", "remote", "federated", "api", "cli", "__main__",
)  # fmt: skip
# What may be imported of what comes before, where that is less than all; a package stands for all that is in it.
MAY = {
    "errors": set(),
    "atomic": set(),
    "importing": {"errors"},
    "method": set(),
    "ops": {"errors", "method"},
    "privacy": {"errors", "method", "ops"},
    "methods": {"errors", "importing", "method", "ops"},
    "models": {"errors", "importing", "method", "ops"},
    "data": {"errors", "importing", "atomic", "method", "ops"},
    "metrics": {"method"},
    "local": {"errors", "method", "ops", "models"},
    "engines": {"errors", "version", "method", "metrics", "ops", "models", "data", "local"},
    "engines.wire": {"method", "ops"},
    "config": {"errors", "importing", "method", "ops", "privacy", "methods", "models", "data"},
    "config.schema": {"errors"},
    "config.registry": {
        "config.schema", "config.sections", "data", "errors", "importing", "method", "methods", "models", "privacy",
    },
    "config.sections": {"errors", "importing"},
    "robust": {"errors", "method", "ops", "privacy", "data", "config.sections"},
    "runs.numbers": set(),
    "runs.lines": {"errors"},
    "runs.listing": {"errors", "atomic"},
    "runs.trust": {"errors", "atomic", "importing", "config", "methods"},
    "runs.segments": {"atomic"},
    "runs.sealed": {"errors", "runs.segments"},
    "runs.store": {"errors", "method", "engines", "runs.segments"},
    "runs.folder": {
        "errors", "atomic", "importing", "method", "engines", "config", "runs.lines", "runs.sealed", "runs.segments",
        "runs.store", "runs.trust",
    },
    "leaks": {
        "atomic", "config", "data", "engines", "errors", "method", "models", "ops", "privacy", "runs",
    },
    "tracking": {"errors", "runs.watch"},
    "tracking.sinks": set(),
    "testing": {"importing", "method", "methods", "models", "ops", "local", "engines.wire", "config"},
    "remote.client": {
        "atomic", "errors", "config", "engines", "explain", "local", "method", "ops", "privacy", "remote",
        "runs.budget", "runs.checks", "runs.cohort", "runs.noised", "runs.securesum", "runs.trust",
    },
    "remote.server": {
        "atomic", "errors", "version", "config", "data", "engines", "local", "method", "metrics", "models", "ops",
        "privacy", "remote", "robust", "runs",
    },
    "report": {"errors", "atomic", "version", "data.domain", "data.split", "config.defaults", "runs"},
    "probes": {"config", "data", "engines", "joining", "method", "papers.theory", "report", "runs"},
}  # fmt: skip
# Rooms of one package that know nothing of each other, or only in one direction.
APART = (
    ("engines.stacked", "engines.ray"),
    ("remote.client", "remote.server"),
    ("remote.server", "remote.client"),
    ("remote.server", "remote.flower"),
    ("remote.client", "remote.flower"),
    ("papers.theory", "papers.reproduce"),
    ("papers.reproduce", "papers.theory"),
)
# How many modules of protofed a client of a federation loads: to train and send, and with its bundle, its data and
# Flower's messages; and what it never loads.
CLIENT_LOADS = {"remote.client.worker": 39, "remote.flower.client": 63}
CLIENT_NEVER = ("report", "papers", "sweep", "tracking", "export", "cli", "api", "probes", "testing", "remote.server")

ONLY_IN = {
    "datasets": {"data/readers/hub.py", "data/flower.py"}, "flwr_datasets": {"data/flower.py"},
    "torchvision": {"data/readers/hub.py"}, "ray": {"engines/ray/cluster.py"},
    "flwr": {"remote/flower/claim.py", "remote/flower/control.py", "remote/flower/fleet.py", "remote/flower/mail.py",
             "remote/flower/parcel.py", "remote/flower/transport.py", "remote/flower/app/protofed_app/client_app.py",
             "remote/flower/app/protofed_app/server_app.py"},
    "cryptography": {
        "remote/flower/certificates.py", "remote/flower/control.py", "remote/flower/fleet.py", "privacy/keys.py",
    },
    "Crypto": {"privacy/shares.py"},
    "uvicorn": {"remote/flower/proxy.py"}, "google": {"remote/flower/control.py"},
    "httpx": {f"remote/flower/{n}.py" for n in ("claim", "control", "diagnose", "door", "fleet", "mail", "proxy")},
    "efficientnet_lite_pytorch": {"models/efficientnet.py"}, "tokenizers": {"models/texts.py"},
    "onnxruntime": {"export/files.py"}, "onnxscript": set(),
    "dp_accounting": {"privacy/accounting.py"},
    "tensorboard": {"tracking/sinks/tensorboard.py"}, "wandb": {"tracking/sinks/wandb.py"},
    "mlflow": {"tracking/sinks/mlflow.py"},
}  # fmt: skip
CALLED = {"sklearn": "scikit_learn", "PIL": "pillow"}  # what the package of a module is called
OPTIONAL = {"pandas"}  # used where a user has it
SLOW = ("matplotlib", "sklearn", "scipy", "pandas")


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in ROOT.rglob("*.py")}
OURS = {name: path for name, path in MODULES.items() if name != "__init__"}


def statements(node: ast.AST, typing: bool) -> Iterator[ast.AST]:
    """All parts of a file; without `typing` not those that are there for type checkers alone."""
    for part in ast.iter_child_nodes(node):
        if typing or not (isinstance(part, ast.If) and ast.unparse(part.test) == "TYPE_CHECKING"):
            yield part
            yield from statements(part, typing)


def imports(path: Path, typing: bool = True) -> set[str]:
    found = set()
    for node in statements(ast.parse(path.read_text(encoding="utf-8")), typing):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def ours(path: Path, typing: bool = True) -> set[str]:
    """The modules of protofed that a file imports; `import protofed` by itself is a table of names."""
    found = set()
    for name in imports(path, typing):
        if name.startswith("protofed."):
            inner = name.removeprefix("protofed.")
            while inner not in OURS:
                inner = inner.rpartition(".")[0]
                assert inner, f"{path} imports {name}, which does not exist"
            found.add(inner)
    return found


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def top(name: str) -> str:
    return name.partition(".")[0]


def test_every_module_has_a_place() -> None:
    assert {top(name) for name in OURS} == set(ORDER)
    ruled = {*MAY, *(name for pair in APART for name in pair)}
    assert all(any(within(name, rule) for name in OURS) for rule in ruled)


def test_imports_go_one_way() -> None:
    """Each package imports what comes before it: so there is no cycle between packages."""
    place = {name: number for number, name in enumerate(ORDER)}
    wrong = {
        (name, other) for name, path in OURS.items() for other in ours(path) if place[top(other)] > place[top(name)]
    }
    assert not wrong


def test_the_picture_of_the_layers_is_true() -> None:
    """Every module and package has a place in it, and imports go down."""
    drawn = runpy.run_path(str(CHECKOUT / "docs" / "hooks" / "draw.py"))
    layer = {name: number for number, (names, _) in enumerate(drawn["LAYERS"]) for name in names}
    assert set(layer) == set(ORDER) - {"__main__"}
    upwards = {
        (name, other)
        for name, path in OURS.items()
        for other in ours(path)
        if name != "__main__" and layer[top(other)] < layer[top(name)]
    }
    assert not upwards


def test_contributing_names_every_package() -> None:
    """And no module or package that does not exist."""
    text = (CHECKOUT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    first = [name for row in rows for name in re.findall(r"`([\w/.]+)`", row.split("|")[1])]
    assert sorted(name.removesuffix(".py").strip("/") for name in first) == sorted(set(ORDER) - {"version", "__main__"})
    inside = {path.name for path in ROOT.rglob("*.py")} | {f"{path.name}/" for path in ROOT.rglob("*") if path.is_dir()}
    named = {name.rpartition("/")[2] for row in rows for name in re.findall(r"`([\w/]+\.py)`", row)}
    assert named <= inside


def test_no_module_needs_itself() -> None:
    """Nor by way of others, in a function, or within a package."""
    TopologicalSorter({name: ours(path, typing=False) - {name} for name, path in OURS.items()}).prepare()


def test_what_may_import_less() -> None:
    wrong = []
    for name, path in OURS.items():
        for rule, allowed in MAY.items():
            if within(name, rule):
                for other in ours(path):
                    if not within(other, rule) and not any(within(other, each) for each in allowed):
                        wrong.append(f"{name} imports {other}, and {rule} may import {sorted(allowed)}")
    assert not wrong


def test_rooms_that_know_nothing_of_each_other() -> None:
    wrong = [
        f"{name} imports {other}"
        for room, unknown in APART
        for name, path in OURS.items()
        if within(name, room)
        for other in ours(path)
        if within(other, unknown)
    ]
    assert not wrong


def test_methods_know_no_engine_file_or_clock() -> None:
    for path in (ROOT / "methods").glob("*.py"):
        names = {name.split(".")[0] for name in imports(path)}
        assert names <= {"protofed", "torch", "abc", "dataclasses", "typing", "collections", "annotated_types"}, path


def test_optional_packages_are_imported_in_one_place() -> None:
    for path in ROOT.rglob("*.py"):
        here = path.relative_to(ROOT).as_posix()
        for name in imports(path):
            package = name.split(".")[0]
            assert package not in ONLY_IN or here in ONLY_IN[package], f"{here} imports {name}"


def test_whatever_else_is_imported_is_installed_with_protofed() -> None:
    """A package that only comes with another one is gone when that one stops using it, as click was with Typer."""
    declared = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    installed = {re.match(r"[\w.-]+", line).group().replace("-", "_") for line in declared}  # type: ignore[union-attr]
    for path in ROOT.rglob("*.py"):
        found = {name.split(".")[0] for name in imports(path)} - {"protofed", *sys.stdlib_module_names, *ONLY_IN}
        missing = {CALLED.get(name, name) for name in found} - installed - OPTIONAL
        assert not missing, f"{path.relative_to(ROOT)} imports {missing}: pyproject.toml should name it"


def loaded(code: str) -> list[str]:
    """The modules that a fresh process has after some code."""
    code = f"import sys, json; {code}; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_importing_protofed_is_cheap_and_needs_no_extra() -> None:
    """Nothing optional is pulled in by the package or its commands, nor what is slow and not always needed."""
    commands = "from protofed.cli.lazy import COMMANDS, load_command; list(map(load_command, COMMANDS))"
    found = loaded(f"{commands}; import protofed.tracking.track; from protofed import *")
    assert not {*ONLY_IN, *SLOW} & set(found)
    assert "torch" not in loaded("import protofed")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--version"], "protofed "),
        (["--help"], "Run one experiment and write its folder."),
        (["rnu", "demo"], "error: there is no command 'rnu'. Did you mean 'run'?"),
        (["run", "demmo"], "Did you mean 'demo'?"),
        (["run", "demo", "--ouut", "x"], "--out"),
        (["list", "mthods"], "'methods'"),
        (["run", "demo", "epchs=3"], "unknown key epchs = 3. Did you mean 'local_epochs'?"),
        (["run", "demo", "method=fedprto"], "Did you mean 'fedproto'?"),
        (["run", "demo", "data.sizee=3"], "unknown key data.sizee = 3. Did you mean 'size'?"),
        (["partition", "demo", "partition=dirichlt"], "Did you mean 'dirichlet'?"),
        (["compare", "local", "fedprto", "--experiment", "demo"], "Did you mean 'fedproto'?"),
        (["explain", "fedprto"], "Did you mean 'fedproto'?"),
        (["explain"], "Missing argument 'METHOD'"),
        (["table", "runs", "--selct", "validation"], "--select"),
        *(([name, "--help"], f"protofed {name}") for name in lazy.COMMANDS),
    ],
)
def test_help_and_a_typo_do_not_wait_for_pytorch(words: list[str], said: str) -> None:
    code = f"import sys; sys.argv[1:] = {words!r}; from protofed.cli import main\ntry: main()\nexcept SystemExit: pass"
    code += "\nprint(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said in done.stdout + done.stderr
    assert not {"torch", "numpy", *ONLY_IN, *SLOW} & set(done.stdout.splitlines()[-1].split())


def test_the_help_of_bench_names_every_workload() -> None:
    from protofed.cli.bench import NAMES
    from protofed.runs.bench import WORKLOADS

    assert tuple(WORKLOADS) == NAMES


def test_help_shows_what_every_command_says_of_itself() -> None:
    for name in lazy.COMMANDS:
        first = (lazy.load_command(name).help or "").split("\n\n")[0]
        assert lazy.about(name).split("\n\n")[0] == first != ""


def test_a_client_imports_no_server_and_nothing_slow() -> None:
    """All of it stays in memory as long as a client runs, and there may be fifty on a machine."""
    pytest.importorskip("flwr", reason="needs Flower: pip install 'protofed[flower]'")
    found = loaded("import protofed.cli.client, protofed.remote.flower.client")
    server = {"protofed.remote.flower.server", "protofed.remote.flower.door"}
    assert not {*SLOW, "uvicorn", "torch._dynamo", *server} & set(found)


@pytest.mark.parametrize(("module", "most"), CLIENT_LOADS.items())
def test_a_client_loads_little_of_protofed(module: str, most: int) -> None:
    if "flower" in module:
        pytest.importorskip("flwr", reason="needs Flower: pip install 'protofed[flower]'")
    names = loaded(f"import protofed.{module}")
    found = [name.removeprefix("protofed.") for name in names if name.startswith("protofed.")]
    assert not [name for name in found if any(within(name, never) for never in CLIENT_NEVER)]
    assert len(found) <= most, sorted(found)


def test_no_function_is_let_off_the_limit_of_complexity_and_no_package_off_strict_types() -> None:
    """`make test` runs ruff and mypy with these settings."""
    tools = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    lint = tools["ruff"]["lint"]
    assert lint["mccabe"]["max-complexity"] <= 15
    assert "C901" in lint["select"]
    assert not any("C901" in rules for rules in (lint["ignore"], *lint["per-file-ignores"].values()))
    assert not [path for path in MODULES.values() if "noqa: C901" in path.read_text(encoding="utf-8")]
    assert tools["mypy"]["strict"] is True
    assert not [table for table in tools["mypy"]["overrides"] if any("protofed" in name for name in table["module"])]
