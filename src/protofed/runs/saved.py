"""What a run has learnt so far: its last whole checkpoint, read without a lock, during the run or after it."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils._pytree import tree_map

from protofed.config.experiment import Experiment
from protofed.data import scaling
from protofed.data.sources import load
from protofed.errors import UserError, option
from protofed.runs.folder import RunFolder, State
from protofed.runs.trust import experiment_of

TRIES = 3  # a run that goes on may remove an old checkpoint while it is being read


class Saved(NamedTuple):
    """A run's experiment and state, and what the user should be told."""

    folder: RunFolder
    experiment: Experiment
    state: State
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        """Without weights: it may end up in a log."""
        return f"<Saved: {self.experiment.method_name} after round {self.state.round}, in {self.folder.path}>"


def read_checkpoint(
    run: str | Path, trust: bool = False, tell: Callable[[str], None] = lambda text: None, device: str | None = None
) -> Saved:
    """The last checkpoint of a run. A UserError if it is not whole, or if the run names code that is neither the user's
    own nor trusted. `tell` hears which code is imported, before it is. `device` replaces the experiment's."""
    folder = RunFolder(Path(run))
    if not folder.exists:
        raise UserError(f"{run} is not a run: it has no experiment.toml. Name the folder of a run, such as runs/NAME.")
    folder.check_plain()
    experiment = experiment_of(folder.experiment_dict(), folder.path, trust, tell)
    if device is not None:
        experiment = Experiment.from_dict({**experiment.to_dict(), "device": device})
    here = experiment.torch_device()
    if folder.finished and not experiment.record.models:
        raise UserError(f"{run} kept no models (record.models = false). Run it again without that.")
    for wait in range(TRIES):
        time.sleep(0.2 * wait)
        state, remarks = folder.restore(here)
        if state is not None and not remarks:
            break
    state = newest(folder, experiment, state, remarks)
    notes = []
    if not folder.finished:
        notes.append(f"{run} is not finished: this is its state after round {state.round} of {experiment.rounds}")
    server = tree_map(lambda tensor: tensor.to(here), state.server)
    return Saved(folder, experiment, state._replace(server=server), tuple(notes))


def newest(folder: RunFolder, experiment: Experiment, state: State | None, remarks: Sequence[str]) -> State:
    """The state that a run ended with or has reached; a UserError if only an older one, or none, is whole."""
    why = "; ".join(remark.partition(";")[0] for remark in remarks)
    if state is None:
        why = f" ({why})" if why else ""
        raise UserError(
            f"{folder.path} has no checkpoint that is whole{why}. Restore it from a copy, or run the experiment again."
        )
    ended = folder.summary().get("rounds", experiment.rounds) if folder.finished else state.round
    if remarks or state.round != ended:
        why = why or f"the last checkpoint is of round {state.round} of {ended}"
        first = "remove its summary.json and " if folder.finished else ""
        raise UserError(
            f"{folder.path}: {why}. Nothing is made of older models. Restore it from a copy, or {first}go on with "
            f"{option('resume', True)}, which runs the rounds after {state.round} again."
        )
    return state


def inputs_of_run(saved: Saved, data_dir: Path | None = None) -> dict[str, Any]:
    """Class names, and how the inputs of each domain are scaled; for an older run, computed from its data."""
    path = saved.folder.file("inputs.json")
    if path.is_file():
        try:
            told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            scaling.check_inputs(told)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(
                f"{path} is damaged ({error}). Go on with {option('resume', True)}, which writes it again."
            ) from None
        return told
    return scaling.inputs(load(saved.experiment.data, data_dir), saved.experiment.normalize)
