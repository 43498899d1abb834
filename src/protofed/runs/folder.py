"""A run is a folder: written atomically, killed at any moment without loss, and read by every report."""

import contextlib
import errno
import fcntl
import io
import json
import os
import shutil
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from protofed.atomic import sync_folder, write_atomically, write_synced
from protofed.config.experiment import Experiment
from protofed.config.schema import differences
from protofed.engines.wire import decode, encode
from protofed.errors import UserError, option
from protofed.importing import only_these
from protofed.method import Tree
from protofed.runs import sealed, trust
from protofed.runs.lines import read_lines, read_summary
from protofed.runs.segments import FILES, RecordPlace, segment_number
from protofed.runs.store import ClientStore, fits

KEPT = 2  # checkpoints: the newest, and one to fall back to
CLIENTS = "clients"  # the folder of their states, next to the checkpoints that refer to them
CENTRES = "centres.safetensors"  # what a robust rule remembers, where there is one


class Busy(UserError):
    """Another process is writing this run."""


def new_folder(name: str, resume: bool) -> Path:
    """runs/NAME, or NAME-2, NAME-3, ...: a new one, or when resuming the newest there is."""
    taken = [Path("runs") / name]
    while taken[-1].exists():
        taken.append(Path("runs") / f"{name}-{len(taken) + 1}")
    return taken[-2] if resume and len(taken) > 1 else taken[-1]


class State(NamedTuple):
    """Everything that a run needs to continue. Randomness is computed from the seed and the round, so the round number
    is enough."""

    round: int  # rounds done
    server: Tree
    clients: ClientStore
    totals: dict[str, Any]  # what is added up over the run
    centres: Tree = ()  # what a robust rule remembers of the last round

    def __repr__(self) -> str:
        return f"<State after round {self.round}, with {len(self.clients)} clients>"  # without weights


