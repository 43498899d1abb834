"""Arrays and dicts that numpy kept as Python objects, read without executing anything.

`np.savez(file, data={"x": ..., "y": ...})` stores a pickle, and unpickling runs whatever its writer chose. This reads
the pickle's instructions one by one instead, and knows only those that build dicts, lists, tuples, numbers, text and
numpy arrays of numbers. Anything else is refused, and nothing is ever imported or called.
"""

import io
import pickletools
import struct
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from protofed.errors import UserError

LAYERS = 8  # of dicts, lists and tuples in each other
LARGEST = 2**34  # bytes of a file, unpacked
NUMBERS = "biuf"  # kinds of arrays that are read
HOMES = ("numpy", "numpy.core.multiarray", "numpy._core.multiarray", "numpy.core.numeric", "numpy._core.numeric")
NAMES = ("_reconstruct", "ndarray", "dtype", "scalar", "_frombuffer")


class Strange(Exception):
    """The pickle holds something else."""


class _Name(str):
    """A function of numpy's that a pickle calls to build an array; it is never called."""


class _Kind:
    """A dtype: its letter and size, and then its byte order."""

    def __init__(self, code: Any) -> None:
        if not isinstance(code, str) or not (code == "O8" or (code[:1] in NUMBERS and code[1:] in "1248" and code[1:])):
            raise Strange(f"an array of type {code!r:.40}")
        self.code, self.order = code, "="

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.code).newbyteorder(self.order)  # type: ignore[arg-type]


class _Array:
    """An array that is filled in later: of numbers, or of the objects in a list."""

    def __init__(self) -> None:
        self.value: Any = None

    def fill(self, shape: Any, kind: Any, data: Any, order: str) -> None:
        whole = isinstance(shape, tuple) and all(type(side) is int and side >= 0 for side in shape)
        if not whole or not isinstance(kind, _Kind):
            raise Strange("an array without a shape or a type")
        if kind.code == "O8":
            if not isinstance(data, list) or len(shape) > 1 or len(data) != (shape[0] if shape else 1):
                raise Strange("an array of objects of several dimensions")
            self.value = data if shape else data[0]
            return
        if not isinstance(data, bytes):
            raise Strange("an array without bytes")
        self.value = np.frombuffer(data, kind.dtype).reshape(shape, order="F" if order == "F" else "C")


class _Mark:
    """A mark: where a list, a tuple or the contents of a dict begin."""


def read_objects(path: Path) -> dict[str, Any]:
    """The arrays of a .npz by name; objects become dicts, lists, tuples, numbers, text and arrays."""
    found: dict[str, Any] = {}
    with zipfile.ZipFile(path) as archive:
        if (size := sum(member.file_size for member in archive.infolist())) > LARGEST:
            raise UserError(f"{path}: unpacked it has {size:,} bytes, and {LARGEST:,} are read at most. Split it.")
        for member in archive.namelist():
            if member.endswith(".npy"):
                found[member.removesuffix(".npy")] = _read_array(archive.read(member), path)
    return found


def _read_array(content: bytes, path: Path) -> Any:
    """One .npy: a header, then numbers, or a pickle."""
    file = io.BytesIO(content)
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if dtype.hasobject:
        try:
            return plain_objects(content[file.tell() :])
        except Strange as error:
            raise UserError(
                f"{path} holds {error}, which is not read: nothing in it was run. Where the file was made, save plain "
                "arrays: np.savez(path, x=data['x'], y=data['y'])."
            ) from None
    array = np.frombuffer(content, dtype, offset=file.tell())
    return array.reshape(shape, order="F" if fortran else "C")


def plain_objects(pickled: bytes) -> Any:
    """What a pickle describes, if it consists only of plain values."""
    try:
        return _plain(_Reader().read(pickled), LAYERS, {})
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, struct.error, OverflowError) as error:
        raise Strange(f"a damaged pickle ({type(error).__name__})") from None


