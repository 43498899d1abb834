"""The engine of a federation whose clients tell no results of their tests, because these are of one client each."""

from collections.abc import Sequence
from typing import Any

from protofed.method import Method, Tree
from protofed.ops.trees import deal
from protofed.remote.protocol import Message, body_of, check_answer
from protofed.remote.server.engine import RemoteEngine
from protofed.remote.server.roster import Member

UNSEEN: dict[str, Any] = {"figures": {}, "part": "", "times": 0.0, "share": 0.0}  # what is known of an upload


class UntoldEngine(RemoteEngine):
    """Clients behind a transport, which are trained and never tested singly."""

    def _test(self, method: Method, server: Tree, numbers: Sequence[int]) -> None:
        """Let these clients do the last phases, if that is due; nobody tells the results of its tests."""
        self._tried |= set(numbers)
        self._measured |= {number: self._untold() for number in numbers}
        if not method.last_phases() or self.round <= self.experiment.rounds:
            return
        self.roster.refresh()
        members = [self.roster.members[number] for number in numbers if number in self.roster.members]
        whole, down = method.global_client(server), method.broadcast(server, self._ids(members))
        model = {} if whole is None else {"global": whole}
        bodies = [body_of({"down": deal(down, row), **model}) for row in range(len(members))]

        def read(member: Member, message: Message) -> None:
            check_answer(message.head, "answer")

        self.asking.ask("finish", self.round, members, bodies, read, ask=[], confusion="")

    def _untold(self) -> dict[str, Any]:
        return {f"{on}/{who}": self._nothing("") for on in ("own", "validation") for who in ("personal", "global")}
