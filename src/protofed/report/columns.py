"""The columns of a table: which number of a run they show, by which rule, and of which rounds. Never the best round on
the test set."""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np

from protofed.errors import UserError, did_you_mean
from protofed.report.rules import KEPT, RULES, Judged, Rule, in_order, stored
from protofed.report.runs import Run

LAST = 10  # rounds that a mean "of the last rounds" is taken over
VALIDATION = {"global": "validation_global_mean", "own": "validation_mean"}  # by what the best round is chosen
BY = tuple(VALIDATION.values())


class Metric(NamedTuple):
    """A number of a run."""

    key: str
    title: str
    unit: Literal["%", "", "s"] = "%"
    better: Literal["high", "low", ""] = "high"
    judged: Judged = ""


METRICS = {
    "accuracy": Metric("accuracy_mean", "accuracy", judged="own"),
    "worst10": Metric("accuracy_worst10", "worst tenth", judged="own"),
    "std": Metric("accuracy_std", "std over clients", "%", "low", "own"),
    "auc": Metric("auc_mean", "AUC", judged="own"),
    "auc-worst10": Metric("auc_worst10", "AUC, worst tenth", judged="own"),
    "auc-global": Metric("auc_global_mean", "AUC, global model", judged="own"),
    "balanced": Metric("balanced_mean", "balanced accuracy", judged="own"),
    "balanced-global": Metric("balanced_global_mean", "balanced accuracy, global model", judged="own"),
    "head": Metric("accuracy_head_mean", "by head"),
    "proto": Metric("accuracy_proto_mean", "by prototype", judged="proto"),
    "global": Metric("global_accuracy", "global model", judged="all"),
    "global-own": Metric("accuracy_global_mean", "global model, own tests", judged="own"),
    "pm_v": Metric("pm_v", "PM(V)", judged="all"),
    "pm_l": Metric("pm_l", "PM(L)", judged="all"),
    "attack": Metric("attack_success", "backdoor success", "%", "low", "own"),
    "forgetting": Metric("forgetting", "forgetting", "%", "low", "own"),
    "forgetting-global": Metric("global_forgetting", "forgetting, global model", "%", "low", "all"),
    "incremental": Metric("accuracy_incremental", "accuracy after each task", judged="own"),
    "incremental-global": Metric("global_accuracy_incremental", "after each task, global model", judged="all"),
    "held-out": Metric("held_out_head_mean", "held-out, by head", judged="head"),
    "held-out-proto": Metric("held_out_proto_mean", "held-out, by prototype", judged="proto"),
    "held-out-start": Metric("held_out_start_mean", "held-out, before training", judged="head"),
    "held-out-alone": Metric("held_out_alone_mean", "held-out, alone", judged="head"),
    "params": Metric("params_up_per_round", "params up / round", "", ""),
    "bytes_up": Metric("bytes_up", "bytes up", "", ""),
    "bytes_down": Metric("bytes_down", "bytes down", "", ""),
    "seconds": Metric("seconds", "seconds", "s", ""),
}
ABOUT = {  # what a title does not say
    "global": "the global model on the whole test set (GM in papers)",
    "pm_v": "the clients' own models on the whole test set, over the classes that each client holds",
    "pm_l": "the clients' own models on the whole test set, each class weighted by its share of the client's samples",
    "forgetting": "how much better an earlier task's classes were known at best than at the end",
}
ACCURACY = METRICS["accuracy"]
HEAD, HEAD_OWN, PROTO_ALL, PROTO_OWN = RULES
BY_RULE = {"head": HEAD, "head-own": HEAD_OWN, "proto-all": PROTO_ALL, "proto-own": PROTO_OWN}
BY_RULE |= {key: rule for rule, key in KEPT[ACCURACY.key].items()}
HELD_OUT = ("held-out", "held-out-proto", "held-out-alone")  # where clients were held out of training
USUAL = (
    "accuracy",
    "head",
    "proto",
    "worst10",
    "auc",
    "balanced",
    "global",
    "pm_v",
    "attack",
    "forgetting",
    "forgetting-global",
    *HELD_OUT,
    "params",
    "seconds",
)
SHORT = ("accuracy", "worst10")


