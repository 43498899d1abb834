"""What a run has learnt so far: its last whole checkpoint, read without a lock, while it runs or after."""

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils._pytree import tree_map

from protofed.data import scaling
from protofed.data.sources import load
from protofed.errors import UserError
from protofed.experiment import Experiment
from protofed.folder import RunFolder, State

TRIES = 3  # a run that goes on may remove an old checkpoint while it is being read


class Saved(NamedTuple):
    """A run's experiment and state, and what the user should be told."""

    folder: RunFolder
    experiment: Experiment
    state: State
    notes: tuple[str, ...]


def read(run: str | Path) -> Saved:
    """The last checkpoint of a run; a UserError where there is none that is whole."""
    folder = RunFolder(Path(run))
    if not folder.exists:
        raise UserError(f"{run} is no run: it has no experiment.toml. Name the folder of a run, such as runs/NAME.")
    experiment = Experiment.from_dict(folder.experiment_dict())
    here = experiment.torch_device()
    if folder.finished and not experiment.record.models:
        raise UserError(f"{run} kept no models (record.models = false). Run it anew without that.")
    for wait in range(TRIES):
        time.sleep(0.2 * wait)
        state, remarks = folder.restore(here)
        if state is not None:
            break
    else:
        why = f" ({remarks[0]})" if remarks else ""
        raise UserError(f"{run} has no checkpoint that is whole{why}. Go on with --resume, or run it anew.")
    notes = list(remarks)
    if not folder.finished:
        notes.append(f"{run} is not finished: this is its state after round {state.round} of {experiment.rounds}")
    server = tree_map(lambda tensor: tensor.to(here), state.server)
    return Saved(folder, experiment, state._replace(server=server), tuple(notes))


def inputs(saved: Saved, data_dir: Path | None = None) -> dict[str, Any]:
    """Class names, and how the inputs of each domain are scaled; of an older run, from its data."""
    path = saved.folder.file("inputs.json")
    if path.is_file():
        try:
            told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{path} is damaged ({error}). Go on with --resume, which writes it anew.") from None
        return told
    return scaling.inputs(load(saved.experiment.data, data_dir), saved.experiment.data.normalize)
