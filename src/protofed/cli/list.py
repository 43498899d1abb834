"""`protofed list`"""

import json
from enum import StrEnum
from typing import Annotated

import typer

from protofed.cli.common import DataDir, console, say


class Kind(StrEnum):
    """What can be listed."""

    methods = "methods"
    models = "models"
    data = "data"
    partitions = "partitions"
    experiments = "experiments"


def list_(
    what: Annotated[Kind, typer.Argument(help="What to list.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every key and its default.")] = False,
    data_dir: DataDir = None,
) -> None:
    """List methods, models, data, partitions or experiments."""
    from protofed.cli import printing  # with PyTorch, which a typo should not wait for

    entries = printing.entries(what, data_dir)
    if as_json:
        console.print_json(json.dumps(entries, default=str))
        return
    for entry in entries:
        keys = ", ".join(f"{k['key']}={k['default']}" for k in entry.get("keys", []))
        say(f"{entry['name']:<20} {entry['about']}" + (f"\n{'':<20} {keys}" if keys else ""))