class RunFolder:
    """One run on disk."""

    def __init__(self, path: Path, keep: int = KEPT) -> None:
        self.path, self.keep = path, keep

    def file(self, name: str) -> Path:
        return self.path / name

    @property
    def _out(self) -> str:
        return option("out", self.path)

    @property
    def exists(self) -> bool:
        return self.file("experiment.toml").is_file()

    @property
    def finished(self) -> bool:
        return self.file("summary.json").is_file()

    def check(self, experiment: Experiment, resume: bool) -> None:
        """Raise if this folder must not be written: nothing is ever overwritten."""
        try:
            self._check(experiment, resume)
        except OSError as error:  # a folder that one may not look into, a name that is too long
            raise UserError(f"{self._out}: {error.strerror}. Name another folder.") from None

    def _check(self, experiment: Experiment, resume: bool) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{self._out} is a file. Name a folder.")
        if not self.exists:
            self._check_place()
            if self.path.is_dir() and any(not p.name.startswith(".") for p in self.path.iterdir()):
                raise UserError(
                    f"{self._out} holds files that are not a run. Name another folder with {option('out')}."
                )
            return
        if not resume:
            what = "a finished run" if self.finished else "an unfinished run"
            remedy = f"Name another folder with {option('out')}"
            remedy += "" if self.finished else f", or continue it with {option('resume', True)}"
            raise UserError(f"{self._out} already holds {what}. {remedy}.")
        old, now = self.experiment_dict(), tomllib.loads(experiment.to_toml())
        if trust.paths(old) <= trust.paths(now):  # otherwise it would import code that nobody asked for
            with only_these(trust.paths(now)):
                old = tomllib.loads(Experiment.from_dict(old).to_toml())  # keys that came since
        changed = differences(old, now)
        if changed:
            raise UserError(
                f"{self.path} was started with another experiment: {'; '.join(changed)} (there -> now). "
                f"Give the same experiment, or another folder with {option('out')}."
            )

    def _check_place(self) -> None:
        """Raise if the folder cannot be made, or nothing can be written into it."""
        above = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        if not above.is_dir():
            raise UserError(f"{self._out} lies under {above}, which is a file. Name another folder.")
        if not os.access(above, os.W_OK | os.X_OK):
            raise UserError(f"{self._out}: {above} cannot be written to. Name another folder.")

    def experiment_dict(self) -> dict[str, Any]:
        return trust.tables_of_run(self.file("experiment.toml"))

    def check_plain(self) -> None:
        """Raise if anything in the folder is not a plain file or folder. A folder that somebody else made may hold
        links; resuming in it would write and remove files elsewhere. wandb makes links to its own cache; we write
        nothing there.

        A folder that somebody else made may hold links: going on with it would write, and remove files, elsewhere.
        wandb makes links of its own, to its cache; nothing of ours writes there."""
        for folder, inner, files in os.walk(self.path):
            if Path(folder) == self.path / "track":
                inner[:] = [name for name in inner if name != "wandb" or (Path(folder) / name).is_symlink()]
            for path in (Path(folder, name) for name in (*inner, *files)):
                try:
                    mode = path.lstat().st_mode
                except FileNotFoundError:  # a run that writes here removes what it no longer needs
                    continue
                if stat.S_ISLNK(mode):
                    raise UserError(f"{path} is a link, which a run never makes. Put the file itself there.")
                if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                    raise UserError(f"{path} is not a file. Remove it.")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Let only one process write a run."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:  # also a place that looks as if it could be written to, such as /proc
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise UserError(f"{self._out} cannot be made: {error.strerror}. Name another folder.") from None
        self.check_plain()
        with open(self.file(".lock"), "a", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Busy(
                    f"{self.path} is being written by another process. Wait, or use another {option('out')}."
                ) from None
            yield

    def write(self, name: str, content: str | bytes) -> None:
        write_atomically(self.file(name), content.encode() if isinstance(content, str) else content)

    def write_json(self, name: str, content: Any) -> None:
        self.write(name, json.dumps(content, indent=2, allow_nan=False) + "\n")

    def read_json(self, name: str) -> dict[str, Any]:
        """What `write_json` wrote; a UserError if it is damaged."""
        try:
            return dict(json.loads(self.file(name).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            remedy = f"Start again with another {option('out')}."
            raise UserError(f"{self.file(name)} cannot be read ({error}). {remedy}") from None

    def write_arrays(self, name: str, arrays: dict[str, np.ndarray]) -> None:
        content = io.BytesIO()
        np.savez(content, **arrays)  # type: ignore[arg-type]
        self.write(name, content.getvalue())

    def rounds(self) -> list[dict[str, Any]]:
        """The lines of rounds.jsonl; a last line that was cut off by a kill is left out."""
        return read_lines(self.file("rounds.jsonl"))

    def check_rounds(self, rounds: int) -> None:
        """Raise if a finished run's rounds.jsonl lacks some of its rounds."""
        last = next((line.get("round") for line in reversed(self.rounds())), 0)
        if last != rounds and last != self.summary().get("rounds"):  # one without a budget for more ends earlier
            raise UserError(
                f"{self.file('rounds.jsonl')} ends at round {last} of {rounds}, although the run is finished."
            )

    def clients(self) -> list[dict[str, Any]]:
        """The lines of clients.jsonl, which is written after the last round."""
        return read_lines(self.file("clients.jsonl"))

    def append_round(self, line: dict[str, Any]) -> None:
        with open(self.file("rounds.jsonl"), "a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")

    def summary(self) -> dict[str, Any]:
        return read_summary(self.file("summary.json"))

    def environment(self) -> dict[str, Any]:
        """The environment that the run was made in, as far as it can be read."""
        try:
            return dict(json.loads(self.file("environment.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, RecursionError):
            return {}

    # checkpoints

    @property
    def _saved(self) -> Path:
        return self.file("checkpoints")

    def store(self, device: torch.device | str = "cpu", limit: int | None = None) -> ClientStore:
        """Client states of a run before anybody has taken part."""
        return ClientStore(self._saved / CLIENTS, device, limit)

    def save(self, state: State) -> None:
        """Write what changed as one segment and a checkpoint next to the last one, then make it count with one
        rename."""
        clients = state.clients
        clients.save(state.round)
        places = [[number, *place] for number, place in sorted(clients.index.items())]
        parts = {
            "server.safetensors": encode(state.server, whole=True),
            "index.safetensors": encode({"places": torch.tensor(places, dtype=torch.int64).reshape(-1, 4)}),
        }
        if state.centres:
            parts[CENTRES] = encode(state.centres, whole=True)
        parts |= sealed.state_files(state.round, state.totals, parts, clients.segments.sealed)
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
        for old in self.checkpoints()[self.keep :]:
            shutil.rmtree(old)
        self._sweep()

    def fits(self, state: State) -> bool:
        """Whether there is room for a checkpoint."""
        return fits(state.clients.unsaved + sum(tensor.nbytes for tensor in tree_leaves(state.server)), self.path)

    def checkpoints(self) -> list[Path]:
        """Whole checkpoints, newest first."""
        found = [p for p in self._saved.glob("round-*") if p.is_dir()] if self._saved.is_dir() else []
        numbers = {int(digits): p for p in found if (digits := p.name.removeprefix("round-")).isdecimal()}
        return [numbers[round] for round in sorted(numbers, reverse=True)]

    def drop_checkpoints(self) -> None:
        """Remove all models."""
        shutil.rmtree(self._saved)

    def go_back(self, state: State | None) -> None:
        """Remove what is useless when continuing from here: later checkpoints, which are damaged, and loose ends."""
        for folder in self.checkpoints():
            if state is None or int(folder.name.removeprefix("round-")) > state.round:
                shutil.rmtree(folder)
        for scratch in self._saved.glob(".*.partial"):
            shutil.rmtree(scratch)
        self._sweep()

    def _sweep(self) -> None:
        """Remove segments that no checkpoint refers to, and any that was not written to its end."""
        used: set[int] = set()
        for folder in self.checkpoints():
            with contextlib.suppress(*sealed.DAMAGE):
                used |= set(sealed.read_state(folder).segments)
        for path in (self._saved / CLIENTS).glob(FILES):
            if segment_number(path) not in used:
                path.unlink()
        for scratch in (self._saved / CLIENTS).glob(".*.partial"):
            scratch.unlink()

    def restore(self, device: torch.device | str = "cpu", limit: int | None = None) -> tuple[State | None, list[str]]:
        """The newest whole checkpoint, and a remark for each that is not whole."""
        remarks: list[str] = []
        for folder in self.checkpoints():
            try:
                return self._read(folder, device, limit), remarks
            except sealed.DAMAGE as error:
                remarks.append(
                    f"checkpoint {folder.name} is damaged ({error}); going back to the one before it, if any"
                )
        return None, remarks

    def _read(self, folder: Path, device: torch.device | str, limit: int | None) -> State:
        about = sealed.read_state(folder)
        clients = ClientStore(self._saved / CLIENTS, device, limit, sealed=about.segments)
        for number, seal in about.segments.items():
            sealed.verify_file(clients.segments.file(number), seal)
        places = decode(sealed.sealed_part(folder, "index.safetensors", about))["places"].tolist()
        clients.index = {number: sealed.inside(RecordPlace(*place), about) for number, *place in places}
        server = decode(sealed.sealed_part(folder, "server.safetensors", about))
        centres = decode(sealed.sealed_part(folder, CENTRES, about)) if CENTRES in about.files else ()
        return State(about.round, server, clients, about.totals, centres)

    def cut(self, round: int) -> list[dict[str, Any]]:
        """Forget the lines of rounds after this one, which will be run again; returns the lines that stay."""
        lines = [line for line in self.rounds() if line["round"] <= round]
        self.write("rounds.jsonl", "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))
        return lines
