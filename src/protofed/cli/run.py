"""`protofed run`"""

import os
import re
import shlex
from pathlib import Path
from typing import Annotated

import typer

from protofed.cli.common import DataDir, ExperimentName, Overrides, Track, Trust, console, note, say, watching
from protofed.config.files import find
from protofed.config.misspelt import refuse_misspelt
from protofed.errors import UserError
from protofed.tracking import TRACK


def run(
    experiment: ExperimentName,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; by default a new one in runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume a run that was stopped.")] = False,
    trust: Trust = False,
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
    name = find(experiment).stem
    if several := next((word for word in overrides or [] if re.fullmatch(r"seed=\W*\d+\W*,.*", word)), None):
        seeds = re.sub(r"[\[\] ]", "", several.removeprefix("seed="))
        raise UserError(
            f"{several!r}: a run has one seed. Use protofed compare METHOD ... --seeds {seeds} for several."
        )
    refuse_misspelt(experiment, *(overrides or []))
    from protofed.cli import printing  # with PyTorch, which a typo should not wait for
    from protofed.probes import ALL
    from protofed.runs.folder import RunFolder, new_folder
    from protofed.runs.loop import Interrupted
    from protofed.runs.loop import run as run_experiment
    from protofed.runs.trust import trusted_experiment

    plan = trusted_experiment(experiment, *(overrides or []), trust=trust, tell=note, folder=out if resume else None)
    watch = watching(plan.method_name, track)
    folder = out or new_folder(f"{name}-{plan.method_name.rpartition(':')[2]}-seed{plan.seed}", resume)
    if resume and not RunFolder(folder).exists:
        raise UserError(f"--resume: there is no run in {folder}. Check --out, or start it without --resume.")
    try:
        result = run_experiment(plan, folder, resume=resume, data_dir=data_dir, watch=watch, probes=ALL)
    except Interrupted as stop:
        again = ["protofed", "run", experiment, *(overrides or []), "--out", str(folder), "--resume"]
        if data_dir is not None and "PROTOFED_DATA" not in os.environ:
            again += ["--data-dir", str(data_dir)]
        if track and TRACK not in os.environ:
            again += [word for sink in track for word in ("--track", sink)]
        say(f"{stop}. Go on with:\n  {shlex.join(again)}")
        raise typer.Exit(130) from None
    printing.result(console, result)
