"""A member that means harm: nothing it sends is run, and nothing that is not as it must be is merged."""

import json
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from federated import set_up, small, worker
from spoilt import poison, raw, worse

import protofed
from protofed.engines.wire import decode, encode
from protofed.method import Mean
from protofed.ops.trees import alone, merge
from protofed.remote.build import no_client, server_domain
from protofed.remote.client.worker import ClientWorker
from protofed.remote.form import read_tree
from protofed.remote.protocol import Message, Refused, body_of, check_answer, pack_message, unpack_message
from protofed.remote.server.asking import check_asked
from protofed.remote.server.audit import Audit, verify_log
from protofed.remote.server.engine import RemoteEngine
from protofed.remote.server.roster import Roster
from protofed.remote.server.status import Status
from protofed.remote.server.verify import check_counts, loss_of
from protofed.remote.settings import Bounds, experiment_hash, load_federation
from protofed.remote.transport import LocalTransport, Reply

RUN = "0123456789abcdef"
MOST = 2_000_000
HASH = experiment_hash(small("model=mlp_digits"))
ASKED = {"run": RUN, "client": 1, "round": 1}


class Says:
    """A client that answers every greeting with the same bytes, whatever they are."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def answer(self, request: bytes) -> bytes:
        return self.content


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("federation")
    set_up(folder, small("model=mlp_digits"))
    return folder


@pytest.fixture(scope="module")
def client(home: Path) -> ClientWorker:
    return worker(home, 1)


def greet(home: Path, content: bytes) -> tuple[Roster, str]:
    """The roster after one greeting, and what was refused."""
    experiment, settings = small("model=mlp_digits"), load_federation(home / "server")
    status = Status.of(home / "status.json", lambda line: None, settings, 3, 2)
    status.refused.clear()
    engine = no_client(experiment, server_domain(home / "server", experiment, settings.task))
    roster = Roster(LocalTransport({101: Says(content)}), settings, experiment, engine, RUN, status)
    roster.refresh()
    return roster, status.refused[-1]["reason"] if status.refused else ""


def hello(client: ClientWorker, **changes: Any) -> bytes:
    task = {"shape": list(client.task.shape), "classes": list(client.task.classes)}
    asked = {"kind": "hello", "experiment": client.hash, "run": RUN, "client": 1, "task": task}
    return pack_message(unpack_message(client.answer(pack_message(asked))).head | changes)


def test_an_honest_hello_is_taken(home: Path, client: ClientWorker) -> None:
    for changes in ({}, {"model": {"name": "cnn_digits", "channels": 8}}):
        roster, why = greet(home, hello(client, **changes))
        assert (list(roster.members), why) == ([1], "")


HELLOS: dict[str, tuple[dict[str, Any], str]] = {
    "a command": ({"model": {"name": "os:system", "command": "touch ran"}}, "the operator must name it in [model]"),
    "a module": ({"model": {"name": "antigravity:geohash"}}, "is not known here"),
    "in memory": ({"model": {"name": "memory:Net"}}, "is not known here"),
    "a long list of names": ({"model": {"name": ["mlp_digits"] * 100_000}}, "bytes, where at most 32,768 are allowed"),
    "a list of names": ({"model": {"name": ["mlp_digits"] * 900}}, "not a message of protofed"),
    "a file of the server's": ({"model": {"name": "resnet18", "weights": "/etc/passwd"}}, "only numbers are taken"),
    "no file of the server's": ({"model": {"name": "resnet18", "weights": "/no/file"}}, "only numbers are taken"),
    "deep": ({"model": {"name": "mlp_digits", "a": [[[[[[1]]]]]]}}, "not a message of protofed"),
    "no number": ({"model": {"name": "cnn_digits", "channels": True}}, "model.channels"),
    "some names": ({"model": {"name": ["mlp_digits"] * 9}}, "is not known here"),
    "a table of tables": ({"model": [{"name": "mlp_digits"}]}, "names no model"),
    "unknown field": ({"model": {"name": "mlp_digits", "depth": 3}}, "unknown key model.depth"),
    "wide beyond the schema": ({"model": {"name": "mlp_digits", "hidden": 10**9}}, "model.hidden"),
    "wide": ({"model": {"name": "mlp_mpfedcl", "hidden": 65_536, "dim": 65_536}}, "parameters, where at most"),
    "many channels": ({"model": {"name": "cnn_digits", "channels": 65_536}}, "parameters, where at most"),
    "large samples": ({"shape": [10**9]}, "its samples have shape"),
    "many axes": ({"shape": [1] * 60}, "its samples have shape"),
    "true for one": ({"shape": [True, 8, 8]}, "its samples have shape"),
    "huge number": ({"samples": 10**400}, "a whole number in its head is too large"),
    "half a sample": ({"samples": 1.5}, "not a whole number"),
    "unknown key": ({"extra": 1}, "nobody asked for"),
    "long word": ({"name": "x" * 5000}, "characters in one word"),
}


@pytest.mark.parametrize("name", HELLOS)
def test_a_hello_that_asks_for_too_much_is_refused_at_once(
    name: str, home: Path, client: ClientWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    changes, why = HELLOS[name]
    started = time.process_time()
    roster, reason = greet(home, hello(client, **changes))
    assert why in reason
    assert not roster.members
    assert time.process_time() - started < 5
    assert not (tmp_path / "ran").exists()


def trained(client: ClientWorker, **head: Any) -> Message:
    asked = {"kind": "train", "experiment": client.hash, "run": RUN, "client": 1, "round": 1} | head
    return unpack_message(client.answer(pack_message(asked, body_of(client.down))))


def accepted(content: bytes, form: Any, samples: int) -> Any:
    """All that the server looks at before it merges an upload."""
    message = unpack_message(content, MOST)
    check_asked(message.head, ASKED | {"experiment": HASH})
    check_answer(message.head, "answer", "loss")
    loss_of(message.head, samples, 1)
    up = read_tree(message.body, form)
    check_counts(up, form, samples)
    return up


def test_thousands_of_spoilt_uploads_are_refused_and_raise_nothing_else(client: ClientWorker, home: Path) -> None:
    message = trained(client)
    roster, _ = greet(home, hello(client))
    form, samples = roster.members[1].form, roster.members[1].samples
    assert accepted(pack_message(message.head, message.body), form, samples)["prototypes"].weight.sum() > 0
    pick, started, merged, said = random.Random(22), time.process_time(), [], set()
    for number in range(5000):
        content = worse(message, pick)
        try:
            accepted(content, form, samples)
        except Refused as refused:
            said.add(str(refused))
        else:
            merged.append((number, content[:400]))
    assert not merged
    assert all(reason.isprintable() for reason in said)
    assert time.process_time() - started < 60


class Rehearsed:
    """An honest client's answers, given again without work; `spoil` may change what it would say."""

    def __init__(self, one: ClientWorker, spoil: Callable[[Message], bytes] | None = None) -> None:
        self.one, self.spoil = one, spoil
        self.known: dict[str, bytes] = {}

    def answer(self, request: bytes) -> bytes:
        kind = unpack_message(request).head["kind"]
        if kind not in self.known:
            self.known[kind] = self.one.answer(request)
        return self.spoil(unpack_message(self.known[kind])) if self.spoil else self.known[kind]


