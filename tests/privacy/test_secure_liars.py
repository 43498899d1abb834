"""Members of a secure sum that lie, step by step: named where that can be told, and no round is stuck where it cannot.

Client 2 lies. It is a member with its own keys, so that what it seals opens, and everything else that it does is right.
"""

import os
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federated import set_up, small, worker

from protofed.privacy import member as members_side
from protofed.privacy.disputes import Disputes, Suspects, doubted
from protofed.privacy.fault import SumFault
from protofed.privacy.fixed import Grid, Whole
from protofed.privacy.member import Masked, SumMember
from protofed.privacy.shares import SECRET, TRIES, combine_shares, recover_secret, split_secret
from protofed.remote.client import summing
from protofed.remote.server.serve import serve
from protofed.remote.transport import LocalTransport

pytest.importorskip("flwr", reason="needs Flower: pip install 'protofed[flower]'")
CLIENTS, LIAR, VICTIM = 5, 2, 4
PLAN = ("clients=5", "model=mlp_digits", "privacy.secure_sum=true", "record.enabled=false", "method=fedproto")


class WeakKey(SumMember):
    """Step 1: a key with which nobody can agree on a secret."""

    @property
    def public(self) -> bytes:
        return bytes(32)


class SealsNonsense(SumMember):
    """Step 2: what it seals cannot be opened by anybody."""

    def shares(self, adverts: Mapping[int, bytes]) -> dict[int, bytes]:
        return {number: bytes(len(one)) for number, one in super().shares(adverts).items()}


class SealsNonsenseForOne(SumMember):
    """Step 2: what it seals cannot be opened by one other member."""

    def shares(self, adverts: Mapping[int, bytes]) -> dict[int, bytes]:
        made = dict(super().shares(adverts))
        return made | {VICTIM: bytes(len(made[VICTIM]))}


class DealsNonsense(SumMember):
    """Step 2: its shares open, and are of no secret."""

    def shares(self, adverts: Mapping[int, bytes]) -> dict[int, bytes]:
        with pytest.MonkeyPatch.context() as patch:
            random = lambda seed, need, many: [os.urandom(SECRET) for _ in range(many)]  # noqa: E731
            patch.setattr(members_side, "split_secret", random)
            return super().shares(adverts)


class FramesOne(SumMember):
    """Step 2: one other member gets a wrong share, which it will pass on."""

    def shares(self, adverts: Mapping[int, bytes]) -> dict[int, bytes]:
        def split(seed: bytes, need: int, many: int) -> list[bytes]:
            made = split_secret(seed, need, many)
            return [bytes(SECRET) if place == VICTIM else one for place, one in enumerate(made)]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(members_side, "split_secret", split)
            return super().shares(adverts)


class FalseCommitment(SumMember):
    """Step 3: it commits to another mask than it shared."""

    def masked(self, received: Mapping[int, bytes], shared: Set[int], vector: Whole, grid: Grid) -> Masked:
        return super().masked(received, shared, vector, grid)._replace(commitment=os.urandom(SECRET))


class OtherMask(SumMember):
    """Step 3: it masks with another seed than it shared, and commits to that one."""

    def masked(self, received: Mapping[int, bytes], shared: Set[int], vector: Whole, grid: Grid) -> Masked:
        self._own_seed = os.urandom(SECRET)
        return super().masked(received, shared, vector, grid)


class MasksNonsense(SumMember):
    """Step 3: its masked upload is noise."""

    def masked(self, received: Mapping[int, bytes], shared: Set[int], vector: Whole, grid: Grid) -> Masked:
        made = super().masked(received, shared, vector, grid)
        return made._replace(vector=np.frombuffer(os.urandom(made.vector.nbytes), made.vector.dtype).copy())


class AccusesAll(SumMember):
    """Step 3: it says that nobody's shares open."""

    def masked(self, received: Mapping[int, bytes], shared: Set[int], vector: Whole, grid: Grid) -> Masked:
        raise SumFault("the keys or shares of all others do not match", *(set(shared) - {LIAR}))


