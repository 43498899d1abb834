"""A run's folder that was made elsewhere is data: code that its experiment names is imported only if it is one's own.

One's own is what was run here before: the same import path with the same options, in the same files with the same
content. Every run and every `--trust` notes that in the user's own folder, where nobody else writes.
"""

import hashlib
import json
import os
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from protofed.atomic import write_atomically
from protofed.config.experiment import Experiment
from protofed.config.files import find, override
from protofed.config.registry import GROUP
from protofed.errors import UserError, option
from protofed.importing import files_of, is_path, only_these
from protofed.methods import METHODS

HUBS = {"hf:": "datasets", "torchvision:": "torchvision"}  # libraries that read data in ways of their own
SHOWN = 200  # characters of options in a message
BEFORE = {"fednh": {"scored_by": "newest"}}  # what a method did before it had a key, where that is not the default
OF_A_RUN = ("environment.json", "rounds.jsonl", "summary.json", "checkpoints")  # next to the experiment.toml of a run


class Use(NamedTuple):
    """Code, or a library, that an experiment uses."""

    key: str  # in the experiment: "model.name"
    name: str
    path: str  # what is imported; empty where a library reads data
    options: dict[str, Any]  # what it is called with

    @property
    def said(self) -> str:
        """One line for a person."""
        how = ", ".join(f"{key} = {value!r}" for key, value in self.options.items())
        how = f" ({how[:SHOWN]})" if how else ""
        if not self.path:
            return f"{self.key} = {self.name!r}, read by {HUBS[self.name.partition(':')[0] + ':']}"
        also = f", which is {self.path}" if self.path != self.name else ""
        files = files_of(self.path)
        return f"{self.key} = {self.name!r}{also}{how}" + (f" from {files[-1]}" if files else "")

    @property
    def note(self) -> dict[str, Any]:
        """Everything that has to be the same for it to be the user's own."""
        files = {str(file.resolve()): _hash(file) for file in files_of(self.path)} if self.path else {}
        return {**self._asdict(), "files": files}


def uses(raw: Mapping[str, Any]) -> list[Use]:
    """The code that the tables of an experiment name; nothing is imported."""
    own = (_method(_table(raw.get("method"))), _models(raw.get("model")), _data(_table(raw.get("data"))))
    return [*chain(*own), *_selection(_table(raw.get("selection")))]


def _method(table: Mapping[str, Any]) -> Iterator[Use]:
    name = table.get("name")
    if isinstance(name, str) and name not in METHODS:
        offered = {point.name: point.value for point in entry_points(group=GROUP)}
        if is_path(path := offered.get(name, name)):
            yield Use("method.name", name, path, _options(table))


def _models(section: Any) -> Iterator[Use]:
    for table in map(_table, section if isinstance(section, list) else [section]):
        names = table.get("name")
        for name in names if isinstance(names, list) else [names]:
            if is_path(name):
                yield Use("model.name", name, name, _options(table))


def _data(table: Mapping[str, Any]) -> Iterator[Use]:
    names = table.get("name")
    for name in names if isinstance(names, list) else [names]:
        if is_path(name):
            yield Use("data.name", name, name, dict(_table(table.get("options"))))
        elif isinstance(name, str) and name.startswith(tuple(HUBS)):
            yield Use("data.name", name, "", {})


def _selection(table: Mapping[str, Any]) -> Iterator[Use]:
    if is_path(rule := table.get("rule")):
        yield Use("selection.rule", rule, rule, {})


def _table(section: Any) -> Mapping[str, Any]:
    return section if isinstance(section, Mapping) else {"name": section}


def _options(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key != "name"}


def paths(raw: Mapping[str, Any]) -> set[str]:
    """What building this experiment imports."""
    return {use.path for use in uses(raw) if use.path}


# what is one's own


def home() -> Path:
    """The user's own folder: $PROTOFED_HOME, else protofed in $XDG_CONFIG_HOME or ~/.config."""
    if given := os.environ.get("PROTOFED_HOME"):
        return Path(given)
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "protofed"


