"""A run as read from its folder. Parts that cannot be read are named with the reason, and the rest is used."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from protofed.errors import UserError
from protofed.report import parts
from protofed.report.parts import Partition, Remark
from protofed.report.rules import Rule, rule_of
from protofed.runs.environment import changed_code
from protofed.runs.folder import RunFolder
from protofed.runs.trust import settings_of_run

NOT_BEGUN = "no round is finished yet"


@dataclass(frozen=True, eq=False)
class Run:
    """One run as read from its folder, finished or not. A table needs the first half, a page all of it."""

    folder: Path
    name: str
    """The method, or the name that a sweep gave it."""
    settings: dict[str, Any]
    """Every key of the experiment with its value, flat: "method.lam"."""
    rounds: list[dict[str, Any]]
    summary: dict[str, Any] | None
    """None while the run is not finished."""
    environment: dict[str, Any]
    partition: Partition
    labels: dict[str, str] = field(default_factory=dict)
    """What distinguishes it in a table: experiment, method, seed and whatever else differs."""
    clients: list[dict[str, Any]] = field(default_factory=list)
    class_names: list[str] = field(default_factory=list)
    superclasses: list[str] | None = None
    confusion: dict[str, np.ndarray] = field(default_factory=dict)
    views: dict[str, np.ndarray] = field(default_factory=dict)
    leaks: dict[str, Any] = field(default_factory=dict)
    """The results of `protofed attack`; empty if they were not requested."""

    @property
    def seed(self) -> int:
        return int(self.settings["seed"] if self.summary is None else self.final["seed"])

    @property
    def final(self) -> dict[str, Any]:
        """The summary; empty while the run is not finished."""
        return self.summary or {}

    @property
    def version(self) -> str:
        """The version of protofed that made it."""
        return str(self.environment.get("protofed", "?"))

    @property
    def rule(self) -> Rule:
        """The rule by which its method is judged."""
        section = {key.removeprefix("method."): value for key, value in self.settings.items()}
        return rule_of(self.final, section)

    def column(self, key: str) -> tuple[list[int], list[float]]:
        """The rounds in which a number was measured, and its values."""
        known = [(line["round"], line[key]) for line in self.rounds if line.get(key) is not None]
        return [round for round, _ in known], [value for _, value in known]

    def number(self, key: str) -> float | None:
        """The value from the summary, or from the last round that has it."""
        if self.summary is not None:
            return self.summary.get(key)
        values = self.column(key)[1]
        return values[-1] if values else None


def one_data(run: Run, other: Run) -> bool:
    """Whether two runs used the same data set, as far as that is known."""
    return len({run.partition.fingerprint, other.partition.fingerprint} - {""}) < 2


def code_notes(label: str, runs: Iterable[Run]) -> list[str]:
    """Whether the user's own methods and models changed between these runs, or since."""
    runs = list(runs)
    if len({str(run.environment["own"]) for run in runs if "own" in run.environment}) > 1:
        return [f"{label}: its code was changed between its runs, which are not of one method or model"]
    changed = sorted({name for run in runs for name in changed_code(RunFolder(run.folder))})
    return [f"{label}: the file of {', '.join(changed)} has changed since its runs"] if changed else []


def but_seed(run: Run) -> dict[str, Any]:
    """The settings that runs of one group share."""
    return {key: value for key, value in run.settings.items() if key != "seed"}


def alike(run: Run, other: Run) -> bool:
    """Whether they differ only in their seed."""
    return but_seed(run) == but_seed(other) and one_data(run, other)


def read_run(folder: Path, remarks: list[Remark], name: str = "") -> Run:
    """A run with all of its parts, under the name that a sweep gave its method. A UserError says why it is not a run;
    `remarks` lists what cannot be used."""
    source = RunFolder(folder)
    settings = _settings(source)
    summary = source.summary() if source.finished else None  # first: the rounds of a finished run are all there
    rounds = _rounds(source, summary, remarks)
    clients = parts.part(folder, "clients.jsonl", parts.client_lines, remarks) or []
    clients = parts.only_finite(clients, folder, "clients.jsonl", remarks)
    if summary is not None:
        _agree(settings, summary)
        if rounds[-1]["round"] < settings["rounds"]:
            far = f"{rounds[-1]['round']} of {settings['rounds']}"
            remarks.append(Remark(folder, f"rounds.jsonl ends at round {far}, although the run is finished"))
        clients = _whole(source, clients, summary, remarks)
    partition = parts.part(folder, "partition.npz", parts.read_partition, remarks) or Partition("", "", None)
    if not partition.hash and summary is not None:
        partition = partition._replace(hash=str(summary.get("partition") or ""))
    names = parts.part(folder, "classes.json", parts.classes, remarks) or {}
    return Run(
        folder=folder,
        name=name or parts.called(folder.parent, remarks).get(folder.name, str(settings["method.name"])),
        settings=settings,
        rounds=rounds,
        summary=summary,
        clients=clients,
        environment=parts.part(folder, "environment.json", parts.json_table, remarks) or {},
        partition=partition,
        class_names=_class_names(folder, names.get("names"), partition, remarks),
        superclasses=names.get("superclasses"),
        confusion=parts.part(folder, "confusion.npz", parts.confusion, remarks) or {},
        views=parts.part(folder, "views.npz", parts.views, remarks) or {},
        leaks=parts.part(folder, "attack.json", parts.leaks, remarks) or {},
    )


