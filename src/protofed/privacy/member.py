"""A member's side of one secure sum, in four steps (Bonawitz et al., CCS 2017, against a server that may lie).

1. It makes a key for this sum, and tells the public one.
2. It splits that key's seed and a second one among its neighbours, sealed for each.
3. It sends its vector plus a mask from each agreement with a neighbour, plus one from its second seed.
4. Told who sent a vector, it gives its shares: of the second seed of those who did, of the key of those who did not.

It never gives both shares of one member, does no step twice in different ways, and opens no sum of fewer than the
threshold.
"""

import os
from collections.abc import Callable, Mapping, Set
from typing import NamedTuple

from protofed.privacy.fault import SumFault
from protofed.privacy.fixed import Grid, Whole
from protofed.privacy.graph import holders_needed, neighbours
from protofed.privacy.keys import PUBLIC, TAG, Identity, SumKey, add_stream, derived, pair, sealed, unsealed
from protofed.privacy.shares import SECRET, split_secret

SEALED = 2 * SECRET + TAG  # bytes of the two shares that one member sends another


class Masked(NamedTuple):
    """A masked vector, and a commitment to the seed of the member's own mask."""

    commitment: bytes
    vector: Whole


def commitment(seed: bytes, context: bytes, number: int) -> bytes:
    """What shows that a seed is the one that its owner meant, and says nothing of it."""
    return derived(seed, context, b"commit", number.to_bytes(4, "little"))[:SECRET]


