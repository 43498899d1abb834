"""The command line: one file per command, loaded when the command is used. Commands that belong together share a
file."""

import errno
import sys
from typing import Annotated, NoReturn

import typer
import typer.core

from protofed.cli.lazy import PLAIN, Commands
from protofed.errors import STEERING, UserError
from protofed.version import VERSION

typer.core.HAS_RICH = False  # before 0.21 it escapes brackets for Rich, which does not print our help
app = typer.Typer(
    name="protofed",
    cls=Commands,
    no_args_is_help=True,
    **PLAIN,
    help="""Prototype-based federated learning.

    Start with:  protofed run demo

    See what comes with it:  protofed list methods   (or models, data, partitions, experiments)

    See what a method does, sends and keeps private:  protofed explain fedproto

    Change anything:  protofed run demo method=fedavg model=cnn_digits rounds=20 optimizer.lr=0.05""",
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"protofed {VERSION}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options that come before any command."""


def main() -> None:
    """Run a command. An error that a user can fix is printed as one line, with exit code 2."""
    try:
        app(prog_name="protofed")
    except UserError as error:
        _refuse(str(error))
    except OSError as error:  # a folder that may not be written, a path that is too long
        where = f"{error.filename}: " if error.filename else ""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        _refuse(f"{where}{error.strerror or error}. {'Free some space' if full else 'Use another path'}.")


def _refuse(message: str) -> NoReturn:
    typer.echo(f"error: {' '.join(message.split()).translate(STEERING)}", err=True)
    sys.exit(2)
