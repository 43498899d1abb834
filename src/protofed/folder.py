"""A run is a folder: written atomically, killed at any moment without loss, and read by every report."""

import contextlib
import fcntl
import hashlib
import io
import json
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from protofed.atomic import sync_folder, write_atomically, write_synced
from protofed.engines.wire import decode, encode
from protofed.errors import UserError
from protofed.experiment import Experiment
from protofed.method import Tree
from protofed.segments import FILES, Place, Seal, number_of
from protofed.store import ClientStore, fits

KEPT = 2  # checkpoints: the newest, and one to fall back to
MEASURED = ("accuracy", "global_accuracy", "pm_", "seconds", "bytes_", "params_", "drift", "margin")  # keys of numbers
CLIENTS = "clients"  # the folder of their states, beside the checkpoints that refer to them


class Busy(UserError):
    """Another process is writing this run."""


def new_folder(name: str, resume: bool) -> Path:
    """runs/NAME, or NAME-2, NAME-3, ...: a new one, or when resuming the newest there is."""
    taken = [Path("runs") / name]
    while taken[-1].exists():
        taken.append(Path("runs") / f"{name}-{len(taken) + 1}")
    return taken[-2] if resume and len(taken) > 1 else taken[-1]


class State(NamedTuple):
    """All that a run needs to go on: randomness is computed from the seed and the round, so the round says it all."""

    round: int  # rounds done
    server: Tree
    clients: ClientStore
    totals: dict[str, Any]  # what is added up over the run


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no number")


def _checked(table: Any) -> dict[str, Any]:
    """A table whose measured numbers are numbers."""
    if not isinstance(table, dict):
        raise ValueError("it is no table")
    for key, value in table.items():
        inner = value.values() if key.endswith("_by") and isinstance(value, dict) else [value]
        inner = value if key.endswith("_per_class") and isinstance(value, list) else inner
        if key.startswith(MEASURED) and any(type(one) not in (int, float, NoneType) for one in inner):
            raise ValueError(f"{key} is {value!r}, which is no number")
    return table


