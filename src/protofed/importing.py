"""Things of the user's own, named by import path: "mypackage.module:Name"."""

import hashlib
import importlib
import importlib.util
import os
import re
import sys
import traceback
from pathlib import Path
from typing import Any

from protofed.errors import UserError

PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
NOT_PATHS = ("hf:", "torchvision:", "memory:")  # prefixes that mean something else
MEMORY = "memory:"  # handed in by a script: only that script can hand it in again


def is_path(name: Any) -> bool:
    """Whether a name is an import path."""
    return isinstance(name, str) and bool(PATH.fullmatch(name)) and not name.startswith(NOT_PATHS)


def imported(key: str, path: str) -> Any:
    """What an import path names; the folder one works in counts, as with `python -m`."""
    module, _, name = path.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            raise UserError(
                f"{key} = {path!r}: there is no module {error.name}. "
                "Run from the folder that it lies in, or install it."
            ) from None
        raise UserError(f"{key} = {path!r} needs {error.name}, which is not installed.") from None
    except Exception as error:
        raise UserError(f"{key} = {path!r}: importing it raises {told(error)}.") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise UserError(f"{key} = {path!r}: {module} has no {part}.")
        found = getattr(found, part)
    return found


def fingerprint(path: str) -> str:
    """Of the file that an import path leads to, as it is now; empty where that is not a file of Python's."""
    try:
        found = importlib.util.find_spec(path.partition(":")[0])
        return hashlib.sha256(Path(found.origin or "").read_bytes()).hexdigest()[:12] if found else ""
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


def told(error: BaseException) -> str:
    """An error of the user's own code in a few words: which, where, and the first line of what it says."""
    said = (str(error).strip() or "no reason given").splitlines()[0].rstrip(".")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if os.sep + "protofed" + os.sep not in f.filename]
    place = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith("<")]
    where = f", {Path(place[-1].filename).name} line {place[-1].lineno}" if place else ""
    return f"{type(error).__name__}: {said}{where}"
