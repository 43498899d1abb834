"""`protofed client`"""

from pathlib import Path
from typing import Annotated

import typer

from protofed.cli.common import Trust, say


def client(
    bundle: Annotated[Path, typer.Argument(help="The client's folder, as the server's operator sent it.")],
    data: Annotated[str | None, typer.Option(help="The data of this site: an .npz file, a folder, or a name.")] = None,
    model: Annotated[str | None, typer.Option(help="The model of this site ('protofed list models').")] = None,
    min_count: Annotated[
        int, typer.Option(min=0, help="Withhold everything about classes with fewer samples than this.")
    ] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be sent, and stop.")] = False,
    state: Annotated[
        Path | None, typer.Option(help="Where to keep the model; by default state/ in the bundle.")
    ] = None,
    wait: Annotated[float, typer.Option(min=0, help="For how many seconds to try to reach the server.")] = 60.0,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Without TLS and keys: for trials on one machine only.")
    ] = False,
    trust: Trust = False,
) -> None:
    """Take part in a federation with this machine's data.

    The data stays here.

    Examples:

      protofed client north --data north.npz --model cnn_digits --dry-run

      protofed client north --data north.npz --model cnn_digits --min-count 5
    """
    from protofed.remote.flower.client import run_client

    finished = run_client(
        bundle, data=data, model=model, min_count=min_count, state=state, dry_run=dry_run, insecure=insecure,
        wait=wait, tell=say, trust=trust,
    )  # fmt: skip
    if not dry_run:
        say("the federation is finished" if finished else "stopped; run the same command to continue")
