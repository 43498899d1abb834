"""Checkpoints that check themselves: every file has a hash, so a flipped bit anywhere is noticed."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from protofed.errors import UserError, option
from protofed.runs.segments import RecordPlace, Seal

STATE = "state.json"  # has the hashes of all other files
SEAL = "state.sha256"  # has that of state.json; older checkpoints have none
DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError)


class StateFile(NamedTuple):
    """The content of state.json."""

    round: int
    totals: dict[str, Any]
    files: dict[str, Seal]
    segments: dict[int, Seal]


def state_files(
    round: int, totals: Mapping[str, Any], parts: Mapping[str, bytes], segments: Mapping[int, Seal]
) -> dict[str, bytes]:
    """state.json of a checkpoint with these parts and segments, and its own seal."""
    content = {
        "round": round,
        "totals": totals,
        "files": {name: Seal(len(part), _hash(part))._asdict() for name, part in parts.items()},
        "segments": {number: seal._asdict() for number, seal in segments.items()},
        "sealed": True,
    }
    text = (json.dumps(content, allow_nan=False) + "\n").encode()
    return {STATE: text, SEAL: _line(text)}


def read_state(checkpoint: Path) -> StateFile:
    """state.json as it was written; raises one of DAMAGE if it is not."""
    text, seal = (checkpoint / STATE).read_bytes(), checkpoint / SEAL
    if seal.exists() and seal.read_bytes() != _line(text):
        raise ValueError(f"{STATE} is not what was written")
    content = json.loads(text)
    if "sha256" in content:
        raise UserError(
            f"{checkpoint.parent.parent} was written by an older protofed, whose checkpoints are not read any more. "
            f"Start again with another {option('out')}."
        )
    if "sealed" in content and not seal.exists():
        raise ValueError(f"{SEAL} is missing")
    round, totals = content["round"], content["totals"]
    if type(round) is not int or checkpoint.name != f"round-{round:06d}":
        raise ValueError(f"{STATE} is of round {round!r}")
    tables = [table for table in totals.values() if isinstance(table, dict)]
    counted = [value for key, value in totals.items() if key != "finished" and not isinstance(value, dict)]
    if any(
        type(one) not in (int, float) for one in (*counted, *(value for table in tables for value in table.values()))
    ):
        raise ValueError("its totals are not numbers")
    return StateFile(
        round, totals, _seals(content["files"]), {int(k): v for k, v in _seals(content["segments"]).items()}
    )


def _seals(table: Mapping[str, Any]) -> dict[str, Seal]:
    return {name: Seal(**seal) for name, seal in table.items()}


def sealed_part(checkpoint: Path, name: str, about: StateFile) -> bytes:
    """A file of a checkpoint, as it was written."""
    content = (checkpoint / name).read_bytes()
    if Seal(len(content), _hash(content)) != about.files[name]:
        raise ValueError(f"{name} is not what was written")
    return content


def verify_file(path: Path, seal: Seal) -> None:
    """Raise ValueError unless a file, which may be large, is as it was written."""
    with open(path, "rb") as file:
        if Seal(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()) != seal:
            raise ValueError(f"{path.name} is not what was written")


def inside(place: RecordPlace, about: StateFile) -> RecordPlace:
    """Raise ValueError unless a client's record lies inside its segment."""
    if place.offset < 0 or place.length < 1 or place.offset + place.length > about.segments[place.segment].bytes:
        raise ValueError("a client's state is said to lie where there is none")
    return place


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _line(content: bytes) -> bytes:
    return f"{_hash(content)}\n".encode()
