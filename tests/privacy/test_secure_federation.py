"""Secure sums in a federation: equal to the simulation, whoever is lost, and with no single upload at the server."""

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from federated import keys_of, set_up, small, worker
from torch.utils._pytree import tree_leaves, tree_map

from protofed import Experiment, UserError, run
from protofed.engines.wire import decode, encode
from protofed.remote.client.worker import ClientWorker
from protofed.remote.protocol import pack_message, unpack_message
from protofed.remote.server.orders import give_order
from protofed.remote.server.serve import serve
from protofed.remote.transport import LocalTransport, Reply
from protofed.runs.folder import RunFolder, State

pytest.importorskip("flwr", reason="needs Flower: pip install 'protofed[flower]'")

from protofed.privacy.keys import member_identity
from protofed.remote.flower import setup
from protofed.remote.settings import Rounds, Task, load_federation, load_members

CLIENTS = 5
PLAN = ("clients=5", "model=mlp_digits", "privacy.secure_sum=true", "record.enabled=false")


def secure(*overrides: str) -> Experiment:
    return small(*PLAN, *overrides)


def state_of(folder: Path) -> State:
    state, _ = RunFolder(folder).restore()
    assert state is not None
    return state


class Lossy(LocalTransport):
    """Clients that are lost before or after they answer: `lose` gets the node and the request's head."""

    def __init__(
        self, workers: Mapping[int, ClientWorker], before: Callable[..., bool], after: Callable[..., bool] | None = None
    ) -> None:
        super().__init__(workers)
        self.before, self.after = before, after or (lambda *told: False)

    def exchange(self, requests: Mapping[int, bytes], deadline: float) -> Iterator[Reply]:
        for node, request in requests.items():
            head = unpack_message(request).head
            if self.before(node, head):
                yield Reply(node, None, "it is gone")
                continue
            (reply,) = super().exchange({node: request}, deadline)
            yield Reply(node, None, "it is gone") if self.after(node, head) else reply


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was lost is greeted again at once."""
    monkeypatch.setattr("protofed.remote.server.roster.AGAIN", 0.05)


def crew(home: Path) -> dict[int, ClientWorker]:
    return {100 + number: worker(home, number) for number in range(CLIENTS)}


def close(transport: LocalTransport) -> None:
    for one in transport.workers.values():
        one.close()  # type: ignore[attr-defined]


def served(home: Path, transport: LocalTransport) -> tuple[Any, list[str]]:
    said: list[str] = []
    try:
        return serve(home / "server", transport, said.append, pause=0.01), said
    finally:
        close(transport)


@pytest.mark.parametrize("method", ["fedproto", "fednh", "fedrep"])
def test_a_federation_equals_its_simulation_and_tells_no_tests(method: str, tmp_path: Path) -> None:
    plan = secure(f"method={method}", "evaluate.own=1")
    simulated = run(plan, tmp_path / "sim")
    set_up(tmp_path, plan, minimum=2)
    transport = LocalTransport(crew(tmp_path))
    result, said = served(tmp_path, transport)
    assert encode(state_of(tmp_path / "sim").server, whole=True) == encode(state_of(result.folder).server, whole=True)
    for mine, theirs in zip(result.rounds, simulated.rounds, strict=True):
        assert mine["loss"] == theirs["loss"]
        assert mine["bytes_up"] == theirs["bytes_up"]
        assert mine["clients"] == CLIENTS
    assert result.summary["accuracy_mean"] is None
    kinds = [unpack_message(request).head["kind"] for _, request, _ in transport.sent]
    assert "evaluate" not in kinds
    assert not any("refused" in text or "no sum" in text for text in said)
    for _, request, answer in transport.sent:
        head = unpack_message(answer).head
        assert "loss" not in head
        if unpack_message(request).head["kind"] == "finish":
            assert unpack_message(answer).body == b""


STEPS = ("train", "share", "mask", "open")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_a_client_lost_at_any_step_costs_its_own_upload_at_most(step: str, when: str, tmp_path: Path) -> None:
    """Client 3 is lost in round 2, before or after it does what is asked; the sum is that of the others."""
    plan = secure("method=fedproto", "privacy.threshold=4")
    set_up(tmp_path, plan, minimum=2)
    lost: list[Any] = []

    def lose(node: int, head: dict[str, Any]) -> bool:
        gone = node == 103 and head.get("round") == 2 and (head["kind"] == step or bool(lost))
        if gone:
            lost.append(head["kind"])
        return gone

    never = lambda *told: False  # noqa: E731
    transport = Lossy(crew(tmp_path), lose if when == "before" else never, lose if when == "after" else None)
    result, said = served(tmp_path, transport)
    assert lost
    assert [line["clients"] for line in result.rounds] == [CLIENTS, 5 if step == "open" else 4]
    assert not any("no sum" in text for text in said)
    alive = range(CLIENTS) if step == "open" else [0, 1, 2, 4]
    totals = [upload(tmp_path, number, 2) for number in alive]
    weight = torch.stack([up.weight for up in totals]).sum(0)
    mean = torch.stack([up.total for up in totals]).sum(0) / weight.clamp(min=1)[:, None]
    found = state_of(result.folder).server
    (value,) = [leaf for leaf in tree_leaves(found) if leaf.shape == mean.shape]
    assert torch.allclose(value[weight > 0], mean[weight > 0], atol=1e-4)


def upload(home: Path, number: int, round: int) -> Any:
    """What a client keeps of its upload, on its own disk."""
    (kept,) = (home / "clients" / f"site-{number}" / "state").glob(f"*/round-{round:06d}/answer.bin")
    up = decode(unpack_message(kept.read_bytes()).body)
    return up["prototypes"] if isinstance(up, dict) else up


def test_too_few_for_a_sum_merge_nothing_and_the_round_is_tried_again(tmp_path: Path) -> None:
    plan = secure("method=fedproto", "rounds=1")
    set_up(tmp_path, plan, minimum=2)
    tries: list[int] = []

    def lose(node: int, head: dict[str, Any]) -> bool:
        if head["kind"] == "share" and node == 100:
            tries.append(node)
        return head["kind"] == "share" and node in (103, 104) and len(tries) == 1

    transport = Lossy(crew(tmp_path), lose)
    result, said = served(tmp_path, transport)
    assert "round 1: no sum: 3 clients are left for the sum, and 4 are needed" in said
    assert "round 1 is tried again" in said
    assert result.rounds[0]["clients"] >= 4


def test_a_sum_that_cannot_be_opened_is_left_out_and_the_next_round_goes_on(tmp_path: Path) -> None:
    plan = secure("method=fedproto", "rounds=2")
    set_up(tmp_path, plan, minimum=2)
    transport = Lossy(crew(tmp_path), lambda node, head: head["kind"] == "open" and node >= 103 and head["round"] == 1)
    result, said = served(tmp_path, transport)
    first, second = (line["clients"] for line in result.rounds)
    assert first == 0
    assert second >= 4  # on a busy machine one may be late, and four are enough for a sum
    assert result.rounds[0]["loss"] is None
    assert any("round 1 is left out" in text for text in said)


def test_a_server_that_is_killed_after_it_asked_to_open_goes_on_over_the_same_clients(tmp_path: Path) -> None:
    plan = secure("method=fedproto", "rounds=2")
    set_up(tmp_path, plan, minimum=2)
    workers = crew(tmp_path)

    class Killed(Exception):
        pass

    def kill(node: int, head: dict[str, Any]) -> bool:
        if head["kind"] == "open" and head["round"] == 1 and node == 102:
            raise Killed
        return head["kind"] == "mask" and head["round"] == 1 and node == 104

    with pytest.raises(Killed):
        serve(tmp_path / "server", Lossy(workers, kill), lambda text: None, pause=0.01)
    asked: dict[int, set[int]] = {}

    def note(node: int, head: dict[str, Any]) -> bool:
        if head["kind"] == "train":
            asked.setdefault(head["round"], set()).add(node)
        return False

    transport = Lossy(workers, note)
    result, _ = served(tmp_path, transport)
    assert asked == {1: {100, 101, 102, 103}, 2: {100, 101, 102, 103, 104}}
    assert [line["clients"] for line in result.rounds] == [4, 5]


def test_clients_open_a_round_over_one_set_of_clients_only_whatever_the_server_forgets(tmp_path: Path) -> None:
    """A server that sums a round over all and then over all but one would know what that one sent."""
    plan = secure("method=fedproto", "rounds=1")
    set_up(tmp_path, plan, minimum=2)
    workers = crew(tmp_path)
    serve(tmp_path / "server", LocalTransport(workers), lambda text: None, pause=0.01)
    opened = [json.loads(p.read_text()) for p in tmp_path.glob("clients/*/state/*/opened.json")]
    assert opened == [{"1": [0, 1, 2, 3, 4]}] * CLIENTS
    assert give_order(tmp_path / "server", "rollback", round=0)
    (tmp_path / "server" / "sum.json").unlink()
    transport = Lossy(workers, lambda node, head: node == 104 and head["kind"] in ("mask", "open"))
    result, said = served(tmp_path, transport)
    assert [line["clients"] for line in result.rounds] == [0]
    assert any("round 1 was summed over 5 clients already" in text for text in said)


# what the server has


def found_of_single_clients(home: Path, everything: bytes, rounds: int = 2) -> tuple[int, int]:
    """How many pieces of single clients' uploads were sought, and how many of them are there: as numbers of two, four
    and eight bytes and as text."""
    sought = found = 0
    for number in range(CLIENTS):
        for round in range(1, rounds + 1):
            flat = torch.cat([leaf.flatten() for leaf in tree_leaves(raw_upload(home, number, round))]).numpy()
            places = [at for at in range(0, len(flat) - 4, 53) if np.abs(flat[at : at + 4]).min() > 1e-3]
            for at in places:
                pieces = [flat[at : at + 4].astype("<f2"), flat[at : at + 2], flat[at : at + 2].astype("<f8")]
                texts = [f"{float(flat[at]):.7g}".encode()]
                sought += 1
                found += any(piece in everything for piece in [*(p.tobytes() for p in pieces), *texts])
    return sought, found


@pytest.mark.parametrize("masked", [True, False])
def test_nothing_of_a_single_client_is_in_what_the_server_hears_and_writes(masked: bool, tmp_path: Path) -> None:
    """Without secure sums the same search finds every piece."""
    plan = secure("method=fedavg") if masked else small("clients=5", "model=mlp_digits", "method=fedavg")
    set_up(tmp_path, plan, minimum=2)
    transport = LocalTransport(crew(tmp_path))
    result, _ = served(tmp_path, transport)
    files = [path.read_bytes() for path in (tmp_path / "server").rglob("*") if path.is_file()]
    sought, found = found_of_single_clients(tmp_path, b"".join([answer for _, _, answer in transport.sent] + files))
    assert sought > 200
    assert found == (0 if masked else sought)
    if masked:
        bodies = [unpack_message(a).body for _, r, a in transport.sent if unpack_message(r).head["kind"] == "mask"]
        ones = np.unpackbits(np.frombuffer(b"".join(bodies), np.uint8)).mean()
        assert abs(float(ones) - 0.5) < 0.01
        single, total = raw_upload(tmp_path, 0, 2), state_of(result.folder).server
        assert not any(torch.equal(a, b) for a in tree_leaves(single) for b in tree_leaves(total) if a.shape == b.shape)


def raw_upload(home: Path, number: int, round: int) -> Any:
    (kept,) = (home / "clients" / f"site-{number}" / "state").glob(f"*/round-{round:06d}/answer.bin")
    return decode(unpack_message(kept.read_bytes()).body)


# members and servers that lie


class Meddler(LocalTransport):
    """The network: `change` may replace a request or an answer."""

    def __init__(self, workers: Mapping[int, ClientWorker], change: Callable[[int, str, bytes], bytes]) -> None:
        super().__init__(workers)
        self.change = change

    def exchange(self, requests: Mapping[int, bytes], deadline: float) -> Iterator[Reply]:
        for node, request in requests.items():
            kind = unpack_message(request).head["kind"]
            for reply in super().exchange({node: self.change(node, f"ask {kind}", request)}, deadline):
                content = reply.content and self.change(node, f"answer {kind}", reply.content)
                yield reply._replace(content=content)


def with_body(message: bytes, body: bytes) -> bytes:
    head = {key: value for key, value in unpack_message(message).head.items() if key not in ("protocol", "protofed")}
    return pack_message(head, body)


def with_head(message: bytes, **more: Any) -> bytes:
    head = {key: value for key, value in unpack_message(message).head.items() if key not in ("protocol", "protofed")}
    return pack_message(head | more, unpack_message(message).body)


LIES = {
    "a key that is none": ("answer train", lambda body: body[:-1], "its answer has 31 bytes, where 32 are expected"),
    "too few shares": ("answer share", lambda body: body[:-48], "its answer has 144 bytes, where 192 are expected"),
    "a short upload": ("answer mask", lambda body: body[:-4], "bytes, where"),
    "too few shares to open": (
        "answer open",
        lambda body: body[:-16],
        "its answer has 64 bytes, where 80 are expected",
    ),
    "shares that do not open": ("answer share", lambda body: bytes(len(body)), "its keys or shares do not match"),
    "wrong shares to open": (
        "answer open",
        lambda body: bytes(len(body)),
        "its shares of other clients' masks were wr",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_member_that_lies_at_a_step_is_named_and_the_others_are_summed(lie: str, tmp_path: Path) -> None:
    at, spoil, said_of_it = LIES[lie]
    plan = secure("method=fedproto", "rounds=1", "privacy.threshold=3")
    set_up(tmp_path, plan, minimum=2)

    def change(node: int, what: str, message: bytes) -> bytes:
        if (node, what) != (102, at) or unpack_message(message).head.get("kind") == "error":
            return message
        return with_body(message, spoil(unpack_message(message).body))

    result, said = served(tmp_path, Meddler(crew(tmp_path), change))
    assert any(text.startswith("round 1: site-2: ") and said_of_it in text for text in said)
    upload_counts = state_of(result.folder)
    assert result.rounds[0]["clients"] >= 4
    assert upload_counts.round == 1


def test_a_client_that_is_sent_another_model_than_the_others_is_not_summed_with_them(tmp_path: Path) -> None:
    """Otherwise the others could be sent one that makes their uploads known (Pasquini et al., CCS 2022)."""
    plan = secure("method=fedavg", "rounds=1", "privacy.threshold=3")
    set_up(tmp_path, plan, minimum=2)

    def change(node: int, what: str, message: bytes) -> bytes:
        if (node, what) != (102, "ask train"):
            return message
        other = tree_map(lambda t: t + 1e-3 if t.is_floating_point() else t, decode(unpack_message(message).body))
        return with_body(message, encode(other))

    result, said = served(tmp_path, Meddler(crew(tmp_path), change))
    assert result.rounds[0]["clients"] == 4
    assert any("the keys or shares of client 2 do not match" in text for text in said)
    assert any("the keys or shares of clients 0, 1, 3, 4 do not match" in text for text in said)


def test_a_masked_upload_that_is_noise_merges_nothing(tmp_path: Path) -> None:
    plan = secure("method=fedproto", "rounds=1")
    set_up(tmp_path, plan, minimum=2)
    before = state_before(plan, tmp_path)

    def change(node: int, what: str, message: bytes) -> bytes:
        body = unpack_message(message).body
        return (
            with_body(message, body[:16] + b"\7" * (len(body) - 16))
            if (node, what) == (102, "answer mask")
            else message
        )

    result, said = served(tmp_path, Meddler(crew(tmp_path), change))
    assert sum("the sum does not open" in text for text in said) == 3
    assert any("round 1 is left out" in text for text in said)
    assert result.rounds[0]["clients"] == 0
    assert encode(state_of(result.folder).server, whole=True) == before


def state_before(plan: Experiment, home: Path) -> bytes:
    """The server's tree before the first round."""
    from protofed.runs.setup import prepare

    return encode(plan.method.init_server(prepare(plan).engine.specs()[0]), whole=True)


