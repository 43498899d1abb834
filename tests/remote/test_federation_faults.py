"""Faults are normal: whatever happens to clients, messages or the server, nothing is lost, nothing wrong is merged."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from federated import set_up, small, worker, workers

from protofed.engines.wire import decode, encode
from protofed.method import Mean
from protofed.remote.protocol import Message, body_of, pack_message, unpack_message
from protofed.remote.server import roster
from protofed.remote.server.serve import serve
from protofed.remote.transport import LocalTransport, Reply
from protofed.runs.folder import RunFolder

QUICK = ("model=mlp_digits", "evaluate.own=0")


def quiet(text: str) -> None:
    pass


def server_state(folder: Path) -> bytes:
    state, remarks = RunFolder(folder).restore()
    assert state is not None
    assert not remarks
    return encode(state.server, whole=True)


def status(server: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((server / "status.json").read_text())
    return found


class Crash(Exception):
    """The server is killed."""


class Crashing(LocalTransport):
    """Kills the server once before and once after every exchange; clients lose their process half of the times."""

    def __init__(self, home: Path) -> None:
        super().__init__({})
        self.home, self.done = home, set[tuple[Any, ...]]()
        self.restart()

    def restart(self) -> None:
        for one in self.workers.values():
            one.close()  # type: ignore[attr-defined]
        self.workers = {100 + number: worker(self.home, number) for number in range(3)}

    def exchange(self, requests: Mapping[int, bytes], deadline: float) -> Iterator[Reply]:
        head = unpack_message(next(iter(requests.values()))).head
        point = (head["kind"], head.get("round"))
        self.crash(*point, "before")
        replies = list(super().exchange(requests, deadline))
        yield replies[0]
        self.crash(*point, "in the middle")
        yield from replies[1:]
        self.crash(*point, "after")

    def crash(self, *point: Any) -> None:
        if point not in self.done:
            self.done.add(point)
            if point[-1] == "after":
                self.restart()
            raise Crash


def ending(server: Path, transport: LocalTransport) -> tuple[int, list[Any]]:
    """How often the server was killed until it was through, and all that came of it."""
    kills = 0
    while True:
        try:
            result = serve(server, transport, quiet, pause=0.01)
            break
        except Crash:
            kills += 1
    state, _ = RunFolder(result.folder).restore()
    assert state is not None
    run = json.loads((server / "run.json").read_text())["run"]
    personal = [one.state.at(run, 9).client for one in transport.workers.values()]  # type: ignore[attr-defined]
    clock = ("seconds", "seconds_train", "parts")
    lines = [{k: v for k, v in line.items() if k not in clock} for line in (*result.rounds, result.summary)]
    states = [encode(tree, whole=True) for tree in (state.server, *personal)]
    return kills, [states, lines, result.clients, {k: v for k, v in state.totals.items() if k not in clock}]


def test_a_server_killed_anywhere_ends_where_it_would_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FedRep has last phases and a state on both sides; every message is cut off before, in and after it."""
    experiment = small("method=fedrep", "model=mlp_digits", "record.enabled=false")
    servers = {}
    for how in ("killed", "untouched"):
        (tmp_path / how).mkdir()
        servers[how] = set_up(tmp_path / how, experiment)
    _, expected = ending(servers["untouched"], workers(tmp_path / "untouched"))
    transport, save = Crashing(tmp_path / "killed"), RunFolder.save

    def saving(self: RunFolder, state: Any) -> None:
        point = ("save", state.round, state.totals["finished"])
        transport.crash(*point, "before")
        save(self, state)
        transport.crash(*point, "after")

    monkeypatch.setattr(RunFolder, "save", saving)
    kills, found = ending(servers["killed"], transport)
    assert found == expected
    assert kills == 3 * 6 + 2 * 4  # hello, 2 x (train, evaluate), finish; checkpoints before and after each round


# what a client may send


def changed(change: Callable[[dict[str, Any], Any], Any]) -> Callable[[Message], bytes]:
    """An answer with another head or another upload."""

    def spoil(message: Message) -> bytes:
        head, up = dict(message.head), decode(message.body)
        up = change(head, up)
        return pack_message(head, body_of(up))

    return spoil


def set_head(**more: Any) -> Callable[[Message], bytes]:
    return lambda message: pack_message(message.head | more, message.body)


def with_mean(make: Callable[[Mean], Mean]) -> Callable[[Message], bytes]:
    return changed(lambda head, up: {"prototypes": make(up["prototypes"])})


def huge_rows(message: Message) -> bytes:
    """A few bytes that ask for a petabyte."""
    length = int.from_bytes(message.body[:8], "little")
    header = message.body[8 : 8 + length].replace(b'\\"rows\\":[10]', b'\\"rows\\":[9999999999999]')
    assert header != message.body[8 : 8 + length]
    return pack_message(message.head, len(header).to_bytes(8, "little") + header + message.body[8 + length :])


