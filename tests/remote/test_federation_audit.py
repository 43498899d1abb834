"""The audit log: what is in it, and that no change of it goes unnoticed."""

import hashlib
import json
import random
import resource
from pathlib import Path
from typing import Any

import pytest
from command import protofed
from federated import set_up, small, workers

from protofed.engines.wire import encode
from protofed.errors import UserError
from protofed.remote.server.audit import Audit, BrokenChain, Head, describe_entry, read_log, verify_log
from protofed.remote.server.orders import waiting_orders
from protofed.remote.server.serve import serve
from protofed.remote.server.status import Status, last_head
from protofed.remote.settings import FederationSettings, load_client
from protofed.remote.transport import LocalTransport
from protofed.runs.folder import RunFolder


def entries(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Twenty lines of two processes."""
    path = tmp_path / "audit.jsonl"
    first, second = Audit(path), Audit(path)
    for number in range(20):
        (first, second)[number % 3 == 0].add("event", number=number, sync=number % 2 == 0)
    first.close()
    second.close()
    return path


def test_a_chain_holds_and_says_where_it_is_broken(log: Path) -> None:
    head, remarks = verify_log(log)
    lines = log.read_bytes().splitlines(keepends=True)
    assert (head.number, remarks) == (20, [])
    assert head.hash == hashlib.sha256(lines[-1][:-1]).hexdigest()
    assert log.stat().st_mode & 0o777 == 0o600
    changed = {
        "a number": ([*lines[:7], lines[7].replace(b'"number": 7', b'"number": 8'), *lines[8:]], 9),
        "removed": ([*lines[:7], *lines[8:]], 8),
        "twice": ([*lines[:7], lines[6], *lines[7:]], 8),
        "moved": ([*lines[:7], lines[8], lines[7], *lines[9:]], 8),
        "the first removed": (lines[1:], 1),
        "garbage": ([*lines[:7], b"garbage\n", *lines[7:]], 8),
        "no entry": ([*lines[:7], b"{}\n", *lines[8:]], 8),
        "an ending": ([*lines, b"garbage\n"], 21),
        "nothing": ([*lines[:7], b"\n", *lines[7:]], 8),
        "nothing at the end": ([*lines, b"\n"], 21),
        "spaces": ([*lines[:7], lines[7].replace(b": ", b":  ", 1), *lines[8:]], 9),
    }
    for name, (other, where) in changed.items():
        log.write_bytes(b"".join(other))
        with pytest.raises(BrokenChain) as broken:
            verify_log(log)
        assert broken.value.line == where, name
    log.write_bytes(b"".join(lines[:15]))  # whole, as far as it goes
    assert verify_log(log)[0].number == 15
    for known in (head, head.hash, Head(15, head.hash)):
        with pytest.raises(BrokenChain):
            verify_log(log, known)
    log.write_bytes(b"".join(lines))
    assert verify_log(log, head, head.hash, hashlib.sha256(lines[3][:-1]).hexdigest())[0] == head


def test_any_bit_that_changes_is_noticed(log: Path) -> None:
    """All but in the last line, which only its head, noted down elsewhere, speaks for."""
    content, head, pick = log.read_bytes(), verify_log(log)[0], random.Random(3)
    for _ in range(300):
        other = bytearray(content)
        at = pick.randrange(len(other))
        other[at] ^= 1 << pick.randrange(8)
        log.write_bytes(other)
        with pytest.raises(BrokenChain):
            verify_log(log, head)


def test_a_line_that_a_crash_cut_off_stays_and_is_noted(log: Path) -> None:
    content = log.read_bytes()
    for cut in (2, 30, len(content.splitlines()[-1]) - 1):
        log.write_bytes(content[:-cut])
        head, remarks = verify_log(log)
        assert head.number == 19
        assert "line 20 was cut off by a crash; the server's next start notes it" in remarks
        audit = Audit(log)
        audit.add("after")
        audit.close()
        assert log.read_bytes().startswith(content[:-cut] + b"\n")  # nothing is ever taken away
        head, remarks = verify_log(log)
        assert (head.number, remarks) == (21, ["line 20 was cut off by a crash, as entry 20 says"])
        lines = log.read_bytes().splitlines(keepends=True)
        log.write_bytes(b"".join([*lines[:19], b"x" + lines[19], *lines[20:]]))
        with pytest.raises(BrokenChain, match="line 20"):
            verify_log(log)
    log.write_bytes(content[:-1])  # nothing but a line break is missing
    Audit(log).close()
    assert log.read_bytes() == content


def test_a_line_that_a_full_disk_cut_off_is_noted_when_there_is_room_again(log: Path) -> None:
    """The kernel writes as much as there is room for, and raises nothing."""
    audit, before = Audit(log), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.stat().st_size + 40, before[1]))
    try:
        with pytest.raises(OSError, match="No space left"):
            audit.add("too much")
        with pytest.raises(OSError, match="File too large"):
            audit.add("again")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    audit.add("there is room")
    audit.close()
    head, remarks = verify_log(log)
    assert (head.number, remarks) == (22, ["line 21 was cut off by a crash, as entry 21 says"])


def test_tables_nested_without_end_are_damage_and_no_traceback(log: Path, tmp_path: Path) -> None:
    deep = "[" * 100_000 + "\n"
    with open(log, "a") as file:
        file.write(deep)
    with pytest.raises(BrokenChain, match="line 21: it cannot be read"):
        verify_log(log)
    for name in ("status.json", "ledger.json"):
        (tmp_path / name).write_text(deep)
    assert last_head(tmp_path / "status.json") is None
    with pytest.raises(UserError, match=r"ledger\.json is damaged"):
        Status.of(tmp_path / "status.json", lambda line: None, FederationSettings(), 3, 2)
    (tmp_path / "ledger.json").unlink()
    assert Status.of(tmp_path / "status.json", lambda line: None, FederationSettings(), 3, 2).refused == []
    (tmp_path / "orders").mkdir()
    (tmp_path / "orders" / "1.json").write_text(deep)
    assert waiting_orders(tmp_path) == []
    (tmp_path / "client.toml").write_text("client = " + deep)
    with pytest.raises(UserError, match="not valid TOML"):
        load_client(tmp_path)


@pytest.mark.parametrize("odd", [{"time": 7}, {"time": {"a": 1}}, {"a": ["\ud800\x1b[2J"]}, {"a": "DEEP"}])
def test_whatever_an_entry_says_it_is_shown_in_a_line(odd: dict[str, Any]) -> None:
    deep: Any = "here"
    for _ in range(900):
        deep = [deep]
    entry = {"n": 1, "event": "e", "before": "", "time": "now"} | {
        k: deep if v == "DEEP" else v for k, v in odd.items()
    }
    line = describe_entry(entry)
    assert line.isprintable()
    assert "..." in line or "DEEP" not in odd.values()


def test_long_lines_and_odd_words(tmp_path: Path) -> None:
    audit = Audit(tmp_path / "audit.jsonl")
    audit.add("long", words="x" * 300_000)
    audit.close()
    again = Audit(tmp_path / "audit.jsonl")
    again.add("odd", client="\x1b[2J\u202e\n[/red]")
    again.close()
    assert verify_log(tmp_path / "audit.jsonl")[0].number == 2
    (_, _, _), (_, _, entry) = read_log(tmp_path / "audit.jsonl")
    assert entry is not None
    assert describe_entry(entry).isprintable()


def test_a_federations_log_tells_all_and_the_command_reads_it(tmp_path: Path) -> None:
    server = set_up(tmp_path, small("model=mlp_digits", "record.enabled=false"))
    transport: LocalTransport = workers(tmp_path)
    result = serve(server, transport, lambda text: None, pause=0.01)
    path = server / "audit.jsonl"
    found = entries(path)
    started = found[0]
    assert started["event"] == "server started"
    assert started["versions"]["protofed"]
    assert started["settings"]["bounds"]["action"] == "refuse"
    assert started["settings"]["rounds"]["deadline_s"] == 60
    joined = [entry for entry in found if entry["event"] == "joined"]
    assert [(entry["client"], entry["samples"] > 0) for entry in joined] == [(f"site-{n}", True) for n in range(3)]
    digests = {hashlib.sha256(part).hexdigest(): len(part) for _, *both in transport.sent for part in both}
    sent = [tuple(one) for entry in found if entry["event"] == "sent" for one in entry["to"].values()]
    received = [(entry["bytes"], entry["sha256"]) for entry in found if entry["event"] == "received"]
    assert len(sent) == len(received) == 3 * 4  # two rounds, trained and tested
    assert all(digests[digest] == size for size, digest in sent + received)
    state, _ = RunFolder(result.folder).restore()
    assert state is not None
    kept = [entry for entry in found if entry["event"] == "round kept"]
    assert [entry["round"] for entry in kept] == [0, 1, 2, 2]
    assert kept[-1]["server"] == hashlib.sha256(encode(state.server, whole=True)).hexdigest()
    assert found[-1]["event"] == "finished"
    head = json.loads((server / "status.json").read_text())["log"]
    assert verify_log(path)[0] == Head(head["number"], head["hash"])

    shown = protofed("federation", "log", str(server))
    assert shown.returncode == 0, shown.stderr
    assert "site-1" in shown.stdout
    assert protofed("federation", "log", str(server), "--json").stdout == path.read_text()
    whole = protofed("federation", "log", str(server), "--verify", "--head", head["hash"])
    assert whole.returncode == 0, whole.stderr
    assert f"Its head: {head['hash']}" in " ".join(whole.stdout.split())
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-2]))
    cut = protofed("federation", "log", str(server), "--verify")
    assert cut.returncode != 0
    assert "the end was cut off" in " ".join(cut.stderr.split())
    path.write_bytes(b"".join([*lines[:4], *lines[5:]]))
    broken = protofed("federation", "log", str(server), "--verify")
    assert broken.returncode != 0
    assert "line 5: it does not follow entry 4" in " ".join(broken.stderr.split())
    path.unlink()
    assert "is not there yet" in " ".join(protofed("federation", "log", str(server)).stderr.split())
