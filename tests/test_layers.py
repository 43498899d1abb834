"""Imports go one way, and heavy or optional packages are imported in one place each."""

import ast
from pathlib import Path

import protofed

ROOT = Path(protofed.__file__).parent

# What each layer may import of protofed; a package stands for all that is in it.
MAY = {
    "errors": set(),
    "atomic": set(),
    "schema": {"errors"},
    "importing": {"errors"},
    "method": set(),
    "ops": {"errors", "method", "ops"},
    "methods": {"errors", "method", "ops", "methods"},
    "registry": {"errors", "importing", "method", "methods"},
    "models": {"errors", "importing", "method", "ops", "models"},
    "data": {"errors", "importing", "atomic", "method", "ops", "data"},
    "metrics": {"method"},
    "local": {"errors", "method", "ops", "models"},
    "engines": {"errors", "version", "method", "metrics", "ops", "models", "data", "local", "engines"},
    "sections": {"schema", "models"},
    "experiment": {
        "errors",
        "importing",
        "schema",
        "method",
        "methods",
        "models",
        "data",
        "ops",
        "registry",
        "sections",
    },
    "segments": {"atomic"},
    "sinks": {"sinks"},
    "store": {"errors", "method", "engines", "segments"},
    "folder": {"errors", "atomic", "method", "engines", "experiment", "segments", "store"},
}
ONLY_IN = {
    "datasets": {"data/hub.py"}, "torchvision": {"data/hub.py"}, "ray": {"engines/cluster.py"},
    "flwr": {"flower/control.py", "flower/transport.py", "flower/app/protofed_app/client_app.py",
             "flower/app/protofed_app/server_app.py"},
    "cryptography": {"flower/certificates.py", "flower/control.py"}, "uvicorn": {"flower/proxy.py"},
    "httpx": {"flower/proxy.py", "flower/transport.py", "flower/door.py", "flower/gate.py", "flower/control.py"},
    "onnxruntime": {"predictor.py"}, "onnxscript": set(),
    "tensorboard": {"sinks/tensorboard.py"}, "wandb": {"sinks/wandb.py"}, "mlflow": {"sinks/mlflow.py"},
}  # fmt: skip
SLOW = ("matplotlib", "sklearn", "scipy", "pandas")


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def layer(name: str) -> str:
    return name.split(".")[1] if name.count(".") else name


def test_imports_go_one_way() -> None:
    wrong = []
    for path in ROOT.rglob("*.py"):
        inner = path.relative_to(ROOT).with_suffix("").parts[0]
        for name in imports(path):
            if name.startswith("protofed.") and inner in MAY and layer(name) not in MAY[inner]:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
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


def test_importing_protofed_is_cheap_and_needs_no_extra() -> None:
    """Nothing optional is pulled in by the package or its commands, nor what is slow and not always needed."""
    import subprocess
    import sys

    code = f"import sys, protofed.cli, protofed.track; print([m for m in {[*ONLY_IN, *SLOW]} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
