"""Records in files that only grow: a file is written to its end, sealed with its hash, and never changed again."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from io import FileIO
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from protofed.atomic import sync_folder

FILES = "[0-9]*.bin"


class RecordPlace(NamedTuple):
    """Where a record is."""

    segment: int
    offset: int
    length: int


class Seal(NamedTuple):
    """What a file has to be."""

    bytes: int
    sha256: str


class _Open(NamedTuple):
    """The segment that is being written, how much of it is whole, and the hash of that."""

    number: int
    file: FileIO
    end: int
    hash: Any


class Segments:
    """The segments of a folder: any number of sealed ones, and one that is being written."""

    def __init__(self, path: Path, sealed: Mapping[int, Seal] | None = None) -> None:
        self.path = path
        self.sealed = dict(sealed or {})
        self._open: _Open | None = None  # replaced whole, so that an interruption finds the old one or the new one

    def append(self, record: bytes) -> RecordPlace:
        """Append a record; it counts only once all of it is written."""
        now = self._open or self._start()
        done = 0
        while done < len(record):
            done += os.pwrite(now.file.fileno(), memoryview(record)[done:], now.end + done)
        after = now.hash.copy()
        after.update(record)
        self._open = now._replace(end=now.end + len(record), hash=after)
        return RecordPlace(now.number, now.end, len(record))

    def _start(self) -> _Open:
        self.path.mkdir(parents=True, exist_ok=True)
        number = 1 + max([*self.sealed, *map(segment_number, self.path.glob(FILES))], default=0)
        return _Open(number, FileIO(_scratch(self.file(number)), "w"), 0, hashlib.sha256())

    def read(self, places: Iterable[RecordPlace]) -> Iterator[tuple[RecordPlace, bytes]]:
        """The records there, file by file."""
        for number, there in groupby(sorted(places), lambda place: place.segment):
            path = self.file(number)
            with open(path if path.exists() else _scratch(path), "rb") as file:
                for place in there:
                    file.seek(place.offset)
                    yield place, file.read(place.length)

    def size(self, number: int) -> int:
        return self.sealed[number].bytes if number in self.sealed else self.written

    @property
    def written(self) -> int:
        """Bytes of the open segment."""
        return self._open.end if self._open else 0

    def seal(self) -> None:
        """Put what was written on the disk under its final name, where it stays as it is."""
        if self._open is None:
            return
        number, file, end, hash = self._open
        os.ftruncate(file.fileno(), end)  # without what an interrupted write left behind
        os.fsync(file.fileno())
        path = self.file(number)
        if _scratch(path).exists():  # else sealing was interrupted right after this
            _scratch(path).rename(path)
        sync_folder(self.path)
        self.sealed[number] = Seal(end, hash.hexdigest())
        self._open = None
        file.close()

    def keep(self, numbers: Iterable[int]) -> None:
        """Forget all sealed segments except these; their files are left to others that use them."""
        self.sealed = {number: self.sealed[number] for number in sorted(numbers)}

    def close(self) -> None:
        """Discard what was not sealed."""
        if self._open is not None:
            _scratch(self.file(self._open.number)).unlink(missing_ok=True)
            self._open.file.close()
            self._open = None

    def file(self, number: int) -> Path:
        return self.path / f"{number:08d}.bin"


def _scratch(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def segment_number(path: Path) -> int:
    return int(path.stem)
