"""Several methods on one experiment: a table of mean and deviation over seeds, and their curves in one picture."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from protofed.atomic import write_atomically
from protofed.report.columns import METRICS
from protofed.report.rules import rule_of
from protofed.runs.measure import Result
from protofed.runs.numbers import over_seeds

KEYS = [metric.key for metric in METRICS.values() if metric.unit == "%"]


def rows(results: Mapping[str, Sequence[Result]]) -> list[dict[str, Any]]:
    """One row per method: every number as (mean, deviation over seeds), None if the method does not have it."""
    table = []
    for method, runs in results.items():
        first = runs[0].summary
        row: dict[str, Any] = {"method": method, "judged by": f"{first['inference']}, {first['candidates']}"}
        row["seeds"] = [r.summary["seed"] for r in runs]
        for key in (*KEYS, "params_up_per_round", "bytes_up", "bytes_down", "seconds"):
            found = over_seeds(r.summary.get(key) for r in runs)
            row[key] = found and list(found)
        table.append(row)
    return table


def write(results: Mapping[str, Sequence[Result]], table: str, folder: Path) -> list[Path]:
    """compare.json, compare.md (the table as Markdown) and compare.png in a folder; returns their paths."""
    paths = [folder / name for name in ("compare.json", "compare.md", "compare.png")]
    write_atomically(paths[0], (json.dumps(rows(results), indent=2) + "\n").encode())
    write_atomically(paths[1], table.encode())
    from protofed.report import pictures  # with Matplotlib, which takes its time

    rules = {method: rule_of(runs[0].summary) for method, runs in results.items()}
    one = f", {next(iter(rules.values()))}" if len(set(rules.values())) == 1 else ""
    named = {
        method if one else f"{method}, by {rules[method]}": [r.rounds for r in results[method]] for method in rules
    }
    pictures.draw_comparison(named, paths[2], judged=one)
    return paths
