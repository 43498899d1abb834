"""docs/deploy.md and docs/operate.md, followed word by word on four machines, with an ear on the wire between them.

The machines are network namespaces. One liberty is taken with the pages: instead of `pip install`, the environment of
this test is on the PATH. What people do by hand is done here: bundles are brought by moving them, and a server is lost.
The machines note the keys of their connections, so that the traffic can be searched twice: as it is, and opened.
"""

import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from blocks import FENCE
from capture import Capture, Stream, records
from checkout import ROOT
from namespaces import BRIDGE, Machines, why_not

import protofed

pytest.importorskip("flwr", reason="needs Flower: pip install 'protofed[flower]'")
if reason := why_not():
    pytest.skip(reason, allow_module_level=True)

from sought import WORDS, private_key, samples, sought, uploads
from tls13 import Secrets

from protofed.remote.flower.certificates import days_left
from protofed.remote.flower.server import processes_file, read_status

pytestmark = [pytest.mark.namespace, pytest.mark.slow, pytest.mark.usefixtures("all_cores")]

SITES = ("north", "south", "west")
ADDRESSES = {"server": "10.77.0.1", "north": "10.77.0.2", "south": "10.77.0.3", "west": "10.77.0.4"}
PORT, PLANTED = 8443, 8080
EPHEMERAL = 32768  # from here on callers have their ports
PATIENCE = 240.0  # seconds, for a machine that does other things too
TITLE = re.compile(r'bash title="(.+)"')
TAKES_PART = re.compile(r"^protofed client (?!.*--dry-run)", re.MULTILINE)
CONTROL = ("/v1/control/list-nodes", "/v1/control/start-run", "/v1/control/register-node")
BEHIND = (*CONTROL, "/v1/runtime/get-nodes", "/v1/fleet/register-node", "/v1/fleet/../control/start-run", "/docs")


class Step(NamedTuple):
    """A block of a page."""

    title: str
    code: str

    @property
    def machines(self) -> list[str]:
        return [word for word in re.split(r",\s*", self.title) if word in ADDRESSES]


def steps(page: str) -> list[Step]:
    """The bash of a page: every block of it says where it is run."""
    found = []
    for fence in FENCE.finditer((ROOT / "docs" / page).read_text(encoding="utf-8")):
        if fence["info"].startswith("bash"):
            title = TITLE.fullmatch(fence["info"])
            assert title, f"{page}: on which machine is this run?\n{fence['code']}"
            found.append(Step(title[1], fence["code"]))
            assert found[-1].machines, found[-1].title
    return found


class Followed:
    """The pages, step by step; clients stay in the background, as they would on machines of their own."""

    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def server(self) -> Path:
        return self.machines.folders["server"] / "hospitals" / "server"

    def log(self, name: str) -> Path:
        return self.machines.folders[name] / "typed.log"

    def follow(self, step: Step) -> str:
        """Do it on all of its machines, at the same time; what was printed on the last one."""
        code = re.sub(r"^pip install .*$", ":", step.code, flags=re.MULTILINE)
        before = {name: self.log(name).stat().st_size if self.log(name).exists() else 0 for name in step.machines}
        begun = {name: self.machines.start(name, code, self.log(name)) for name in step.machines}
        if TAKES_PART.search(step.code):
            self.running |= begun
            return ""
        for name, process in begun.items():
            assert process.wait(PATIENCE) == 0, f"on {name}:\n{step.code}\n{self._since(name, before[name])}"
        return self._since(name, before[name])

    def _since(self, name: str, size: int) -> str:
        """What was printed since the log had so many bytes."""
        return self.log(name).read_bytes()[size:].decode()

    def until(self, what: Callable[[], Any], why: str) -> None:
        end = time.monotonic() + PATIENCE
        while not what():
            for name, process in self.running.items():
                assert process.poll() in (None, 0), f"{name} ended before {why}: {self.log(name).read_text()}"
            assert time.monotonic() < end, f"waited in vain until {why}: {self.server / 'logs'}"
            time.sleep(0.05)

    def bring(self) -> None:
        """Bundles and data to their sites; nothing of them stays."""
        for name in SITES:
            for end in ("tgz", "npz"):
                shutil.move(self.machines.folders["server"] / f"{name}.{end}", self.machines.folders[name])


