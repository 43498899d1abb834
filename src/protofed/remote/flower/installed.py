"""Whether Flower is there, in which version, and how its commands are started."""

import importlib.metadata
import os
import sys
from pathlib import Path

import protofed
from protofed.errors import UserError

OLDEST, NEWEST = (1, 41), (1, 42)  # the versions that the tests know
REMEDY = "pip install 'protofed[flower]'"


def need_flower() -> str:
    """Flower's version, or one line that says how to get it."""
    try:
        version = importlib.metadata.version("flwr")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"Flower is not installed, and a federation runs on it. Install it: {REMEDY}") from None
    parts = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if not OLDEST <= parts <= NEWEST:
        raise UserError(
            f"flwr {version} is installed; protofed works with {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}. "
            f"Get one of them: {REMEDY}"
        )
    return version


def command(name: str) -> str:
    """The path of one of Flower's commands, beside this Python."""
    path = Path(sys.executable).parent / name
    if not path.is_file():
        raise UserError(f"Flower's command {name} is not next to {sys.executable}. Install it there: {REMEDY}")
    return str(path)


def flower_environment(home: Path, **more: str) -> dict[str, str]:
    """For everything that starts Flower: nothing is reported or installed, and it finds this Python's commands."""
    here = str(Path(sys.executable).parent)
    source = str(Path(protofed.__file__).parent.parent)
    return (
        os.environ
        | {
            "FLWR_HOME": str(home.resolve()),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
            "PYTHONUNBUFFERED": "1",
            "PATH": os.pathsep.join([here, os.environ.get("PATH", os.defpath)]),
            "PYTHONPATH": os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        | more
    )
