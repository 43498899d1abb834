"""What a sweep consists of: its file, and the cells that follow from it."""

import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from protofed.config import schema
from protofed.config.experiment import Experiment
from protofed.config.files import find, shipped_experiments
from protofed.config.registry import find_method, is_method
from protofed.errors import UserError, did_you_mean
from protofed.methods import METHODS
from protofed.runs.trust import trusted_experiment
from protofed.sweep.sections import (
    checked_methods,
    checked_parameters,
    checked_seeds,
    checked_words,
    read_sweep,
    text,
)

KEYS = ("experiment", "seeds", "changes", "methods", "parameters")
DIGITS = 12  # of a cell's hash


class Cell(NamedTuple):
    """One run of a sweep."""

    labels: dict[str, str]  # experiment, method, seed, and each parameter that its method has
    experiment: Experiment
    hash: str

    @property
    def name(self) -> str:
        """The cell as people read it."""
        labels = dict(self.labels)
        parts = [labels.pop("experiment"), labels.pop("method")]
        seed = labels.pop("seed")
        return ", ".join([*parts, *(f"{key}={value}" for key, value in labels.items()), f"seed {seed}"])

    @property
    def folder(self) -> str:
        """The name of its folder: readable, and with the hash by which it is found."""
        return f"{slug(self.name)[:100].rstrip('-')}-{self.hash}"


@dataclass(frozen=True)
class Sweep:
    """Methods x experiments x seeds x parameters."""

    experiments: tuple[str, ...]
    """Names of shipped experiments, or paths."""
    methods: Mapping[str, Sequence[str]]
    """Label -> changes; a label that is a method's name implies method=LABEL."""
    seeds: tuple[int, ...] = (0,)
    changes: tuple[str, ...] = ()
    """Changes for every cell; a key of [method] goes to the methods that have it."""
    parameters: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """A grid: key -> values. A key of [method] goes to the methods that have it."""
    base: Path = Path()
    """The folder that relative paths of experiments refer to."""
    file: Path | None = None
    """The file it was read from."""
    trust: bool = False
    """Whether to import code that an experiment in a run's folder names and that was never run here."""

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any], *changes: str, trust: bool = False) -> "Sweep":
        """From a file or its tables, with further changes for every cell."""
        if isinstance(source, Mapping):
            raw, file = dict(source), None
        else:
            raw, file = read_sweep(Path(source)), Path(source)
        for key in raw:
            if key not in KEYS:
                raise UserError(f"unknown key {key} in the sweep. {did_you_mean(key, KEYS)}")
        named = raw.get("experiment", ())
        sweep = cls(
            experiments=checked_words("experiment", [named] if isinstance(named, str) else named),
            methods=checked_methods(raw.get("methods", {})),
            seeds=checked_seeds(raw.get("seeds", [0])),
            changes=(*checked_words("changes", raw.get("changes", []), empty=True), *changes),
            parameters=checked_parameters(raw.get("parameters", {})),
            base=file.parent if file else Path(),
            file=file,
            trust=trust,
        )
        sweep.check()
        sweep.check_given(changes)
        return sweep

    def check(self) -> None:
        """Raise if a key or a label makes no sense, whatever the experiments say."""
        for label, own in self.methods.items():
            method_of(label, own)
            _refuse_fixed(own, ("seed",))
        fixed = [*self.changes, *(f"{key}={text(values[0])}" for key, values in self.parameters.items())]
        _refuse_fixed(fixed, ("method", "method.name", "seed"))
        names = {label: method_of(label, own) for label, own in self.methods.items()}
        for word in fixed:
            if not any(method_takes(name, word) for name in names.values()):
                raise UserError(
                    f"unknown key {word!r}: none of {', '.join(names)} has it. See 'protofed list methods'."
                )
        self._check_grid()

    def _check_grid(self) -> None:
        """Raise if a parameter would undo what a label stands for."""
        for key, (label, own) in itertools.product(self.parameters, self.methods.items()):
            twice = [word for word in own if _same(key_of(word), key)]
            if twice and method_takes(method_of(label, own), key):
                raise UserError(f"methods.{label} says {twice[0]!r}, which parameters.{key} would undo. Remove one.")

    def check_given(self, changes: Sequence[str]) -> None:
        """Raise if the file sets for some cells what is now given for all."""
        for word in changes:
            key = key_of(word)
            where = [f"parameters.{other}" for other in self.parameters if _same(other, key)]
            for label, own in self.methods.items():
                where += [f"methods.{label}" for other in map(key_of, own) if _same(other, key)]
            if where:
                raise UserError(f"{word!r}: the sweep's {where[0]} sets {key} too, and would win. Change it there.")

    def cells(self, tell: Callable[[str], None] = lambda text: None) -> list[Cell]:
        """Every run, methods in their order and seeds innermost; a UserError names a cell that cannot be built. `tell`
        hears which code is imported because it is trusted, before it is.

        `tell` hears which code is imported because it is trusted, before it is."""
        found = []
        for source, (label, own) in itertools.product(self.experiments, self.methods.items()):
            method = method_of(label, own)
            shared = [word for word in self.changes if method_takes(method, word)]
            grid = {key: values for key, values in self.parameters.items() if method_takes(method, key)}
            for values in itertools.product(*grid.values()):
                point = {key: text(value) for key, value in zip(grid, values, strict=True)}
                words = [f"method={method}", *shared, *own, *(f"{key}={value}" for key, value in point.items())]
                for seed in self.seeds:
                    labels = {"experiment": self._label(source), "method": label, "seed": str(seed)}
                    labels |= {key: value.strip('"') for key, value in point.items()}
                    try:
                        experiment = trusted_experiment(
                            self._file(source), *words, f"seed={seed}", trust=self.trust, tell=tell
                        )
                    except UserError as error:
                        raise UserError(f"{Cell(labels, Experiment(), '').name}: {error}") from None
                    found.append(Cell(labels, experiment, identity(experiment)))
        return found

    def to_toml(self, folder: Path) -> str:
        """The sweep as a file that may lie in this folder."""
        kept = [g if g in shipped_experiments() else os.path.relpath(self._file(g), folder) for g in self.experiments]
        return tomli_w.dumps(
            {
                "experiment": kept[0] if len(kept) == 1 else kept,
                "seeds": list(self.seeds),
                "changes": list(self.changes),
                "methods": {label: list(own) for label, own in self.methods.items()},
                "parameters": {key: list(values) for key, values in self.parameters.items()},
            }
        )

    def _file(self, given: str) -> Path:
        beside = self.base / given
        return beside if beside.is_file() else find(given)

    def _label(self, given: str) -> str:
        """An experiment's file name, or the full path if two files have the same name."""
        stems = [Path(other).stem for other in self.experiments]
        return given.removesuffix(".toml") if stems.count(Path(given).stem) > 1 else Path(given).stem


