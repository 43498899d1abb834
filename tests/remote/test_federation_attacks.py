"""Attacks by members that look like ordinary answers: odd encodings, doubtful counts, lies about losses, late bans."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command import protofed
from federated import set_up, small, worker, workers
from safetensors.torch import load, save

from protofed.engines.wire import decode, encode
from protofed.method import Each, Mean
from protofed.remote.build import no_client, server_domain
from protofed.remote.client.worker import ClientWorker
from protofed.remote.form import read_tree
from protofed.remote.protocol import Message, Refused, body_of, failure, pack_message, unpack_message
from protofed.remote.server.audit import Audit
from protofed.remote.server.engine import RemoteEngine
from protofed.remote.server.orders import give_order, sole_judge, waiting_orders
from protofed.remote.server.roster import Roster
from protofed.remote.server.serve import serve
from protofed.remote.server.status import Status
from protofed.remote.server.verify import check_counts
from protofed.remote.settings import load_federation
from protofed.remote.transport import LocalTransport, Reply

RUN = "0123456789abcdef"
NAN = "in round 1 its loss is no longer a number"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("federation")
    set_up(folder, small("model=mlp_digits"))
    return folder


# encodings

ROWS = torch.arange(10.0)[:, None].repeat(1, 4)
HELD = (torch.arange(10) % 2).float()
FORM = {"prototypes": Mean(torch.ones(10, 4), torch.ones(10))}
UPLOAD = encode({"prototypes": Mean(ROWS * HELD[:, None], HELD)})


def rewritten(**changes: Any) -> bytes:
    """An upload of five classes with other tensors."""
    length = int.from_bytes(UPLOAD[:8], "little")
    metadata = json.loads(UPLOAD[8 : 8 + length])["__metadata__"]
    tensors = load(UPLOAD)
    return save({name: changes.get(name[len("/prototypes") :] or "total", t) for name, t in tensors.items()}, metadata)


def test_the_upload_that_is_changed_is_read_as_it_was_sent() -> None:
    assert torch.equal(read_tree(rewritten(), FORM)["prototypes"].total, ROWS * HELD[:, None])


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("total", torch.ones(1, 4)),
        ("#n", torch.ones(1)),
        ("#n", torch.ones(())),
        ("#i", torch.tensor([0.3, 1.3, 2.3, 3.3, 4.3])),
        ("#i", torch.arange(5)),
        ("#i", torch.arange(5, dtype=torch.uint8)[:, None]),
        ("#i", torch.ones(5, dtype=torch.bool)),
        ("#i", torch.tensor([0, 1, 2, 3, 10], dtype=torch.uint8)),
        ("#i", torch.tensor([0, 1, 2, 3, 3], dtype=torch.uint8)),
        ("total", torch.ones(5, 4, dtype=torch.float64)),
        ("total", torch.ones(5, 4).to(torch.float8_e4m3fn)),
        ("total", torch.ones(5, 1)),
    ],
)
def test_rows_that_torch_would_repeat_or_convert_are_refused(name: str, tensor: torch.Tensor) -> None:
    with pytest.raises(Refused):
        read_tree(rewritten(**{name: tensor}), FORM)


def lying(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def test_a_message_larger_than_its_form_is_refused_before_it_is_read() -> None:
    """A header of 60 MB once took 28 seconds and 2 GB; rows without numbers may claim any width."""
    bomb = b'{"__metadata__":{"tree":""},"a":[' + b",".join([b"[]"] * 5_000_000) + b"]}"
    wide = {"dtype": "F32", "shape": [0, 10**12], "data_offsets": [0, 0]}
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    tree = '{"dict":{"prototypes":{"mean":{"rows":[10],"total":null}}}}'
    index = empty | {"dtype": "U8"}
    names = {"/prototypes": wide, "/prototypes#n": empty, "/prototypes#i": index}
    claims = json.dumps({"__metadata__": {"tree": tree}, **names}).encode()
    started = time.process_time()
    for content, why in (
        (lying(bomb), "more than its form"),
        (lying(b"{}", bytes(1_000_000)), "more than its form"),
        ((2**63).to_bytes(8, "little") + b"{}", "more than its form"),
        (lying(claims), "more than its form"),
        (b"", "not a tree"),
    ):
        with pytest.raises(Refused, match=why):
            read_tree(content, FORM)
    assert time.process_time() - started < 1


# counts

COUNTED = torch.tensor([2.0, 3.0, 2.0])  # as the form of a method that counts samples has them


@pytest.mark.parametrize(
    ("form", "count", "why"),
    [
        (torch.ones(3), [1.0, 0.0, 5.0], "at most once"),
        (torch.tensor(1.0), 9.0, "at most once"),
        (COUNTED, [20.0, 0.0, 11.0], "in all"),
        (COUNTED, [20.5, 0.0, 1.0], "whole"),
        (torch.tensor(7.0), 31.0, "30 samples"),
        (COUNTED, [1e-40, 0.0, 1.0], "whole"),
        (COUNTED, [-1.0, 0.0, 1.0], "negative"),
        (COUNTED, [math.nan, 0.0, 1.0], "whole"),
    ],
)
def test_counts_that_are_not_possible_are_refused(form: torch.Tensor, count: Any, why: str) -> None:
    def mean(weight: torch.Tensor) -> Mean:
        return Mean(weight[..., None] * torch.ones(2), weight)

    for wrap in (lambda m: m, lambda m: {"a": m}, Each):
        with pytest.raises(Refused, match=why):
            check_counts(wrap(mean(torch.tensor(count))), wrap(mean(form)), 30)
        check_counts(wrap(mean(form)), wrap(mean(form)), 30)
    zero = torch.zeros_like(form)
    check_counts(mean(-zero), mean(form), 30)  # minus 0 is 0
    with pytest.raises(Refused, match="total other than 0"):
        check_counts(Mean(torch.ones(*form.shape, 2), zero), mean(form), 30)


def test_a_client_that_counts_once_cannot_count_thirty_times(home: Path, tmp_path: Path) -> None:
    """FedProto's prototypes of one client count alike, however many samples it says it has."""
    client = worker(home, 1, state=tmp_path / "1")
    asked = {"kind": "train", "experiment": client.hash, "run": RUN, "client": 1, "round": 1}
    up = decode(unpack_message(client.answer(pack_message(asked, body_of(client.down)))).body)["prototypes"]
    roster = joined(home, tmp_path, LocalTransport({101: client}))
    form = roster.members[1].form
    check_counts({"prototypes": up}, form, 30)
    with pytest.raises(Refused, match="at most once"):
        check_counts({"prototypes": Mean(up.total * 5, up.weight * 5)}, form, 30)


