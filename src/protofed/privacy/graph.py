"""Who masks with whom: everybody with everybody, or, of many, each with some (SecAgg+; Bell et al., CCS 2020)."""

import hashlib
import math
from collections.abc import Mapping

from protofed.errors import UserError

MANY = 50  # clients from which on each masks with some only


def needed(threshold: int, clients: int) -> int:
    """How many of a round's clients must take part in its sum: as told, or more than two thirds."""
    if threshold == 0:
        return max(2, 2 * clients // 3 + 1)
    if threshold > clients:
        raise UserError(
            f"privacy.threshold = {threshold}, but a round has {clients} clients. Use at most {clients}, more clients, "
            "or a larger participation."
        )
    if 2 * threshold <= clients:
        raise UserError(
            f"privacy.threshold = {threshold} is not more than half of a round's {clients} clients, so the server "
            f"could open two sums. Use at least {clients // 2 + 1}."
        )
    return threshold


def neighbours(adverts: Mapping[int, bytes], context: bytes) -> dict[int, list[int]]:
    """Each member's neighbours, in ascending order: drawn from the keys of all, so that all find the same ones."""
    numbers = sorted(adverts)
    if len(numbers) < MANY:
        return {number: [other for other in numbers if other != number] for number in numbers}
    digest = hashlib.sha256(context)
    for number in numbers:
        digest.update(number.to_bytes(4, "little") + adverts[number])
    seed = digest.digest()
    ring = sorted(numbers, key=lambda number: hashlib.sha256(seed + number.to_bytes(4, "little")).digest())
    half = degree(len(numbers)) // 2
    found: dict[int, list[int]] = {}
    for place, number in enumerate(ring):
        steps = [step for step in range(-half, half + 1) if step]
        found[number] = sorted({ring[(place + step) % len(ring)] for step in steps})
    return found


def degree(clients: int) -> int:
    """How many neighbours each of so many has: an even number that grows with the logarithm."""
    if clients < MANY:
        return clients - 1
    return min(2 * ((clients - 1) // 2), 2 * math.ceil(3 * math.log2(clients)))


def holders_needed(threshold: int, members: int, holders: int) -> int:
    """How many holders of a secret must give their shares of it: the same part of them as the threshold is of all
    members, and more than half."""
    return max(2, math.ceil(threshold * holders / members), holders // 2 + 1)
