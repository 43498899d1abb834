"""Several methods on one experiment: a table of mean and deviation over seeds, and their curves in one picture."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from protofed.atomic import write_atomically
from protofed.report import pictures
from protofed.results import Result

COLUMNS = {
    "accuracy_mean": "accuracy",
    "accuracy_std": "std over clients",
    "accuracy_worst10": "worst tenth",
    "accuracy_head_mean": "by head",
    "accuracy_proto_mean": "by prototype",
    "global_accuracy": "global model",
    "pm_v": "PM(V)",
    "pm_l": "PM(L)",
}


def rows(results: Mapping[str, Sequence[Result]]) -> list[dict[str, Any]]:
    """One row a method: every number as (mean, deviation over seeds), None where the method has none."""
    table = []
    for method, runs in results.items():
        first = runs[0].summary
        row: dict[str, Any] = {"method": method, "judged by": f"{first['inference']}, {first['candidates']}"}
        row["seeds"] = [r.summary["seed"] for r in runs]
        for key in (*COLUMNS, "params_up_per_round", "bytes_up", "bytes_down", "seconds"):
            values = [r.summary[key] for r in runs if r.summary[key] is not None]
            row[key] = [float(np.mean(values)), float(np.std(values))] if values else None
        table.append(row)
    return table


def cell(value: Sequence[float] | None, seeds: int) -> str:
    """A percentage, with the deviation where there are several seeds."""
    if value is None:
        return "-"
    mean, std = 100 * value[0], 100 * value[1]
    return f"{mean:.2f} ± {std:.2f}" if seeds > 1 else f"{mean:.2f}"


def sent(number: float) -> str:
    """A number of parameters or bytes, short."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f}{unit}"
    return f"{number:.0f}"


def used(table: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The columns in which some method has a number."""
    return {key: title for key, title in COLUMNS.items() if any(row[key] is not None for row in table)}


def markdown(table: Sequence[Mapping[str, Any]]) -> str:
    """The table for a page."""
    columns = used(table)
    titles = ["method", "judged by", *columns.values(), "params up / round", "seconds"]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for row in table:
        cells = [cell(row[key], len(row["seeds"])) for key in columns]
        tail = [sent(row["params_up_per_round"][0]), f"{row['seconds'][0]:.1f}"]
        lines.append("| " + " | ".join([row["method"], row["judged by"], *cells, *tail]) + " |")
    return "\n".join(lines) + "\n"


def write(results: Mapping[str, Sequence[Result]], folder: Path) -> list[Path]:
    """compare.json, compare.md and compare.png in a folder; returns their paths."""
    table = rows(results)
    paths = [folder / name for name in ("compare.json", "compare.md", "compare.png")]
    write_atomically(paths[0], (json.dumps(table, indent=2) + "\n").encode())
    write_atomically(paths[1], markdown(table).encode())
    pictures.curves({method: [r.rounds for r in runs] for method, runs in results.items()}, paths[2])
    return paths
