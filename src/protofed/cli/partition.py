"""`protofed partition`"""

from pathlib import Path
from typing import Annotated

import typer

from protofed.cli.common import DataDir, ExperimentName, Overrides, Trust, note, say
from protofed.config.files import find
from protofed.config.misspelt import refuse_misspelt
from protofed.errors import UserError


def partition(
    experiment: ExperimentName,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Folder for partition.npz and partition.png.")] = None,
    export: Annotated[Path | None, typer.Option(help="Folder for each client's samples, client-000.npz ...")] = None,
    trust: Trust = False,
    data_dir: DataDir = None,
) -> None:
    """Show which client has which samples, without training.

    The file it writes can be used again:  protofed run ... partition=file partition.path=FOLDER/partition.npz
    """
    refuse_misspelt(experiment, *(overrides or []))
    from protofed.remote.shares import export_shares  # with PyTorch, which a typo should not wait for
    from protofed.report import pictures  # with Matplotlib, which takes its time
    from protofed.report.figures import partition as has
    from protofed.runs.setup import prepare_split
    from protofed.runs.trust import trusted_experiment

    plan = trusted_experiment(experiment, *(overrides or []), trust=trust, tell=note)
    domains, split = prepare_split(plan, data_dir)
    if domains[0].computed is not None:
        raise UserError(
            f"{domains[0].name} computes each client's samples when it is drawn, so there is no partition to draw."
        )
    folder = out or Path("runs") / f"partition-{find(experiment).stem}"
    if folder.is_dir() and {p.name for p in folder.iterdir()} - {"partition.npz", "partition.png"}:
        raise UserError(f"--out {folder} holds other files. Name another folder for the partition.")
    folder.mkdir(parents=True, exist_ok=True)
    split.save(folder / "partition.npz", domains)
    pictures.draw_split(split, domains, folder / "partition.png")
    for text in split.notes:
        say(f"note: {text}")
    for what, value in has.describe(split, domains).items():
        if what != "hash":
            text = ", ".join(f"{k} {_short(v)}" for k, v in value.items()) if isinstance(value, dict) else str(value)
            say(f"{what}: {text}")
    if export:
        export_shares(plan, domains, export)
        say(f"samples of each client, and the server's test samples: {export}")
    say(f"hash: {split.hash}\nfile: {folder / 'partition.npz'}\npicture: {folder / 'partition.png'}")


def _short(value: float) -> str:
    """A number with two decimals at most: 17.95, 17.5, 18."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