def test_a_client_that_says_it_has_far_more_samples_than_others_is_pointed_out(home: Path, tmp_path: Path) -> None:
    def many(message: Message) -> bytes:
        return pack_message(message.head | {"samples": 10**9}, message.body)

    said: list[str] = []
    one, other = (worker(home, number, state=tmp_path / str(number)) for number in (0, 1))
    joined(home, tmp_path, LocalTransport({100: one, 101: Changed(other, many)}), said)
    assert [line for line in said if "10 times as many samples" in line and line.startswith("site-1")]
    assert not [line for line in said if "10 times as many samples" in line and not line.startswith("site-1")]


class Changed:
    """A client whose answers to greetings are changed."""

    def __init__(self, one: ClientWorker, change: Callable[[Message], bytes]) -> None:
        self.one, self.change = one, change

    def answer(self, request: bytes) -> bytes:
        return self.change(unpack_message(self.one.answer(request)))


def joined(home: Path, place: Path, transport: LocalTransport, said: list[str] | None = None) -> Roster:
    """A roster after its first greetings."""
    experiment, settings = small("model=mlp_digits"), load_federation(home / "server")
    status = Status.of(place / "status.json", ([] if said is None else said).append, settings, 3, 2)
    here = no_client(experiment, server_domain(home / "server", experiment, settings.task))
    roster = Roster(transport, settings, experiment, here, RUN, status)
    roster.refresh()
    return roster


