"""`protofed server`"""

from pathlib import Path
from typing import Annotated

import typer

from protofed.cli.common import say


def server(
    folder: Annotated[Path, typer.Argument(help="The server's folder, from 'protofed federation init'.")],
    bind: Annotated[
        str | None, typer.Option(help="Address to listen on; by default all addresses of this machine.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Without TLS and keys: for trials on one machine only.")
    ] = False,
) -> None:
    """Run a federation's server in the foreground.

    It ends when the federation is finished. After a stop, the same command continues.

    Example:

      protofed server hospitals/server
    """
    from protofed.remote.flower.operate import server_folder
    from protofed.remote.flower.server import run_server

    if not run_server(server_folder(folder), bind=bind, insecure=insecure, tell=say):
        say(f"stopped. Go on with:\n  protofed server {folder}")
        return
    say(f"finished; see {server_folder(folder)}/run")