class SumMember:
    """One member in one sum. `context` names the sum: run, round and try."""

    def __init__(
        self, identity: Identity, context: bytes, threshold: int, random: Callable[[int], bytes] = os.urandom
    ) -> None:
        self.number, self._identity, self._context, self._threshold = identity.number, identity, context, threshold
        self._key_seed, self._own_seed = random(SECRET), random(SECRET)
        self._key = SumKey(self._key_seed, context)
        self._adverts: dict[int, bytes] = {}
        self.near: list[int] = []  # neighbours, in ascending order
        self._sealed: dict[int, bytes] = {}  # for each neighbour
        self._mine = b""  # its own shares of its own seeds
        self._received: dict[int, bytes] = {}  # from the neighbours, sealed
        self._held: dict[int, bytes] = {}  # the shares in it
        self._shared: Set[int] = frozenset()  # who takes part in step 3
        self._masked: Masked | None = None
        self._given: tuple[Set[int], dict[int, bytes]] | None = None

    @property
    def public(self) -> bytes:
        """Step 1: the public key of this sum."""
        return self._key.public

    def shares(self, adverts: Mapping[int, bytes]) -> dict[int, bytes]:
        """Step 2: for each neighbour its shares, sealed. `adverts`: everybody's public key."""
        if self._adverts:
            if dict(adverts) != self._adverts:
                raise SumFault("it was asked twice for shares, with different keys")
            return self._sealed
        if adverts.get(self.number) != self.public:
            raise SumFault("the server lists another key for this client than it sent")
        if any(len(public) != PUBLIC for public in adverts.values()) or len(set(adverts.values())) < len(adverts):
            raise SumFault("the server lists a key twice, or something that is not a key")
        if len(adverts) < self._threshold:
            raise SumFault(f"{len(adverts)} clients are left for the sum, and {self._threshold} are needed")
        near = neighbours(adverts, self._context)[self.number]
        holders = sorted([*near, self.number])
        need = holders_needed(self._threshold, len(adverts), len(holders))
        halves = zip(
            *(split_secret(seed, need, len(holders)) for seed in (self._own_seed, self._key_seed)), strict=True
        )
        parts = {number: own + key for number, (own, key) in zip(holders, halves, strict=True)}
        made = {
            number: sealed(self._seal_key(number, adverts, to=True), parts[number], self.public + adverts[number])
            for number in near
        }
        self._mine, self._sealed, self.near, self._adverts = parts[self.number], made, near, dict(adverts)
        return self._sealed

    def _seal_key(self, other: int, adverts: Mapping[int, bytes], to: bool) -> bytes:
        """The key for what goes to a neighbour, or comes from it."""
        way = pair(self.number, other) if to else pair(other, self.number)
        try:
            agreed = self._key.agreed(adverts[other])
        except SumFault as fault:
            raise SumFault(f"{fault}: that of client {other}", other) from None
        return derived(self._identity.agreed(other) + agreed, self._context, b"seal", way)

    def masked(self, received: Mapping[int, bytes], shared: Set[int], vector: Whole, grid: Grid) -> Masked:
        """Step 3: the vector under masks. `shared`: who has shared; `received`: what the neighbours among them sealed
        for this member."""
        if self._masked is not None:
            if (dict(received), shared) != (self._received, self._shared):
                raise SumFault("it was asked twice for its upload, with other members")
            return self._masked
        if not self._adverts:
            raise SumFault("it was asked for its upload before its shares")
        if self.number not in shared or not shared <= self._adverts.keys() or len(shared) < self._threshold:
            raise SumFault(f"{len(shared)} clients have shared, and {self._threshold} are needed, this one among them")
        there = [number for number in self.near if number in shared]
        if sorted(received) != there:
            raise SumFault("the server did not pass on the shares of all who have shared")
        if len(there) + 1 < holders_needed(self._threshold, len(self._adverts), len(self.near) + 1):
            raise SumFault("too few of this client's neighbours have shared")
        held, wrong = {self.number: self._mine}, []
        for number in there:
            about = self._adverts[number] + self.public
            try:
                held[number] = unsealed(self._seal_key(number, self._adverts, to=False), received[number], about)
                if len(held[number]) != 2 * SECRET:
                    raise SumFault("too long")
            except SumFault:
                wrong.append(number)
        if wrong:
            raise SumFault(
                f"the keys or shares of {_listed(wrong)} do not match: this bundle has other keys, or the server sent "
                "each something else to train on",
                *wrong,
            )
        made = vector.copy()
        for number in there:
            sign = 1 if number > self.number else -1
            add_stream(made, pair_key(self._key, self._adverts[number], self.number, number, self._context), sign, grid)
        add_stream(made, own_key(self._own_seed, self._context, self.number), 1, grid)
        self._held, self._shared, self._received = held, frozenset(shared), dict(received)
        self._masked = Masked(commitment(self._own_seed, self._context, self.number), made)
        return self._masked

    def unmask(self, survivors: Set[int]) -> dict[int, bytes]:
        """Step 4: one share of every member that it holds shares of; afterwards it holds none."""
        if self._given is not None:
            if survivors != self._given[0]:
                raise SumFault("it was asked twice to open the sum, over different clients")
            return self._given[1]
        if self._masked is None:
            raise SumFault("it was asked to open a sum that it takes no part in")
        if self.number not in survivors or not survivors <= self._shared or len(survivors) < self._threshold:
            raise SumFault(
                f"it was asked to open a sum of {len(survivors)} clients, and {self._threshold} are needed, this one "
                "among them"
            )
        near = sum(number in survivors for number in self._held)
        if near < holders_needed(self._threshold, len(self._adverts), len(self.near) + 1):
            raise SumFault("too few of this client's neighbours are in the sum that it was asked to open")
        given = {
            number: share[:SECRET] if number in survivors else share[SECRET:] for number, share in self._held.items()
        }
        self._given = frozenset(survivors), given
        self._held, self._mine, self._own_seed, self._key_seed = {}, b"", b"", b""
        return given


def pair_key(key: SumKey, public: bytes, mine: int, other: int, context: bytes) -> bytes:
    """The key of the mask that two members have in common."""
    return derived(key.agreed(public), context, b"mask", pair(min(mine, other), max(mine, other)))


def own_key(seed: bytes, context: bytes, number: int) -> bytes:
    """The key of a member's own mask."""
    return derived(seed, context, b"own", number.to_bytes(4, "little"))


def _listed(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")
    return f"client {shown}" if len(numbers) == 1 else f"clients {shown}"