def other_row(message: Message) -> bytes:
    """A class that there is not, in place of the last one."""
    body = bytearray(message.body)
    length = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + length])
    (name,) = [key for key in header if key.endswith("#i")]
    body[8 + length + header[name]["data_offsets"][1] - 1] = 200
    return pack_message(message.head, bytes(body))


def negative(message: Message) -> bytes:
    up = decode(message.body)["prototypes"]
    return pack_message(message.head, encode({"prototypes": Mean(up.total, up.weight - 2)}, whole=True))


NAN = float("nan")
MALFORMED: dict[str, tuple[Callable[[Message], bytes], str]] = {
    "NaN": (with_mean(lambda m: Mean(m.total * NAN, m.weight)), "NaN or infinite"),
    "wrong width": (with_mean(lambda m: Mean(m.total[:, :-1].contiguous(), m.weight)), "is float32 (10, 31), where"),
    "too many classes": (
        with_mean(lambda m: Mean(torch.ones(11, 32), torch.ones(11))),
        "shape [11, 32], which is more than its form",
    ),
    "unknown class": (other_row, "not a tree of tensors"),
    "negative counts": (negative, "negative count"),
    "counts beyond its samples": (with_mean(lambda m: Mean(m.total, m.weight * 1e6)), "but there are"),
    "another type": (with_mean(lambda m: Mean(m.total.double(), m.weight)), "is float64"),
    "huge array": (lambda m: pack_message(m.head, bytes(3_000_000)), "where at most 2,000,000 are allowed"),
    "huge promise": (huge_rows, "rows, where [10] are expected"),
    "other names": (changed(lambda head, up: {"weights": up["prototypes"]}), "other parts than expected"),
    "a bare tensor": (changed(lambda head, up: {"prototypes": up["prototypes"].total}), "is not a mean"),
    "cut short": (lambda m: pack_message(m.head, m.body[:-7]), "not a tree of tensors"),
    "garbage": (lambda m: b"\x00" * 3, "not a message of protofed"),
    "garbage body": (lambda m: pack_message(m.head, b"garbage" * 9), "which is more than its form"),
    "nothing": (lambda m: pack_message(m.head, b""), "not a tree of tensors"),
    "another round": (set_head(round=77), "it answers round 77"),
    "another experiment": (set_head(experiment="0" * 64), "another experiment"),
    "another client": (set_head(client=0), "another client"),
    "another run": (set_head(run="f" * 16), "another run"),
    "no loss": (set_head(loss=[NAN, 1.0]), "is not a number"),
    "another version": (set_head(protofed="7.0.0"), "Install the same version"),
    "its own error": (set_head(kind="error", reason="disk\nfull"), "it says: disk full"),
}


class Spoiling(LocalTransport):
    """Client 2's answers to training are spoilt, another way in each round, or do not come at all."""

    spoil = True

    def exchange(self, requests: Mapping[int, bytes], deadline: float) -> Iterator[Reply]:
        for reply in super().exchange(requests, deadline):
            head = unpack_message(requests[reply.node]).head
            if head["kind"] != "train" or reply.node != 102:
                yield reply
            elif self.spoil:
                assert reply.content is not None
                yield Reply(102, list(MALFORMED.values())[head["round"] - 1][0](unpack_message(reply.content)))


def test_malformed_uploads_are_refused_and_nothing_else_suffers(tmp_path: Path) -> None:
    """The server ends as if the client had never answered, and says each time why."""
    experiment = small(*QUICK, f"rounds={len(MALFORMED)}", "record.enabled=false")
    ends = {}
    for how in ("spoilt", "silent"):
        home = tmp_path / how
        home.mkdir()
        server = set_up(home, experiment, {"refusals": 0}, minimum=2, max_bytes=2_000_000)
        transport = Spoiling(workers(home).workers)
        transport.spoil = how == "spoilt"
        said: list[str] = []
        result = serve(server, transport, said.append, pause=0.01)
        assert [line["clients"] for line in result.rounds] == [2] * len(MALFORMED)
        ends[how] = server_state(result.folder)
        found = status(server)
        refused = sorted(found["refused"] + found["missing"], key=lambda entry: entry["round"])
        assert {entry["state"] for entry in found["missing"]} == ({"failed"} if how == "spoilt" else {"late"})
        assert [(entry["round"], entry["client"]) for entry in refused] == [(n + 1, 2) for n in range(len(MALFORMED))]
        for (name, (_, why)), entry in zip(MALFORMED.items(), refused, strict=True):
            why = why if how == "spoilt" else "no answer within 60 s"
            assert entry["name"] == "site-2"
            assert why in entry["reason"], name
            assert any(entry["reason"] in text for text in said)
    assert ends["spoilt"] == ends["silent"]


