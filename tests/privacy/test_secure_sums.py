"""The protocol of secure sums: exact for every set of clients that is left, and closed to a server that asks more."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cryptography", reason="needs cryptography: pip install 'protofed[flower]'")
pytest.importorskip("Crypto", reason="needs pycryptodome: pip install 'protofed[flower]'")

from protofed.errors import UserError
from protofed.method import Mean
from protofed.privacy.collector import SumCollector
from protofed.privacy.fault import SumFault
from protofed.privacy.fixed import CHECKS, Grid, caps_of, means_of
from protofed.privacy.graph import MANY, degree, holders_needed, needed, neighbours
from protofed.privacy.keys import Identity, lasting_keys, member_identity, sealed, unsealed
from protofed.privacy.member import SumMember
from protofed.privacy.shares import combine_shares, recover_secret, split_secret

CONTEXT = b"run/1/try"
FORM = {"a": Mean({"x": torch.zeros(3, 2)}, torch.zeros(3)), "b": Mean(torch.zeros(4), torch.zeros(()))}


def upload(number: int) -> Any:
    draw = torch.Generator().manual_seed(number)
    held = torch.randint(0, 2, (3,), generator=draw).float()
    return {
        "a": Mean.of({"x": torch.randn(3, 2, generator=draw)}, held),
        "b": Mean.of(torch.randn(4, generator=draw), torch.tensor(float(1 + number % 7))),
    }


def grid(clients: int, bits: int = 32) -> Grid:
    return Grid(bits, 8.0, clients, (1.0, 7.0))


class Round:
    """A sum of some clients, step by step."""

    def __init__(self, clients: int, threshold: int, bits: int = 32, identities: dict[int, Identity] | None = None):
        self.numbers = list(range(clients))
        self.grid = grid(clients, bits)
        self.ups = {number: upload(number) for number in self.numbers}
        known = identities or lasting_keys(self.numbers)
        self.members = {n: SumMember(known[n], CONTEXT, threshold) for n in self.numbers}
        self.server = SumCollector(CONTEXT, threshold, self.grid, self.grid.size(FORM))
        self.sent: dict[int, Any] = {}

    def keys(self, who: set[int]) -> "Round":
        for number in sorted(who):
            self.server.advertise(number, self.members[number].public)
        self.server.begin()
        return self

    def share(self, who: set[int]) -> "Round":
        for number in sorted(who & set(self.server.adverts)):
            self.server.share(number, list(self.members[number].shares(self.server.adverts).values()))
        return self

    def upload(self, who: set[int]) -> "Round":
        for number in sorted(who & set(self.server.shared)):
            received, shared = self.server.for_member(number), set(self.server.shared)
            vector = self.grid.encode(self.ups[number])
            masked = self.members[number].masked(received, shared, vector, self.grid)
            self.sent[number] = masked.vector.copy()
            self.server.add(number, masked.commitment, masked.vector)
        return self

    def open(self, who: set[int]) -> "Round":
        for number in sorted(who & set(self.server.survivors)):
            self.server.open_with(number, self.members[number].unmask(set(self.server.survivors)))
        return self

    def plain(self) -> Any:
        """The sum of the survivors' vectors, unmasked."""
        total = sum(self.grid.encode(self.ups[n]).astype(object) for n in self.server.survivors)
        return total % 2**self.grid.bits


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whoever_is_lost_and_when_the_sum_is_exact_if_enough_are_left_and_closed_if_not(data: st.DataObject) -> None:
    clients = data.draw(st.integers(3, 9))
    threshold = data.draw(st.integers(clients // 2 + 1, clients))
    bits = data.draw(st.sampled_from([24, 32, 40, 64]))
    lost_at = data.draw(st.lists(st.integers(1, 9), min_size=clients, max_size=clients))  # 1 to 4: before this step

    def left(step: int) -> set[int]:
        return {number for number, at in enumerate(lost_at) if at > step}

    round = Round(clients, max(2, threshold), bits)
    if len(left(4)) >= max(2, threshold):
        round.keys(left(1)).share(left(2)).upload(left(3)).open(left(4))
        assert round.server.openable
        assert (round.server.total().astype(object) == round.plain()).all()
        opened = round.grid.decode(round.server.total(), FORM, len(round.server.survivors))
        ups = [round.ups[n] for n in round.server.survivors]
        assert torch.equal(opened.up["a"].weight, torch.stack([up["a"].weight for up in ups]).sum(0))
        step = round.grid.total_step(7.0)
        error = (opened.up["b"].total.double() - torch.stack([up["b"].total.double() for up in ups]).sum(0)).abs().max()
        assert float(error) <= len(ups) * step / 2 + 1e-4
        return
    with pytest.raises(SumFault, match="needed"):
        round.keys(left(1)).share(left(2)).upload(left(3)).open(left(4)).server.total()


def test_a_graph_of_many_clients_gives_the_exact_sum_when_a_tenth_is_lost_at_every_step() -> None:
    clients, threshold = 60, 35
    round = Round(clients, threshold)
    everybody = set(range(clients))
    round.keys(everybody - {3, 4}).share(everybody - {5, 6, 7}).upload(everybody - {8, 9, 10}).open(
        everybody - {11, 12}
    )
    assert all(len(near) == degree(58) < 57 for near in round.server.near.values())
    assert (round.server.total().astype(object) == round.plain()).all()
    assert len(round.server.survivors) == 52


def test_neighbours_are_mutual_follow_from_all_keys_and_are_everybody_among_few() -> None:
    adverts = {number: bytes([number]) * 32 for number in range(80)}
    near = neighbours(adverts, CONTEXT)
    assert all(len(set(some)) == len(some) == degree(80) and n not in some for n, some in near.items())
    assert all(number in near[other] for number, some in near.items() for other in some)
    changed = neighbours(adverts | {7: bytes(32)}, CONTEXT)
    assert changed != near
    assert neighbours(adverts, b"another sum") != near
    few = dict(list(adverts.items())[: MANY - 1])
    assert all(len(some) == MANY - 2 for some in neighbours(few, CONTEXT).values())


def test_a_masked_upload_says_nothing_and_differs_in_every_sum() -> None:
    first, second = (Round(5, 4).keys(set(range(5))).share(set(range(5))).upload(set(range(5))) for _ in range(2))
    plain = first.grid.encode(first.ups[0])
    for sent in (first.sent[0], second.sent[0]):
        assert (sent != plain).mean() > 0.9
        assert (sent[-CHECKS:] != 1).any()
    assert (first.sent[0] != second.sent[0]).mean() > 0.9


def test_masked_numbers_are_spread_evenly_over_all_bits() -> None:
    wide = Round(4, 3)
    wide.grid = Grid(32, 8.0, 4, (1.0,))
    form = Mean(torch.zeros(20_000), torch.zeros(()))
    wide.server = SumCollector(CONTEXT, 3, wide.grid, wide.grid.size(form))
    wide.ups = dict.fromkeys(range(4), Mean(torch.full((20_000,), 0.5), torch.ones(())))
    sent = wide.keys(set(range(4))).share(set(range(4))).upload(set(range(4))).sent[2]
    ones = ((sent[:, None] >> np.arange(32, dtype=np.uint32)) & 1).mean(0)
    assert (abs(ones - 0.5) < 0.02).all()  # 5.6 standard deviations
    assert np.array_equal(wide.open(set(range(4))).server.total().astype(object), wide.plain())


# a server that asks for more


def opened(clients: int = 5, threshold: int = 4) -> Round:
    return Round(clients, threshold).keys(set(range(clients))).share(set(range(clients))).upload(set(range(clients)))


def test_a_client_gives_one_kind_of_share_of_each_member_and_only_once() -> None:
    round = opened()
    member = round.members[0]
    given = member.unmask({0, 1, 2, 3})
    assert member.unmask({0, 1, 2, 3}) == given  # the same request again, after a lost answer
    with pytest.raises(SumFault, match="asked twice to open the sum"):
        member.unmask({0, 1, 2, 3, 4})
    with pytest.raises(SumFault, match="asked twice to open the sum"):
        member.unmask({0, 1, 2, 4})


def test_shares_of_both_kinds_never_reach_the_threshold_for_one_client() -> None:
    """The server tells some clients that client 4 is there, and others that it is lost."""
    round = opened(5, 3)
    own, key = {}, {}
    for holder, told in ((0, {0, 1, 2, 3, 4}), (1, {0, 1, 2, 3, 4}), (2, {0, 1, 2, 3}), (3, {0, 1, 2, 3})):
        (own if 4 in told else key)[holder] = round.members[holder].unmask(told)[4]
    assert len(own) < 3 or len(key) < 3
    assert combine_shares(dict(list(own.items())[:2])) != round.members[4]._own_seed
    assert combine_shares(dict(list(key.items())[:2])) != round.members[4]._key_seed


@pytest.mark.parametrize("told", [{0}, {0, 1, 2}, {1, 2, 3, 4}, {0, 1, 2, 3, 7}])
def test_a_client_opens_no_sum_of_too_few_without_itself_or_with_strangers(told: set[int]) -> None:
    with pytest.raises(SumFault, match="it was asked to open a sum of"):
        opened().members[0].unmask(told)


def test_a_client_uploads_once_and_only_to_who_has_shared() -> None:
    round = Round(5, 4).keys(set(range(5))).share(set(range(5)))
    vector = round.grid.encode(round.ups[0])
    member, received = round.members[0], round.server.for_member(0)
    with pytest.raises(SumFault, match="before its shares"):
        Round(5, 4).members[0].masked(received, set(range(5)), vector, round.grid)
    with pytest.raises(SumFault, match="3 clients have shared, and 4 are needed"):
        member.masked({n: received[n] for n in (1, 2)}, {0, 1, 2}, vector, round.grid)
    with pytest.raises(SumFault, match="did not pass on the shares"):
        member.masked({n: received[n] for n in (1, 2, 3)}, set(range(5)), vector, round.grid)
    first = member.masked(received, set(range(5)), vector, round.grid)
    assert member.masked(received, set(range(5)), vector, round.grid) is first
    with pytest.raises(SumFault, match="asked twice for its upload"):
        member.masked({n: received[n] for n in (1, 2, 3)}, {0, 1, 2, 3}, vector, round.grid)


def test_a_client_shares_its_secrets_once_and_with_the_keys_that_it_was_told_first() -> None:
    round = Round(4, 3).keys(set(range(4)))
    adverts = round.server.adverts
    with pytest.raises(SumFault, match="another key for this client"):
        round.members[0].shares({**adverts, 0: adverts[1]})
    with pytest.raises(SumFault, match="a key twice"):
        round.members[0].shares({**adverts, 2: adverts[1]})
    with pytest.raises(SumFault, match="2 clients are left for the sum, and 3 are needed"):
        round.members[0].shares({0: adverts[0], 1: adverts[1]})
    first = round.members[0].shares(adverts)
    assert round.members[0].shares(adverts) == first
    with pytest.raises(SumFault, match="asked twice for shares"):
        round.members[0].shares({n: adverts[n] for n in (0, 1, 2)})


def test_a_server_that_puts_its_own_key_in_the_place_of_a_member_gets_no_upload() -> None:
    """It knows everything but the members' lasting keys."""
    round = Round(4, 3).keys(set(range(4)))
    forged = SumMember(lasting_keys([0, 1, 2, 3])[1], CONTEXT, 3)  # a lasting key that is not client 1's
    adverts = {**round.server.adverts, 1: forged.public}
    round.members[0].shares(adverts)
    theirs = {n: round.members[n].shares(adverts)[0] for n in (2, 3)} | {1: forged.shares(adverts)[0]}
    with pytest.raises(SumFault, match="the keys or shares of client 1 do not match") as caught:
        round.members[0].masked(theirs, set(range(4)), round.grid.encode(round.ups[0]), round.grid)
    assert caught.value.accused == (1,)


def test_shares_of_another_sum_are_not_taken() -> None:
    known = lasting_keys(list(range(4)))
    round = Round(4, 3, identities=known).keys(set(range(4))).share(set(range(4)))
    other = SumMember(known[1], b"run/2/try", 3)
    other._key = round.members[1]._key
    received = round.server.for_member(0) | {1: other.shares(round.server.adverts)[0]}
    with pytest.raises(SumFault, match="client 1 do not match"):
        round.members[0].masked(received, set(range(4)), round.grid.encode(round.ups[0]), round.grid)


# members that lie


def test_wrong_shares_are_found_named_and_done_without() -> None:
    round = opened(6, 4)
    for number, member in round.members.items():
        given = member.unmask(set(range(6)))
        if number == 0:
            given = {owner: bytes(16) for owner in given}
        round.server.open_with(number, given)
    assert (round.server.total().astype(object) == round.plain()).all()
    assert round.server.disputes.liars() == {0}


@pytest.mark.parametrize(("clients", "liars"), [(20, {0}), (20, {2, 7, 13}), (60, {0, 30})])
def test_a_few_liars_among_many_spoil_no_sum(clients: int, liars: set[int]) -> None:
    """There are too many choices of right shares to try them one after another."""
    everybody, threshold = set(range(clients)), needed(0, clients)
    round = Round(clients, threshold).keys(everybody).share(everybody).upload(everybody)
    for number, member in round.members.items():
        given = member.unmask(everybody)
        round.server.open_with(number, {owner: bytes(16) for owner in given} if number in liars else given)
    assert (round.server.total().astype(object) == round.plain()).all()
    assert round.server.disputes.liars() == liars


def test_too_many_wrong_shares_open_nothing() -> None:
    round = opened(5, 4)
    for number, member in round.members.items():
        given = member.unmask(set(range(5)))
        round.server.open_with(number, {owner: bytes(16) for owner in given} if number < 2 else given)
    with pytest.raises(SumFault, match="the mask of client 0 cannot be taken off"):
        round.server.total()


def test_a_wrong_mask_is_noticed() -> None:
    round = Round(4, 3).keys(set(range(4))).share(set(range(4))).upload({0, 1, 2})
    masked = round.members[3].masked(
        round.server.for_member(3), set(range(4)), round.grid.encode(round.ups[3]), round.grid
    )
    noise = np.random.default_rng(0).integers(0, 2**32, len(masked.vector), np.uint32)
    round.server.add(3, masked.commitment, noise)
    round.open(set(range(4)))
    with pytest.raises(SumFault, match="the sum does not open"):
        round.grid.decode(round.server.total(), FORM, 4)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda s: s.advertise(9, b"short"), "its public key is not a key"),
        (lambda s: s.advertise(9, s.adverts[1]), "or is another client's"),
        (lambda s: s.share(0, [bytes(48)]), "too many, too few or too long"),
        (lambda s: s.share(0, [bytes(47)] * 3), "too many, too few or too long"),
        (lambda s: s.add(9, bytes(16), np.zeros(s.size, np.uint32)), "is not expected"),
        (lambda s: s.add(0, bytes(15), np.zeros(s.size, np.uint32)), "another size"),
        (lambda s: s.add(0, bytes(16), np.zeros(3, np.uint32)), "another size"),
        (lambda s: s.open_with(0, {0: bytes(16)}), "shares to open the sum"),
        (lambda s: s.open_with(0, dict.fromkeys(range(4), b"")), "shares to open the sum"),
    ],
)
def test_what_a_member_may_send_in_each_step(spoil: Callable[[SumCollector], None], said: str) -> None:
    server = Round(4, 3).keys(set(range(4))).share(set(range(4))).server
    with pytest.raises(SumFault, match=said):
        spoil(server)