def test_no_answer_ends_stalls_or_bends_a_federation(home: Path, client: ClientWorker, tmp_path: Path) -> None:
    """Hundreds of answers of one member, through the roster and the engine, each with two honest ones next to it."""
    experiment, settings = small("model=mlp_digits"), load_federation(home / "server")
    settings = replace(settings, bounds=Bounds(refusals=0))  # else it is put out at once
    audit = Audit(tmp_path / "audit.jsonl")
    status = Status.of(tmp_path / "status.json", lambda line: None, settings, 3, 2, audit)
    here = no_client(experiment, server_domain(home / "server", experiment, settings.task))
    pick, method = random.Random(5), experiment.method
    bad: list[bytes] = []

    def spoil(message: Message) -> bytes:
        if message.head["kind"] != "answer":
            return pack_message(message.head, message.body)
        spoilt = (worse if "loss" in message.head and pick.random() < 0.4 else poison)(message, pick)
        bad.append(spoilt)
        return spoilt

    honest = [worker(home, number, state=tmp_path / str(number)) for number in (0, 2)]
    nodes = {100: Rehearsed(honest[0]), 101: Rehearsed(client, spoil), 102: Rehearsed(honest[1])}
    roster = Roster(LocalTransport(nodes), settings, experiment, here, RUN, status)
    engine = RemoteEngine(experiment, here, roster, status, replace(settings.rounds, minimum=2), 0.0, tmp_path)
    server = method.init_server(here.specs()[0])
    longest, merged, started = 0.0, 0, time.process_time()
    for _ in range(300):
        roster.transport.sent.clear()  # type: ignore[attr-defined]
        trained = engine.train(method, server, [0, 1, 2], 0)
        assert {0, 2} <= set(trained.answered or ())
        merged += 1 in (trained.answered or ())
        if 1 not in (trained.answered or ()):  # refused: the round is what it is without that client, to the bit
            ups = [alone(decode(unpack_message(nodes[node].known["train"]).body)) for node in (100, 102)]
            assert encode(trained.up) == encode(merge(*ups))
        assert bool(torch.isfinite(trained.up["prototypes"].total).all())
        longest = max(longest, float(trained.up["prototypes"].value.norm(dim=1).max()))
        engine._server = None
        tallies = engine.evaluate(method, server, [0, 1, 2], "own", "personal")
        assert all(0 <= one["head"].accuracy() <= 1 for one in tallies if one["head"].samples.sum() > 0)
    assert len(bad) == 600
    assert 0 < merged < 300  # a change may be within bounds
    usual = max(
        float(decode(unpack_message(nodes[n].known["train"]).body)["prototypes"].value.norm(dim=1).max())
        for n in (100, 102)
    )
    assert longest < settings.bounds.factor * usual
    assert time.process_time() - started < 120
    audit.close()
    assert verify_log(tmp_path / "audit.jsonl")[0].number > 1500