# coming and going


class Script(LocalTransport):
    """Does to each round what a script says."""

    def __init__(self, home: Path, script: dict[int, Callable[["Script"], None]]) -> None:
        super().__init__({100: worker(home, 0), 101: worker(home, 1)})
        self.home, self.script = home, script
        self.silent: set[int] = set()
        self.twice: set[int] = set()
        self.late: set[int] = set()  # whose answers come one round later
        self.held: dict[int, bytes] = {}

    def exchange(self, requests: Mapping[int, bytes], deadline: float) -> Iterator[Reply]:
        head = unpack_message(next(iter(requests.values()))).head
        if head["kind"] == "train":
            self.script.pop(head["round"], lambda transport: None)(self)
        for reply in super().exchange(requests, deadline):
            if head["kind"] != "train":
                yield reply
            elif reply.node in self.held:
                yield Reply(reply.node, self.held.pop(reply.node))
            elif reply.node in self.late and reply.content is not None:
                self.held[reply.node] = reply.content
            elif reply.node not in self.silent:
                yield reply
                if reply.node in self.twice:
                    yield reply


def test_clients_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A late joiner, a silent one, one that says all twice, one that is too late, one that is killed and comes back."""
    monkeypatch.setattr(roster, "AGAIN", 0.0)
    server = set_up(tmp_path, small(*QUICK, "rounds=9", "record.enabled=false"), minimum=1)

    def join(transport: Script) -> None:
        transport.workers[102] = worker(tmp_path, 2)

    def kill(transport: Script) -> None:
        transport.workers.pop(101).close()  # type: ignore[attr-defined]

    def rejoin(transport: Script) -> None:
        transport.workers[105] = worker(tmp_path, 1)  # without a key, a node has another name

    def end(transport: Script) -> None:
        transport.silent, transport.twice, transport.late = set(), set(), set()

    transport = Script(
        tmp_path,
        {
            1: join,
            3: lambda t: t.silent.add(102),
            4: end,
            5: lambda t: (t.late.add(100), t.twice.add(102))[0],
            6: end,
            7: kill,
            8: rejoin,
        },
    )
    seen = {}
    said: list[str] = []

    def tell(text: str) -> None:
        said.append(text)
        seen[text] = status(server) if (server / "status.json").is_file() else {}

    result = serve(server, transport, tell, pause=0.01)
    #       late joiner: 2, then 3; silent: 2; late: 2, and its old answer is refused; killed: 2; back: 3
    assert [line["clients"] for line in result.rounds] == [2, 3, 2, 3, 2, 2, 2, 2, 3]
    missing = [(entry["round"], entry["name"], entry["state"], entry["reason"]) for entry in status(server)["missing"]]
    assert missing == [
        (3, "site-2", "late", "no answer within 60 s"),
        (5, "site-0", "late", "no answer within 60 s"),
        (7, "site-1", "lost", "no answer: it is gone"),
    ]
    (refused,) = status(server)["refused"]
    assert (refused["name"], refused["reason"]) == ("site-0", "it answers round 5, but this is round 6")
    states = {client["name"]: client["state"] for client in status(server)["clients"]}
    assert states == {"site-0": "answered", "site-1": "answered", "site-2": "answered"}
    assert status(server)["phase"] == "finished"
    participations = {client["client"]: client["rounds"] for client in result.clients}
    assert participations == {0: 7, 1: 7, 2: 7}
    run = json.loads((server / "run.json").read_text())["run"]
    assert transport.workers[105].state.rounds(run) == [9, 6, 5, 4, 3, 2]  # type: ignore[attr-defined]


def test_too_few_answers_end_nothing_and_who_never_answers_well_is_put_out(tmp_path: Path) -> None:
    server = set_up(tmp_path, small(*QUICK), minimum=2)
    transport = Spoiling({100: worker(tmp_path, 0), 102: worker(tmp_path, 2)})
    said: list[str] = []

    def nodes() -> dict[int, int | None]:  # the third one comes while the server waits
        if any("waiting" in text for text in said) and 101 not in transport.workers:
            transport.workers[101] = worker(tmp_path, 1)
        return dict.fromkeys(transport.workers)

    transport.nodes = nodes  # type: ignore[method-assign]
    result = serve(server, transport, said.append, pause=0.01)
    assert [line["clients"] for line in result.rounds] == [2, 2]
    assert sum("1 answers, 2 are needed; it is tried again" in text for text in said) == 5
    assert "waiting for clients: 1 of 2 are here, 2 are needed (1 put out)" in said
    (out,) = status(server)["put_out"]
    assert out["name"] == "site-2"
    assert "refused 5 times in a row, the last time: prototypes holds NaN" in out["reason"]
