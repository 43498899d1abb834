"""AUC and balanced accuracy of every client after the last round."""

from collections.abc import Mapping, Sequence
from typing import Any

from protofed.config.experiment import Experiment
from protofed.engines import Engine
from protofed.method import Tree
from protofed.metrics import SCORES, Tally, auc, judged_by, spread

Numbers = dict[int, dict[str, float | None]]  # of clients, by number


class Ranking:
    """Collects both for the clients' own models and for the global one, on the clients' own test sets."""

    def __init__(self, experiment: Experiment, classes: int, scores_here: bool) -> None:
        """`scores_here`: clients do not keep the scores of their samples to themselves."""
        self.method, self.kind = experiment.method, judged_by(experiment.method)
        wanted = {"auto": classes == 2, "always": True, "never": False}[experiment.evaluate.auc]
        self.on = wanted and scores_here
        self.found: Numbers = {}

    def measure(
        self, engine: Engine, server: Tree, some: Sequence[int], own: Mapping[int, Tally], whole: Mapping[int, Tally]
    ) -> None:
        """Count these clients; their right answers are already counted."""
        if not self.on:
            return
        for who, counted, suffix in (("personal", own, ""), ("global", whole, "_global")):
            if counted:
                kept = engine.evaluate(self.method, server, some, on="own", who=who, confusion=SCORES + self.kind)
                for number, tally in zip(some, kept, strict=True):
                    numbers = self.found.setdefault(number, {})
                    numbers[f"auc{suffix}"] = auc(tally[self.kind])
                    numbers[f"balanced{suffix}"] = counted[number][self.kind].balanced()

    def of(self, number: int) -> dict[str, float | None]:
        """One client's numbers."""
        return self.found.get(number, {})

    def summary(self, honest: Sequence[int]) -> dict[str, Any]:
        """The means over these clients."""
        result: dict[str, Any] = {}
        for key in next(iter(self.found.values()), {}):
            over = spread([self.found[number][key] for number in honest])
            result[f"{key}_mean"] = over.mean
            if not key.endswith("_global"):
                result[f"{key}_worst10"] = over.worst10
        return result
