"""What a sweep writes next to the folders of its runs: which cell each one is, and why one failed."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from protofed.atomic import write_atomically
from protofed.errors import UserError

LISTING = "cells.json"


def write_cells(folder: Path, cells: Iterable[tuple[str, str, Mapping[str, str]]]) -> None:
    """For each cell, the name of its folder, its hash and its labels."""
    rows = [{"folder": name, "hash": code, "labels": dict(labels)} for name, code, labels in cells]
    write_atomically(folder / LISTING, (json.dumps(rows, indent=1) + "\n").encode())


def read_cells(folder: Path) -> list[tuple[str, dict[str, str]]]:
    """The folders of a sweep's cells with their labels, which include the method; two cells may be the same run."""
    path = folder / LISTING
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        return [(str(row["folder"]), row["labels"] | {"method": str(row["labels"]["method"])}) for row in rows]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error}). Run the sweep again: it writes the file again.") from None


def reason(run: Path) -> Path:
    """The file that says why the run in this folder failed."""
    return run.with_name(f"{run.name}.failed.txt")
