"""Keys that an experiment's file leaves out while they are at their defaults."""

from dataclasses import asdict
from functools import cache
from typing import Any

from protofed.config import schema
from protofed.config.experiment import CHANGED, LATER, LATER_OF_PARTITIONS, PLAIN
from protofed.data import PARTITIONS


@cache
def unwritten() -> dict[str, Any]:
    """Every key that `Experiment.to_dict` leaves out, with its default."""
    usual = {name: asdict(kind()) for name, kind in PLAIN.items()}
    keys = LATER | {name: tuple(usual[name]) for name in CHANGED}
    found = {f"{name}.{key}": usual[name][key] for name, some in keys.items() for key in some}
    kinds = {PARTITIONS[kind]: some for kind, some in LATER_OF_PARTITIONS.items() if kind}
    return found | {f"partition.{key}": schema.fields(kind)[key][1] for kind, some in kinds.items() for key in some}