class AccusesOne(SumMember):
    """Step 3: it says that one other member's shares do not open."""

    def masked(self, received: Mapping[int, bytes], shared: Set[int], vector: Whole, grid: Grid) -> Masked:
        raise SumFault(f"the keys or shares of client {VICTIM} do not match", VICTIM)


class GivesNonsense(SumMember):
    """Step 4: its shares of everybody's secrets are wrong."""

    def unmask(self, survivors: Set[int]) -> dict[int, bytes]:
        return {number: os.urandom(SECRET) for number in super().unmask(survivors)}


class GivesOneWrong(SumMember):
    """Step 4: its share of one other member's secret is wrong."""

    def unmask(self, survivors: Set[int]) -> dict[int, bytes]:
        return dict(super().unmask(survivors)) | {0: os.urandom(SECRET)}


class GivesNothing(SumMember):
    """Step 4: it refuses to open anything."""

    def unmask(self, survivors: Set[int]) -> dict[int, bytes]:
        raise SumFault("no")


SHARES = "its keys or shares do not match those of other clients"
MASK = "its mask is not the one that it shared"
WRONG = "its shares of other clients' masks were wrong"
NAMED = [
    (WeakKey, 4, [4, 4, 4], "a public key is not one"),
    (SealsNonsense, 4, [4, 4, 4], SHARES),
    (DealsNonsense, 3, [0, 4, 4], MASK),
    (FalseCommitment, 3, [0, 4, 4], MASK),
    (OtherMask, 3, [0, 4, 4], MASK),
    (AccusesAll, 4, [4, 4, 4], SHARES),
    (GivesNonsense, 4, [5, 4, 4], WRONG),
    (GivesNothing, 4, [5, 5, 5], "it says: no"),
]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protofed.remote.server.roster.AGAIN", 0.05)
    monkeypatch.setattr("protofed.remote.server.masked.LONGEST", 0.05)


def served(
    home: Path, kind: type[SumMember], threshold: int, rounds: int, patch: pytest.MonkeyPatch
) -> tuple[list[int], list[str]]:
    """How many clients each round merged, and what the server said."""

    def made(identity: Any, context: bytes, least: int) -> SumMember:
        return (kind if identity.number == LIAR else SumMember)(identity, context, least)

    patch.setattr(summing, "SumMember", made)
    set_up(home, small(*PLAN, f"rounds={rounds}", f"privacy.threshold={threshold}"), minimum=2)
    transport, said = LocalTransport({100 + number: worker(home, number) for number in range(CLIENTS)}), []
    try:
        result = serve(home / "server", transport, said.append, pause=0.01)
    finally:
        for one in transport.workers.values():
            one.close()  # type: ignore[attr-defined]
    return [line["clients"] for line in result.rounds], said


def refused(said: list[str]) -> Iterator[int]:
    """Who is named as a liar."""
    for text in said:
        for number in range(CLIENTS):
            yield from [number] if any(f"site-{number}: {why}" in text for why in (SHARES, MASK, WRONG)) else []


@pytest.mark.parametrize(("kind", "threshold", "clients", "words"), NAMED)
def test_a_member_that_lies_is_named_and_the_rounds_go_on_without_it(
    kind: type[SumMember], threshold: int, clients: list[int], words: str, tmp_path: Path, monkeypatch: Any
) -> None:
    found, said = served(tmp_path, kind, threshold, 3, monkeypatch)
    assert found == clients, said
    assert any(f"site-{LIAR}: {words}" in text for text in said), said
    assert set(refused(said)) <= {LIAR}


@pytest.mark.parametrize(
    ("kind", "threshold", "clients"),
    [(SealsNonsenseForOne, 4, [4, 4]), (AccusesOne, 4, [4, 4]), (FramesOne, 3, [5, 5]), (GivesOneWrong, 3, [5, 5])],
)
def test_a_lie_about_one_other_member_costs_at_most_one_upload_and_names_nobody_who_is_honest(
    kind: type[SumMember], threshold: int, clients: list[int], tmp_path: Path, monkeypatch: Any
) -> None:
    found, said = served(tmp_path, kind, threshold, 2, monkeypatch)
    assert found == clients, said
    assert not list(refused(said))