def test_a_server_that_asks_for_more_than_its_part_gets_a_line_for_it(tmp_path: Path) -> None:
    plan = secure("method=fedproto", "rounds=1")
    set_up(tmp_path, plan, minimum=2)
    transport = LocalTransport(crew(tmp_path))
    served(tmp_path, transport)
    asked = {unpack_message(request).head["kind"]: request for node, request, _ in transport.sent if node == 100}
    again = worker(tmp_path, 0)
    other = transport.workers[100]
    try:
        head = {k: v for k, v in unpack_message(asked["open"]).head.items() if k not in ("protocol", "protofed")}
        tests = {**head, "kind": "evaluate", "ask": ["own/personal"], "confusion": ""}
        for client, request, said in (
            (other, pack_message(head, b"\x0f"), "round 1 was summed over 5 clients already"),
            (other, pack_message(head, b"\xff"), "does not fit the members"),
            (other, pack_message({**head, "try": "x"}, b"\x1f"), "it takes no part in this sum"),
            (again, asked["mask"], "it takes no part in this sum: it was started again"),
            (other, pack_message(tests, unpack_message(asked["train"]).body), "it tells no test results"),
            (other, with_head(asked["train"], **{"try": None}), "names no sum"),
        ):
            answer = unpack_message(client.answer(request))
            assert answer.head["kind"] == "error"
            assert said in answer.head["reason"], answer.head["reason"]
            assert answer.body == b""
    finally:
        again.close()


