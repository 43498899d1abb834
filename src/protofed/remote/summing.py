"""The messages of a secure sum as bytes: who is left, public keys, sealed shares, masked uploads and shares."""

import hashlib
from collections.abc import Mapping, Sequence, Set

from torch.utils._pytree import tree_leaves

from protofed.method import Each, Tree
from protofed.ops.trees import is_node
from protofed.privacy.fixed import Grid
from protofed.privacy.keys import PUBLIC
from protofed.privacy.member import SEALED, Masked
from protofed.privacy.shares import SECRET
from protofed.remote.protocol import Refused

NUMBER = 4  # bytes of a client's number
STEPS = ("share", "mask", "open")  # what is asked after "train", whose answer is a public key


def sum_context(experiment: str, run: str, round: int, attempt: str, sent: str) -> bytes:
    """The name of one sum, which all its keys depend on; `sent`: the hash of what all clients were sent alike."""
    return f"{experiment}/{run}/{round}/{attempt}/{sent}".encode()


def sent_alike(broadcast: Tree, body: bytes) -> str:
    """The hash of a broadcast that is the same for all; empty where each client gets a part of its own.

    Keys that depend on it do not match between clients that were sent different models, whose sum could tell more."""
    nodes = tree_leaves(broadcast, is_leaf=is_node)
    return "" if any(isinstance(node, Each) for node in nodes) else hashlib.sha256(body).hexdigest()


def pack_adverts(adverts: Mapping[int, bytes]) -> bytes:
    """Everybody's number and public key."""
    return b"".join(number.to_bytes(NUMBER, "little") + adverts[number] for number in sorted(adverts))


def unpack_adverts(body: bytes, most: int) -> dict[int, bytes]:
    """What was packed, of so many clients at most."""
    one = NUMBER + PUBLIC
    if not body or len(body) % one or len(body) > most * one:
        raise Refused(f"the list of keys has {len(body):,} bytes, which is not one of at most {most} clients")
    parts = [body[at : at + one] for at in range(0, len(body), one)]
    found = {int.from_bytes(part[:NUMBER], "little"): part[NUMBER:] for part in parts}
    if list(found) != sorted(found) or len(found) < len(parts):
        raise Refused("the list of keys names a client twice, or is out of order")
    return found


def pack_left(left: Set[int], members: Sequence[int]) -> bytes:
    """Which of the members are left, as bits."""
    bits = sum(1 << place for place, number in enumerate(members) if number in left)
    return bits.to_bytes(-(-len(members) // 8), "little")


def unpack_left(body: bytes, members: Sequence[int]) -> set[int]:
    """Which of the members are left."""
    bits = int.from_bytes(body, "little")
    if len(body) != -(-len(members) // 8) or bits >> len(members):
        raise Refused("the list of who is left does not fit the members of the sum")
    return {number for place, number in enumerate(members) if bits >> place & 1}


def split_evenly(body: bytes, size: int, most: int) -> list[bytes]:
    """A message's parts of one size, of which there are so many at most."""
    if len(body) % size or len(body) > size * most:
        raise Refused(f"{len(body):,} bytes are not up to {most} parts of {size}")
    return [body[at : at + size] for at in range(0, len(body), size)]


def unpack_sealed(body: bytes, members: Sequence[int], near: Sequence[int]) -> tuple[set[int], dict[int, bytes]]:
    """Who has shared, and what the neighbours among them sealed for this member."""
    listed = -(-len(members) // 8)
    shared = unpack_left(body[:listed], members)
    there = [number for number in near if number in shared]
    parts = split_evenly(body[listed:], SEALED, len(there))
    return shared, dict(zip(there, parts, strict=False))


def pack_masked(masked: Masked, grid: Grid) -> bytes:
    """A masked upload and the commitment that belongs to it."""
    return masked.commitment + grid.pack(masked.vector)


def unpack_masked(body: bytes, grid: Grid, size: int) -> Masked:
    """What was packed; a SumFault if it has another size."""
    return Masked(body[:SECRET], grid.unpack(body[SECRET:], size))