def read_finished(folder: Path, labels: Mapping[str, str] | None = None) -> Run:
    """A finished run as a table needs it. Its keys are those in its file, because some may be unknown here."""
    source = RunFolder(folder)
    summary = source.summary()
    return Run(
        folder=folder,
        name=str(summary.get("method")),
        settings=flat(_several_models(source.experiment_dict())),
        rounds=source.rounds(),
        summary=summary,
        environment=source.environment(),
        partition=Partition(str(summary.get("partition")), parts.fingerprint(folder / "partition.npz"), None),
        labels=dict(labels) if labels is not None else {"method": str(summary.get("method"))},
    )


def _several_models(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tables of several models, numbered, with the keys of a single one."""
    if not isinstance(models := table.get("model"), list):
        return table
    several = {str(i): dict(model) if isinstance(model, dict) else {} for i, model in enumerate(models)}
    names = [str(model.pop("name", "?")) for model in several.values()]
    return {**table, "model": {"name": "+".join(names), **several}}


def _rounds(source: RunFolder, summary: dict[str, Any] | None, remarks: list[Remark]) -> list[dict[str, Any]]:
    rounds = source.rounds()
    if not rounds:
        raise UserError(NOT_BEGUN if summary is None else "rounds.jsonl is empty, although the run is finished")
    if not all(map(parts.is_round, rounds)):
        raise UserError("rounds.jsonl has lines that are not rounds: it was written by another version")
    return parts.only_finite(rounds, source.path, "rounds.jsonl", remarks)


def _whole(
    source: RunFolder, clients: list[dict[str, Any]], summary: Mapping[str, Any], remarks: list[Remark]
) -> list[dict[str, Any]]:
    """The clients of a finished run, if it has all of them."""
    if not source.file("clients.jsonl").is_file():
        remarks.append(Remark(source.path, "clients.jsonl is missing, although the run is finished"))
    elif clients and len(clients) < (many := summary.get("clients_measured", summary.get("clients", 0))):
        far = f"{len(clients)} of {many}"
        remarks.append(Remark(source.path, f"clients.jsonl has {far} clients: it was cut, and is left out"))
        return []
    return clients


def _class_names(folder: Path, names: Any, partition: Partition, remarks: list[Remark]) -> list[str]:
    """A name for every class, or its number if the names do not fit the partition."""
    classes = partition.counts.shape[1] if partition.counts is not None else 0
    known = names or range(classes)
    if classes and len(known) != classes:
        remarks.append(Remark(folder, f"classes.json has {len(known)} names for {classes} classes"))
        known = range(classes)
    return [str(name) for name in known]


def _agree(settings: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
    """A UserError if a summary belongs to another run than its settings, or to none."""
    if type(summary.get("seed")) is not int:
        raise UserError(f"its summary.json is damaged: seed is {summary.get('seed')!r}")
    for name, key in {"method": "method.name", "seed": "seed", "rounds": "rounds"}.items():
        if name in summary and summary[name] != settings[key]:
            what = f"{name} is {settings[key]!r} in the one and {summary[name]!r} in the other"
            raise UserError(f"its experiment.toml and summary.json are of different runs: {what}")


def _settings(source: RunFolder) -> dict[str, Any]:
    if not source.file("experiment.toml").is_file():
        raise UserError("experiment.toml is missing: the folder is half written")
    try:
        return flat(settings_of_run(source.experiment_dict()))
    except UserError as error:
        what = str(error).partition(". ")[0]  # the remedy is for who writes one
        raise UserError(f"experiment.toml is of another version or method: {what}") from None


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dots in the keys."""
    result: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result