@pytest.mark.parametrize("kind", [SealsNonsenseForOne, AccusesOne, FalseCommitment, MasksNonsense])
def test_where_a_sum_needs_everybody_its_rounds_are_left_out_and_the_log_says_what_is_known(
    kind: type[SumMember], tmp_path: Path, monkeypatch: Any
) -> None:
    """Nobody can be done without: nothing is merged, and the run comes to its end."""
    found, said = served(tmp_path, kind, 5, 2, monkeypatch)
    assert found == [0, 0]
    assert not list(refused(said))
    assert sum(f"round {n} is left out" in text for n in (1, 2) for text in said) == 2
    if kind in (SealsNonsenseForOne, AccusesOne):
        assert "round 1: site-2 and site-4 contradict each other: one of them lies, and nothing shows which" in said
    elif kind is FalseCommitment:
        assert any("the mask of client 2 cannot be taken off" in t and "it lied, or 1 or more of" in t for t in said)
    else:
        assert any("one of site-0, site-1, site-2, site-3, site-4 masked with other numbers" in text for text in said)


@pytest.mark.parametrize(("threshold", "clients"), [(4, [0, 0, 0, 4, 4]), (3, [0, 0, 3, 4, 4])])
def test_who_spoils_sums_without_a_trace_is_found_from_round_to_round(
    threshold: int, clients: list[int], tmp_path: Path, monkeypatch: Any
) -> None:
    """Some are left out of each round, and the sums that open show who is honest."""
    found, said = served(tmp_path, MasksNonsense, threshold, 5, monkeypatch)
    assert found == clients, said
    assert not list(refused(said))


# parts


def test_who_contradicts_more_than_may_lie_together_lies_and_of_other_pairs_one_does() -> None:
    disputes = Disputes(doubted(6, 4))
    for one, other in ((0, 1), (2, 0), (0, 3), (4, 5), (5, 4), (1, 1)):
        disputes.add(one, other)
    assert disputes.liars() == {0}
    assert disputes.unsettled() == [(4, 5)]
    assert Disputes(doubted(5, 5)).doubt == 1
    disputes.add(3, 1)
    assert disputes.unsettled() == [(1, 3), (4, 5)]
    assert disputes.unsettled([4]) == [(1, 3)]


def test_suspects_are_those_of_all_sums_that_failed_and_of_none_that_opened() -> None:
    suspects = Suspects()
    assert suspects.aside({0, 1, 2}, 1) == set()
    suspects.spoilt({0, 1, 2, 3})
    assert suspects.aside({0, 1, 2, 3}, 5) == {0, 1}
    assert suspects.aside({0, 1, 2, 3}, 1) == {0}
    assert suspects.aside({0, 1, 2, 3}, 0) == set()
    suspects.spoilt({1, 2, 3})
    assert suspects.among == [1, 2, 3]
    suspects.opened({0, 1, 3})
    assert suspects.among == [2]
    assert suspects.aside({0, 1, 2, 3}, 2) == {2}
    suspects.spoilt({0, 1, 3})  # there are two, or it was somebody else
    assert suspects.among == [0, 1, 3]


def test_shares_that_agree_on_another_secret_are_sure_to_be_no_others_fault() -> None:
    """Among 20 there are more choices than are tried: it is enough that all shares are of one secret."""
    shares = dict(enumerate(split_secret(b"x" * SECRET, 14, 20)))
    with pytest.raises(SumFault) as caught:
        recover_secret(shares, 14, lambda secret: secret == b"y" * SECRET)
    assert caught.value.sure  # type: ignore[attr-defined]
    with pytest.raises(SumFault) as caught:
        recover_secret(shares | {3: bytes(SECRET)}, 14, lambda secret: secret == b"y" * SECRET)
    assert not caught.value.sure  # type: ignore[attr-defined]
    few = dict(enumerate(split_secret(b"x" * SECRET, 3, 5))) | {3: bytes(SECRET)}
    with pytest.raises(SumFault) as caught:
        recover_secret(few, 3, lambda secret: secret == b"y" * SECRET)
    assert caught.value.sure  # type: ignore[attr-defined]  # all choices were tried
    assert combine_shares({place: few[place] for place in (0, 1, 2)}) == b"x" * SECRET
    assert TRIES < 38_760  # choices of 14 of 20
