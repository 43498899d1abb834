"""Prototype-based federated learning: different data, different classes, different models, one set of prototypes."""

from protofed.api import federate
from protofed.errors import UserError, in_python
from protofed.experiment import Experiment
from protofed.federated import Federated
from protofed.joining import join as _join
from protofed.method import Method
from protofed.methods import METHODS
from protofed.models import MODELS
from protofed.run import Result
from protofed.run import run as _run
from protofed.version import VERSION as __version__

join = in_python(_join)
run = in_python(_run)

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
    "run",
]
