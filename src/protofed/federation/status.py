"""status.json: who is there, what the server is doing, and what was refused; written anew after every event."""

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from protofed.federation.settings import FederationSettings

KEPT = 200  # refusals that are listed


@dataclass
class Seen:
    """One client as the server knows it."""

    number: int
    name: str
    state: str = "never seen"  # joined, training, answered, late, refused, lost
    last_seen: float | None = None  # seconds since 1970
    samples: int | None = None
    architecture: str | None = None
    last_reason: str | None = None


@dataclass
class Status:
    """All of status.json."""

    path: Path
    tell: Callable[[str], None]
    clients: dict[int, Seen]
    rounds: int
    round: int = 0
    phase: str = "starting"
    refused: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(
        cls, path: Path, tell: Callable[[str], None], settings: FederationSettings, clients: int, rounds: int
    ) -> "Status":
        numbers = sorted({*range(clients)} if not settings.clients else {m.number for m in settings.clients})
        status = cls(path, tell, {n: Seen(n, settings.name_of(n)) for n in numbers}, rounds)
        status._remember()
        return status

    def _remember(self) -> None:
        """What a server that was stopped knew of the clients, as far as it can be read."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            before = json.loads(self.path.read_text(encoding="utf-8"))
            for old in before["clients"]:
                if (seen := self.clients.get(old["number"])) and old["last_seen"] is not None:
                    seen.state, seen.last_seen, seen.last_reason = "lost", old["last_seen"], old["last_reason"]
                    seen.samples, seen.architecture = old["samples"], old["architecture"]
            self.refused = before["refused"]

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

    def refuse(self, number: int | None, reason: str, state: str = "refused", who: str = "") -> None:
        """Something of a client is not accepted."""
        name = self.clients[number].name if number in self.clients else who or "an unknown client"
        self.tell(f"round {self.round}: {name}: {reason}" if self.round else f"{name}: {reason}")
        self.refused.append({"round": self.round, "client": number, "reason": reason, "time": time.time()})
        del self.refused[:-KEPT]
        if number in self.clients:
            self.client(number, state, heard=state == "refused", last_reason=reason)
        else:
            self.write()

    def write(self) -> None:
        content = {
            "phase": self.phase,
            "round": self.round,
            "rounds": self.rounds,
            "time": time.time(),
            "clients": [asdict(seen) for seen in self.clients.values()],
            "refused": self.refused,
        }
        scratch = self.path.with_name(f".{self.path.name}.partial")
        scratch.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        scratch.replace(self.path)  # whole or not at all; whether it survives a power cut does not matter
