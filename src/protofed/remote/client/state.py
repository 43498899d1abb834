"""What a client keeps: its state after each of its last rounds, with the answer it gave; written whole, and hashed."""

import fcntl
import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from protofed.atomic import sync_folder, write_atomically, write_synced
from protofed.engines.wire import decode, encode
from protofed.errors import UserError
from protofed.method import Client
from protofed.remote.protocol import Refused

# Rounds at least: the last, the one before, and one for a server that falls back to its last checkpoint but one.
KEPT = 3
MOST = 21  # rounds at most, whatever a server asks for
PARTS = ("client.safetensors", "answer.bin")
OPENED = "opened.json"  # by round: over whom its secure sum was opened


class Kept(NamedTuple):
    """A client after one of its rounds."""

    round: int
    client: Client
    answer: bytes
    request: str  # the hash of what was asked


class StateFolder:
    """A client's state, for each run of a server in a folder of its own: DIR/RUN/round-000003."""

    def __init__(self, path: Path, tell: Callable[[str], None]) -> None:
        self.path, self.tell = path, tell
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.chmod(0o700)
        self._lock = open(path / ".lock", "a", encoding="utf-8")  # noqa: SIM115  (held as long as the client lives)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise UserError(f"--state {path} is in use by another client. Stop that one, or name another.") from None

    def close(self) -> None:
        self._lock.close()

    def _run(self, run: str) -> Path:
        if not re.fullmatch(r"[0-9a-f]{16}", run):
            raise Refused("the run has no proper name")
        return self.path / run

    def rounds(self, run: str) -> list[int]:
        """The rounds that are kept, the newest first."""
        found = self._run(run).glob("round-*")
        return sorted((int(p.name.removeprefix("round-")) for p in found), reverse=True)

    def read(self, run: str, round: int) -> Kept | None:
        """The state after a round; None where there is none, or it is damaged."""
        folder = self._run(run) / f"round-{round:06d}"
        if not folder.is_dir():
            return None
        try:
            about: dict[str, Any] = json.loads((folder / "about.json").read_text(encoding="utf-8"))
            parts = [(folder / name).read_bytes() for name in PARTS]
            if [hashlib.sha256(part).hexdigest() for part in parts] != about["sha256"]:
                raise ValueError("it is not what was written")
            return Kept(round, decode(parts[0]), parts[1], about["request"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            self.tell(f"the state after round {round} is damaged ({error}); going on from the one before it")
            return None

    def before(self, run: str, round: int) -> Kept | None:
        """The state that a round begins with; None: as a client begins."""
        found = self.at(run, round - 1)
        later = self.rounds(run)
        if found is None and later and later[-1] < round:
            raise Refused(f"its state before round {round} is damaged. Restore {self.path}, or move it away and rejoin")
        if found is None and later and self._previous(run, later[-1]) != 0:
            raise Refused(
                f"round {round} is asked for, but this client has done round {later[0]} and keeps its states after "
                f"rounds {', '.join(map(str, sorted(later)))} only. Bring back "
                "the server's latest checkpoint, or begin a new run"
            )
        return found

    def _previous(self, run: str, round: int) -> int | None:
        """Which round a state was trained from; 0: the beginning; None: not known."""
        try:
            text = (self._run(run) / f"round-{round:06d}" / "about.json").read_text(encoding="utf-8")
            return int(json.loads(text)["previous"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def at(self, run: str, round: int) -> Kept | None:
        """The newest state that is not newer than this round."""
        for number in self.rounds(run):
            if number <= round and (kept := self.read(run, number)):
                return kept
        return None

    def opened(self, run: str, round: int) -> list[int] | None:
        """The clients over whom this client helped to open a round's secure sum; None if it did not."""
        path = self._run(run) / OPENED
        if not path.is_file():
            return None
        try:
            found = json.loads(path.read_text(encoding="utf-8")).get(str(round))
        except (OSError, ValueError, AttributeError) as error:
            raise Refused(f"its list of opened sums is damaged ({error}). Restore {path}, or remove it") from None
        return None if found is None else [int(number) for number in found]

    def note_opened(self, run: str, round: int, clients: list[int]) -> None:
        """Remember, before any share leaves, over whom a round's sum is opened."""
        path = self._run(run) / OPENED
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        write_atomically(path, json.dumps(known | {str(round): clients}).encode())

    def put(self, run: str, kept: Kept, previous: int, many: int = KEPT) -> None:
        """Keep a state, which counts by one rename, and so many in all; later ones, of a server that went back, go."""
        home = self._run(run)
        if not home.is_dir():
            home.mkdir()
            others = len({p.parent for p in self.path.glob("*/round-*")})
            self.tell(f"a new run begins, kept in {home}" + (f"; {others} earlier stay as they are" if others else ""))
        target = home / f"round-{kept.round:06d}"
        scratch = home / f".{target.name}.partial"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        parts = [encode(kept.client, whole=True), kept.answer]
        hashes = [hashlib.sha256(part).hexdigest() for part in parts]
        about = {"round": kept.round, "previous": previous, "request": kept.request, "sha256": hashes}
        for name, part in zip((*PARTS, "about.json"), (*parts, json.dumps(about).encode()), strict=True):
            write_synced(scratch / name, part)
        for number in self.rounds(run):
            if number >= kept.round:
                shutil.rmtree(home / f"round-{number:06d}")
        scratch.rename(target)
        sync_folder(home)
        for number in self.rounds(run)[min(MOST, max(KEPT, many)) :]:
            shutil.rmtree(home / f"round-{number:06d}")
