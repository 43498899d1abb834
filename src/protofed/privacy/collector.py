"""The server's side of one secure sum: it passes on what it cannot read, adds up, and takes the masks off the sum."""

import secrets
from collections.abc import Mapping, Sequence

from protofed.privacy.disputes import Disputes, doubted
from protofed.privacy.fault import NoSecret, SumFault
from protofed.privacy.fixed import Grid, Whole
from protofed.privacy.graph import holders_needed, neighbours
from protofed.privacy.keys import PUBLIC, SumKey, add_stream, refuse_weak
from protofed.privacy.member import SEALED, commitment, own_key, pair_key
from protofed.privacy.shares import SECRET, recover_secret


class SumCollector:
    """One sum. Each step may end with fewer members than the one before, and not with fewer than the threshold."""

    def __init__(self, context: bytes, threshold: int, grid: Grid, size: int) -> None:
        self.context, self.threshold, self.grid, self.size = context, threshold, grid, size
        self.adverts: dict[int, bytes] = {}
        self.near: dict[int, list[int]] = {}
        self.shared: dict[int, dict[int, bytes]] = {}  # what each member sealed for its neighbours
        self.survivors: list[int] = []
        self.disputes = Disputes(1)  # of members whose shares do not fit
        self._commitments: dict[int, bytes] = {}
        self._total: Whole | None = None  # of masked vectors: none is kept singly
        self._given: dict[int, dict[int, bytes]] = {}  # by owner: the shares of its secret, by holder

    def advertise(self, number: int, public: bytes) -> None:
        """Step 1: a member's public key."""
        if len(public) != PUBLIC or public in self.adverts.values():
            raise SumFault("its public key is not a key, or is another client's")
        refuse_weak(public)
        self.adverts[number] = public

    def begin(self) -> None:
        """The end of step 1: who masks with whom."""
        self._enough(len(self.adverts))
        self.near = neighbours(self.adverts, self.context)
        self.disputes.doubt = doubted(len(self.adverts), self.threshold)

    def share(self, number: int, sealed: Sequence[bytes]) -> None:
        """Step 2: what a member sealed for its neighbours, in ascending order."""
        if len(sealed) != len(self.near[number]) or any(len(one) != SEALED for one in sealed):
            raise SumFault("its shares are too many, too few or too long")
        self.shared[number] = dict(zip(self.near[number], sealed, strict=True))

    def for_member(self, number: int) -> dict[int, bytes]:
        """What the neighbours that have shared sealed for this member."""
        self._enough(len(self.shared))
        return {other: self.shared[other][number] for other in self.near[number] if other in self.shared}

    def add(self, number: int, committed: bytes, vector: Whole) -> None:
        """Step 3: a masked vector, which is added to the sum at once."""
        if number not in self.shared or number in self._commitments:
            raise SumFault("its masked upload is not expected")
        if len(committed) != SECRET or len(vector) != self.size:
            raise SumFault("its masked upload has another size than expected")
        self._commitments[number] = committed
        self._total = vector.copy() if self._total is None else self.grid.reduced(self._total + vector)
        self.survivors = sorted([*self.survivors, number])

    def open_with(self, number: int, shares: Mapping[int, bytes]) -> None:
        """Step 4: a member's shares, one of each neighbour that has shared and one of its own."""
        if sorted(shares) != self.holdings(number) or any(len(one) != SECRET for one in shares.values()):
            raise SumFault("its shares to open the sum are too many, too few or too long")
        for owner, share in shares.items():
            self._given.setdefault(owner, {})[number] = share

    def holdings(self, number: int) -> list[int]:
        """Whose shares a member holds, in ascending order."""
        return sorted([number, *(other for other in self.near[number] if other in self.shared)])

    @property
    def openable(self) -> bool:
        """Whether enough shares of every secret have come."""
        return all(len(self._given.get(owner, {})) >= self._holders(owner) for owner in self._wanted())

    def total(self) -> Whole:
        """The sum of the survivors' vectors; a SumFault if it cannot be opened."""
        self._enough(len(self.survivors))
        assert self._total is not None
        total, alive = self._total.copy(), set(self.survivors)
        for owner in self._wanted():
            if owner in alive:
                add_stream(total, own_key(self._secret(owner, own=True), self.context, owner), -1, self.grid)
                continue
            key = SumKey(self._secret(owner, own=False), self.context)
            for other in self.near[owner]:
                if other in alive:  # it added or subtracted the mask that it has in common with the lost one
                    mask = pair_key(key, self.adverts[other], owner, other, self.context)
                    add_stream(total, mask, -1 if owner > other else 1, self.grid)
        return total

    def _wanted(self) -> list[int]:
        """The members of whom a secret is needed: all survivors, and the lost ones that a survivor masked with."""
        alive = set(self.survivors)
        return [n for n in sorted(self.shared) if n in alive or not alive.isdisjoint(self.near[n])]

    def _holders(self, owner: int) -> int:
        return holders_needed(self.threshold, len(self.adverts), len(self.near[owner]) + 1)

    def _secret(self, owner: int, own: bool) -> bytes:
        holders = sorted([*self.near[owner], owner])
        given = {holders.index(holder): share for holder, share in self._given.get(owner, {}).items()}

        def fits(secret: bytes) -> bool:
            if own:
                made, meant = commitment(secret, self.context, owner), self._commitments[owner]
            else:
                made, meant = SumKey(secret, self.context).public, self.adverts[owner]
            return secrets.compare_digest(made, meant)

        at_odds = {number for pair in self.disputes.pairs for number in pair} | self.disputes.caught
        try:
            last = {place for place, holder in enumerate(holders) if holder in at_odds}
            secret, wrong = recover_secret(given, self._holders(owner), fits, last)
        except NoSecret as fault:
            lying = len(given) - self._holders(owner) + 1  # of those who hold its shares, at least, if not itself
            sure = fault.sure and lying > self.disputes.doubt
            who = "" if sure else f": it lied, or {lying} or more of those who hold its shares"
            raise SumFault(
                f"the mask of client {owner} cannot be taken off: {fault}{who}", *([owner] if sure else [])
            ) from None
        except SumFault as fault:
            raise SumFault(f"the mask of client {owner} cannot be taken off: {fault}") from None
        for holder in (holders[place] for place in wrong):
            self.disputes.add(owner, holder)
            if holder == owner:  # nobody else made this share
                self.disputes.caught.add(owner)
        return secret

    def _enough(self, members: int) -> None:
        if members < self.threshold:
            raise SumFault(f"{members} clients are left for the sum, and {self.threshold} are needed")