# lies about losses


class Liars(LocalTransport):
    """Some clients say that their loss is not a number; some are gone."""

    def __init__(self, home: Path, count: int, liars: set[int], until: int = 10**9) -> None:
        super().__init__(workers(home, count).workers)
        self.liars, self.until = liars, until
        self.asked: list[tuple[int, list[int]]] = []

    def exchange(self, requests: Mapping[int, bytes], deadline: float) -> Iterator[Reply]:
        head = unpack_message(next(iter(requests.values()))).head
        if head["kind"] == "train":
            self.asked.append((head["round"], sorted(node - 100 for node in requests)))
        lie = head["kind"] == "train" and len(self.asked) <= self.until
        for reply in super().exchange(requests, deadline):
            yield Reply(reply.node, failure(NAN)) if lie and reply.node - 100 in self.liars else reply


def quick(*more: str) -> Any:
    return small("model=mlp_digits", "evaluate.own=0", "record.enabled=false", *more)


def test_a_minority_that_says_its_loss_is_not_a_number_takes_nothing_back(tmp_path: Path) -> None:
    server = set_up(tmp_path, quick("rounds=3"), minimum=1)
    said: list[str] = []
    result = serve(server, transport := Liars(tmp_path, 3, {2}), said.append, pause=0.01)
    assert [round for round, _ in transport.asked] == [1, 2, 3]
    assert [line["clients"] for line in result.rounds] == [2, 2, 2]
    assert not json.loads((server / "status.json").read_text())["put_out"]


def test_one_liar_that_is_drawn_alone_gives_its_place_to_another(tmp_path: Path) -> None:
    """With one client in a round the only one asked is the majority of those asked, but not of the federation."""
    server = set_up(tmp_path, quick("rounds=3", "participation=0.34"), minimum=1)
    result = serve(server, transport := Liars(tmp_path, 3, {1}), lambda line: None, pause=0.01)
    assert [line["clients"] for line in result.rounds] == [1, 1, 1]
    assert [1] in [asked for _, asked in transport.asked]
    assert [round for round, _ in transport.asked] == sorted(round for round, _ in transport.asked)  # never back
    assert not json.loads((server / "status.json").read_text())["put_out"]


def test_a_liar_that_is_left_alone_ends_and_takes_back_nothing(tmp_path: Path) -> None:
    """Before others join, and after they have gone: the round is tried until they are back."""
    server = set_up(tmp_path, quick("rounds=2"), minimum=1, wait_s=0)

    class Alone(Liars):
        def nodes(self) -> dict[int, int | None]:
            gone = len(self.asked) < 3 or 4 <= len(self.asked) < 7
            return {node: number for node, number in super().nodes().items() if not gone or node == 102}

    transport = Alone(tmp_path, 3, {2})
    result = serve(server, transport, lambda line: None, pause=0.01)
    assert transport.asked[:4] == [(1, [2])] * 3 + [(1, [0, 1, 2])]
    assert transport.asked[4:] == [(2, [2])] * 3 + [(2, [0, 1, 2])]
    assert [line["clients"] for line in result.rounds] == [2, 2]
    assert not json.loads((server / "status.json").read_text())["put_out"]


