"""Objects named by import path: "mypackage.module:Name"."""

import contextlib
import hashlib
import importlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from protofed.errors import UserError

PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
NOT_PATHS = ("hf:", "torchvision:", "memory:")  # prefixes that mean something else
MEMORY = "memory:"  # handed in by a script: only that script can hand it in again

T = TypeVar("T")

_only: ContextVar[frozenset[str] | None] = ContextVar("_only", default=None)  # the paths that may be imported
_added: set[str] = set()  # folders that are on Python's path because of us


def is_path(name: Any) -> TypeGuard[str]:
    """Whether a name is an import path."""
    return isinstance(name, str) and bool(PATH.fullmatch(name)) and not name.startswith(NOT_PATHS)


class Catalogue(Mapping[str, T]):
    """What comes with protofed, by name. A file is imported when its name is looked up, so a client of a federation
    loads only its own method and model."""

    def __init__(self, places: Mapping[str, str]) -> None:
        """`places`: the import path of every name."""
        self.places = dict(places)

    def __getitem__(self, name: str) -> T:
        return self._at(self.places[name])

    def _at(self, place: str) -> T:
        module, _, attribute = place.partition(":")
        found: T = getattr(importlib.import_module(module), attribute)
        return found

    def defined(self, attribute: str) -> T:
        """The class with this name, for the `__getattr__` of the package that has this table."""
        for place in self.places.values():
            if place.endswith(f":{attribute}"):
                return self._at(place)
        raise AttributeError(f"there is no {attribute} here")

    def __contains__(self, name: object) -> bool:
        return name in self.places

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def name_of(self, kind: type) -> str | None:
        """The name under which a class is listed here. Nothing is imported."""
        place = f"{kind.__module__}:{kind.__qualname__}"
        return next((name for name, known in self.places.items() if known == place), None)


@contextlib.contextmanager
def only_these(paths: Iterable[str]) -> Iterator[None]:
    """Inside this context, only these paths are imported: for files that somebody else may have written."""
    token = _only.set(frozenset(paths))
    try:
        yield
    finally:
        _only.reset(token)


@contextlib.contextmanager
def _here_first() -> Iterator[None]:
    """Put the working folder on Python's path, as `python -m` does: first during a lookup, last afterwards, so that no
    file in it is taken for a library that is imported later."""
    here = str(Path.cwd())
    if "" in sys.path or (here in sys.path and here not in _added):
        yield
        return
    _added.add(here)
    sys.path[:] = [here, *(folder for folder in sys.path if folder != here)]
    try:
        yield
    finally:
        sys.path[:] = [*(folder for folder in sys.path if folder != here), here]


def imported(key: str, path: str) -> Any:
    """The object at an import path."""
    allowed = _only.get()
    if allowed is not None and path not in allowed:
        raise UserError(f"{key} = {path!r} is code, which is not imported here: a run's folder is read as data.")
    module, _, name = path.partition(":")
    try:
        with _here_first():
            found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            raise UserError(
                f"{key} = {path!r}: there is no module {error.name}. "
                "Run from the folder that it lies in, or install it."
            ) from None
        raise UserError(f"{key} = {path!r} needs {error.name}, which is not installed.") from None
    except Exception as error:
        raise UserError(f"{key} = {path!r}: importing it raises {error_in_words(error)}.") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise UserError(f"{key} = {path!r}: {module} has no {part}.")
        found = getattr(found, part)
    return found


def own_function(key: str, path: str, what: str) -> Callable[..., Any]:
    """A function of the user's own; `what` it does."""
    function = imported(key, path)
    if not callable(function):
        raise UserError(f"{key} = {path!r} is {type(function).__name__}, not a function {what}.")
    found: Callable[..., Any] = function
    return found


def files_of(path: str) -> list[Path]:
    """The files that importing this path would begin with: those of its packages and its module. Nothing is
    imported."""
    found: list[Path] = []
    where: list[str] | None = None
    names = path.partition(":")[0].split(".")
    for number in range(len(names)):
        spec = _spec(".".join(names[: number + 1]), where)
        if spec is None:
            return found
        found += [Path(spec.origin)] if spec.has_location and spec.origin else []
        inside = spec.submodule_search_locations
        where = list(getattr(inside, "_path", inside)) if inside is not None else []
    return found


def _spec(name: str, where: list[str] | None) -> Any:
    with _here_first():
        for finder in sys.meta_path:
            spec = finder.find_spec(name, where) if hasattr(finder, "find_spec") else None
            if spec is not None:
                return spec
    return None


def code_fingerprint(path: str) -> str:
    """A hash of the file behind an import path as it is now; empty if that is not a Python file."""
    module = path.partition(":")[0].rpartition(".")[2]
    try:
        files = files_of(path)
        last = files[-1] if files and module in (files[-1].name.partition(".")[0], files[-1].parent.name) else None
        return hashlib.sha256(last.read_bytes()).hexdigest()[:12] if last else ""
    except (OSError, ImportError, ValueError):
        return ""


def path_of(thing: Any) -> str | None:
    """The import path of a class or function, if it has one that leads back to it."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "")
    path = f"{module}:{name}"
    if not module or not is_path(path):
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return path if found is thing else None


def error_in_words(error: BaseException) -> str:
    """An error of the user's own code in a few words: its type, its first line, and where it was raised."""
    said = (str(error).strip() or "no reason given").splitlines()[0].rstrip(".")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if os.sep + "protofed" + os.sep not in f.filename]
    place = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith("<")]
    where = f", {Path(place[-1].filename).name} line {place[-1].lineno}" if place else ""
    return f"{type(error).__name__}: {said}{where}"
