"""The software and machine that a run was made with."""

import os
import platform
import sys
import tomllib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from protofed.config.experiment import Experiment
from protofed.importing import code_fingerprint, is_path
from protofed.runs.folder import RunFolder
from protofed.runs.trust import uses
from protofed.version import VERSION


def environment(experiment: Experiment) -> dict[str, Any]:
    """Versions, machine, command, and which code of the user's own."""
    device = experiment.torch_device()
    return {
        "protofed": VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "command": sys.argv,
        "own": own_code(experiment),
    }


def own_code(experiment: Experiment) -> dict[str, str]:
    """Import path -> fingerprint of its file, for every method, model and data set of the user's own."""
    return _fingerprints(tomllib.loads(experiment.to_toml()))


def _fingerprints(tables: Mapping[str, Any]) -> dict[str, str]:
    return {use.name: code_fingerprint(use.name) for use in uses(tables) if is_path(use.name)}


def changed_code(folder: RunFolder) -> list[str]:
    """The import paths whose file has changed since the run was made, as far as that is known. Nothing is imported.

    Nothing is imported."""
    then = folder.environment().get("own")
    known = then if isinstance(then, dict) else {}
    if not known or not folder.exists:
        return []
    return [name for name, now in _fingerprints(folder.experiment_dict()).items() if known.get(name, now) != now]
