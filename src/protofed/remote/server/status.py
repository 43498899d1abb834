"""status.json: who is there, what the server is doing, and what was refused; written again after every event."""

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from protofed.remote.server.audit import Audit, Head
from protofed.remote.server.ledger import Ledger
from protofed.remote.settings import FederationSettings

KEPT = 200  # events that are listed
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)  # by a file that was damaged
SINGLY = "seen singly"


def last_head(path: Path) -> Head | None:
    """The last entry of the audit log that status.json tells of, as far as that can be read."""
    with contextlib.suppress(*UNREADABLE):
        told = json.loads(path.read_text(encoding="utf-8"))["log"]
        return Head(int(told["number"]), str(told["hash"]))
    return None


@dataclass
class ClientStatus:
    """One client as the server knows it."""

    number: int
    name: str
    state: str = "never seen"  # joined, training, answered, late, failed, refused, lost, put out
    last_seen: float | None = None  # seconds since 1970
    samples: int | None = None
    architecture: str | None = None
    last_reason: str | None = None


@dataclass
class Status:
    """All of status.json; what it is told goes into the log and the audit log too."""

    path: Path
    tell: Callable[[str], None]
    clients: dict[int, ClientStatus]
    rounds: int
    ledger: Ledger
    audit: Audit | None = None
    round: int = 0
    phase: str = "starting"
    refused: list[dict[str, Any]] = field(default_factory=list)
    missing: list[dict[str, Any]] = field(default_factory=list)  # late, lost or failed: no fault is assumed
    clipped: list[dict[str, Any]] = field(default_factory=list)
    uploads: str = SINGLY  # how they are seen here

    @classmethod
    def of(
        cls,
        path: Path,
        tell: Callable[[str], None],
        settings: FederationSettings,
        clients: int,
        rounds: int,
        audit: Audit | None = None,
    ) -> "Status":
        numbers = sorted({*range(clients)} if not settings.clients else {m.number for m in settings.clients})
        ledger = Ledger.of(path.with_name("ledger.json"))
        status = cls(path, tell, {n: ClientStatus(n, settings.name_of(n)) for n in numbers}, rounds, ledger, audit)
        status._remember()
        return status

    def _remember(self) -> None:
        """What a server that was stopped knew of the clients, as far as it can be read."""
        with contextlib.suppress(*UNREADABLE):
            before = json.loads(self.path.read_text(encoding="utf-8"))
            for old in before["clients"]:
                if (seen := self.clients.get(old["number"])) and old["last_seen"] is not None:
                    seen.state, seen.last_seen, seen.last_reason = "lost", old["last_seen"], old["last_reason"]
                    seen.samples, seen.architecture = old["samples"], old["architecture"]
            self.refused = before["refused"]
            self.missing, self.clipped = before.get("missing", []), before.get("clipped", [])

    def name(self, number: int | None, otherwise: str = "") -> str:
        return self.clients[number].name if number in self.clients else otherwise or "an unknown client"

    def be(self, phase: str, round: int | None = None) -> None:
        """The server is doing this now."""
        self.phase, self.round = phase, self.round if round is None else round
        self.write()

    def client(self, number: int, state: str, heard: bool = True, **known: Any) -> None:
        """A client is in this state now."""
        seen = self.clients[number]
        seen.state = state
        seen.last_seen = time.time() if heard else seen.last_seen
        for key, value in known.items():
            setattr(seen, key, value)
        self.write()

    def log(self, event: str, sync: bool = True, **about: Any) -> None:
        """A line of the audit log, where there is one."""
        if self.audit is not None:
            self.audit.add(event, sync=sync, **about)

    def refuse(self, number: int | None, reason: str, who: str = "") -> None:
        """Something of a client is not accepted."""
        self._note(self.refused, "refused", number, reason, who)

    def miss(self, number: int, reason: str, state: str) -> None:
        """A client gave no answer: it is late, lost, or says that it failed."""
        self._note(self.missing, state, number, reason)

    def clip(self, number: int, reason: str) -> None:
        """An upload was brought back to its bound, and merged."""
        self._note(self.clipped, "clipped", number, reason)

    def _note(self, events: list[dict[str, Any]], state: str, number: int | None, reason: str, who: str = "") -> None:
        name = self.name(number, who)
        shown = reason if state in ("refused", "late", "lost", "failed") else f"{state}: {reason}"
        self.tell(f"round {self.round}: {name}: {shown}" if self.round else f"{name}: {shown}")
        about = {"round": self.round, "client": number, "name": name, "state": state, "reason": reason}
        events.append(about | {"time": time.time()})
        del events[:-KEPT]
        self.log(state, sync=False, round=self.round, client=name, reason=reason)
        if number in self.clients:
            heard = state in ("refused", "failed", "clipped")
            self.client(number, "answered" if state == "clipped" else state, heard=heard, last_reason=reason)
        else:
            self.write()

    def put_out(self, number: int, reason: str) -> None:
        """A client is put out by the server itself."""
        self.ledger.put_out(number, reason, "server", self.round)
        name = self.name(number)
        self.tell(f"{name} is put out: {reason}. 'protofed federation unban DIR {name}' lets it in again")
        self.log("put out", client=name, by="server", round=self.round, reason=reason)
        self.client(number, "put out", heard=False, last_reason=reason)

    def write(self) -> None:
        out = self.ledger.out
        content = {
            "phase": self.phase,
            "round": self.round,
            "rounds": self.rounds,
            "uploads": self.uploads,
            "time": time.time(),
            "clients": [asdict(seen) for seen in self.clients.values()],
            "refused": self.refused,
            "missing": self.missing,
            "clipped": self.clipped,
            "put_out": [{"client": number, "name": self.name(number), **one} for number, one in sorted(out.items())],
            "log": None if self.audit is None else self.audit.synced._asdict(),
        }
        scratch = self.path.with_name(f".{self.path.name}.partial")
        scratch.write_text(json.dumps(content) + "\n", encoding="utf-8")
        scratch.replace(self.path)  # whole or not at all; whether it survives a power cut does not matter