# parts


def test_shares_give_the_secret_and_fewer_do_not() -> None:
    secret = bytes(range(16))
    shares = dict(enumerate(split_secret(secret, 3, 5)))
    assert combine_shares({n: shares[n] for n in (0, 2, 4)}) == secret
    assert combine_shares({n: shares[n] for n in (0, 2)}) != secret
    with pytest.raises(SumFault, match="2 shares of a secret came, and 3 are needed"):
        recover_secret({n: shares[n] for n in (0, 2)}, 3, lambda found: True)
    found, wrong = recover_secret(shares | {1: bytes(16)}, 3, lambda one: one == secret)
    assert (found, wrong) == (secret, (1,))


def test_a_sealed_message_opens_with_its_key_and_about_its_sum_alone() -> None:
    text = sealed(bytes(32), b"shares", b"about")
    assert unsealed(bytes(32), text, b"about") == b"shares"
    for key, about in ((b"\1" * 32, b"about"), (bytes(32), b"else")):
        with pytest.raises(SumFault):
            unsealed(key, text, about)


@pytest.mark.parametrize(
    ("threshold", "clients", "said"),
    [(11, 10, "a round has 10 clients"), (5, 10, "not more than half"), (1, 2, "not more than half")],
)
def test_thresholds_that_cannot_be(threshold: int, clients: int, said: str) -> None:
    with pytest.raises(UserError, match=said):
        needed(threshold, clients)