class RunFolder:
    """One run on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def file(self, name: str) -> Path:
        return self.path / name

    @property
    def exists(self) -> bool:
        return self.file("experiment.toml").is_file()

    @property
    def finished(self) -> bool:
        return self.file("summary.json").is_file()

    def check(self, experiment: Experiment, resume: bool) -> None:
        """Raise where this folder must not be written: nothing is ever overwritten."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"--out {self.path} is a file. Name a folder.")
        if not self.exists:
            if self.path.is_dir() and any(not p.name.startswith(".") for p in self.path.iterdir()):
                raise UserError(f"--out {self.path} holds files that are no run. Name another folder with --out.")
            return
        if not resume:
            what = "a finished run" if self.finished else "an unfinished run"
            remedy = "Name another folder with --out" + ("" if self.finished else ", or continue it with --resume")
            raise UserError(f"--out {self.path} already holds {what}. {remedy}.")
        before = Experiment.from_dict(self.experiment_dict())  # a key that came since has its default
        changed = differences(tomllib.loads(before.to_toml()), tomllib.loads(experiment.to_toml()))
        if changed:
            raise UserError(
                f"{self.path} was started with another experiment: {'; '.join(changed)} (there -> now). "
                "Give the same experiment, or another folder with --out."
            )

    def experiment_dict(self) -> dict[str, Any]:
        try:
            return tomllib.loads(self.file("experiment.toml").read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise UserError(f"{self.file('experiment.toml')} cannot be read: {error}.") from None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Only one process writes a run."""
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.file(".lock"), "a", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Busy(f"{self.path} is being written by another process. Wait, or use another --out.") from None
            yield

    def write(self, name: str, content: str | bytes) -> None:
        write_atomically(self.file(name), content.encode() if isinstance(content, str) else content)

    def write_json(self, name: str, content: Any) -> None:
        self.write(name, json.dumps(content, indent=2, allow_nan=False) + "\n")

    def write_arrays(self, name: str, arrays: dict[str, np.ndarray]) -> None:
        content = io.BytesIO()
        np.savez(content, **arrays)  # type: ignore[arg-type]
        self.write(name, content.getvalue())

    def rounds(self) -> list[dict[str, Any]]:
        """The lines of rounds.jsonl; a last line that was cut off by a kill is left out."""
        return self._lines("rounds.jsonl")

    def check_rounds(self, rounds: int) -> None:
        """Raise where a finished run's rounds.jsonl lacks some of its rounds."""
        last = next((line.get("round") for line in reversed(self.rounds())), 0)
        if last != rounds:
            raise UserError(
                f"{self.file('rounds.jsonl')} ends at round {last} of {rounds}, although the run is finished."
            )

    def clients(self) -> list[dict[str, Any]]:
        """The lines of clients.jsonl, which comes after the last round."""
        return self._lines("clients.jsonl")

    def _lines(self, name: str) -> list[dict[str, Any]]:
        path = self.file(name)
        if not path.is_file():
            return []
        try:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            return [_checked(json.loads(line)) for line in lines if line.endswith("\n")]
        except ValueError as error:
            raise UserError(f"{path} is damaged ({error}). Mend or remove that line, and try again.") from None

    def append_round(self, line: dict[str, Any]) -> None:
        with open(self.file("rounds.jsonl"), "a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")

    def summary(self) -> dict[str, Any]:
        try:
            text = self.file("summary.json").read_text(encoding="utf-8")
            return _checked(json.loads(text, parse_constant=_refuse))
        except ValueError as error:
            remedy = "Remove it, and go on: the same sweep again, or run with --resume"
            raise UserError(f"{self.file('summary.json')} is damaged ({error}). {remedy}.") from None

    def environment(self) -> dict[str, Any]:
        """What the run was made with, as far as that can be read."""
        try:
            return dict(json.loads(self.file("environment.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return {}

    # checkpoints

    @property
    def _saved(self) -> Path:
        return self.file("checkpoints")

    def store(self, device: torch.device | str = "cpu", limit: int | None = None) -> ClientStore:
        """Client states of a run in which nobody has taken part."""
        return ClientStore(self._saved / CLIENTS, device, limit)

    def save(self, state: State) -> None:
        """Write what changed as one segment and a checkpoint beside the last one, then let it count by one rename."""
        clients = state.clients
        clients.save(state.round)
        places = [[number, *place] for number, place in sorted(clients.index.items())]
        parts = {
            "server.safetensors": encode(state.server, whole=True),
            "index.safetensors": encode({"places": torch.tensor(places, dtype=torch.int64).reshape(-1, 4)}),
        }
        files = {name: Seal(len(part), hashlib.sha256(part).hexdigest()) for name, part in parts.items()}
        about = {
            "round": state.round,
            "totals": state.totals,
            "files": {name: seal._asdict() for name, seal in files.items()},
            "segments": {number: seal._asdict() for number, seal in clients.segments.sealed.items()},
        }
        parts["state.json"] = (json.dumps(about, allow_nan=False) + "\n").encode()
        target = self._saved / f"round-{state.round:06d}"
        scratch = target.with_name(f".{target.name}.partial")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        try:
            for name, part in parts.items():
                write_synced(scratch / name, part)
        except OSError:
            shutil.rmtree(scratch, ignore_errors=True)  # a full disk gets its space back; the last checkpoint stands
            raise
        shutil.rmtree(target, ignore_errors=True)
        scratch.rename(target)
        sync_folder(target.parent)
        for old in self.checkpoints()[KEPT:]:
            shutil.rmtree(old)
        self._sweep()

    def fits(self, state: State) -> bool:
        """Whether there is room for a checkpoint."""
        return fits(state.clients.unsaved + sum(tensor.nbytes for tensor in tree_leaves(state.server)), self.path)

    def checkpoints(self) -> list[Path]:
        """Whole checkpoints, the newest first."""
        found = [p for p in self._saved.glob("round-*") if p.is_dir()] if self._saved.is_dir() else []
        return sorted(found, key=lambda p: int(p.name.removeprefix("round-")), reverse=True)

    def drop_checkpoints(self) -> None:
        """Remove all models."""
        shutil.rmtree(self._saved)

    def go_back(self, state: State | None) -> None:
        """Remove what is of no use when going on from here: later checkpoints, which are damaged, and loose ends."""
        for folder in self.checkpoints():
            if state is None or int(folder.name.removeprefix("round-")) > state.round:
                shutil.rmtree(folder)
        for scratch in self._saved.glob(".*.partial"):
            shutil.rmtree(scratch)
        self._sweep()

    def _sweep(self) -> None:
        """Remove the segments that no checkpoint refers to, and any that was not written to its end."""
        used: set[int] = set()
        for folder in self.checkpoints():
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                used |= {int(number) for number in _about(folder)["segments"]}
        for path in (self._saved / CLIENTS).glob(FILES):
            if number_of(path) not in used:
                path.unlink()
        for scratch in (self._saved / CLIENTS).glob(".*.partial"):
            scratch.unlink()

    def restore(self, device: torch.device | str = "cpu", limit: int | None = None) -> tuple[State | None, list[str]]:
        """The newest checkpoint that is whole, and a remark for each that is not."""
        remarks: list[str] = []
        for folder in self.checkpoints():
            try:
                return self._read(folder, device, limit), remarks
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                remarks.append(
                    f"checkpoint {folder.name} is damaged ({error}); going back to the one before it, if any"
                )
        return None, remarks

    def _read(self, folder: Path, device: torch.device | str, limit: int | None) -> State:
        about = _about(folder)
        if "sha256" in about:
            raise UserError(
                f"{self.path} was written by an older protofed, whose checkpoints are not read any more. "
                "Start anew with another --out."
            )
        sealed = {int(number): Seal(**seal) for number, seal in about["segments"].items()}
        for name, seal in about["files"].items():
            _verify(folder / name, Seal(**seal))
        clients = ClientStore(self._saved / CLIENTS, device, limit, sealed=sealed)
        for number, seal in sealed.items():
            _verify(clients.segments.file(number), seal)
        places = decode((folder / "index.safetensors").read_bytes())["places"].tolist()
        clients.index = {number: Place(*place) for number, *place in places}
        return State(about["round"], decode((folder / "server.safetensors").read_bytes()), clients, about["totals"])

    def cut(self, round: int) -> list[dict[str, Any]]:
        """Forget the lines of rounds after this one, which will be run again; returns those that stay."""
        lines = [line for line in self.rounds() if line["round"] <= round]
        self.write("rounds.jsonl", "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))
        return lines


def _about(checkpoint: Path) -> dict[str, Any]:
    about: dict[str, Any] = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    return about


def _verify(path: Path, seal: Seal) -> None:
    """A ValueError unless the file is as it was written."""
    with open(path, "rb") as file:
        if Seal(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()) != seal:
            raise ValueError(f"{path.name} is not what was written")


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """The keys that differ, with both values."""
    found = []
    for key in [*old, *(k for k in new if k not in old)]:
        name, left, right = f"{prefix}{key}", old.get(key), new.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            found += differences(left, right, f"{name}.")
        elif left != right:
            found.append(f"{name} {left!r} -> {right!r}")
    return found
