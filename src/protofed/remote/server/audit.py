"""audit.jsonl: what happened in a federation, one line an event, each with the hash of the line before.

The chain proves that no line within it was changed, removed, added or moved since the last line was written, to whoever
has noted down a later head (the hash of the last line). It does not prove that what a line says is true, and somebody
who may write the file can write a whole other one: compare its head with one that was noted down elsewhere.
"""

import errno
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

FIRST = "0" * 64  # what stands for the line before the first
CUT = "a line was cut off by a crash"
CHANGED = "the log was changed"
CHUNK = 65536
DEEPEST = 8  # tables and lists within each other that are shown; the server writes three


class Head(NamedTuple):
    """The last line: its number, and its hash."""

    number: int
    hash: str


class BrokenChain(Exception):
    """The chain does not hold; `line` says where, counted from 1."""

    def __init__(self, line: int, why: str) -> None:
        super().__init__(f"line {line}: {why}")
        self.line = line


class Audit:
    """A log that is only ever appended to, by one process at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        self._end = -1  # where the file ended when it was last looked at
        self._head = Head(0, FIRST)
        self.synced = self._head  # what survives a power cut
        self._locked(lambda: None)
        self.synced = self._head

    def add(self, event: str, *, sync: bool = True, **about: Any) -> None:
        """Append a line; with `sync` it and all before it are on disk when this returns."""
        self._locked(lambda: self._append(event, about))
        if sync:
            os.fsync(self._file)
            self.synced = self._head

    def check(self, known: Head | None) -> str | None:
        """What is wrong with the log as it is found, which is also noted in it; None where nothing is.

        `known` is a head that must be in it. Else whoever cuts off the end of a log and lets the server go on with the
        rest would leave no trace.
        """
        try:
            verify_log(self.path, *([] if known is None else [known]))
        except BrokenChain as broken:
            missing: dict[str, Any] = {} if known is None else {"expected": known.number, "hash": known.hash}
            self.add(CHANGED, reason=str(broken), **missing)
            return str(broken)
        return None

    def close(self) -> None:
        os.close(self._file)

    def _locked(self, work: Any) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            if os.fstat(self._file).st_size != self._end:
                self._look()
            work()
        except OSError:  # such as a full disk: a part of a line may be there, which is noted with the next one
            self._end = -1
            raise
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _append(self, event: str, about: dict[str, Any]) -> None:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
        entry = {"n": self._head.number + 1, "time": f"{at}Z", "event": event, **about, "before": self._head.hash}
        line = json.dumps(entry, ensure_ascii=True, allow_nan=False).encode()
        if os.write(self._file, line + b"\n") <= len(line):  # the kernel writes as much as there is room for
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        self._head = Head(self._head.number + 1, _hash(line))
        self._end = os.fstat(self._file).st_size

    def _look(self) -> None:
        """Find the last whole line; what a crash left of another is closed, and noted in a line of its own."""
        self._end = os.fstat(self._file).st_size
        broken, last = self._tail()
        entry = _entry(last) if last else None
        self._head = Head(entry["n"], _hash(last)) if entry else Head(0, FIRST)
        if broken:
            os.write(self._file, b"\n")
            self._end += 1
        if broken and (entry := _entry(broken)):
            self._head = Head(entry["n"], _hash(broken))  # only its line break was missing
        elif broken:
            self._append(CUT, {"bytes": len(broken), "sha256": _hash(broken)})

    def _tail(self) -> tuple[bytes, bytes]:
        """What stands behind the last line break, and the last whole line."""
        found, at = b"", self._end
        while at > 0 and found.count(b"\n") < 3:
            step = min(at, max(CHUNK, len(found)))
            at -= step
            found = os.pread(self._file, step, at) + found
        *lines, rest = found.split(b"\n")
        for line in reversed(lines):  # a closed scrap may stand between
            if line and _entry(line) is not None:
                return rest, line
        return rest, b""


def read_log(path: Path) -> Iterator[tuple[int, bytes, dict[str, Any] | None]]:
    """Line numbers, lines and entries; None for a line that a crash cut off."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            yield number, line, _entry(line.rstrip(b"\n"))


def describe_entry(entry: dict[str, Any]) -> str:
    """An entry as a line for people; digests are shown by their first letters, and settings are left out."""
    words = [_short(entry.get("time", "?")), f"{entry['n']:>5}", entry["event"]]
    for key, value in entry.items():
        if key not in ("n", "time", "event", "before", "settings", "clients") or (
            key == "clients" and "round" in entry
        ):
            words.append(f"{key}={_short(value)}")
    return "".join(c if c.isprintable() else " " for c in "  ".join(words))


def _short(value: Any, deep: int = 0) -> str:
    if isinstance(value, dict | list) and deep == DEEPEST:
        return "..."
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_short(part, deep + 1)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return " ".join(_short(part, deep + 1) for part in value)
    if isinstance(value, float):
        return f"{value:.3g}"
    text = str(value)
    return text[:12] if len(text) == 64 and " " not in text else text


def verify_log(path: Path, *known: Head | str) -> tuple[Head, list[str]]:
    """The head of a log whose chain holds, and remarks; Broken where it does not hold.

    `known` are heads that must be in it: as status.json has one, or a hash that somebody noted down.
    """
    head, remarks, last, changed = Head(0, FIRST), list[str](), 0, 0
    scrap: bytes | None = None
    heads: dict[str, int] = {FIRST: 0}
    for last, raw, entry in read_log(path):
        line = raw.rstrip(b"\n")
        if entry is None:
            if scrap is not None:
                raise BrokenChain(last, "it cannot be read, and neither can the line before")
            scrap = line
            continue
        follows = entry["before"] == head.hash and entry["n"] == head.number + 1
        if not follows and scrap is None:
            raise BrokenChain(last, f"it does not follow entry {head.number}: a line was changed, removed or added")
        if scrap is not None:
            if not follows or entry.get("sha256") != _hash(scrap) or entry["event"] != CUT:
                raise BrokenChain(last - 1, "it cannot be read, and no entry says that a crash cut it off")
            remarks.append(f"line {last - 1} was cut off by a crash, as entry {entry['n']} says")
            scrap = None
        head = Head(entry["n"], _hash(line))
        heads[head.hash] = head.number
        changed = changed or (last if entry["event"] == CHANGED else 0)
    if scrap is not None and raw.endswith(b"\n"):
        raise BrokenChain(last, "it cannot be read")
    if scrap is not None:
        remarks.append(f"line {last} was cut off by a crash; the server's next start notes it")
    if changed:
        raise BrokenChain(
            changed, "the server found here, when it started, that lines before this one had been changed"
        )
    for one in known:
        if isinstance(one, str) and one not in heads:
            raise BrokenChain(last, f"no entry has the hash {one[:80]}: what was noted down is not in this log")
        if isinstance(one, Head) and heads.get(one.hash) != one.number:
            raise BrokenChain(last, f"status.json names an entry {one.number} that is not there: the end was cut off")
    return head, remarks


def _entry(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(entry, dict) and type(entry.get("n")) is int and isinstance(entry.get("before"), str)
    return entry if whole and isinstance(entry.get("event"), str) else None


def _hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()