def test_no_greeting_ends_or_stalls_a_server(home: Path, client: ClientWorker, tmp_path: Path) -> None:
    """Two thousand mutations of a hello: joined in order, or refused in a line."""
    experiment, settings = small("model=mlp_digits"), load_federation(home / "server")
    told: list[str] = []
    status = Status.of(tmp_path / "status.json", told.append, settings, 3, 2)
    here = no_client(experiment, server_domain(home / "server", experiment, settings.task))
    says = Says(b"")
    roster = Roster(LocalTransport({101: says}), settings, experiment, here, RUN, status)
    pick, started, joined = random.Random(9), time.process_time(), 0
    honest = unpack_message(hello(client)).head
    odd: list[Any] = [
        None,
        True,
        -1,
        0,
        2**53,
        10**9,
        1.5,
        1e308,
        "",
        "x" * 900,
        "\x1b[2J\n\u202e",
        [],
        [[[]]],
        {},
        {"a": 1},
    ]
    odd += [{"name": "cnn_digits", "channels": n} for n in range(1, 40)]
    for _ in range(2000):
        head = honest | {pick.choice(list(honest)): pick.choice(odd) for _ in range(pick.choice([1, 1, 2, 5]))}
        text = json.dumps(head)
        cut = pick.randrange(len(text))
        spoilt = text[:cut] + pick.choice(["", "[" * 50, "\x00", '"', "1" * 500, "}"]) + text[cut + pick.randrange(3) :]
        says.content = pick.choice([pack_message(head), pack_message(head), raw(spoilt, b""), pick.randbytes(50)])
        roster.members.clear()
        roster.let_in()
        roster.refresh()
        joined += len(roster.members)
    assert joined > 0
    assert len(roster._told[1]) <= 8
    assert any("announced 8 other models already" in line for line in told)
    assert all(line.isprintable() and len(line) < 500 for line in told)
    assert time.process_time() - started < 120


