"""Runs that differ only by their seed form a group: its label, its colour, and whether groups can be compared."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from protofed.report.labels import short_labels
from protofed.report.rules import Rule
from protofed.report.runs import Run, alike, but_seed, code_notes
from protofed.report.style import Look, looks

MISSING = "-"


@dataclass(frozen=True, eq=False)
class Group:
    """The runs of one method with the same settings, by seed."""

    label: str
    look: Look
    runs: list[Run]

    @property
    def seeds(self) -> list[int]:
        return [run.seed for run in self.runs]

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs if run.summary is not None]

    @property
    def counted(self) -> list[Run]:
        """The finished runs or, while there are none, all of them as they are."""
        return self.finished or self.runs

    @property
    def rule(self) -> Rule:
        """The rule by which its method is judged."""
        return self.runs[0].rule

    @property
    def name(self) -> str:
        """The label, and whether its runs are finished: shown to readers of a figure."""
        left = len(self.runs) - len(self.finished)
        many = f"{left} of {len(self.runs)} seeds " if len(self.runs) > 1 else ""
        return f"{self.label} ({many}unfinished)" if left else self.label

    def first(self, has: Callable[[Run], Any]) -> Run | None:
        """The run with the lowest seed that has this part."""
        return next((run for run in self.runs if has(run)), None)


def group(runs: Iterable[Run]) -> list[Group]:
    """In the order in which methods first appear."""
    sets: list[list[Run]] = []
    for run in runs:
        same = next((some for some in sets if alike(some[0], run)), None)
        if same is None:
            sets.append([run])
        else:
            same.append(run)
    labels = _labels([some[0] for some in sets])
    return [
        Group(label, look, sorted(some, key=lambda run: run.seed))
        for label, look, some in zip(labels, looks(len(sets)), sets, strict=True)
    ]


def judged(groups: Sequence[Group]) -> dict[str, str]:
    """The rule of each label if the rules differ; otherwise nothing needs to be said."""
    rules = {some.label: str(some.rule) for some in groups}
    return rules if len(set(rules.values())) > 1 else {}


def titled(groups: Sequence[Group]) -> dict[str, str]:
    """The heading of each label's panel, with the rule if rules differ."""
    rules = judged(groups)
    return {some.label: ", by ".join([some.name, *filter(None, [rules.get(some.label)])]) for some in groups}


def _labels(runs: Sequence[Run]) -> list[str]:
    """The name, with the settings that tell it from others of that name, shortened if that is enough."""
    for brief in (True, False):
        found = short_labels([(run.name, _parameters(run, runs, brief)) for run in runs])
        if len(set(found)) == len(found):
            return found
    twice = {each for each in found if found.count(each) > 1}
    return [f"{each} ({run.folder})" if each in twice else each for each, run in zip(found, runs, strict=True)]


def _parameters(run: Run, runs: Sequence[Run], brief: bool) -> dict[str, str]:
    """`brief`: of a partition, model or data set with another name, not every key."""
    keys = differing([but_seed(other) for other in runs if other.name == run.name])
    named = {key.removesuffix(".name") for key in keys if key.endswith(".name")} if brief else set()
    mine = [key for key in keys if key in run.settings]
    mine = [key for key in mine if key.partition(".")[0] not in named or key.endswith(".name")]
    return {key: _value(run.settings[key]) for key in mine}


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return str(value.get("name", value))
    return "+".join(map(_value, value)) if isinstance(value, list) else str(value)


def differing(settings: Sequence[dict[str, Any]]) -> list[str]:
    """The keys whose values differ between runs."""
    keys = list(dict.fromkeys(key for some in settings for key in some))
    return [key for key in keys if any(some.get(key, MISSING) != settings[0].get(key, MISSING) for some in settings)]


def incomparable(groups: Sequence[Group]) -> list[str]:
    """Why these runs cannot be compared, one line per reason; empty if they can."""
    runs = [run for some in groups for run in some.runs]
    reasons = []
    data = _sets(groups, lambda run: run.partition.fingerprint)
    if len(data) > 1:
        reasons.append(f"Different data: {_listed(data)}.")
    for seed, source in sorted({(run.seed, run.partition.fingerprint) for run in runs}):

        def split(run: Run, here: tuple[int, str] = (seed, source)) -> str:
            return run.partition.hash if (run.seed, run.partition.fingerprint) == here else ""

        splits = _sets(groups, split)
        if len(splits) > 1:
            where = "the same data and " if len(data) > 1 else ""
            said = f"Different partitions with {where}seed {seed} (those that share one stand together)"
            reasons.append(f"{said}: {_listed(splits)}.")
    if len({tuple(run.seed for run in some.counted) for some in groups}) > 1:
        shown = "; ".join(f"{some.label} {', '.join(str(run.seed) for run in some.counted)}" for some in groups)
        reasons.append(f"Different {'finished ' if any(run.summary is None for run in runs) else ''}seeds: {shown}.")
    return [*reasons, *(note for some in groups for note in code_notes(some.label, some.runs))]


def not_finished(groups: Sequence[Group]) -> list[str]:
    """The runs that are drawn only up to where they are, one line per method."""
    left = {some.label: [run for run in some.runs if run.summary is None] for some in groups}
    return [
        f"Not finished: {label}, seed {', '.join(str(run.seed) for run in runs)}, "
        f"after round {', '.join(str(run.rounds[-1]['round']) for run in runs)} of {runs[0].settings['rounds']}."
        for label, runs in left.items()
        if runs
    ]


def _sets(groups: Sequence[Group], key: Callable[[Run], str]) -> list[list[str]]:
    """The labels that share a value; '' means unknown and is left out."""
    found: dict[str, list[str]] = {}
    for some in groups:
        for value in dict.fromkeys(filter(None, map(key, some.runs))):
            found.setdefault(value, []).append(some.label)
    return list(found.values())


def _listed(sets: Sequence[Sequence[str]]) -> str:
    """Labels that belong together, in quotes if they contain commas."""
    commas = any("," in label for labels in sets for label in labels)
    return "; ".join(", ".join(f"'{label}'" if commas else label for label in labels) for labels in sets)
