"""Questions to members, and what comes of them: answers that can be read, refusals, and who gave none."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from protofed.remote.protocol import NAN, SPENT, Message, Refused, one_line, pack_message, unpack_message
from protofed.remote.server.roster import Member, Roster
from protofed.remote.server.status import Status
from protofed.remote.settings import Rounds

Found = TypeVar("Found")
NO_ANSWER = "no answer"


class Failed(Exception):
    """A client says that it has no answer, and why; `accused` are the members that it blames."""

    def __init__(self, reason: str, accused: tuple[int, ...] = ()) -> None:
        super().__init__(reason)
        self.accused = accused


class Replies(NamedTuple):
    """Who did what, of those who were asked."""

    late: list[int]  # or lost: no answer came
    not_a_number: list[int]  # whose loss is not a number any more, as they say
    accused: dict[int, tuple[int, ...]] = {}  # by who failed: whom it blames for that (never mutated)
    spent: tuple[int, ...] = ()  # who sends nothing more, because its privacy budget is spent


class Asking:
    """Asks members, and keeps the record of it."""

    def __init__(self, roster: Roster, status: Status, rules: Rounds, look: Callable[[], None]) -> None:
        self.roster, self.status, self.rules = roster, status, rules
        self.look = look  # for orders; called between answers

    def ask(
        self,
        kind: str,
        round: int,
        members: Sequence[Member],
        bodies: Sequence[bytes],
        read: Callable[[Member, Message], Found],
        **more: Any,
    ) -> tuple[dict[int, Found], Replies]:
        """Everybody's answer that can be read, and what became of the others."""
        by_node = {member.node: member for member in members}
        packed = {
            member.node: pack_message(
                self.roster.head(kind, member.number, round=round, keep=self.rules.keep, **more), body
            )
            for member, body in zip(members, bodies, strict=True)
        }
        for member in members:
            self.status.clients[member.number].state = "training"
        self.status.write()
        digests = {self.status.name(by_node[node].number): _digest(content) for node, content in packed.items()}
        self.status.log("sent", sync=False, round=round, kind=kind, to=digests)
        found: dict[int, Found] = {}
        heard: set[int] = set()
        not_a_number: list[int] = []
        accused: dict[int, tuple[int, ...]] = {}
        spent: tuple[int, ...] = ()
        started = time.monotonic()
        for reply in self.roster.transport.exchange(packed, self.rules.deadline_s):
            self.look()
            if reply.node not in by_node:
                continue  # not asked
            member = by_node[reply.node]
            if member.number in heard or self._out(member.number):
                continue  # said twice, or put out meanwhile
            if time.monotonic() - started > self.rules.deadline_s:
                break
            heard.add(member.number)
            if reply.content is None:
                self.roster.forget(member.number, later=True)
                self.status.miss(member.number, f"{NO_ANSWER}: {one_line(reply.error)}", "lost")
                continue
            about = dict(zip(("bytes", "sha256"), _digest(reply.content), strict=True))
            self.status.log(
                "received", sync=False, round=round, kind=kind, client=self.status.name(member.number), **about
            )
            try:
                found[member.number] = self._accept(member, round, reply.content, read)
                self.status.client(member.number, "answered", last_reason=None)
            except Failed as failed:
                self.status.miss(member.number, f"it says: {failed}", "failed")
                not_a_number += [member.number] if NAN in str(failed) else []
                accused[member.number] = failed.accused
                spent += (member.number,) if SPENT in str(failed) else ()
            except Refused as refused:
                self.refuse(member.number, str(refused))
        late = [member.number for member in members if member.number not in heard and not self._out(member.number)]
        for number in late:
            self.status.miss(number, f"{NO_ANSWER} within {self.rules.deadline_s:g} s", "late")
        return found, Replies(
            [*late, *(n for n in heard if self.status.clients[n].state == "lost")], not_a_number, accused, spent
        )

    def refuse(self, number: int, reason: str) -> None:
        """Refuse an answer; the client is put out where that was once too often in a row."""
        self.status.refuse(number, reason)
        ledger, most = self.status.ledger, self.roster.settings.bounds.refusals
        if ledger.refuse(number) >= most > 0 and number not in ledger.out:
            self.status.put_out(number, f"refused {most} times in a row, the last time: {reason}")
            self.roster.put_out(number)

    def _out(self, number: int) -> bool:
        return number in self.status.ledger.out

    def _accept(self, member: Member, round: int, content: bytes, read: Callable[[Member, Message], Found]) -> Found:
        message = unpack_message(content, self.rules.max_bytes)
        head = message.head
        if head.get("kind") == "error":
            blamed = head.get("accused")
            blamed = [n for n in blamed if type(n) is int] if isinstance(blamed, list) else []
            raise Failed(one_line(head.get("reason")), tuple(blamed))
        asked = {"experiment": self.roster.hash, "run": self.roster.run, "client": member.number, "round": round}
        check_asked(head, asked)
        if head.get("session") != member.session:
            self.roster.forget(member.number)  # started again: it is greeted again before the next round
        try:
            return read(member, message)
        except Refused:
            raise
        except Exception as error:  # whatever one client sends, the others go on
            raise Refused(f"it cannot be read ({one_line(error)})") from None


def check_asked(head: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Refused where an answer is to another question: one of an earlier round or run, or of another client."""
    for key, mine in asked.items():
        told = head.get(key)
        if type(told) is not type(mine) or told != mine:
            if key == "round":
                raise Refused(f"it answers round {one_line(told)[:20]}, but this is round {mine}")
            raise Refused(f"it answers for another {key} ({one_line(told)[:20]})")


def _digest(content: bytes) -> tuple[int, str]:
    return len(content), hashlib.sha256(content).hexdigest()
