"""Run every study of docs/results.toml and write docs/results.md, its numbers in docs/results.json.

    python benchmarks/results.py --data-dir DIR            # all studies, several runs at a time, resumable
    python benchmarks/results.py fedpr-mnist --jobs 2      # one of them
    python benchmarks/results.py --write                   # only the page, from the runs there are and the numbers kept

A run that is finished is not run again; a study whose runs are not on this machine keeps the numbers of results.json.
"""

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from protofed.atomic import write_atomically
from protofed.cli.sweep import closing
from protofed.experiment import Experiment
from protofed.report.columns import Column
from protofed.report.gather import Run
from protofed.sweep import Cell, run_cells
from protofed.sweep.plan import identity
from protofed.sweep.view import view
from protofed.sweep.workers import Placed

ROOT = Path(__file__).parent.parent
PLAN, NUMBERS, PAGE = (ROOT / "docs" / f"results.{kind}" for kind in ("toml", "json", "md"))


def main(
    studies: Annotated[
        list[str] | None, typer.Argument(help="Names of studies in docs/results.toml; all if none.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the runs are kept.")] = Path("runs/results"),
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time; by default as in 'protofed sweep'.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets lie.", envvar="PROTOFED_DATA")] = None,
    write: Annotated[bool, typer.Option("--write", help="Run nothing, only write the page.")] = False,
) -> None:
    """Run the studies that are named and write the page."""
    plan = tomllib.loads(PLAN.read_text(encoding="utf-8"))["study"]
    names = [study["name"] for study in plan if "runs" in study]
    if unknown := set(studies or []) - set(names):
        raise typer.BadParameter(f"there is no study {', '.join(sorted(unknown))}. There are: {', '.join(names)}.")
    chosen = [study for study in plan if study["name"] in (studies or names)]
    if not write:
        _run_all(chosen, out, jobs, data_dir)
    numbers = json.loads(NUMBERS.read_text(encoding="utf-8")) if NUMBERS.is_file() else {}
    for study in (study for study in plan if "runs" in study):
        numbers |= {study["name"]: _collect(study, out) or numbers.get(study["name"], {})}
    write_atomically(NUMBERS, (json.dumps(numbers, indent=1, sort_keys=True) + "\n").encode())
    write_atomically(PAGE, _page(plan, numbers).encode())


def _runs(study: dict[str, Any]) -> list[tuple[str, int, list[str]]]:
    """Every run of a study: its label, its seed and its changes to the experiment."""
    return [
        (label, seed, [*changes, *study.get("changes", []), f"seed={seed}"])
        for label, changes in study.get("runs", {}).items()
        for seed in study["seeds"]
    ]


def _folder(study: dict[str, Any], out: Path, label: str, seed: int) -> Path:
    return out / study["name"] / f"{label.replace(' ', '-').replace(',', '')}-seed{seed}"


def _run_all(studies: list[dict[str, Any]], out: Path, jobs: int | None, data_dir: Path | None) -> None:
    placed = []
    for study in studies:
        for label, seed, changes in _runs(study):
            plan = Experiment.load(study["experiment"], *changes)
            labels = {"experiment": study["name"], "method": label, "seed": str(seed)}
            placed.append(Placed(Cell(labels, plan, identity(plan)), _folder(study, out, label, seed)))
    closing(run_cells(placed, data_dir=data_dir, jobs=jobs, watch=view(Console(stderr=True))))


def _collect(study: dict[str, Any], out: Path) -> dict[str, dict[str, list[float | None]]]:
    """By label and column, one number per seed; empty if not every run is finished."""
    found: dict[str, dict[str, list[float | None]]] = {}
    for label, seed, _ in _runs(study):
        folder = _folder(study, out, label, seed)
        if not (folder / "summary.json").is_file():
            return {}
        run = Run(folder, json.loads((folder / "summary.json").read_text(encoding="utf-8")))
        for title, metric in study["columns"].items():
            found.setdefault(label, {}).setdefault(title, []).append(Column.parse(metric).of(run))
    return found


def _page(plan: list[dict[str, Any]], numbers: dict[str, Any]) -> str:
    parts = [
        "# Results\n\nWritten by `python benchmarks/results.py` from `docs/results.toml`, which has the settings, the "
        "seeds and the remarks; the numbers by seed are in `docs/results.json`. Percent, mean ± standard deviation "
        "over seeds. `@ r` is the mean of the ten rounds up to round r; everything else is after the last round. "
        "A claim holds, or does not, if all seeds agree; otherwise it is undecided.\n"
    ]
    for study in plan:
        parts.append(f"## {study['title']}\n")
        parts.append(study["text"].strip() + "\n")
        parts.append(_command(study))
        if "images" in study:
            parts += [f"![{study['title']}]({image})\n" for image in study["images"]]
            parts.append(study["why"].strip() + "\n")
            continue
        found = numbers.get(study["name"])
        if not found:
            parts.append("*Not run yet.*\n")
            continue
        parts.append(_table(study, found))
        claims = [_claim(claim, found) for claim in study.get("claims", [])]
        parts.append("\n".join(claims) + "\n" if claims else "")
        parts.append(study.get("why", "").strip() + "\n")
    return "\n".join(part for part in parts if part.strip()) + ""


def _command(study: dict[str, Any]) -> str:
    if "command" in study:
        return f"`{study['command']}`.\n"
    changes = " ".join(study.get("changes", []))
    seeds = ", ".join(map(str, study["seeds"]))
    return (
        f"Experiment `{study['experiment']}`{f' with `{changes}`' if changes else ''}, seeds {seeds}: "
        f"`python benchmarks/results.py {study['name']}`.\n"
    )


def _table(study: dict[str, Any], found: dict[str, Any]) -> str:
    titles = list(study["columns"])
    lines = ["| | " + " | ".join(titles) + " |", "|---|" + "---:|" * len(titles)]
    for label, changes in study["runs"].items():
        if label in found:
            shown = " ".join(changes[1:])
            name = f"{label} (`{shown}`)" if shown else label
            lines.append(f"| {name} | " + " | ".join(_cell(found[label].get(title)) for title in titles) + " |")
    return "\n".join(lines) + "\n"


def _cell(values: list[float | None] | None) -> str:
    known = [100 * value for value in values or [] if value is not None]
    return f"{np.mean(known):.2f} ± {np.std(known):.2f}" if known else "-"


def _claim(claim: dict[str, str], found: dict[str, Any]) -> str:
    """Whether one run is above another in a column (or than it in another column), seed by seed."""
    title, than = claim["in"], claim.get("than", claim["in"])
    pairs = zip(found[claim["is"]][title], found[claim["above"]][than], strict=True)
    gains = [100 * (a - b) for a, b in pairs if a is not None and b is not None]
    won = sum(gain > 0 for gain in gains)
    verdict = "holds" if won == len(gains) else "**does not hold**" if won == 0 else "undecided"
    other = f" ({than})" if than != title else ""
    return (
        f"- {claim['is']} above {claim['above']}{other}, {title}: {verdict}: {np.mean(gains):+.2f} on average, "
        f"in {won} of {len(gains)} seeds."
    )


if __name__ == "__main__":
    typer.run(main)
