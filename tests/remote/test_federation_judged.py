"""The server's judgement: uploads beyond the bounds, rounds taken back, bans, rollbacks, and the log of it all."""

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from command import protofed
from federated import set_up, small, workers

from protofed.engines.wire import decode, encode
from protofed.method import Each, Mean
from protofed.remote.flower.certificates import make_authority, make_server
from protofed.remote.protocol import Message, body_of, pack_message, unpack_message
from protofed.remote.server.bounds import PartSize, clip_upload, judge, part_sizes
from protofed.remote.server.orders import give_order
from protofed.remote.server.serve import serve
from protofed.remote.settings import Bounds
from protofed.remote.transport import LocalTransport, Reply
from protofed.runs.folder import RunFolder
from protofed.runs.measure import Result

QUICK = ("model=mlp_digits", "evaluate.own=0", "record.enabled=false", "rounds=5")
Change = Callable[[Message], bytes]


def server_state(folder: Path) -> bytes:
    state, remarks = RunFolder(folder).restore()
    assert state is not None
    assert not remarks
    return encode(state.server, whole=True)


def status(server: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((server / "status.json").read_text())
    return found


def entries(server: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (server / "audit.jsonl").read_text().splitlines()]


class Poisoned(LocalTransport):
    """Client 2's uploads of some rounds are changed; orders are given when a round is asked for."""

    def __init__(
        self, home: Path, changes: dict[int, Change], orders: dict[int, Callable[[], Any]] | None = None
    ) -> None:
        super().__init__(workers(home).workers)
        self.changes, self.orders = changes, orders or {}
        self.asked: list[int] = []

    def exchange(self, requests: Mapping[int, bytes], deadline: float) -> Iterator[Reply]:
        head = unpack_message(next(iter(requests.values()))).head
        if head["kind"] == "train":
            self.asked.append(head["round"])
            self.orders.pop(head["round"], lambda: None)()
        for reply in super().exchange(requests, deadline):
            change = self.changes.get(head.get("round", 0)) if head["kind"] == "train" and reply.node == 102 else None
            message = unpack_message(reply.content) if change and reply.content else None
            poison = change and message and message.head["kind"] == "answer"
            yield Reply(102, change(message)) if poison else reply  # type: ignore[misc, arg-type]


def scaled(factor: float) -> Change:
    def change(message: Message) -> bytes:
        mean = decode(message.body)["prototypes"]
        return pack_message(message.head, body_of({"prototypes": Mean(mean.total * factor, mean.weight)}))

    return change


def served(home: Path, transport: LocalTransport, said: list[str]) -> Result:
    return serve(home / "server", transport, said.append, pause=0.01)


def ban(home: Path, number: int = 2) -> Callable[[], Any]:
    return lambda: give_order(home / "server", "ban", client=number, reason="trial")


# figures and bounds, by hand

WEIGHT = torch.tensor([2.0, 0.0, 1.0])
ROWS = Mean(torch.tensor([[6.0, 8.0], [0.0, 0.0], [3.0, 4.0]]), WEIGHT)  # lengths 5, none, 5


def model(value: float, bias: float = 0.0) -> dict[str, Any]:
    params = {"w": torch.full((2, 2), value), "b": torch.full((1,), bias)}
    return {"params": params, "buffers": {"running_mean": torch.full((4,), value)}}


def test_figures_by_hand() -> None:
    up = {"prototypes": ROWS, "model": Mean.of(model(3.0, 4.0), torch.tensor(7.0)), "size": Each(torch.tensor(9.0))}
    down = {"prototypes": Mean(torch.zeros(3, 2), torch.zeros(3)), "all": {"model": model(1.0, 1.0)}}
    found = part_sizes(up, down, up)
    assert found["prototypes"] == PartSize("prototype", 5.0, 5.0)
    assert found["model/params"].size == pytest.approx(5.0)  # four times 2, and 3
    assert found["model/params"].guess == pytest.approx(0.2 * 5.0**0.5)  # a fifth of the broadcast's length
    assert found["model/buffers"].size == pytest.approx(4.0)
    assert set(found) == {"prototypes", "model/params", "model/buffers"}
    single = {"pool": Each(Mean(ROWS.total[None], ROWS.weight[None])), "model": Each(model(2.0))}
    alone = part_sizes(single, model(1.0), single)
    assert (alone["pool"].size, alone["model/buffers"].size) == (5.0, 2.0)
    assert part_sizes(Mean.of(model(1.0), torch.tensor(0.0)), down, up) == {}  # what weighs nothing


def test_what_is_no_model_is_measured_by_its_length() -> None:
    """Such as pFedFDA's covariance: a new estimate lies anywhere around the one that was sent."""
    up = {"gaussian": Mean.of({"covariance": torch.full((2, 2), 3.0)}, torch.tensor(7.0))}
    down = {"gaussian": {"covariance": torch.full((2, 2), 2.5)}}
    assert part_sizes(up, down, up) == {"gaussian": PartSize("change", 6.0, 6.0)}
    clipped = clip_upload(up, down, {"gaussian": 3.0})
    assert clipped["gaussian"].value["covariance"].flatten().tolist() == [1.5] * 4


def test_clipping_by_hand() -> None:
    up = {"prototypes": ROWS, "model": Mean.of(model(3.0, 4.0), torch.tensor(7.0))}
    down = {"model": model(1.0, 1.0)}
    clipped = clip_upload(up, down, {"prototypes": 2.5, "model/params": 2.5})
    assert clipped["prototypes"].value.tolist() == [[1.5, 2.0], [0.0, 0.0], [1.5, 2.0]]
    assert clipped["model"].weight == 7.0
    assert clipped["model"].value["params"]["w"].flatten().tolist() == [2.0] * 4  # half of the way
    assert clipped["model"].value["params"]["b"].tolist() == [2.5]
    assert clipped["model"].value["buffers"]["running_mean"].tolist() == [3.0] * 4
    one = clip_upload(Each(model(3.0, 4.0)), model(1.0, 1.0), {"buffers": 1.0})
    assert one.rows["buffers"]["running_mean"].tolist() == [1.5] * 4
    same = clip_upload(up, down, {})
    assert same["prototypes"] is up["prototypes"]
    assert same["model"] is up["model"]


def beyond(sizes: list[float], *, before: dict[int, float] | None = None, kind: str = "prototype", guess: float = 1.0,
           bounds: Bounds | None = None) -> list[int]:  # fmt: skip
    here = {number: {"p": PartSize(kind, size, guess)} for number, size in enumerate(sizes)}
    earlier = {number: {"p": size} for number, size in (before or {}).items()}
    verdicts = judge(bounds or Bounds(factor=5.0), here, earlier)
    return [number for number, verdict in verdicts.items() if verdict.beyond]


def test_the_rule_of_the_bound() -> None:
    assert beyond([1.0, 2.0, 9.9]) == []  # five times the median
    assert beyond([1.0, 2.0, 10.1]) == [2]
    assert beyond([0.0, 300.0, 310.0, 290.0]) == []  # nothing cannot make the others look large
    assert beyond([300.0, 1e30]) == [1]
    assert beyond([300.0, 310.0]) == []  # of one kind, whatever the server would guess
    assert beyond([1.0, 0.0]) == []  # the server's guess is the third
    assert beyond([499.0]) == []  # alone: a hundred times wider
    assert beyond([501.0]) == [0]
    assert beyond([50.0], before={1: 10.0, 2: 11.0}) == []  # others' last figures
    assert beyond([56.0], before={1: 10.0, 2: 11.0}) == [0]
    assert beyond([1.0, 1.0, 40.0], kind="change", guess=50.0) == []  # nearer to the broadcast than that is long
    assert beyond([1.0, 1.0, 60.0], kind="change", guess=50.0) == [2]
    assert beyond([0.0, 0.0, 0.9], kind="change", guess=1.0) == []  # where nobody else moved at all
    assert beyond([0.0, 0.0, 1.1], kind="change", guess=1.0) == [2]
    assert beyond([0.0, 0.0, 4.9]) == []
    assert beyond([0.0, 0.0, 5.1]) == [2]
    assert beyond([0.0, 0.0, 1.0], guess=0.0) == [2]
    assert beyond([1.0, 1.0, 1.0], bounds=Bounds(prototype=0.5)) == [0, 1, 2]
    assert beyond([1.0, 2.0, 1e9], bounds=Bounds(prototype=1e10)) == []


# poison


@pytest.mark.parametrize("factor", [1e30, 1e6])
def test_poison_is_refused_by_name_and_the_rest_is_as_without_it(factor: float, tmp_path: Path) -> None:
    ends = {}
    for how in ("poisoned", "banned"):
        home = tmp_path / how
        home.mkdir()
        server = set_up(home, small(*QUICK), minimum=2)
        poison = {number: scaled(factor) for number in (1, 2, 4, 5)} if how == "poisoned" else {}
        orders = {} if how == "poisoned" else {4: ban(home)}
        said: list[str] = []
        result = served(home, Poisoned(home, poison, orders), said)
        ends[how] = [line["clients"] for line in result.rounds]
        if how == "poisoned":
            found = status(server)["refused"]
            assert [(one["round"], one["name"]) for one in found] == [
                (1, "site-2"),
                (2, "site-2"),
                (4, "site-2"),
                (5, "site-2"),
            ]
            assert all("its prototypes measures" in one["reason"] and "is the bound" in one["reason"] for one in found)
            assert any("site-2: its prototypes measures" in line for line in said)
            assert not status(server)["put_out"]  # the third round was in order
    assert ends["poisoned"] == [2, 2, 3, 2, 2]
    assert ends["banned"] == [3, 3, 3, 2, 2]


def test_an_upload_that_is_clipped_is_merged_at_the_bound(tmp_path: Path) -> None:
    server = set_up(tmp_path, small(*QUICK), {"action": "clip", "prototype": 30.0})
    said: list[str] = []
    result = served(tmp_path, Poisoned(tmp_path, {2: scaled(1e6)}), said)
    assert [line["clients"] for line in result.rounds] == [3] * 5
    (one,) = status(server)["clipped"]
    assert (one["round"], one["name"]) == (2, "site-2")
    assert any("site-2: clipped: its prototypes measures" in line for line in said)
    merged = next(line for line in entries(server) if line["event"] == "merged" and line["round"] == 2)
    assert merged["clients"]["site-2"]["share"] > 1e3
    ledger = json.loads((server / "ledger.json").read_text())
    assert ledger["merged"]["2"]["2"]["figures"]["prototypes"] == 30.0


def test_a_round_that_makes_losses_no_numbers_is_taken_back(tmp_path: Path) -> None:
    """Without bounds: the poison is merged, the round undone, its sender named and out; as if it had been banned."""
    ends = {}
    for how in ("poisoned", "banned"):
        home = tmp_path / how
        home.mkdir()
        server = set_up(home, small(*QUICK), {"action": "none"}, minimum=2)
        said: list[str] = []
        if how == "poisoned":
            transport = Poisoned(home, {2: scaled(1e30)})
        else:
            transport = Poisoned(home, {}, {2: ban(home)})
        result = served(home, transport, said)
        assert [line["clients"] for line in result.rounds] == [3, 2, 2, 2, 2]
        ends[how] = server_state(result.folder)
        if how == "poisoned":
            assert transport.asked == [1, 2, 3, 2, 3, 4, 5]
            (line,) = [text for text in said if "is taken back" in text]
            assert "3 of 3 clients say that their loss is no longer a number" in line or "2 of 3" in line
            assert "The upload that stood out most is site-2's (prototypes: 1" in line
            assert [one["name"] for one in status(server)["put_out"]] == ["site-2"]
            assert {"undone", "rolled back", "put out"} <= {entry["event"] for entry in entries(server)}
    assert ends["poisoned"] == ends["banned"]


def test_losses_that_nobody_stands_out_to_be_blamed_for_end_the_run_and_blame_nobody(tmp_path: Path) -> None:
    server = set_up(tmp_path, small(*QUICK, "optimizer.lr=1000000000"))
    said: list[str] = []
    with pytest.raises(Exception, match="no longer a number, and no upload stands out"):
        served(tmp_path, workers(tmp_path), said)
    assert not status(server)["put_out"]
    assert status(server)["phase"].startswith("failed: round")


# orders


def test_rollback_ban_and_unban_while_the_server_runs(tmp_path: Path) -> None:
    """Going back changes nothing where all answer again; who is banned is told so, and comes back when let in."""
    ends = {}
    for how in ("untouched", "rolled back"):
        home = tmp_path / how
        home.mkdir()
        back = functools.partial(give_order, set_up(home, small(*QUICK)), "rollback", round=1)
        transport = Poisoned(home, {}, {4: back} if how == "rolled back" else {})
        said: list[str] = []
        ends[how] = server_state(served(home, transport, said).folder)
    assert transport.asked == [1, 2, 3, 4, 2, 3, 4, 5]
    assert "back to the state after round 1: round 2 is next" in said
    assert ends["untouched"] == ends["rolled back"]

    home = tmp_path / "banned"
    home.mkdir()
    server = set_up(home, small(*QUICK), minimum=2)
    unban = lambda: give_order(server, "unban", client=2)  # noqa: E731
    transport = Poisoned(home, {}, {2: ban(home), 4: unban})
    result = served(home, transport, said := [])
    assert [line["clients"] for line in result.rounds] == [3, 2, 2, 2, 3]
    assert "site-2 is put out by the operator: trial" in said
    assert "site-2 is let in again by the operator" in said
    assert status(server)["put_out"] == []
    assert not list((server / "orders").glob("*.json"))


def test_orders_while_the_server_is_stopped(tmp_path: Path) -> None:
    """A finished run goes back too, with other members; the commands say what they did, and what they cannot do."""
    server = set_up(tmp_path, small(*QUICK), minimum=2)
    (server / "server.crt").write_bytes(make_server(make_authority("trial"), ["localhost"]).certificate)
    transport = workers(tmp_path)
    served(tmp_path, transport, [])
    for words, what in (
        (("rollback", "--round", "77"), "There are: 1, 2, 3, 4, 5"),
        (("ban", "nobody"), "no client is called 'nobody'. There are site-0, site-1, site-2"),
        (("unban", "site-1"), "site-1 is not put out"),
    ):
        done = protofed("federation", words[0], str(server), *words[1:])
        assert done.returncode == 2, done.stderr
        assert what in done.stderr
    assert (
        "site-2 is put out" in protofed("federation", "ban", str(server), "site-2", "--reason", "[/red]\x1b[2J").stdout
    )
    assert "back to the state after round 3" in protofed("federation", "rollback", str(server), "--round", "3").stdout
    assert not (server / "run" / "summary.json").exists()
    result = served(tmp_path, transport, said := [])
    assert [line["clients"] for line in result.rounds] == [3, 3, 3, 2, 2]
    assert any("resuming" in line and "after round 3" in line for line in said)
    assert any("site-2: it was put out: [/red] [2J. The operator can let it in again" in line for line in said)
    assert "it was put out" in str(transport.workers[102].refusal)  # type: ignore[attr-defined]
    shown = protofed("federation", "status", str(server))
    assert shown.returncode == 0, shown.stderr  # whatever words others use
    assert "put out: site-2 (by the operator): [/red] [2J" in shown.stdout
    assert "\x1b[2J" not in shown.stdout
    assert "site-2 is let in again" in protofed("federation", "unban", str(server), "site-2").stdout
    events = [entry["event"] for entry in entries(server)]
    assert [event for event in events if event in ("put out", "rolled back", "let in", "finished")] == [
        "finished",
        "put out",
        "rolled back",
        "finished",
        "let in",
    ]
