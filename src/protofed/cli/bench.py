"""`protofed bench`"""

import json
from typing import Annotated

import typer

from protofed.cli.common import DataDir, Overrides, console, errors

NAMES = (
    "fedproto-mnist", "fedproto-mnist-200", "fednh-cifar", "fednh-round", "resnet18-gn", "pfl-cifar10", "digits-100",
)  # fmt: skip


def bench(
    workload: Annotated[str, typer.Argument(help="One of: " + ", ".join(NAMES) + ".")],
    overrides: Overrides = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to time, after a warm-up.")] = 5,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Time one workload on the reference and the stacked engine.

    The stacked engine is timed as it is and compiled.

    Example:

      protofed bench digits-100 --json
    """
    from protofed.cli import printing  # with PyTorch, which a typo should not wait for
    from protofed.runs.bench import time_engines as run_bench

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
        printing.bench_table(console, found)