def identity(experiment: Experiment) -> str:
    """The hash of everything that defines a run. Keys at their defaults do not count, so a new key changes no hash; if
    a default changes, it is noticed when the run's folder is opened."""
    plain = {
        "clients": experiment.clients,
        "model": [choice.name for choice in experiment.model],
        "method": experiment.method_name,
        "partition": experiment.to_dict()["partition"]["name"],
    }
    usual = Experiment.from_dict(plain).to_dict()
    here = experiment.to_dict() | {"model": [choice.label for choice in experiment.model]}
    content = json.dumps([plain, _changed(usual, here)], sort_keys=True, default=list)
    return hashlib.sha256(content.encode()).hexdigest()[:DIGITS]


def _changed(usual: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in here.items():
        if isinstance(value, dict):
            if inner := _changed(usual.get(key, {}), value):
                found[key] = inner
        elif value != usual.get(key):
            found[key] = value
    return found


def method_of(label: str, own: Sequence[str]) -> str:
    """The method that a label of the sweep stands for."""
    named = [word.partition("=")[2].strip().strip("\"'") for word in own if key_of(word) in ("method", "method.name")]
    if is_method(label) and named and named[-1] != label:
        raise UserError(f"methods: {label!r} is a method, but its changes say method={named[-1]}. Use another label.")
    if not named and not is_method(label):
        raise UserError(
            f"methods: {label!r} is not a method. {did_you_mean(label, METHODS)} "
            f'Your own label must say which method it is: "{label}" = ["method=fedproto", ...].'
        )
    return named[-1] if named else label


def method_takes(method: str, word: str) -> bool:
    """Whether a method has this key ("method.lam", "method.lam=1"); every method has the keys outside [method]."""
    key = key_of(word)
    if not key.startswith("method."):
        return True
    name = key.removeprefix("method.")
    if not is_method(method):
        return name == "preset"  # errors in it are reported elsewhere
    kind = find_method(method)
    return bool(kind.presets) if name == "preset" else name in schema.fields(kind)


def key_of(word: str) -> str:
    return word.partition("=")[0].strip()


def _same(key: str, other: str) -> bool:
    """Whether two keys set the same thing: model is model.name."""
    return key.removesuffix(".name") == other.removesuffix(".name")


def slug(name: str) -> str:
    """The text with only letters, digits, dots and dashes."""
    return re.sub(r"[^A-Za-z0-9._=]+", "-", name).strip("-.").replace("=", "")


def _refuse_fixed(words: Sequence[str], keys: Sequence[str]) -> None:
    for word in words:
        if key_of(word) in keys:
            raise UserError(
                f"{word!r} cannot be changed here: methods and seeds are what is compared. Name them there."
            )