def test_bounds_that_need_single_uploads_are_refused_with_secure_sums(tmp_path: Path) -> None:
    set_up(tmp_path, secure(), bounds={"action": "clip"})
    with pytest.raises(UserError, match=r"bounds.action = 'clip' judges the uploads of single clients"):
        serve(tmp_path / "server", LocalTransport({}), lambda text: None, pause=0.01)


def test_a_bundle_whose_keys_do_not_fit_is_refused_in_a_line(tmp_path: Path) -> None:
    set_up(tmp_path, secure())
    bundles = [tmp_path / "clients" / f"site-{number}" for number in range(2)]
    (bundles[0] / "key").write_bytes((bundles[1] / "key").read_bytes())
    with pytest.raises(UserError, match="the key listed for client 0 is not this client's own"):
        worker(tmp_path, 0)
    (bundles[0] / "key").unlink()
    with pytest.raises(UserError, match="do not fit"):
        worker(tmp_path, 0)


def test_a_member_whose_key_the_others_do_not_list_takes_no_part(tmp_path: Path) -> None:
    """As after 'rekey', when the others have the bundle of before."""
    plan = secure("method=fedproto", "rounds=1", "privacy.threshold=3")
    set_up(tmp_path, plan, minimum=2)
    ((key, public),) = keys_of(1)
    bundle = tmp_path / "clients" / "site-2"
    settings = tomllib.loads((bundle / "client.toml").read_text())
    settings["members"][2]["public_key"] = public
    (bundle / "client.toml").write_text(tomli_w.dumps(settings))
    (bundle / "key").write_bytes(key)
    result, said = served(tmp_path, LocalTransport(crew(tmp_path)))
    assert result.rounds[0]["clients"] == 4
    assert any("the keys or shares of client 2 do not match: this bundle has other keys" in text for text in said)
    assert any("round 1: site-2: its keys or shares do not match" in text for text in said)