def test_the_usual_threshold_is_more_than_two_thirds() -> None:
    assert [needed(0, clients) for clients in (2, 3, 6, 10, 100)] == [2, 3, 5, 7, 67]
    assert needed(51, 100) == 51
    assert holders_needed(4, 5, 5) == 4
    assert holders_needed(67, 100, 41) == 28
    assert holders_needed(51, 100, 41) == 21


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=6),
    st.integers(0, 600),
    st.sampled_from([24, 32, 40, 48, 56, 64]),
)
def test_numbers_come_back_within_half_a_step_and_are_cut_at_the_range(
    values: list[float], weight: int, bits: int
) -> None:
    one = Grid(bits, 64.0, 20, (600.0,))
    up = Mean(torch.tensor(values), torch.tensor(float(weight)))
    packed = one.pack(one.encode(up))
    assert len(packed) == (len(values) + 1 + 1 + CHECKS) * bits // 8
    vector = one.unpack(packed, len(values) + 2 + CHECKS)
    back, cut = one.decode(vector, up, 1)
    step, edge = one.total_step(600.0), one.total_step(600.0) * (2 ** (one.room - 1) - 1)
    wanted = up.total.double().clamp(-edge, edge)
    assert bool(((back.total.double() - wanted).abs() <= step / 2 + wanted.abs() * 2**-23).all())
    assert edge >= 64 * 600
    assert float(back.weight) == weight
    assert cut == int((up.total.double().abs() > edge + step / 2).sum())


