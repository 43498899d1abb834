"""`protofed watch`"""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from protofed.cli.common import say
from protofed.errors import UserError

if TYPE_CHECKING:
    from protofed.report.live import Live

LOOK_SECONDS = 1.0
LAST_SECONDS = 5.0


def watch(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of many runs. They need not exist yet.")],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port. If it is in use, the next free one is taken.")
    ] = 8765,
    until_finished: Annotated[
        bool, typer.Option("--until-finished", help="Stop when all runs in the folders are finished.")
    ] = False,
) -> None:
    """Serve the report of runs as a page that updates itself.

    Only browsers on this machine can open it.

    Examples:

      protofed watch runs/demo-fedproto-seed0

      protofed watch runs --port 9000
    """
    for path in runs:
        if path.is_file():
            raise UserError(f"{path} is a file. Name a run's folder, or one that holds runs.")
    from protofed.report.live import serving  # with PyTorch, which a typo should not wait for

    os.nice(5)  # the runs come first
    with serving(runs, port) as server:
        if port not in (0, server.server_port):
            say(f"port {port} is in use")
        names = ", ".join(map(str, runs))
        say(f"watching {names} at {server.url} (this machine only; Ctrl-C ends it)")
        try:
            _wait(runs if until_finished else [], server.live)
        except KeyboardInterrupt:
            say("the watch has ended; the runs continue")


def _wait(runs: list[Path], live: "Live") -> None:
    """Wait until all runs are finished and stay so for a moment (the next one may be about to start), and open pages
    show them."""
    from protofed.report.live import AWAY, unfinished

    since: float | None = None
    while since is None or (waited := time.monotonic() - since) < LAST_SECONDS or (waited < AWAY and live.behind()):
        time.sleep(LOOK_SECONDS)
        since = (since or time.monotonic()) if unfinished(runs) == 0 else None
    say("all runs are finished")
