"""What a run was made with."""

import os
import platform
import sys
from typing import Any

import numpy as np
import torch

from protofed.experiment import Experiment
from protofed.folder import RunFolder
from protofed.importing import fingerprint, is_path
from protofed.version import VERSION


def environment(experiment: Experiment) -> dict[str, Any]:
    """Versions, machine, command, and which code of one's own."""
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
    """Import path -> fingerprint of the file it lies in, of every method, model and data set of one's own."""
    data = experiment.data.name
    names = [experiment.method_name, *(model.name for model in experiment.model)]
    names += [data] if isinstance(data, str) else data
    return {name: fingerprint(name) for name in dict.fromkeys(names) if is_path(name)}


def changed_code(folder: RunFolder, experiment: Experiment) -> list[str]:
    """The import paths whose file is not what it was when the run in this folder was made, as far as that is known."""
    then = folder.environment().get("own")
    known = then if isinstance(then, dict) else {}
    return [name for name, now in own_code(experiment).items() if known.get(name, now) != now]
