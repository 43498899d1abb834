"""Prototype-based federated learning: different data, different classes, different models, one set of prototypes."""

from protofed.errors import UserError
from protofed.experiment import Experiment
from protofed.joining import join
from protofed.method import Method
from protofed.methods import METHODS
from protofed.models import MODELS
from protofed.run import Result, run
from protofed.version import VERSION as __version__

__all__ = ["METHODS", "MODELS", "Experiment", "Method", "Result", "UserError", "__version__", "join", "run"]