class Column(NamedTuple):
    """A number of a run, after its end or from some of its rounds."""

    metric: Metric
    at: str = ""  # "": after the last round; "last10", "validation", or a round's number
    rule: Rule | None = None  # None: the rule of the method, which is the same in all rows

    @classmethod
    def parse(cls, text: str) -> "Column":
        """From "accuracy", "accuracy@last10", "accuracy@validation" or "accuracy@50"."""
        name, _, at = text.strip().partition("@")
        if at in ("best", "max", "best-test"):
            raise UserError(
                f"column {text!r}: the best round on the test set is not offered: the test set would choose the round "
                f"and then judge it. Use {name}@validation, {name}@last{LAST}, or {name} after the last round."
            )
        if at not in ("", f"last{LAST}", "validation") and not at.isdecimal():
            raise UserError(f"column {text!r}: after @ write last{LAST}, validation, or the number of a round.")
        if at.isdecimal() and not int(at):
            raise UserError(f"column {text!r}: rounds are counted from 1.")
        if name in BY_RULE:
            return cls(ACCURACY, at, BY_RULE[name])
        return cls(METRICS.get(name) or _other(name), at)

    @property
    def title(self) -> str:
        title = self._what
        if self.at.isdecimal():
            return f"{title}, rounds {max(1, int(self.at) - LAST + 1)} to {int(self.at)}"
        return title + {"": "", f"last{LAST}": f", last {LAST}", "validation": ", best on validation"}[self.at]

    @property
    def _what(self) -> str:
        if self.rule is None:
            return self.metric.title
        if self.metric == ACCURACY:
            return str(self.rule)
        fixed = self.metric.judged in ("head", "proto")  # the title says by what
        return f"{self.metric.title}, {f'{self.rule.among} classes' if fixed else self.rule}"

    def of(self, run: Run) -> float | None:
        """This number of a run, or its value so far if the run is not finished; None if there is none."""
        if not self.at:
            lines = [run.summary] if run.summary is not None else reversed(run.rounds)
            return next((value for line in lines if (value := self._in(line, run)) is not None), None)
        if self.at == "validation":
            line = self._best_on_validation(run)
            return self._in(line, run) if line else None
        known = self.window(run)
        return float(np.mean(known)) if known else None

    def _in(self, line: dict[str, Any], run: Run) -> float | None:
        """This number in a summary or in the line of a round."""
        if self.rule is None:
            return _number(line.get(self.metric.key))
        return _number(stored(line, self.metric.key, self.metric.judged, run.rule, self.rule))

    def along(self, run: Run) -> tuple[list[int], list[float]]:
        """The rounds in which this number was measured, and its values."""
        known = [(line["round"], value) for line in run.rounds if (value := self._in(line, run)) is not None]
        return [round for round, _ in known], [value for _, value in known]

    def marked(self, run: Run) -> bool:
        """Whether this is the rule of the run's method, if there are numbers by other rules too."""
        return self.rule is not None and self.metric.key in KEPT and run.rule.of(self.metric.judged) == self.rule

    def window(self, run: Run) -> list[float]:
        """The numbers of the rounds that a mean is taken over; empty if it is not a mean, or if the run ended
        earlier."""
        if self.at in ("", "validation") or not run.rounds:
            return []
        end = run.rounds[-1]["round"]
        last = int(self.at) if self.at.isdecimal() else end
        known = zip(*self.along(run), strict=True)
        return [value for round, value in known if last - LAST < round <= last] if last <= end else []

    def _best_on_validation(self, run: Run) -> dict[str, Any] | None:
        """The first of the rounds that are best on validation samples, by the model that the number belongs to."""
        by = VALIDATION["global" if "global" in self.metric.key else "own"]
        known = [line for line in run.rounds if _number(line.get(by)) is not None and self._in(line, run) is not None]
        return max(known, key=lambda line: line[by]) if known else None


def _other(name: str) -> Metric:
    """Any key of summary.json or rounds.jsonl; a share is shown in percent."""
    for metric in METRICS.values():
        if metric.key == name:
            return metric
    share = name.startswith(("accuracy_", "global_accuracy", "validation_", "pm_"))
    if name.startswith("validation_"):
        return Metric(name, name.replace("_", " "), judged="own")
    share = share or (name.startswith("held_out_") and name.endswith("_mean"))  # others are counts
    return Metric(name, name.replace("_", " "), "%", "high") if share else Metric(name, name.replace("_", " "), "", "")


def _number(value: Any) -> float | None:
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if known else None


def chosen_columns(texts: str | None, runs: Sequence[Run], usual: Sequence[str] = USUAL) -> list[Column]:
    """The requested columns, or the usual ones that some run has a number for."""
    if texts is None:
        wanted = [column for name in usual for column in by_rule(Column.parse(name), runs, always=name == "accuracy")]
        wanted.sort(
            key=lambda column: RULES.index(column.rule) if column.rule in RULES and column.metric == ACCURACY else 9
        )
        return [column for column in dict.fromkeys(wanted) if any(column.of(run) is not None for run in runs)]
    columns = [Column.parse(text) for text in texts.split(",") if text.strip()]
    if not columns or len(set(columns)) < len(columns):
        raise UserError(f"--columns {texts!r} should be different columns with commas, such as accuracy,worst10.")
    for column in columns:
        if all(column.of(run) is None for run in runs):
            _refuse(column, texts, runs)
    return list(dict.fromkeys(one for column in columns for one in by_rule(column, runs)))


def by_rule(column: Column, runs: Sequence[Run], always: bool = False) -> list[Column]:
    """One column for each rule by which the runs are judged; the column itself if there is only one rule, unless
    `always`."""
    if not column.metric.judged or column.rule is not None:
        return [column]
    rules = in_order({run.rule.of(column.metric.judged) for run in runs})
    if column.metric == METRICS["proto"]:
        return [Column(ACCURACY, column.at, rule) for rule in rules]
    return [column._replace(rule=rule) for rule in rules] if always or len(rules) > 1 else [column]


def _refuse(column: Column, texts: str, runs: Sequence[Run]) -> NoReturn:
    """Why no run has a number for a column."""
    if column.at == "validation":
        if any(by in line for run in runs for line in run.rounds for by in BY):
            raise UserError(
                f"{column.metric.title!r} is not measured in those rounds that validation samples choose from. "
                f"Use it after the last round: --columns {texts.replace('@validation', '')}."
            )
        raise UserError(
            f"no run has validation samples to choose the round of {column.metric.title!r} by. "
            "Run with evaluate.validation=0.1, say, which holds a tenth of every client's training samples back."
        )
    longest = max((run.rounds[-1]["round"] for run in runs if run.rounds), default=0)
    if column.at.isdecimal() and int(column.at) > longest:
        raise UserError(f"column {column.metric.title}@{column.at}: the runs have {longest} rounds.")
    known = {key for run in runs for key, value in run.final.items() if _number(value) is not None}
    if column.metric in METRICS.values():  # which is no slip of the pen
        there = ", ".join(name for name, metric in METRICS.items() if metric.key in known)
        raise UserError(f"no run has a number for column {column.title!r}. The runs have {there}.")
    raise UserError(
        f"no run has a number for column {column.title!r}. {did_you_mean(column.metric.key, {*METRICS, *known})}"
    )