@pytest.fixture
def followed(tmp_path: Path) -> Iterator[Followed]:
    here = Path(sys.executable).parent
    environment = {
        "PATH": f"{here}:{os.environ['PATH']}", "PYTHONPATH": str(Path(protofed.__file__).parent.parent),
        "LANG": "C.UTF-8", "SSLKEYLOGFILE": str(tmp_path / "keys.log"),
    }  # fmt: skip
    machines = Machines(tmp_path, ADDRESSES, environment)
    try:
        yield Followed(machines)
    finally:
        machines.close()


def test_the_page_followed_on_four_machines(followed: Followed, tmp_path: Path) -> None:
    machines, server = followed.machines, followed.server
    capture = Capture(lambda make: machines.inside(BRIDGE, make))
    *joining, look = steps("deploy.md")
    for step in joining:
        if "--dry-run" in step.code:
            followed.bring()
        said = followed.follow(step)
        if "--dry-run" in step.code:
            assert "prototypes: float32" in said
            assert "joined" not in said
    assert set(followed.running) == set(SITES)

    followed.until(lambda: rounds_of(server), "the first round is done")
    assert [client["state"] for client in read_status(server)["clients"]].count("never seen") == 0
    for name in SITES:  # asleep, so that there is a federation left to operate, however slow this machine is
        machines.signal(name, signal.SIGSTOP)
    _only_clients_calls_are_answered(machines, server, tmp_path / "keys.log")
    _operated(followed, steps("operate.md"), tmp_path / "keys.log")
    again = next(step for step in joining if step.machines == ["north"] and TAKES_PART.search(step.code))
    _has_a_new_key(followed, again)
    for name in SITES[1:]:
        machines.signal(name, signal.SIGCONT)

    for name in SITES:
        assert followed.running[name].wait(PATIENCE) == 0, followed.log(name).read_text()
        assert followed.log(name).read_text().count("joined") >= 1
    followed.until(lambda: not machines.processes(), "all have ended by themselves")
    said = followed.follow(look)
    assert "finished, round 5 of 5" in said
    assert all(name in said for name in SITES)
    assert "<html" in (machines.folders["server"] / "report.html").read_text()[:200]
    assert len(rounds_of(server)) == 5
    assert all(line["clients"] == 3 for line in rounds_of(server))

    _plant(followed)
    assert capture.stop() == 0  # frames lost
    assert capture.beside() == set()
    _searched(followed, capture.streams(), Secrets(tmp_path / "keys.log"))


def rounds_of(server: Path) -> list[dict[str, Any]]:
    """The rounds that are done."""
    path = server / "run" / "rounds.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _context(authority: Path, keys: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority)
    context.keylog_filename = str(keys)
    return context


def _answer(url: str, context: ssl.SSLContext) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, b"", method="POST"), context=context) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def _only_clients_calls_are_answered(machines: Machines, server: Path, keys: Path) -> None:
    """The control can be reached on the server's loopback, and nowhere else; nobody can call a site."""
    superlink = json.loads(processes_file(server).read_bytes())["superlink"]
    inner, outer = server / "flower" / "inner-ca.crt", machines.folders["north"] / "north" / "ca.crt"
    for route in CONTROL:
        there = machines.inside("server", lambda: _answer(f"https://{superlink}{route}", _context(inner, keys)))  # noqa: B023
        assert there != 404, route
    for route in BEHIND:
        url = f"https://10.77.0.1:{PORT}{route}"
        assert machines.inside("north", lambda: _answer(url, _context(outer, keys))) == 404, route  # noqa: B023
    port = int(superlink.split(":")[1])
    with pytest.raises(ConnectionRefusedError):
        machines.inside("north", lambda: socket.create_connection(("10.77.0.1", port), 5))
    assert (True, port) in machines.listening("server")
    assert {port for loopback, port in machines.listening("server") if not loopback} == {PORT}
    for name in SITES:
        assert {port for loopback, port in machines.listening(name) if not loopback} == set(), name


