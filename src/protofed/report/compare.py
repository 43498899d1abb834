"""Several methods on one experiment: a table of mean and deviation over seeds, and their curves in one picture."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from protofed.atomic import write_atomically
from protofed.report.columns import METRICS, deviation
from protofed.results import Result

COLUMNS = {metric.key: metric.title for metric in METRICS.values() if metric.unit == "%"}


def rows(results: Mapping[str, Sequence[Result]]) -> list[dict[str, Any]]:
    """One row a method: every number as (mean, deviation over seeds), None where the method has none."""
    table = []
    for method, runs in results.items():
        first = runs[0].summary
        row: dict[str, Any] = {"method": method, "judged by": f"{first['inference']}, {first['candidates']}"}
        row["seeds"] = [r.summary["seed"] for r in runs]
        for key in (*COLUMNS, "params_up_per_round", "bytes_up", "bytes_down", "seconds"):
            values = [r.summary[key] for r in runs if r.summary.get(key) is not None]
            row[key] = list(deviation(values)) if values else None
        table.append(row)
    return table


def sent(number: float) -> str:
    """A number of parameters or bytes, short."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f}{unit}"
    return f"{number:.0f}"


def write(results: Mapping[str, Sequence[Result]], table: str, folder: Path) -> list[Path]:
    """compare.json, compare.md (the table as Markdown) and compare.png in a folder; returns their paths."""
    paths = [folder / name for name in ("compare.json", "compare.md", "compare.png")]
    write_atomically(paths[0], (json.dumps(rows(results), indent=2) + "\n").encode())
    write_atomically(paths[1], table.encode())
    from protofed.report import pictures  # with Matplotlib, which takes its time

    pictures.curves({method: [r.rounds for r in runs] for method, runs in results.items()}, paths[2])
    return paths
