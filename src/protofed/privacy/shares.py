"""Secrets in shares, any t of which give the secret back, and fewer of which say nothing (Shamir 1979)."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from random import SystemRandom

from Crypto.Protocol.SecretSharing import Shamir  # as Flower's own secure aggregation does

from protofed.privacy.fault import NoSecret, SumFault

SECRET = 16  # bytes of a secret, and of a share
TRIES = 500  # choices of t shares that are tried if some are wrong


def split_secret(secret: bytes, threshold: int, holders: int) -> list[bytes]:
    """A share for each holder, in order."""
    return [share for _, share in Shamir.split(threshold, holders, secret, ssss=False)]


def combine_shares(shares: Mapping[int, bytes]) -> bytes:
    """The secret of exactly t shares, by their holders' places from 0 on."""
    secret: bytes = Shamir.combine([(place + 1, share) for place, share in shares.items()], ssss=False)
    return secret


def recover_secret(
    shares: Mapping[int, bytes], threshold: int, fits: Callable[[bytes], bool], doubted: Set[int] = frozenset()
) -> tuple[bytes, tuple[int, ...]]:
    """The secret that `fits`, and the places whose shares are wrong; a SumFault if there are too few shares, and
    NoSecret if they give none. `doubted`: places whose shares of other secrets were wrong, which are taken last."""
    if len(shares) < threshold:
        raise SumFault(f"{len(shares)} shares of a secret came, and {threshold} are needed")
    order = sorted(shares, key=lambda place: (place in doubted, place))
    for number, some in enumerate(_choices(order, threshold)):
        secret = combine_shares({place: shares[place] for place in some})
        if fits(secret):
            return secret, _off(shares, some, secret, shares if number else doubted)
    sure = math.comb(len(order), threshold) <= TRIES
    if not sure:  # too many choices to try them all; but if all shares agree, no choice is another one
        first = tuple(order[:threshold])
        sure = not _off(shares, first, combine_shares({place: shares[place] for place in first}), shares)
    raise NoSecret("no set of shares gives the secret that was committed to", sure)


def _off(shares: Mapping[int, bytes], some: Sequence[int], secret: bytes, among: Iterable[int]) -> tuple[int, ...]:
    """Which of the places `among` have shares that are not of the secret that some others give."""
    others = [place for place in among if place in shares and place not in some]
    return tuple(p for p in others if combine_shares({q: shares[q] for q in (*some[1:], p)}) != secret)


def _choices(order: Sequence[int], threshold: int) -> Iterator[tuple[int, ...]]:
    """Choices of so many places, the first ones first: all choices, or, of very many, some by chance, because those
    next to the first have nearly the same places."""
    if math.comb(len(order), threshold) <= TRIES:
        yield from itertools.combinations(order, threshold)
        return
    yield tuple(order[:threshold])
    chance = SystemRandom()
    for _ in range(TRIES - 1):
        yield tuple(chance.sample(order, threshold))