def test_nobody_within_the_bound_is_put_out_for_a_round_that_is_taken_back(tmp_path: Path) -> None:
    """The largest upload was three times the usual, which the bound allows: it is named, and stays a member."""
    server = set_up(tmp_path, quick("rounds=3"), minimum=3)

    def larger(message: Message) -> bytes:
        mean = decode(message.body)["prototypes"]
        return pack_message(message.head, body_of({"prototypes": Mean(mean.total * 3, mean.weight)}))

    class Once(Liars):
        def exchange(self, requests: Mapping[int, bytes], deadline: float) -> Iterator[Reply]:
            self.liars = {0, 1} if len(self.asked) == 1 else set()  # what comes next is the second time of asking
            for reply in super().exchange(requests, deadline):
                poison = (
                    len(self.asked) == 1 and reply.node == 102 and unpack_message(next(iter(requests.values()))).head
                )
                honest = not poison or poison["kind"] != "train" or reply.content is None
                yield reply if honest else Reply(102, larger(unpack_message(reply.content or b"")))

    said: list[str] = []
    result = serve(server, transport := Once(tmp_path, 3, set()), said.append, pause=0.01)
    assert [round for round, _ in transport.asked] == [1, 2, 1, 2, 3]
    (line,) = [text for text in said if "is taken back" in text]
    assert "The upload that stood out most is site-2's (prototypes:" in line
    assert len(result.rounds) == 3
    assert not json.loads((server / "status.json").read_text())["put_out"]


# orders while a round is under way


def test_an_answer_that_came_before_a_ban_is_not_merged_after_it(home: Path, tmp_path: Path) -> None:
    class Late(LocalTransport):
        def exchange(self, requests: Mapping[int, bytes], deadline: float) -> Iterator[Reply]:
            training = unpack_message(next(iter(requests.values()))).head["kind"] == "train"
            yield from super().exchange(requests, deadline)
            if training:  # all answers have been read
                with sole_judge(tmp_path):  # as a server that runs
                    give_order(tmp_path, "ban", client=1, reason="late")

    (tmp_path / "federation.toml").write_bytes((home / "server" / "federation.toml").read_bytes())
    nodes = {100 + number: worker(home, number, state=tmp_path / str(number)) for number in range(3)}
    roster = joined(home, tmp_path, Late(nodes))
    experiment, rules = roster.experiment, replace(roster.settings.rounds, minimum=1)
    engine = RemoteEngine(experiment, roster.engine, roster, roster.status, rules, 0.0, tmp_path)
    server = experiment.method.init_server(roster.engine.specs()[0])
    assert engine.train(experiment.method, server, [0, 1, 2], 0).answered == (0, 2)
    assert list(roster.members) == [0, 2]


def test_what_is_no_order_is_put_aside(tmp_path: Path) -> None:
    folder = tmp_path / "orders"
    folder.mkdir()
    for number, text in enumerate(
        ['{"order": "ban"}', '{"order": "ban", "client": "1"}', '{"order": "rollback", "client": 1}', "[]", "{", '""',
         '{"order": "rm", "client": 1}', '{"order": [], "client": 1}', '{"order": "ban", "client": true}',
         '{"order": "ban", "client": 1}']
    ):  # fmt: skip
        (folder / f"{number}.json").write_text(text)
    assert [one.about for one in waiting_orders(tmp_path)] == [{"client": 1}]
    assert len(list(folder.glob("*.unreadable"))) == 9


# the log


def test_a_log_whose_end_is_cut_off_while_the_server_is_stopped_never_verifies_again(tmp_path: Path) -> None:
    server = set_up(tmp_path, quick("rounds=2"))
    serve(server, workers(tmp_path), lambda line: None, pause=0.01)
    path = server / "audit.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    for name, content in (("end", lines[:-3]), ("middle", [*lines[:4], *lines[5:]]), ("all", [])):
        path.write_bytes(b"".join(content))
        status = (server / "status.json").read_bytes()
        said: list[str] = []
        serve(server, LocalTransport({}), said.append, pause=0.01)  # it is finished: nothing but a start
        assert any("is not as the server left it" in line for line in said), name
        done = protofed("federation", "log", str(server), "--verify")
        assert done.returncode == 2, name
        assert "line" in done.stderr
        (server / "status.json").write_bytes(status)
    path.write_bytes(b"".join(lines))
    audit = Audit(path)
    assert audit.check(None) is None
    audit.close()
    assert path.read_bytes() == b"".join(lines)
