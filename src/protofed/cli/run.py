"""`protofed run`"""

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from protofed import tables
from protofed.cli.common import DataDir, ExperimentName, Overrides, Track, console, say, watching
from protofed.errors import UserError
from protofed.experiment import Experiment, find
from protofed.folder import RunFolder, new_folder
from protofed.run import Interrupted
from protofed.run import run as run_experiment
from protofed.track import TRACK


def run(
    experiment: ExperimentName,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; by default a new one in runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped.")] = False,
    data_dir: DataDir = None,
    track: Track = None,
) -> None:
    """Run one experiment and write its folder.

    Examples:

      protofed run demo

      protofed run configs/fedproto/mnist_n3.toml --data-dir DIR rounds=20

      protofed run demo method=local seed=1 --out runs/alone

      protofed run demo --track tensorboard --track wandb
    """
    plan = Experiment.load(experiment, *(overrides or []))
    watch = watching(plan.method_name, track)
    folder = out or new_folder(f"{find(experiment).stem}-{plan.method_name.rpartition(':')[2]}-seed{plan.seed}", resume)
    if resume and not RunFolder(folder).exists:
        raise UserError(f"--resume: there is no run in {folder}. Check --out, or start it without --resume.")
    try:
        result = run_experiment(plan, folder, resume=resume, data_dir=data_dir, watch=watch)
    except Interrupted as stop:
        again = ["protofed", "run", experiment, *(overrides or []), "--out", str(folder), "--resume"]
        if data_dir is not None and "PROTOFED_DATA" not in os.environ:
            again += ["--data-dir", str(data_dir)]
        if track and TRACK not in os.environ:
            again += [word for sink in track for word in ("--track", sink)]
        say(f"{stop}. Go on with:\n  {shlex.join(again)}")
        raise typer.Exit(130) from None
    tables.result(console, result)
