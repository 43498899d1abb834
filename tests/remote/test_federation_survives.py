"""What one member sends neither ends a federation nor holds it up for ever."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from federated import set_up, small, worker, workers
from spoilt import with_header, with_tensor
from torch.utils._pytree import tree_map

from protofed.engines.wire import decode
from protofed.errors import UserError
from protofed.method import Mean
from protofed.ops.heads import qda_head
from protofed.remote.client.worker import ClientWorker
from protofed.remote.protocol import Message, body_of, one_line, pack_message, unpack_message
from protofed.remote.server.serve import serve
from protofed.remote.transport import LocalTransport, Reply

QUICK = ("model=mlp_digits", "evaluate.own=0", "record.enabled=false")


class Spoiling:
    """A client whose answers are changed."""

    def __init__(self, one: ClientWorker, change: Callable[[Message], bytes]) -> None:
        self.one, self.change = one, change

    def answer(self, request: bytes) -> bytes:
        message = unpack_message(self.one.answer(request))
        answers = message.head["kind"] == "answer" and message.body
        return self.change(message) if answers else pack_message(message.head, message.body)


@pytest.mark.parametrize("tree", ['{"dict":{"NAME":null}}', '{"NAME":null}', None])
def test_a_name_that_cannot_be_written_ends_no_server(tree: str | None, tmp_path: Path) -> None:
    """The log is a file of UTF-8, which half of a surrogate does not fit into."""
    server, name = set_up(tmp_path, small(*QUICK), minimum=2), "\\ud800\\u001b[2J"
    changes: dict[str, Any] = {json.loads(f'"{name}"'): {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 0]}}
    if tree is not None:
        changes = {"__metadata__": {"tree": tree.replace("NAME", name)}}

    def spoil(message: Message) -> bytes:
        return pack_message(message.head, with_header(message.body, changes))

    nodes = {100: worker(tmp_path, 0), 101: Spoiling(worker(tmp_path, 1), spoil), 102: worker(tmp_path, 2)}
    with open(tmp_path / "told.log", "w", encoding="utf-8") as told:
        result = serve(server, LocalTransport(nodes), lambda line: told.write(line + "\n") and None, pause=0.01)
    assert [line["clients"] for line in result.rounds] == [2, 2]
    lines = (tmp_path / "told.log").read_text().splitlines()
    assert all(line.isprintable() for line in lines)
    assert [line for line in lines if line.startswith("round 1: site-1: ")]


def test_whatever_is_quoted_fits_into_a_log() -> None:
    assert one_line("a\ud800\x1b[2J\n\u202eb") == "a [2J b"


# arithmetic that a sum within the bounds leads to


@pytest.mark.parametrize("how", ["neither", "opposite", "nothing"])
def test_a_covariance_that_no_samples_have_ends_no_federation(how: str, tmp_path: Path) -> None:
    """QDA takes the root of a matrix that one client can make any other: within the bounds, but not positive."""
    experiment = small(*QUICK, "method=qda", "rounds=1")
    server = set_up(tmp_path, experiment)

    def spoil(message: Message) -> bytes:
        by = {"neither": 1.0, "opposite": -3.0, "nothing": 0.0}[how]
        return pack_message(message.head, with_tensor(message.body, "second", lambda tensor: tensor * by))

    nodes = {100: worker(tmp_path, 0), 101: Spoiling(worker(tmp_path, 1), spoil), 102: worker(tmp_path, 2)}
    said: list[str] = []
    result = serve(server, LocalTransport(nodes), said.append, pause=0.01)
    assert [line["clients"] for line in result.rounds] == [3]


def test_a_head_of_impossible_sums_is_finite() -> None:
    weight = torch.tensor([3.0, 4.0], dtype=torch.float64)
    means = Mean(torch.ones(2, 3, dtype=torch.float64), weight)
    second = Mean(-torch.ones(2, 6, dtype=torch.float64), weight)
    head = qda_head({"means": means, "second": second}, 0.05, "counts")
    assert all(bool(torch.isfinite(part).all()) for part in head.values())


def test_a_covariance_of_nothing_from_whoever_is_alone_ends_no_federation(tmp_path: Path) -> None:
    """Whose mean is all there is, as of the only client of a round; it is broadcast by its inverse."""
    experiment = small(*QUICK, "method=pfedfda", "rounds=3", "participation=0.34")
    server = set_up(tmp_path, experiment, minimum=1)

    def spoil(message: Message) -> bytes:
        return pack_message(message.head, with_tensor(message.body, "covariance", lambda tensor: tensor * 0))

    nodes = {100 + number: Spoiling(worker(tmp_path, number), spoil) for number in range(3)}
    result = serve(server, LocalTransport(nodes), lambda line: None, pause=0.01)
    assert [line["clients"] for line in result.rounds] == [1, 1, 1]


# rounds of which nothing is of use


class First(LocalTransport):
    """Client 2 is alone for nine rounds, and sends thirty times as much in each; then the others come."""

    def __init__(self, home: Path) -> None:
        super().__init__(workers(home).workers)
        self.asked = 0
        self.sent_last: Any = None

    def nodes(self) -> dict[int, int | None]:
        return {node: number for node, number in super().nodes().items() if self.asked >= 9 or node == 102}

    def exchange(self, requests: Mapping[int, bytes], deadline: float) -> Iterator[Reply]:
        head = unpack_message(next(iter(requests.values()))).head
        self.asked += head["kind"] == "train"
        assert self.asked < 60, "it goes round in circles"
        for reply in super().exchange(requests, deadline):
            told = unpack_message(reply.content or b"")
            poison = reply.node == 102 and head["kind"] == "train"
            yield Reply(102, self._poison(told, head)) if poison else reply

    def _poison(self, told: Message, head: dict[str, Any]) -> bytes:
        last: Mean = decode(told.body) if self.sent_last is None else self.sent_last
        self.sent_last = Mean(tree_map(lambda tensor: 30 * tensor, last.total), last.weight)
        about = {key: head[key] for key in ("experiment", "run", "client", "round")}
        return pack_message({"kind": "answer", "session": "", "loss": [1.0, 1], **about}, body_of(self.sent_last))


def test_a_run_that_cannot_go_back_far_enough_ends_and_says_what_to_do(tmp_path: Path) -> None:
    """Whoever is alone at first can spoil every state that is kept: going back leads nowhere, and must not go on."""
    server = set_up(tmp_path, small(*QUICK, "method=fedavg", "rounds=20"), minimum=1)
    said: list[str] = []
    with pytest.raises(UserError, match=r"none is kept but those after rounds .*Start a new run .*rounds.minimum"):
        serve(server, First(tmp_path), said.append, pause=0.01)
    assert any("is taken back" in line for line in said)
    status = json.loads((server / "status.json").read_text())
    assert [one["name"] for one in status["put_out"]] == ["site-2"]
    assert status["phase"].startswith("failed: round")
