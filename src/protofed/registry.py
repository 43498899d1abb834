"""Which methods there are: those of protofed, of installed packages (entry points), and by import path."""

import inspect
from importlib.metadata import entry_points

from protofed.errors import UserError, nearest
from protofed.importing import imported, is_path, path_of
from protofed.method import Method
from protofed.methods import METHODS

GROUP = "protofed.methods"  # the entry points under which installed packages offer methods


def find_method(name: object, key: str = "method.name") -> type[Method]:
    """The class of a method: one of METHODS, of an entry point, or by import path ("mymethods.root:RootWeighted")."""
    if isinstance(name, str) and name in METHODS:
        return METHODS[name]
    offered = {point.name: point.value for point in entry_points(group=GROUP)}
    path = offered.get(str(name), name)
    if not isinstance(path, str) or not is_path(path):
        raise UserError(f"{key} = {name!r} is unknown. {nearest(str(name), [*METHODS, *offered])}")
    kind = imported(key, path)
    if not isinstance(kind, type) or not issubclass(kind, Method) or inspect.isabstract(kind):
        lacking = ", ".join(sorted(getattr(kind, "__abstractmethods__", ())))
        raise UserError(
            f"{key} = {name!r} is no method: it should be a class that extends protofed.Method"
            + (f" and defines {lacking}." if lacking else ".")
        )
    return kind


def is_method(name: str) -> bool:
    """Whether `find_method` can be asked for it: the name of a method, or an import path."""
    return name in METHODS or is_path(name) or name in {point.name for point in entry_points(group=GROUP)}


def name_of(kind: type[Method]) -> str:
    """By which name `find_method` finds a class."""
    for name, known in METHODS.items():
        if known is kind:
            return name
    path = path_of(kind)
    if path is None:
        raise UserError(
            f"{kind.__name__} is defined inside of a function, where no run can find it again. "
            "Define it at the top of a file."
        )
    return next((point.name for point in entry_points(group=GROUP) if point.value == path), path)


def all_methods() -> dict[str, type[Method]]:
    """Those that come with protofed, and those of entry points; one that cannot be loaded is left out."""
    found = dict(METHODS)
    for point in entry_points(group=GROUP):
        try:
            found.setdefault(point.name, find_method(point.name))
        except UserError:
            continue
    return found
