"""A run is a folder: written atomically, killed at any moment without loss, and read by every report."""

import contextlib
import fcntl
import hashlib
import json
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from protofed.atomic import sync_folder, write_atomically, write_synced
from protofed.engines.wire import decode, encode
from protofed.errors import UserError
from protofed.experiment import Experiment
from protofed.method import Client, Tree

KEPT = 2  # checkpoints: the newest, and one to fall back to


class State(NamedTuple):
    """All that a run needs to go on: randomness is computed from the seed and the round, so the round says it all."""

    round: int  # rounds done
    server: Tree
    clients: dict[int, Client]
    totals: dict[str, Any]  # what is added up over the run


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
        changed = differences(self.experiment_dict(), tomllib.loads(experiment.to_toml()))
        if changed:
            raise UserError(
                f"{self.path} was started with another experiment: {'; '.join(changed)} (there -> now). "
                "Give the same experiment, or another folder with --out."
            )

    def experiment_dict(self) -> dict[str, Any]:
        try:
            return tomllib.loads(self.file("experiment.toml").read_text(encoding="utf-8"))
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise UserError(f"{self.file('experiment.toml')} cannot be read: {error}.") from None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Only one process writes a run."""
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.file(".lock"), "a", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"{self.path} is being written by another process. Wait, or use another --out."
                ) from None
            yield

    def write(self, name: str, content: str | bytes) -> None:
        write_atomically(self.file(name), content.encode() if isinstance(content, str) else content)

    def write_json(self, name: str, content: Any) -> None:
        self.write(name, json.dumps(content, indent=2, allow_nan=False) + "\n")

    def rounds(self) -> list[dict[str, Any]]:
        """The lines of rounds.jsonl; a last line that was cut off by a kill is left out."""
        path = self.file("rounds.jsonl")
        if not path.is_file():
            return []
        whole = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
        try:
            return [json.loads(line) for line in whole]
        except ValueError as error:
            raise UserError(f"{path} is damaged ({error}). Mend or remove that line, and try again.") from None

    def append_round(self, line: dict[str, Any]) -> None:
        with open(self.file("rounds.jsonl"), "a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")

    def summary(self) -> dict[str, Any]:
        try:
            summary: dict[str, Any] = json.loads(self.file("summary.json").read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{self.file('summary.json')} is damaged ({error}). Remove it and --resume.") from None
        return summary

    # checkpoints

    def save(self, state: State) -> None:
        """Write a checkpoint beside the last one, then let it count by one rename."""
        parts = {
            "server.safetensors": encode(state.server),
            "clients.safetensors": encode({str(number): client for number, client in state.clients.items()}),
        }
        about = {
            "round": state.round,
            "totals": state.totals,
            "sha256": {name: hashlib.sha256(part).hexdigest() for name, part in parts.items()},
        }
        parts["state.json"] = (json.dumps(about, indent=2, allow_nan=False) + "\n").encode()
        target = self._checkpoint(state.round)
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

    def checkpoints(self) -> list[Path]:
        """Whole checkpoints, the newest first."""
        folder = self.file("checkpoints")
        found = [p for p in folder.glob("round-*") if p.is_dir()] if folder.is_dir() else []
        return sorted(found, key=lambda p: int(p.name.removeprefix("round-")), reverse=True)

    def restore(self) -> tuple[State | None, list[str]]:
        """The newest checkpoint that is whole, and a remark for each that is not."""
        remarks: list[str] = []
        for folder in self.checkpoints():
            try:
                return self._read(folder), remarks
            except (OSError, ValueError, KeyError, TypeError) as error:
                remarks.append(
                    f"checkpoint {folder.name} is damaged ({error}); going back to the one before it, if any"
                )
        return None, remarks

    def _read(self, folder: Path) -> State:
        about = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        parts = {}
        for name, digest in about["sha256"].items():
            parts[name] = (folder / name).read_bytes()
            if hashlib.sha256(parts[name]).hexdigest() != digest:
                raise ValueError(f"{name} is not what was written")
        clients = decode(parts["clients.safetensors"])
        return State(
            about["round"],
            decode(parts["server.safetensors"]),
            {int(number): client for number, client in clients.items()},
            about["totals"],
        )

    def cut(self, round: int) -> list[dict[str, Any]]:
        """Forget the lines of rounds after this one, which will be run again; returns those that stay."""
        lines = [line for line in self.rounds() if line["round"] <= round]
        self.write("rounds.jsonl", "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))
        return lines

    def _checkpoint(self, round: int) -> Path:
        return self.file("checkpoints") / f"round-{round:06d}"


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
