"""The command line: one file a command, or a few that belong together."""

import errno
import sys
from typing import Annotated, NoReturn

import typer
import typer.core

from protofed.cli import (
    bench,
    client,
    compare,
    export,
    federation,
    join,
    look,
    predict,
    report,
    reproduce,
    run,
    server,
    sweep,
    table,
    watch,
)
from protofed.cli.common import errors, say
from protofed.errors import UserError
from protofed.version import VERSION

typer.core.HAS_RICH = False  # before 0.21 it escapes brackets for Rich, which does not print our help
app = typer.Typer(
    name="protofed",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="""Prototype-based federated learning.

    Start with:  protofed run demo

    See what there is:  protofed list methods   (models, data, partitions, experiments)

    See what a method does, sends and keeps private:  protofed explain fedproto

    Change anything:  protofed run demo method=fedavg model=cnn_digits rounds=20 optimizer.lr=0.05""",
)


def _version(asked: bool) -> None:
    if asked:
        say(f"protofed {VERSION}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Options before any command."""


app.command()(run.run)
app.command()(compare.compare)
app.command()(report.report)
app.command()(watch.watch)
app.command()(sweep.sweep)
app.command()(table.table)
app.command()(reproduce.reproduce)
app.command()(join.join)
app.command()(export.export)
app.command()(predict.predict)
app.command()(look.partition)
app.command()(look.explain)
app.command()(bench.bench)
app.command("list")(look.list_)
app.add_typer(federation.federation, name="federation")
app.command()(server.server)
app.command()(client.client)


def main() -> None:
    """Errors that a user can mend are one line and exit code 2."""
    try:
        app(prog_name="protofed")
    except UserError as error:
        _refuse(str(error))
    except OSError as error:  # a folder that may not be written, a path that is too long
        where = f"{error.filename}: " if error.filename else ""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        _refuse(f"{where}{error.strerror or error}. {'Free some space' if full else 'Use another path'}.")


def _refuse(message: str) -> NoReturn:
    errors.print(f"error: {' '.join(message.split())}", highlight=False, markup=False, soft_wrap=True)
    sys.exit(2)