def _place(note: Mapping[str, Any]) -> Path:
    content = json.dumps(note, sort_keys=True, default=str)
    return home() / "trusted" / f"{hashlib.sha256(content.encode()).hexdigest()}.json"


def known(use: Use) -> bool:
    """Whether exactly this code was run here before."""
    try:
        return _place(use.note).is_file()
    except (OSError, RuntimeError):  # a file that cannot be read; nobody's home
        return False


def remember(experiment: Experiment, where: Path, tell: Callable[[str], None]) -> None:
    """Remember that the code of an experiment that the user runs is the user's own."""
    for use in uses(tomllib.loads(experiment.to_toml())):
        _remember(use, where, tell)


def _remember(use: Use, where: Path, tell: Callable[[str], None]) -> None:
    if known(use):
        return
    try:
        note = use.note
        place = _place(note)
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        about = {**note, "run": str(where.resolve()), "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        write_atomically(place, (json.dumps(about, indent=2, default=str) + "\n").encode())
        place.chmod(0o600)
    except (OSError, RuntimeError) as error:
        later = f"to open {where} later, give {option('trust', True)}"
        tell(f"that {use.name} is your own code cannot be noted ({error}): {later}")


# experiments of run folders


def experiment_of(raw: Mapping[str, Any], where: Path, trust: bool, tell: Callable[[str], None]) -> Experiment:
    """The experiment of a run's folder. Code that it names is imported only if it is the user's own, or trusted."""
    named = uses(raw)
    strange = [use for use in named if not known(use)]
    if strange and not trust:
        raise UserError(
            f"{where} names code that was not run here before: {'; '.join(use.said for use in strange)}. "
            f"Nothing of it was imported. Give {option('trust', True)} if you know where the folder comes from and "
            "want it to run."
        )
    for use in strange:
        tell(f"{'importing' if use.path else 'loading'} what {where} names: {use.said}")
        _remember(use, where, tell)
    with only_these(use.path for use in named):
        experiment = Experiment.from_dict(raw)
    made = uses(tomllib.loads(experiment.to_toml()))
    if odd := [use for use in made if (use.key, use.name) not in {(one.key, one.name) for one in named}]:
        raise UserError(f"{where}: its experiment.toml is not as a run writes it ({odd[0].said}).")
    return experiment


def trusted_experiment(
    source: str | Path,
    *overrides: str,
    trust: bool = False,
    tell: Callable[[str], None] = lambda text: None,
    folder: Path | None = None,
) -> Experiment:
    """The experiment that a user names. One in a run's folder, such as the `folder` that is resumed, belongs to that
    folder; all others are the user's own."""
    path = find(source)
    of_a_run = any((path.parent / name).exists() for name in OF_A_RUN)
    if path.name != "experiment.toml" or not (of_a_run or path == (folder or Path()) / path.name):
        return Experiment.load(source, *overrides)
    return experiment_of(override(tables_of_run(path), overrides), path, trust, tell)


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of an experiment.toml that a run or a federation wrote."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from None


def tables_of_run(path: Path) -> dict[str, Any]:
    """The tables of a run's experiment.toml, which has every key of its method. Keys that were added after the run get
    the value that the method had before."""
    tables = read_toml(path)
    method = _table(tables.get("method"))
    before = BEFORE.get(str(method.get("name")), {})
    return {**tables, "method": {**before, **method}} if before else tables


def settings_of_run(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Every key of an experiment with its value; code stays a name, and nothing is imported."""
    keys = {use.key.partition(".")[0] for use in uses(raw)} & {"method", "model"}
    own = {key: raw[key] if isinstance(raw[key], list) else dict(_table(raw[key])) for key in keys}
    with only_these(()):
        return Experiment.from_dict({key: value for key, value in raw.items() if key not in keys}).to_dict() | own


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
