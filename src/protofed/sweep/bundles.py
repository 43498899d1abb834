"""Which cells go to a worker together, to be trained as one program."""

import json
from collections.abc import Sequence
from typing import TypeVar

from protofed.config.experiment import SCHEDULE, Experiment
from protofed.engines.fused.method import method_kind

OWN = (
    "seed",
    "rounds",
    "clients",
    "participation",
    "held_out_clients",
    "partition",
    "record",
    "join",
    "method",
    "selection",
    "stopping",
)
MOST = 64  # cells of one bundle

T = TypeVar("T")


def kind_of_run(experiment: Experiment) -> str | None:
    """What runs have to share to be trained together; None: this one is trained by itself."""
    plain = all(choice.known for choice in experiment.model) and not experiment.by_client and not experiment.attack.on
    stacked = experiment.engine.name in ("auto", "stacked") and experiment.method.stackable
    if not (plain and stacked) or experiment.evaluate.theory:
        return None
    tables = {key: value for key, value in experiment.to_dict().items() if key not in OWN}
    tables["optimizer"] = {k: v for k, v in tables["optimizer"].items() if k not in ("lr", "lr_decay", *SCHEDULE)}
    return json.dumps([tables, repr(method_kind(experiment.method))], sort_keys=True, default=list)


def bundled(cells: Sequence[tuple[T, Experiment]], jobs: int) -> list[list[T]]:
    """Groups of cells of one kind, in the order of their first cell; groups are cut only if there are fewer kinds than
    workers."""
    kinds: dict[str, list[T]] = {}
    for number, (cell, experiment) in enumerate(cells):
        kinds.setdefault(kind_of_run(experiment) or f"alone {number}", []).append(cell)
    most = MOST if len(kinds) >= jobs else max(1, -(-len(cells) // jobs))
    return [some[i : i + most] for some in kinds.values() for i in range(0, len(some), min(most, MOST))]
