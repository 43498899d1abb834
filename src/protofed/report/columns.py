"""What a column of a table shows: which number of a run, and of which rounds. Never the best on the test set."""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from protofed.errors import UserError, nearest
from protofed.report.gather import Run

LAST = 10  # rounds that a mean "of the last rounds" is taken over
VALIDATION = {"global": "validation_global_mean", "own": "validation_mean"}  # by what the best round is chosen
BY = tuple(VALIDATION.values())


def deviation(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation of the population, as everywhere here."""
    return float(np.mean(values)), float(np.std(values))


class Metric(NamedTuple):
    """A number of a run."""

    key: str
    title: str
    unit: Literal["%", "", "s"] = "%"
    better: Literal["high", "low", ""] = "high"


METRICS = {
    "accuracy": Metric("accuracy_mean", "accuracy"),
    "worst10": Metric("accuracy_worst10", "worst tenth"),
    "std": Metric("accuracy_std", "std over clients", "%", "low"),
    "head": Metric("accuracy_head_mean", "by head"),
    "proto": Metric("accuracy_proto_mean", "by prototype"),
    "global": Metric("global_accuracy", "global model"),
    "global-own": Metric("accuracy_global_mean", "global model, own tests"),
    "pm_v": Metric("pm_v", "PM(V)"),
    "pm_l": Metric("pm_l", "PM(L)"),
    "held-out": Metric("held_out_head_mean", "held-out, by head"),
    "held-out-proto": Metric("held_out_proto_mean", "held-out, by prototype"),
    "held-out-alone": Metric("held_out_alone_mean", "held-out, alone"),
    "params": Metric("params_up_per_round", "params up / round", "", ""),
    "bytes_up": Metric("bytes_up", "bytes up", "", ""),
    "bytes_down": Metric("bytes_down", "bytes down", "", ""),
    "seconds": Metric("seconds", "seconds", "s", ""),
}
HELD_OUT = ("held-out", "held-out-proto", "held-out-alone")  # where clients were held out of training
USUAL = ("accuracy", "worst10", "head", "proto", "global", "pm_v", *HELD_OUT, "params", "seconds")


class Column(NamedTuple):
    """A number of a run, after the end or of some rounds."""

    metric: Metric
    at: str = ""  # "": after the last round; "last10", "validation", or a round's number

    @classmethod
    def parse(cls, text: str) -> "Column":
        """From "accuracy", "accuracy@last10", "accuracy@validation" or "accuracy@50"."""
        name, _, at = text.strip().partition("@")
        if at in ("best", "max", "best-test"):
            raise UserError(
                f"column {text!r}: the best round on the test set is not offered, since it is chosen by what it is "
                f"judged by. Use {name}@validation, {name}@last{LAST}, or {name} after the last round."
            )
        if at not in ("", f"last{LAST}", "validation") and not at.isdecimal():
            raise UserError(f"column {text!r}: behind @ stands last{LAST}, validation, or a round's number.")
        if at.isdecimal() and not int(at):
            raise UserError(f"column {text!r}: rounds are counted from 1.")
        return cls(METRICS.get(name) or _other(name), at)

    @property
    def title(self) -> str:
        if self.at.isdecimal():
            return f"{self.metric.title}, rounds {max(1, int(self.at) - LAST + 1)} to {int(self.at)}"
        at = {"": "", f"last{LAST}": f", last {LAST}", "validation": ", best on validation"}[self.at]
        return self.metric.title + at

    def of(self, run: Run) -> float | None:
        """This number of a run; None where it has none."""
        key = self.metric.key
        if not self.at:
            return _number(run.summary.get(key))
        if self.at == "validation":
            line = _best_on_validation(run, key)
            return _number(line.get(key)) if line else None
        known = self.window(run)
        return float(np.mean(known)) if known else None

    def window(self, run: Run) -> list[float]:
        """The numbers of the rounds that a mean is taken over; none where it is not a mean, or a run ended before."""
        if self.at in ("", "validation") or not run.rounds:
            return []
        end = run.rounds[-1]["round"]
        last = int(self.at) if self.at.isdecimal() else end
        values = [_number(line.get(self.metric.key)) for line in run.rounds if last - LAST < line["round"] <= last]
        return [value for value in values if value is not None] if last <= end else []


def _other(name: str) -> Metric:
    """Any key of summary.json or rounds.jsonl; a share is shown in percent."""
    for metric in METRICS.values():
        if metric.key == name:
            return metric
    share = name.startswith(("accuracy_", "global_accuracy", "validation_", "pm_"))
    share = share or (name.startswith("held_out_") and name.endswith("_mean"))  # others are counts
    return Metric(name, name.replace("_", " "), "%", "high") if share else Metric(name, name.replace("_", " "), "", "")


def _number(value: Any) -> float | None:
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if known else None


def _best_on_validation(run: Run, key: str) -> dict[str, Any] | None:
    """The first of the rounds that are best on validation samples, by the model that the number is of."""
    by = VALIDATION["global" if "global" in key else "own"]
    known = [line for line in run.rounds if _number(line.get(by)) is not None and _number(line.get(key)) is not None]
    return max(known, key=lambda line: line[by]) if known else None


def choose(texts: str | None, runs: Sequence[Run], usual: Sequence[str] = USUAL) -> list[Column]:
    """The columns that were asked for, or those of the usual ones that some run has."""
    if texts is None:
        columns = [Column(METRICS[name]) for name in usual]
        return [column for column in columns if any(column.of(run) is not None for run in runs)]
    columns = [Column.parse(text) for text in texts.split(",") if text.strip()]
    if not columns or len(set(columns)) < len(columns):
        raise UserError(f"--columns {texts!r} should be different columns with commas, such as accuracy,worst10.")
    for column in columns:
        if any(column.of(run) is not None for run in runs):
            continue
        if column.at == "validation" and any(by in line for run in runs for line in run.rounds for by in BY):
            raise UserError(
                f"{column.metric.title!r} is not measured in those rounds that validation samples choose from. "
                f"Use it after the last round: --columns {texts.replace('@validation', '')}."
            )
        if column.at == "validation":
            raise UserError(
                f"no run has validation samples to choose the round of {column.metric.title!r} by. "
                "Run with evaluate.validation=0.1, say, which holds a tenth of every client's training samples back."
            )
        longest = max((run.rounds[-1]["round"] for run in runs if run.rounds), default=0)
        if column.at.isdecimal() and int(column.at) > longest:
            raise UserError(f"column {column.metric.title}@{column.at}: the runs have {longest} rounds.")
        known = {key for run in runs for key, value in run.summary.items() if _number(value) is not None}
        if column.metric in METRICS.values():  # which is no slip of the pen
            there = ", ".join(name for name, metric in METRICS.items() if metric.key in known)
            raise UserError(f"no run has a number for column {column.title!r}. The runs have {there}.")
        raise UserError(
            f"no run has a number for column {column.title!r}. {nearest(column.metric.key, {*METRICS, *known})}"
        )
    return columns