class Silent(LocalTransport):
    """A node that comes and goes, and answers only when it is told to."""

    def __init__(self, one: ClientWorker) -> None:
        super().__init__({})
        self.one, self.speaks, self.waited = one, False, list[float]()

    def exchange(self, requests: Mapping[int, bytes], deadline: float) -> Iterator[Reply]:
        self.waited.append(deadline)
        if self.speaks:
            yield from super().exchange(requests, deadline)
            yield from super().exchange(requests, deadline)


def test_a_client_that_comes_and_goes_and_answers_no_greeting_stalls_the_others_less_and_less(
    home: Path, client: ClientWorker, tmp_path: Path
) -> None:
    experiment, settings = small("model=mlp_digits"), load_federation(home / "server")
    status = Status.of(tmp_path / "status.json", lambda line: None, settings, 3, 2)
    here = no_client(experiment, server_domain(home / "server", experiment, settings.task))
    transport = Silent(client)
    roster = Roster(transport, settings, experiment, here, RUN, status)

    def come_and_go() -> None:
        for there in ({101: client}, {}):
            transport.workers = there
            roster.refresh()

    for _ in range(7):
        come_and_go()
    assert transport.waited == [30.0, 15.0, 7.5, 3.75, 1.875, 0.9375, 0.9375]
    transport.speaks = True
    transport.workers = {101: client}
    roster.refresh()
    assert list(roster.members) == [1]
    transport.speaks = False
    transport.workers = {}
    roster.refresh()
    come_and_go()
    assert transport.waited[-1] == 30.0  # whoever has answered has all the time again


def test_samples_told_are_bounded_by_the_operator(home: Path, client: ClientWorker, tmp_path: Path) -> None:
    experiment, settings = small("model=mlp_digits"), load_federation(home / "server")
    engine = no_client(experiment, server_domain(home / "server", experiment, settings.task))
    many = unpack_message(hello(client)).head["samples"]
    first, second, third = settings.clients
    for bounds, own, allowed in (
        (0, 0, True),
        (many, 0, True),
        (many - 1, 0, False),
        (many, many - 1, False),
        (1, many, True),
    ):
        told = replace(settings, bounds=Bounds(samples=bounds), clients=(first, replace(second, samples=own), third))
        status = Status.of(tmp_path / "status.json", lambda line: None, told, 3, 2)
        says = Says(hello(client, tests=1))
        roster = Roster(LocalTransport({101: says}), told, experiment, engine, RUN, status)
        roster.refresh()
        assert bool(roster.members) == allowed, (bounds, own)


def test_a_variance_is_never_negative() -> None:
    form = Mean.of({"buffers": {"bn.running_var": torch.ones(3)}}, torch.tensor(1.0))
    assert read_tree(encode(form), form).weight == 1
    with pytest.raises(Refused, match="which no variance is"):
        read_tree(
            encode(Mean.of({"buffers": {"bn.running_var": torch.tensor([1.0, -1.0, 1.0])}}, torch.tensor(1.0))), form
        )


def test_a_client_runs_nothing_that_a_server_sends(
    client: ClientWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trained(client, model={"name": "os:system", "command": "touch ran"}, method="os:system")
    bad = [{"kind": "os:system"}, {"ask": ["os:system"], "kind": "evaluate"}, {"run": "../up"}, {"round": 10**400}]
    for head in bad:
        assert trained(client, **head).head["kind"] == "error"
    pick = random.Random(7)
    for _ in range(300):
        assert unpack_message(client.answer(pick.randbytes(pick.randrange(300)))).head["kind"] == "error"
    assert not (tmp_path / "ran").exists()


def test_what_reads_the_wire_can_run_nothing() -> None:
    """No pickle, no eval, no import by name in any file that reads what others send."""
    root = Path(protofed.__file__).parent
    files = [*(root / "remote").rglob("*.py"), root / "engines" / "wire.py"]
    never = re.compile(
        r"\bpickle\b|\bmarshal\b|(?<![\w.])(eval|exec)\(|import_module|__import__|find_spec|\bimported\(|torch\.load\("
    )
    lines = [(path.name, line) for path in files for line in path.read_text().splitlines()]
    assert not [(name, line) for name, line in lines if never.search(line) and "weights_only=True" not in line]
    assert "from_dict" not in (root / "remote" / "server" / "roster.py").read_text()  # which imports what it names
