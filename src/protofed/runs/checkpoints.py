"""When a run is saved: often enough to lose little, seldom enough that writing never outweighs training."""

import time

from protofed.config.experiment import Experiment
from protofed.runs.folder import RunFolder, State
from protofed.runs.watch import Watch

CHECKPOINT_SECONDS = 10.0  # between two checkpoints at least
SPILLED = 2**30  # bytes of client states written for want of memory, after which a checkpoint is due all the same


class Checkpoints:
    """The checkpoints of a run."""

    def __init__(self, folder: RunFolder, experiment: Experiment, done: int, watch: Watch, seconds: float) -> None:
        self.folder, self.experiment, self.watch, self.seconds = folder, experiment, watch, seconds
        self.round = done  # that is saved
        self.room = True
        self.at, self.took = time.monotonic(), 0.0

    def after(self, state: State) -> None:
        """Save a round if it is due and there is room for it; in any case, save the models that a run ends with."""
        last = state.round == self.experiment.rounds
        if not (last or self._due(state)):
            return
        began = time.monotonic()
        before, self.room = self.room, self.folder.fits(state)
        if self.room or (last and self.experiment.record.models):
            self.folder.save(state)
            self.round = state.round
        elif before:
            self.watch.note(
                f"the disk has no room for checkpoints of {self.folder.path}: the run continues without them. Free "
                f"some space; if it is stopped now, it resumes after round {self.round}"
            )
        self.at = time.monotonic()
        self.took = self.at - began

    def _due(self, state: State) -> bool:
        pause = max(self.seconds, 10 * self.took) if self.seconds else 0.0
        return time.monotonic() - self.at >= pause or state.clients.spilled > SPILLED