def test_init_lists_every_members_key_and_rekey_changes_it_in_all_bundles(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    names = [f"site-{number}" for number in range(CLIENTS)]
    task = Task((1, 8, 8), tuple(map(str, range(10))))
    setup.init(
        folder, names=names, hosts=["localhost"], port=8443, experiment=secure(), rounds=Rounds(minimum=3), task=task
    )
    federation = load_federation(folder / "server")
    assert federation.bounds.action == "none"
    listed = {member.number: member.public_key for member in federation.clients}
    bundles = [folder / "clients" / name for name in names]
    assert all(load_members(bundle) == listed for bundle in bundles)
    setup.rekey(folder / "server", "site-2")
    changed = {member.number: member.public_key for member in load_federation(folder / "server").clients}
    assert [number for number in listed if listed[number] != changed[number]] == [2]
    assert all(load_members(bundle) == changed for bundle in bundles)
    keys = {
        number: member_identity(number, (bundle / "key").read_bytes(), changed) for number, bundle in enumerate(bundles)
    }
    assert keys[2].agreed(4) == keys[4].agreed(2)
    assert "members" not in (folder / "server" / "federation.toml").read_text()


def test_init_refuses_what_cannot_be_summed(tmp_path: Path) -> None:
    for override, said in (("privacy.threshold=2", "not more than half"), ("robust.rule=median", "robust.rule")):
        with pytest.raises(UserError, match=said):
            setup.init(
                tmp_path / "fed", names=["a", "b", "c", "d", "e"], hosts=["localhost"], port=8443,
                experiment=secure(override), rounds=Rounds(minimum=3), task=Task((1, 8, 8), ("0", "1")),
            )  # fmt: skip
    assert not (tmp_path / "fed").exists()


def test_a_client_says_before_it_joins_who_sees_what_and_whose_keys_it_trusts(tmp_path: Path) -> None:
    server = set_up(tmp_path, secure("method=fedproto"))
    one = worker(tmp_path, 0)
    try:
        said = one.describe()
    finally:
        one.close()
    assert "only in the sum over at least 4 clients" in said
    assert "as 1,348 bytes of masked numbers (32 bits each, values from -64 to 64), with 320 bytes of keys" in said
    assert "seen singly" not in said
    assert "It tells no results of its tests" in said
    listed = load_members(tmp_path / "clients" / "site-0")
    for number, key in listed.items():
        assert f"client {number}{' (this one)' if number == 0 else ''}: {sha256(key.encode()).hexdigest()[:16]}" in said
    transport = LocalTransport(crew(tmp_path))
    served(tmp_path, transport)
    assert json.loads((server / "status.json").read_text())["uploads"] == "seen only in sums over at least 4 clients"
