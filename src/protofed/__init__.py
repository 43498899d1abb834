"""Prototype-based federated learning: different data, different classes, different models, one set of prototypes."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from protofed.version import VERSION as __version__

if TYPE_CHECKING:
    from protofed.api import federate, join, load, run
    from protofed.config.experiment import Experiment
    from protofed.errors import UserError
    from protofed.federated import Federated
    from protofed.method import Method
    from protofed.methods import METHODS
    from protofed.models import MODELS
    from protofed.runs.measure import Result

__all__ = [
    "METHODS",
    "MODELS",
    "Experiment",
    "Federated",
    "Method",
    "Result",
    "UserError",
    "__version__",
    "federate",
    "join",
    "load",
    "run",
]
_HOMES = {
    "METHODS": "methods",
    "MODELS": "models",
    "Experiment": "config.experiment",
    "Federated": "federated",
    "Method": "method",
    "Result": "runs.measure",
    "UserError": "errors",
    "federate": "api",
    "join": "api",
    "load": "api",
    "run": "api",
}


def __getattr__(name: str) -> Any:
    """Names are imported when they are used: a client of a federation needs few of them."""
    if name not in _HOMES:
        raise AttributeError(f"module 'protofed' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"protofed.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(globals() | _HOMES)