class _Reader:
    """Follows a pickle's instructions on a stack of its own."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def read(self, pickled: bytes) -> Any:
        for code, argument, _ in pickletools.genops(pickled):
            if code.name == "STOP":
                return self.stack.pop()
            if code.name in SIMPLE:
                self.stack.append(SIMPLE[code.name](argument))
            elif code.name in STEPS:
                STEPS[code.name](self, argument)
            elif code.name not in ("PROTO", "FRAME"):
                raise Strange(f"a Python object (instruction {code.name})")
        raise ValueError("no end")

    def since_mark(self) -> list[Any]:
        """Everything above the last mark; the mark is removed too."""
        at = len(self.stack) - 1
        while not isinstance(self.stack[at], _Mark):  # from above: each item is looked at once
            if at == 0:
                raise ValueError("no mark")
            at -= 1
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items

    def memoize(self, place: int | None) -> None:
        self.memo[len(self.memo) if place is None else place] = self.stack[-1]

    def together(self, many: int | None) -> None:
        items = self.since_mark() if many is None else [self.stack.pop() for _ in range(many)][::-1]
        self.stack.append(tuple(items))

    def extend(self, items: Sequence[Any]) -> None:
        self._top(list).extend(items)

    def set_items(self, items: Sequence[Any]) -> None:
        if not all(isinstance(key, str | int) for key in items[::2]):
            raise Strange("a dict whose keys are not text or numbers")
        self._top(dict).update(zip(items[::2], items[1::2], strict=True))

    def _top(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise ValueError("out of order")
        return self.stack[-1]

    def name(self, module: Any, name: Any) -> None:
        if module not in HOMES or name not in NAMES:
            raise Strange(f"a Python object ({module!s:.60}.{name!s:.60})")
        self.stack.append(_Name(name))

    def reduce(self) -> None:
        """Numpy's ways to make a type, an empty array, a number, or an array from bytes."""
        given, name = self.stack.pop(), self.stack.pop()
        if not isinstance(name, _Name) or not isinstance(given, tuple):
            raise Strange("a call of something that is not numpy's")
        made = _Array()
        if name == "dtype":
            self.stack.append(_Kind(given[0]))
            return
        if name == "scalar":
            made.fill((), given[0], given[1], "C")
        elif name == "_frombuffer":
            made.fill(given[2], given[1], given[0], given[3])
        elif name != "_reconstruct":
            raise Strange(f"a call of numpy's {name}")
        self.stack.append(made)

    def build(self) -> None:
        """Fill a type or an array with this state."""
        state, made = self.stack.pop(), self.stack[-1]
        if isinstance(made, _Kind):
            if state[1] not in ("<", ">", "|", "=") or any(part is not None for part in state[2:5]):
                raise Strange("an array of records")
            made.order = state[1]
        elif isinstance(made, _Array):
            _, shape, kind, fortran, data = state
            made.fill(shape, kind, data, "F" if fortran else "C")
        else:
            raise Strange("a Python object")


def _as_it_is(argument: Any) -> Any:
    return argument


SIMPLE: dict[str, Callable[[Any], Any]] = {
    "MARK": lambda _: _Mark(), "EMPTY_DICT": lambda _: {}, "EMPTY_LIST": lambda _: [], "EMPTY_TUPLE": lambda _: (),
    "NONE": lambda _: None, "NEWTRUE": lambda _: True, "NEWFALSE": lambda _: False,
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"), _as_it_is),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"), _as_it_is),
    **dict.fromkeys(("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"), _as_it_is),
    "BYTEARRAY8": bytes,
}  # fmt: skip
STEPS: dict[str, Callable[[_Reader, Any], None]] = {
    **dict.fromkeys(("MEMOIZE", "BINPUT", "LONG_BINPUT"), _Reader.memoize),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda reader, place: reader.stack.append(reader.memo[place])),
    "TUPLE": lambda reader, _: reader.together(None), "TUPLE1": lambda reader, _: reader.together(1),
    "TUPLE2": lambda reader, _: reader.together(2), "TUPLE3": lambda reader, _: reader.together(3),
    "APPEND": lambda reader, _: reader.extend([reader.stack.pop()]),
    "APPENDS": lambda reader, _: reader.extend(reader.since_mark()),
    "SETITEM": lambda reader, _: reader.set_items([reader.stack.pop(-2), reader.stack.pop()]),
    "SETITEMS": lambda reader, _: reader.set_items(reader.since_mark()),
    "GLOBAL": lambda reader, both: reader.name(*both.split(" ", 1)),
    "STACK_GLOBAL": lambda reader, _: reader.name(reader.stack.pop(-2), reader.stack.pop()),
    "REDUCE": lambda reader, _: reader.reduce(), "BUILD": lambda reader, _: reader.build(),
}  # fmt: skip


def _plain(item: Any, layers: int, done: dict[int, Any]) -> Any:
    """The same without placeholders; an object that occurs twice is made once."""
    if isinstance(item, _Array | list | tuple | dict):
        if not layers:
            raise Strange(f"more than {LAYERS} lists or dicts in each other")
        if id(item) not in done:
            if isinstance(item, _Array):
                made: Any = item.value if isinstance(item.value, np.ndarray) else _plain(item.value, layers - 1, done)
            elif isinstance(item, dict):
                made = {key: _plain(value, layers - 1, done) for key, value in item.items()}
            else:
                made = type(item)(_plain(value, layers - 1, done) for value in item)
            done[id(item)] = made
        return done[id(item)]
    if isinstance(item, _Name | _Kind | _Mark):
        raise Strange("a Python object that is not data")
    return item