@pytest.mark.parametrize("bits", [24, 32, 40, 48, 56, 64])
@pytest.mark.parametrize("clients", [2, 3, 4, 100, 1000])
def test_the_largest_numbers_of_all_clients_fit_the_sum(bits: int, clients: int) -> None:
    one = Grid(bits, 8.0, clients, (1.0,))
    up = Mean(torch.tensor([8.0, -8.0]), torch.ones(()))
    total = one.kind.type(0) * one.encode(up)
    for _ in range(clients):
        total = one.reduced(total + one.encode(up))
    back, cut = one.decode(total, up, clients)
    assert back.total.tolist() == [8.0 * clients, -8.0 * clients]
    assert float(back.weight) == clients
    assert cut == 0


def test_a_sum_with_impossible_weights_or_numbers_is_refused() -> None:
    one = Grid(32, 8.0, 3, (1.0,))
    form = Mean(torch.zeros(1), torch.zeros(()))
    good = one.encode(Mean(torch.ones(1), torch.ones(())))
    heavy, large = good.copy(), good.copy()
    heavy[0] *= 2
    large[1] = 2**31 - 1
    for vector, said in ((heavy, "a weight of 2"), (large, "beyond privacy.range")):
        with pytest.raises(SumFault, match=said):
            one.decode(vector, form, 1)


def test_a_mean_of_ones_uses_all_bits_and_one_of_counts_leaves_room_for_them() -> None:
    counted = caps_of(means_of(FORM | {"c": Mean(torch.zeros(2), torch.tensor([1.0, 40.0]))}), 600)
    assert counted == (1.0, 1.0, 600.0)


def test_the_keys_of_a_federation_that_do_not_fit_are_refused() -> None:
    certificates = pytest.importorskip("protofed.remote.flower.certificates")
    mine, other = certificates.make_client_key(), certificates.make_client_key()
    public = {0: mine.certificate.decode(), 1: other.certificate.decode()}
    first = member_identity(0, mine.key, public)
    second = member_identity(1, other.key, public)
    assert first.agreed(1) == second.agreed(0)
    with pytest.raises(ValueError, match="not this client's own"):
        member_identity(0, mine.key, {0: public[1], 1: public[0]})
    with pytest.raises(SumFault, match="client 7 is not among"):
        first.agreed(7)
