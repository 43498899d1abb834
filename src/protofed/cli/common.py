"""What every command uses: consoles, and the arguments that recur."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from protofed import progress, tables
from protofed.results import Watch
from protofed.track import TRACK, chosen, tracked

console = Console(width=None if sys.stdout.isatty() else 120)
errors = Console(stderr=True)

ExperimentName = Annotated[
    str, typer.Argument(help="A .toml file, or a shipped experiment's name ('protofed list experiments').")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes, such as method.lam=0.5 rounds=10.")
]
DataDir = Annotated[
    Path | None, typer.Option(help="Where data sets lie; else $PROTOFED_DATA, else ./data.", envvar="PROTOFED_DATA")
]
Track = Annotated[
    list[str] | None,
    typer.Option(
        "--track", metavar="SINK", envvar=TRACK,
        help="Send the numbers there too: tensorboard, wandb (offline unless WANDB_MODE is set), mlflow.",
    ),
]  # fmt: skip


def watching(label: str, sinks: list[str] | None) -> Watch:
    """What a person sees of a run, and the sinks."""
    return tracked(progress.watch(console, label), sinks)


def track_all(sinks: list[str] | None) -> None:
    """Runs in other processes are tracked too."""
    os.environ[TRACK] = ",".join(chosen(sinks or []))


def say(text: str) -> None:
    tables.say(console, text)
