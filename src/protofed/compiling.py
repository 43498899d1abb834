"""Whether to compile the training steps of a run."""

import json
import os
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from protofed.engines import Engine
from protofed.engines.ray import RayEngine
from protofed.engines.stacked import StackedEngine
from protofed.experiment import Experiment
from protofed.folder import RunFolder
from protofed.prepare import draw_cohort

COMPILING = 20.0  # seconds to compile one kind of step, roughly
GAIN = {"cpu": 0.5, "cuda": 0.35}  # share of the training's time that compiling saves, roughly


def choose(experiment: Experiment, engine: Engine, server: Any, folder: RunFolder, tell: Callable[[str], None]) -> None:
    """Compile training steps where the run is long enough to repay it: found by a few steps at its beginning, and kept
    in its folder, because compiled steps round otherwise."""
    if not isinstance(engine, StackedEngine | RayEngine) or experiment.engine.compile != "auto":
        return
    method, gain = experiment.method, GAIN[engine.device.type]
    if engine.why_not(method) or engine.guess(method, experiment.rounds) * gain < COMPILING:
        return
    kept = folder.file("engine.json")
    if not kept.is_file():
        ahead = engine.trial(method, server, draw_cohort(experiment, 0)) * experiment.rounds
        cost = COMPILING * len(method.phases()) * len(set(engine.architectures))
        pays = ahead * gain > 2 * cost
        folder.write_json("engine.json", {"compiled": pays, "training_s": ahead, "compiling_s": cost})
    found = json.loads(kept.read_text(encoding="utf-8"))
    if not found["compiled"]:
        return
    lacking = no_compiler(engine.device)
    if lacking:
        tell(f"{lacking}: training stays uncompiled, and takes up to twice as long")
        return
    tell(
        f"compiling the training step ({found['compiling_s']:.0f} s or so, once): some {found['training_s']:.0f} s of "
        "training are ahead. engine.compile = never leaves it out"
    )
    engine.use(compiled=True)
    if "compiled_training_s" not in found:
        ahead = engine.trial(method, server, draw_cohort(experiment, 0)) * experiment.rounds
        found |= {"compiled_training_s": ahead, "compiled": ahead < found["training_s"]}
        folder.write_json("engine.json", found)
        if not found["compiled"]:
            tell("compiled it is not faster here; going on without")
            engine.use(compiled=False)


def no_compiler(device: torch.device) -> str | None:
    """What is missing for compiling, in words."""
    if not any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++") if name):
        return "there is no C++ compiler (g++ or clang++)"
    if device.type == "cuda" and find_spec("triton") is None:
        return "triton is not installed"
    return None
