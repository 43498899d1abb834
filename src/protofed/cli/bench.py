"""`protofed bench`"""

import json
from typing import Annotated

import typer

from protofed import tables
from protofed.bench import WORKLOADS
from protofed.bench import bench as run_bench
from protofed.cli.common import DataDir, Overrides, console, errors


def bench(
    workload: Annotated[str, typer.Argument(help="One of: " + ", ".join(WORKLOADS) + ".")],
    overrides: Overrides = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that are timed, after some to warm up.")] = 5,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Time one workload on the reference engine and on the stacked one, as it is and compiled, in one run.

    Example:

      protofed bench digits-100 --json
    """
    changes = tuple(overrides or [])
    found = run_bench(
        workload,
        rounds=rounds,
        device=device,
        changes=changes,
        data_dir=data_dir,
        tell=lambda engine: errors.print(f"timing the {engine} engine ...", highlight=False),
    )
    if as_json:
        console.print_json(json.dumps(found))
    else:
        tables.bench(console, found)
