"""What a caller lets a run check, measure and draw besides training."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from protofed.config.experiment import Experiment
from protofed.data.domain import Domain
from protofed.data.split import Split
from protofed.engines import Engine, Trained
from protofed.method import Spec
from protofed.runs.folder import RunFolder


class Probes:
    """Asked at fixed points of a run. This one adds nothing: `protofed.probes` has those that every command uses."""

    def check(self, experiment: Experiment, spec: Spec) -> tuple[str, ...]:
        """Before anything is written, refuse what could not be measured later; notes on what is left out."""
        return ()

    def partition(self, split: Split, domains: Sequence[Domain], file: Path) -> None:
        """Draw the partition."""

    def round(
        self,
        experiment: Experiment,
        engine: Engine,
        servers: tuple[Any, Any],  # before and after the round
        cohort: Sequence[int],
        round: int,
        trained: Trained,
    ) -> dict[str, Any]:
        """More numbers of a round, counted from 0, before its clients' new states are kept."""
        return {}

    def joined(
        self,
        experiment: Experiment,
        domains: Sequence[Domain],
        split: Split,
        modules: Sequence[Any] | None,  # one for each client, where they were handed in
        server: Any,
        measured: Callable[[int], None],
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """A record of each held-out client that joins now, and their numbers for the summary; `measured` hears how many
        are done."""
        return [], {}

    def pictures(self, folder: RunFolder, method: str, clients: Sequence[Mapping[str, Any]]) -> None:
        """Draw how a finished run went, from its rounds and the records of its clients."""


NO_PROBES = Probes()
