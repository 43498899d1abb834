"""ledger.json: what the server remembers of its members' conduct: who is put out, refusals in a row, merged figures."""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protofed.atomic import write_atomically
from protofed.errors import UserError

ROUNDS = 20  # whose figures are remembered


@dataclass
class Ledger:
    """All of ledger.json, which is written with every change, and survives a power cut."""

    path: Path
    out: dict[int, dict[str, Any]] = field(default_factory=dict)  # client: reason, by, round, time
    refusals: dict[int, int] = field(default_factory=dict)  # client: uploads refused in a row
    merged: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)  # round: client: figures, part, times
    undone: dict[int, int] = field(default_factory=dict)  # round: how often, with nobody to put out

    @classmethod
    def of(cls, path: Path) -> "Ledger":
        """As it was left; empty where there is none."""
        ledger = cls(path)
        if path.is_file():
            try:
                told = json.loads(path.read_text(encoding="utf-8"))
                ledger.out, ledger.refusals, ledger.undone = (
                    {int(k): v for k, v in told[key].items()} for key in ("out", "refusals", "undone")
                )
                ledger.merged = {int(r): {int(c): v for c, v in one.items()} for r, one in told["merged"].items()}
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise UserError(
                    f"{path} is damaged ({error}). Restore it; or remove it, and ban again whom it had put out."
                ) from None
        return ledger

    def put_out(self, number: int, reason: str, by: str, round: int) -> None:
        self.out[number] = {"reason": reason, "by": by, "round": round, "time": time.time()}
        self.save()

    def let_in(self, number: int) -> bool:
        """Whether it was out."""
        was = self.out.pop(number, None) is not None
        self.refusals.pop(number, None)
        self.save()
        return was

    def refuse(self, number: int) -> int:
        """How many times in a row its uploads have been refused now."""
        self.refusals[number] = self.refusals.get(number, 0) + 1
        self.save()
        return self.refusals[number]

    def merge(self, round: int, figures: dict[int, dict[str, Any]]) -> None:
        """These clients were merged in a round: their figures, and the part that stands out most."""
        self.merged[round] = figures
        for number in figures:
            self.refusals.pop(number, None)
        for old in sorted(self.merged)[:-ROUNDS]:
            del self.merged[old]
        self.save()

    def latest(self, round: int) -> dict[int, dict[str, float]]:
        """The figures of each client's last merged upload before a round; not of those who are out."""
        found: dict[int, dict[str, float]] = {}
        for number in sorted(n for n in self.merged if n < round):
            found |= {client: one["figures"] for client, one in self.merged[number].items()}
        return {client: one for client, one in found.items() if client not in self.out}

    def stands_out(self, round: int) -> tuple[int, dict[str, Any]] | None:
        """Whose upload of a round was the largest in relation to the others', and its figures."""
        known = {n: one for n, one in self.merged.get(round, {}).items() if one["times"] > 0}  # 0: nobody saw it
        return max(known.items(), key=lambda one: one[1]["times"]) if known else None

    def go_back(self, round: int) -> None:
        """Forget the rounds after this one."""
        self.merged = {number: one for number, one in self.merged.items() if number <= round}
        self.save()

    def save(self) -> None:
        content = {"out": self.out, "refusals": self.refusals, "merged": self.merged, "undone": self.undone}
        write_atomically(self.path, (json.dumps(content) + "\n").encode())
