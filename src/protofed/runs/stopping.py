"""When a run ends early: after some rounds without a better accuracy on validation samples."""

from typing import Any

from protofed.config.experiment import Experiment
from protofed.errors import UserError

Totals = dict[str, Any]
MEASURED = {"personal": "validation_mean", "global": "validation_global_mean"}


class Stopper:
    """Remembers the best round so far in what a checkpoint keeps, so that a resumed run ends where it would have."""

    def __init__(self, experiment: Experiment, server: Any) -> None:
        self.rule, self.rounds = experiment.stopping, experiment.rounds
        if not self.rule.patience:
            return
        if self.rule.by == "global" and experiment.method.global_client(server) is None:
            raise UserError(
                f"stopping.by = 'global', but {experiment.method_name} has no global model. Use 'personal'."
            )
        self._number = MEASURED[self.rule.by]

    def remembered(self, before: Totals, line: dict[str, Any]) -> Totals:
        """The best round so far, given the `line` of this one."""
        if not self.rule.patience:
            return {}
        best, now = before.get("best"), line.get(self._number)
        if now is not None and (best is None or now > best["accuracy"] + self.rule.min_gain):
            best = {"round": line["round"], "accuracy": now}
        return {} if best is None else {"best": best}

    def why(self, round: int, totals: Totals) -> str:
        """Why no round follows after `round` rounds; empty if one does."""
        best = totals.get("best") if self.rule.patience else None
        if best is None or round - best["round"] < self.rule.patience:
            return ""
        whose = "" if self.rule.by == "personal" else " by the global model"
        return (
            f"stopped after round {round} of {self.rounds}: no better accuracy on validation samples{whose} than "
            f"{best['accuracy']:.1%} in round {best['round']} (stopping.patience = {self.rule.patience})"
        )
