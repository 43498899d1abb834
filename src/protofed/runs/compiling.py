"""Whether to compile the training steps of a run."""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch

from protofed.config.experiment import Experiment
from protofed.engines import Engine
from protofed.engines.fused.engine import RunEngine
from protofed.engines.ray.engine import RayEngine
from protofed.engines.stacked.engine import StackedEngine
from protofed.method import Method
from protofed.runs.cohort import draw_cohort
from protofed.runs.folder import RunFolder

COMPILING = 20.0  # seconds to compile one kind of step, roughly
GAIN = {"cpu": 0.5, "cuda": 0.35}  # share of the training's time that compiling saves, roughly


def choose_compiling(
    experiment: Experiment, engine: Engine, server: Any, folder: RunFolder, tell: Callable[[str], None]
) -> None:
    """Compile training steps if the run is long enough to repay it; the choice is kept in its folder."""

    def keep(choice: dict[str, Any]) -> None:
        folder.write_json("engine.json", choice)

    if isinstance(engine, RunEngine):  # the choice was made for all fused runs together
        keep(engine.choice)
    elif isinstance(engine, StackedEngine | RayEngine) and experiment.engine.compile == "auto":
        cohort = draw_cohort(experiment, 0)
        compile_if_it_pays(
            experiment.method, engine, server, cohort, experiment.rounds, kept_choice(folder), keep, tell
        )


def kept_choice(folder: RunFolder) -> dict[str, Any]:
    """The choice that a run made when it began."""
    kept = folder.file("engine.json")
    return json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}


def compile_if_it_pays(
    method: Method,
    engine: StackedEngine | RayEngine,
    server: Any,
    cohort: Sequence[int],
    rounds: int,
    found: dict[str, Any],
    keep: Callable[[dict[str, Any]], None],
    tell: Callable[[str], None],
) -> None:
    """Compile if this many rounds repay it: `found` at the start from a few steps, and kept, because compiled steps
    round differently."""
    gain = GAIN[engine.device.type]
    if engine.why_not(method) or engine.guess(method, rounds) * gain < COMPILING:
        return
    if "compiled" not in found:
        ahead = engine.trial(method, server, cohort) * rounds
        cost = COMPILING * len(method.phases()) * len(engine.specs())
        found |= {"compiled": ahead * gain > 2 * cost, "training_s": ahead, "compiling_s": cost}
        keep(found)
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
        ahead = engine.trial(method, server, cohort) * rounds
        found |= {"compiled_training_s": ahead, "compiled": ahead < found["training_s"]}
        keep(found)
        if not found["compiled"]:
            tell("compiling does not make it faster here; continuing without")
            engine.use(compiled=False)


def no_compiler(device: torch.device) -> str | None:
    """What is missing for compiling, in words."""
    if not any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++") if name):
        return "there is no C++ compiler (g++ or clang++)"
    if device.type == "cuda" and find_spec("triton") is None:
        return "triton is not installed"
    return None
