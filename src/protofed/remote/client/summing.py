"""A client's part in the secure sums of its rounds: the upload stays here, and only masked numbers leave."""

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from protofed.config.experiment import Experiment
from protofed.method import Mean, Tree
from protofed.privacy.fault import SumFault
from protofed.privacy.fixed import Grid, means_of
from protofed.privacy.graph import needed
from protofed.privacy.keys import Identity
from protofed.privacy.member import SumMember
from protofed.privacy.shared import noised_grid
from protofed.remote.client.state import StateFolder
from protofed.remote.protocol import Message, Refused, one_line
from protofed.remote.summing import pack_masked, sum_context, unpack_adverts, unpack_left, unpack_sealed
from protofed.runs.cohort import draw_cohort
from protofed.runs.securesum import with_loss

MOST_WEIGHT = 1e12  # that a server may say a client can have


class Accused(Refused):
    """A step is refused because of what other members sent, as far as this one can tell."""

    def __init__(self, reason: str, accused: tuple[int, ...]) -> None:
        super().__init__(reason)
        self.accused = accused


class Sum(NamedTuple):
    """The sum that this client takes part in now."""

    run: str
    round: int
    attempt: str
    sent: str  # the hash of what all clients were sent alike
    member: SumMember
    up: Tree  # with the loss
    members: list[int]  # all who sent a key, in ascending order; empty until that is known


class ClientSums:
    """One sum at a time; nothing of it is written to disk but which clients a round's sum was opened over."""

    def __init__(
        self,
        experiment: Experiment,
        hash: str,
        identity: Identity,
        listed: Mapping[int, str],  # all members' public keys
        state: StateFolder,
        tell: Callable[[str], None],
        noise: float | None = None,  # over the clip, where each client adds its share
    ) -> None:
        self.noise = noise
        self.experiment, self.hash, self.identity, self.state, self.tell = experiment, hash, identity, state, tell
        self.listed = listed
        self.cohort = len(draw_cohort(experiment, 0))
        self.threshold = needed(experiment.privacy.threshold, self.cohort)
        self._now: Sum | None = None
        self._steps = {"share": self._share, "mask": self._mask, "open": self._open}

    def describe(self) -> str:
        """The members' keys on which the secrecy of sums rests, for people to compare."""
        prints = {n: hashlib.sha256(key.strip().encode()).hexdigest()[:16] for n, key in sorted(self.listed.items())}
        lines = [f"  client {n}{' (this one)' if n == self.identity.number else ''}: {p}" for n, p in prints.items()]
        return "\n".join(
            [
                "The server cannot read uploads if these are the members' own keys. Compare them with the members:",
                *lines,
            ]
        )

    def key(self, head: dict[str, Any], round: int, sent: str, up: Tree, loss: Mean | None) -> bytes:
        """Step 1, after training on what was `sent`: the public key for this sum."""
        run, attempt = str(head.get("run")), head.get("try")
        if not isinstance(attempt, str) or not 1 <= len(attempt) <= 64:
            raise Refused("the request to train names no sum. This experiment has privacy.secure_sum")
        now = self._now
        if now is None or (now.run, now.round, now.attempt, now.sent) != (run, round, attempt, sent):
            context = sum_context(self.hash, run, round, attempt, sent)
            member = SumMember(self.identity, context, self.threshold)
            self._now = Sum(run, round, attempt, sent, member, with_loss(up, loss), [])
            return member.public
        return now.member.public

    def step(self, message: Message) -> bytes:
        """One of the other steps."""
        head, now = message.head, self._now
        if now is None or [head.get(key) for key in ("run", "round", "try")] != [now.run, now.round, now.attempt]:
            raise Refused("it takes no part in this sum: it was started again, or asked for another meanwhile")
        try:
            return self._steps[str(head["kind"])](now, message)
        except SumFault as fault:
            raise Accused(str(fault), fault.accused) from None

    def _share(self, now: Sum, message: Message) -> bytes:
        adverts = unpack_adverts(message.body, self.cohort)
        sealed = now.member.shares(adverts)
        self._now = now._replace(members=sorted(adverts))
        return b"".join(sealed[number] for number in sorted(sealed))

    def _mask(self, now: Sum, message: Message) -> bytes:
        shared, received = unpack_sealed(message.body, now.members, now.member.near)
        grid = self._grid(message.head, now)
        return pack_masked(now.member.masked(received, shared, grid.encode(now.up), grid), grid)

    def _grid(self, head: dict[str, Any], now: Sum) -> Grid:
        """The grid, for which the server says how much a client can weigh."""
        told, many = head.get("caps"), len(means_of(now.up))
        if not isinstance(told, list) or len(told) != many:
            raise Refused(f"the server tells no largest weight for each of the {many} means that are summed")
        for cap in told:
            if type(cap) not in (int, float) or not 0 < cap <= MOST_WEIGHT or not math.isfinite(cap):
                raise Refused(f"{one_line(cap)[:40]} is not a largest weight")
        privacy = self.experiment.privacy
        if self.noise is not None:  # whatever it is told: no number is cut, and the grid is fine enough
            return noised_grid(privacy, self.noise, self.cohort)
        return Grid(privacy.bits, privacy.range, self.cohort, tuple(map(float, told)))

    def _open(self, now: Sum, message: Message) -> bytes:
        survivors = unpack_left(message.body, now.members)
        before = self.state.opened(now.run, now.round)
        if before is not None and before != sorted(survivors):
            raise Refused(
                f"round {now.round} was summed over {len(before)} clients already, and another sum of it could tell a "
                "single client's upload. It goes on with the next round"
            )
        given = now.member.unmask(survivors)
        self.state.note_opened(now.run, now.round, sorted(survivors))
        self.tell(f"round {now.round}: gave shares to open the sum of {len(survivors)} clients")
        return b"".join(given[number] for number in sorted(given))
