"""The files of experiments: where they are, what they build on, and changes from the command line."""

import copy
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from protofed.errors import UserError, did_you_mean

EXTENDS, DEPTH = "extends", 8  # the key that names a base experiment, and the longest chain of them


SECTIONS = (
    "method", "model", "data", "partition", "optimizer", "engine", "evaluate", "record", "join", "robust", "attack",
    "privacy", "selection", "stopping", "skew",
    "stragglers", "incremental",
)  # fmt: skip
SHORT = ("method", "model", "data", "partition", "optimizer", "engine")  # "method=fedavg" is "method.name=fedavg"
NAMED = ("method", "model", "partition")  # sections whose keys depend on their name


def override(raw: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Apply "key.sub=value". Naming another method, model, partition or preset starts from its own defaults."""
    return _changed(raw, [_pair(text) for text in overrides])


def _changed(raw: Mapping[str, Any], pairs: Sequence[tuple[list[str], Any]]) -> dict[str, Any]:
    result = copy.deepcopy(dict(raw))
    for keys, value in pairs:
        section, is_name = keys[0], keys[1:] == ["name"] or keys == [keys[0]]
        if section in NAMED and is_name and name_in(result.get(section)) != value:
            result[section] = {"name": value}
    if any(keys == ["method", "preset"] for keys, _ in pairs):
        named = name_in(result.get("method"))
        result["method"] = {"name": named} if named else {}
    for keys, value in pairs:
        if len(keys) == 1 and keys[0] in SHORT and not _tables(value):
            keys = [keys[0], "name"]
        table: Any = result
        for key in keys[:-1]:
            inner = table.get(key, {})
            inner = {"name": inner} if isinstance(inner, str) and key in SECTIONS else inner
            if not isinstance(inner, dict):
                raise UserError(f"{'.'.join(keys)} = {value!r} cannot be set: {key} is {inner!r}, not one table.")
            table[key] = table = inner
        table[keys[-1]] = value
    return result


def _tables(value: Any) -> bool:
    """Whether a value is a table, or a list of tables, such as [[model]]."""
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(one, dict) for one in value))


def read_tables(source: str | Path) -> dict[str, Any]:
    """The tables of an experiment, given by path or name, merged with those of the experiments it extends."""
    return _read(find(source), ())


def _read(path: Path, before: tuple[Path, ...]) -> dict[str, Any]:
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not valid TOML: {error}.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    if EXTENDS not in raw:
        return raw
    base = _base(path, raw.pop(EXTENDS))
    chain = (*before, path.resolve())
    if base.resolve() in chain or len(chain) > DEPTH:
        raise UserError(f"{path}: extends = {base.stem!r} leads back here or through more than {DEPTH} files.")
    return _changed(_read(base, chain), list(_pairs(raw)))


def _base(path: Path, name: Any) -> Path:
    """The file that another one extends: one next to it, or a shipped experiment. Never a file elsewhere on disk."""
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        raise UserError(
            f"{path}: extends = {name!r} should name a file in the same folder, such as 'base.toml', or a shipped "
            "experiment, such as 'fedproto/mnist_n3'."
        )
    beside = path.parent / (name if name.endswith(".toml") else f"{name}.toml")
    shipped_one = configs() / f"{name.removesuffix('.toml')}.toml"
    if not beside.is_file() and not shipped_one.is_file():
        raise UserError(
            f"{path}: extends = {name!r}, but there is neither {beside} nor a shipped experiment of that name. "
            f"{did_you_mean(name, shipped_experiments())}"
        )
    return beside if beside.is_file() else shipped_one


def _pairs(raw: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[list[str], Any]]:
    """Every value in nested tables, with its keys."""
    for key, value in raw.items():
        if isinstance(value, dict):
            yield from _pairs(value, (*above, key))
        else:
            yield [*above, key], value


def _pair(text: str) -> tuple[list[str], Any]:
    key, equals, value = text.partition("=") if isinstance(text, str) else ("", "", "")
    if not equals or not key.strip():
        raise UserError(f"{text!r} is not an override: write key=value, such as method.lam=0.5 or rounds=10.")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()  # a bare word is a string
    keys = key.strip().split(".")
    named = keys[-1] in ("name", "path") or (len(keys) == 1 and keys[0] in SHORT)
    return keys, value.strip() if named and isinstance(parsed, float) else parsed  # a file may be called nan


def name_in(section: Any) -> Any:
    return section.get("name") if isinstance(section, dict) else section


def configs() -> Path:
    """The folder of the shipped experiments: in the package, or next to it in a checkout."""
    here = Path(__file__).parents[1]
    return next((p for p in (here / "configs", here.parent.parent / "configs") if p.is_dir()), here / "configs")


def shipped_experiments() -> list[str]:
    """Names of the shipped experiments."""
    return sorted(p.relative_to(configs()).with_suffix("").as_posix() for p in configs().rglob("*.toml"))


def _files_near(path: Path) -> str:
    """The .toml files in a path's folder, or what to do if there are none."""
    there = sorted(str(other) for other in path.parent.glob("*.toml"))
    if there:
        return did_you_mean(str(path), there)
    return "Write one (docs/experiment.md), or name a shipped one: protofed list experiments."


def find(source: str | Path) -> Path:
    """The file of an experiment, given by path or name."""
    if not isinstance(source, str | Path):
        raise UserError(
            f"an experiment is named by a path or a name such as 'demo', not by {type(source).__name__}. "
            "Of a dict of its keys, use Experiment.from_dict."
        )
    for path in (Path(source), configs() / f"{source}.toml"):
        if path.is_file():
            return path
    if Path(source).is_dir():
        path, what = Path(source, "experiment.toml"), f"{str(source)!r} is a folder, not an experiment."
        if not path.is_file():
            raise UserError(f"{what} Name a .toml file, or a shipped experiment ('protofed list experiments').")
        raise UserError(f"{what} Name {path} for the experiment of this run.")
    if str(source).endswith(".toml") and not str(source).startswith("configs/"):
        raise UserError(f"there is no file {str(source)!r}. {_files_near(Path(source))}")
    hint = did_you_mean(str(source).removeprefix("configs/").removesuffix(".toml"), shipped_experiments())
    raise UserError(f"there is no experiment {str(source)!r}, neither as a file nor as a shipped one. {hint}")