def _operated(followed: Followed, todo: list[Step], keys: Path) -> None:
    """A certificate is renewed while all runs, north gets a key; the server is backed up, lost, and restored."""
    renew, rekey, back_up, restore = todo
    machines, server = followed.machines, followed.server
    authority = machines.folders["north"] / "north" / "ca.crt"

    def certificate() -> bytes:
        with (
            socket.create_connection(("10.77.0.1", PORT), 10) as plain,
            _context(authority, keys).wrap_socket(plain, server_hostname="10.77.0.1") as secure,
        ):
            return secure.getpeercert(True) or b""

    old = machines.inside("north", certificate)
    assert "10.77.0.1" in followed.follow(renew)
    assert days_left((server / "server.crt").read_bytes()) > 800
    followed.until(lambda: machines.inside("north", certificate) != old, "the new certificate is in use")

    assert "a new key for north" in followed.follow(rekey)
    assert "the server has ended" in followed.follow(back_up)
    done = rounds_of(server)
    shutil.rmtree(server)
    followed.follow(restore)
    assert rounds_of(server) == done
    assert 1 <= len(done) <= 2


def _has_a_new_key(followed: Followed, again: Step) -> None:
    """The old key is refused; with the new one north is itself again."""
    made, bundle = followed.server.parent / "clients" / "north", followed.machines.folders["north"] / "north"
    followed.machines.signal("north", signal.SIGCONT)
    assert followed.running.pop("north").wait(PATIENCE) == 2
    assert "key" in followed.log("north").read_text().splitlines()[-1]
    for name in ("key", "key.pub"):
        assert (made / name).read_bytes() != (bundle / name).read_bytes()
        shutil.copy(made / name, bundle / name)
    before = followed.log("north").read_text().count("joined")
    followed.follow(again)
    followed.until(lambda: followed.log("north").read_text().count("joined") > before, "north is back")


def _plant(followed: Followed) -> None:
    """What must never be heard, sent over the same bridge in the clear, from north to a port of the server."""
    folder = followed.machines.folders["north"]
    data = samples(folder / "north.npz")
    message = b"POST /v1/fleet/push-messages HTTP/1.1\r\n\r\n" + b'{"protofed":"0","north":"north"}'
    message += data["samples"][3][13:77] + data["labels"][1] + data["file"][0][100:200]
    message += uploads(folder / "north")[0] + b"".join(private_key(folder / "north" / "key"))
    with (
        followed.machines.inside("server", lambda: socket.create_server(("10.77.0.1", PLANTED))) as there,
        followed.machines.inside("north", lambda: socket.create_connection(("10.77.0.1", PLANTED), 10)) as here,
    ):
        here.sendall(message)
        here.shutdown(socket.SHUT_WR)
        caller, _ = there.accept()
        with caller:
            assert len(caller.makefile("rb").read()) == len(message)


def _searched(followed: Followed, streams: list[Stream], keys: Secrets) -> None:
    """Nothing can be read; with the keys, what was said to be sent is there, and no sample is."""
    assert {port for stream in streams for port in stream.flow[1::2] if port < EPHEMERAL} == {PORT, PLANTED}
    planted = b"".join(stream.content() for stream in streams if stream.flow.target_port == PLANTED)
    unheard: list[bytes] = []
    wire, down, up = b"", b"", dict.fromkeys((ADDRESSES[name] for name in SITES), b"")
    for call in streams:
        if call.flow.target_port == PORT and call.parts:
            assert call.back is not None
            sent, got = call.content(), call.back.content()
            wire += sent + got
            if not keys.of(sent):  # it went down before it had noted its keys
                unheard.append(sent)
            elif list(records(got)):  # else it went down before it answered
                sent, got = keys.open(sent, got)
                up[call.flow.source] += sent
                down += got
    said = b"".join(up.values()) + down
    assert len(unheard) <= 2
    assert all(len(sent) < 2000 for sent in unheard)  # no prototypes

    search = sought({name: followed.machines.folders[name] for name in SITES}, followed.server)
    assert search.found(wire) == set()
    assert search.found(said) == {"prototypes", "global prototypes", *WORDS}
    assert search.found(planted) == {"prototypes", "samples", "labels", "file", "key", *WORDS}

    for name in SITES:
        kept = uploads(followed.machines.folders[name] / name)
        assert len(kept) == 5  # of all rounds: [rounds] keep
        assert all(upload[-256:] in up[ADDRESSES[name]] for upload in kept)
        assert b"/v1/fleet/activate-node" in up[ADDRESSES[name]]
    lines = rounds_of(followed.server)
    assert len(b"".join(up.values())) > sum(line["bytes_up"] for line in lines) > 10_000
    assert len(down) > sum(line["bytes_down"] for line in lines) > 10_000
    assert len(wire) > len(said)
