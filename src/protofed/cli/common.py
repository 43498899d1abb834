"""What all commands share: consoles, and arguments that recur."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from protofed.errors import STEERING
from protofed.tracking import TRACK

if TYPE_CHECKING:
    from protofed.runs.watch import Watch


class SafeConsole(Console):
    """Prints text as text: escape sequences in names that others chose could control the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=segment.text.translate(STEERING))


console = SafeConsole(width=None if sys.stdout.isatty() else 120)
errors = SafeConsole(stderr=True)

ExperimentName = Annotated[
    str, typer.Argument(help="A .toml file, or a shipped experiment's name ('protofed list experiments').")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes, such as method.lam=0.5 rounds=10.")
]
DataDir = Annotated[
    Path | None,
    typer.Option(help="Folder with data sets; by default $PROTOFED_DATA, or else ./data.", envvar="PROTOFED_DATA"),
]
Jobs = Annotated[
    int | None,
    typer.Option(min=1, help="How many runs at a time; by default one per core, or as many as fit on the GPU."),
]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Import code that somebody else's run or bundle names, even if it never ran here."),
]
Track = Annotated[
    list[str] | None,
    typer.Option(
        "--track", metavar="SINK", envvar=TRACK,
        help="Also send the numbers to tensorboard, wandb (offline unless WANDB_MODE is set) or mlflow.",
    ),
]  # fmt: skip


def watching(label: str, sinks: list[str] | None) -> "Watch":
    """What a person sees of a run, and the sinks."""
    from protofed.runs import progress  # with PyTorch, which a typo should not wait for
    from protofed.tracking.track import tracked

    return tracked(progress.watch_rounds(console, label), sinks)


def track_all(sinks: list[str] | None) -> None:
    """Track runs in other processes too."""
    from protofed.tracking.track import chosen_sinks

    os.environ[TRACK] = ",".join(chosen_sinks(sinks or []))


def pour(text: str) -> None:
    """Print a file's content with its own line ends."""
    typer.echo(text.translate({sign: made for sign, made in STEERING.items() if sign != ord("\r")}), nl=False)


def say(text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def note(text: str) -> None:
    """Print something that is worth knowing but was not asked for."""
    errors.print(f"note: {text}", highlight=False, markup=False, soft_wrap=True)
