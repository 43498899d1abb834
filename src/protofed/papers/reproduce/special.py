"""Entries that are not runs: numbers that are counted, splits that are drawn, and FedNH's spirals."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from protofed.methods.pool import PrototypePool
from protofed.papers.reproduce import spiral
from protofed.papers.reproduce.entry import PaperColumn
from protofed.papers.reproduce.plan import EntryPlan
from protofed.report import pictures
from protofed.runs.setup import prepare, prepare_split
from protofed.sweep import Cell

Rows = dict[str, dict[str, list[float | None]]]


def matches(column: PaperColumn, cell: Cell) -> bool:
    """Whether a run belongs to a column."""
    return all(cell.labels.get(key) == value for key, value in column.at.items())


def count(plan: EntryPlan, data_dir: Path | None) -> Rows:
    """The parameters of the model, and of a client's prototypes of all classes."""
    rows: Rows = {}
    for cell in plan.cells:
        spec = prepare(cell.experiment, data_dir).engine.specs()[0]
        method = cell.experiment.method
        assert isinstance(method, PrototypePool)
        model, prototypes = sum(p.numel() for p in spec.params.values()), spec.classes * method.slots * spec.dim
        numbers = {"count:model": model, "count:prototypes": prototypes, "count:ratio": prototypes / model}
        row = rows.setdefault(cell.labels["method"], {})
        row |= {c.name: [float(numbers[c.metric])] for c in plan.entry.columns if matches(c, cell)}
    return rows


def partition_pictures(plan: EntryPlan, data_dir: Path | None, folder: Path) -> tuple[Rows, list[Path]]:
    """A picture of every split, and the number of classes per client."""
    rows: Rows = {}
    paths = []
    for cell in plan.cells:
        domains, split = prepare_split(cell.experiment, data_dir)
        paths.append(folder / f"{Path(cell.labels['experiment']).name}.png")
        pictures.draw_split(split, domains, paths[-1])
        classes = float(np.count_nonzero(split.counts(domains), axis=1).mean())
        row = rows.setdefault(cell.labels["method"], {})
        row |= {c.name: [classes] for c in plan.entry.columns if matches(c, cell)}
    return rows, paths


def spirals(plan: EntryPlan, seeds: list[int], folder: Path, tell: Callable[[str], None]) -> tuple[Rows, list[Path]]:
    """FedNH's figure 1 for every seed; the pictures are those of the first."""
    rows: Rows = {}
    paths = []
    for arms, setting in spiral.SETTINGS.items():
        setting = setting._replace(epochs=setting.epochs // 20) if plan.quick else setting
        for seed in seeds:
            tell(f"{arms} arms, seed {seed}")
            outcomes = spiral.panels(setting, seed)
            if seed == seeds[0]:
                paths.append(folder / f"{arms}.png")
                spiral.picture(outcomes, paths[-1])
            for letter, outcome in outcomes.items():
                row = rows.setdefault(", ".join(spiral.PANELS[letter]), {})
                for column in plan.entry.columns:
                    group, _, key = column.metric.partition(" ")
                    if group == arms:
                        row.setdefault(column.name, []).append(outcome.numbers[key])
    return rows, paths
