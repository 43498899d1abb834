"""A client on the real SuperLink: what it does about faults while it computes, and how it gets out to the network."""

import contextlib
import datetime
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from command import protofed

pytest.importorskip("flwr", reason="needs Flower: pip install 'protofed[flower]'")

from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

import protofed as protofed_package
from protofed.remote.client.bundle import make_worker
from protofed.remote.client.worker import ClientWorker
from protofed.remote.flower import client, diagnose, parcel
from protofed.remote.flower.certificates import make_client_key
from protofed.remote.flower.control import SuperLinkControl
from protofed.remote.flower.fleet import Fleet, ServerAway, load_key
from protofed.remote.flower.proxy import free_port
from protofed.remote.flower.server import processes_file
from protofed.remote.protocol import unpack_message
from protofed.remote.settings import load_client

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("all_cores")]

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(protofed_package.__file__).parent.parent)}
PATIENCE = 300.0  # seconds, for a machine that does other things too
PLAN = ("model=mlp_digits", "rounds=3", "evaluate.own=0", "partition.shots=4", "engine=reference", "device=cpu")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Path]:
    """The folder of a server that runs, of one client."""
    words = ("--clients", "1", "--host", "127.0.0.1", "--port", str(free_port()), "--deadline", "100")
    done = protofed("federation", "init", str(tmp_path / "fed"), "--experiment", "demo", *words, *PLAN)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "fed" / "server"
    with open(tmp_path / "server.log", "wb") as log:
        begun = [sys.executable, "-m", "protofed", "server", str(folder)]
        process = subprocess.Popen(begun, stdout=log, stderr=log, env=ENVIRONMENT)
    try:
        yield folder
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()
        process.wait()


def until(what: Callable[[], Any], why: str) -> None:
    end = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < end, f"waited in vain until {why}"
        time.sleep(0.05)


def bundle_of(server: Path) -> Path:
    return server.parent / "clients" / "client-000"


def fleet_of(server: Path) -> Fleet:
    """Calls with the client's key, from outside the client."""
    bundle = bundle_of(server)
    tls = ssl.create_default_context(cafile=bundle / "ca.crt")
    return Fleet(load_client(bundle)[0].server, tls, load_key(bundle / "key"))


def processes(server: Path) -> dict[str, Any]:
    return dict(json.loads(processes_file(server).read_bytes()))


class Faults:
    """A client's worker: while it computes for the first time in a round, something goes wrong elsewhere."""

    def __init__(self, server: Path) -> None:
        self.server = server
        self.asked: list[tuple[str, int]] = []
        self.came: list[str] = []  # when the client came, for the SuperLink, before and after it was forgotten

    def worker(self, bundle: Path, **options: Any) -> ClientWorker:
        made = make_worker(bundle, **options)
        answer = made.answer

        def after_a_fault(request: bytes) -> bytes:
            head = unpack_message(request).head
            self.asked.append((head["kind"], head.get("round", 0)))
            if head["kind"] == "train" and self.asked.count(self.asked[-1]) == 1:
                [self._superlink_dies, self._forgotten, lambda: None][head["round"] - 1]()
            return answer(request)

        made.answer = after_a_fault  # type: ignore[method-assign]
        return made

    def _superlink_dies(self) -> None:
        os.kill(processes(self.server)["pids"]["superlink"], signal.SIGKILL)

    def _forgotten(self) -> None:
        """The server takes the client to be gone, as after a long stop; its heartbeats mend that while it computes."""
        control = SuperLinkControl(processes(self.server)["superlink"], self.server / "flower" / "inner-ca.crt")
        before = control._nodes()[0]
        with contextlib.closing(fleet_of(self.server)) as outside:
            outside.leave(before.node_id)
        until(lambda: control._nodes()[0].status == "online", "a heartbeat brings the client back")
        first = control._nodes()[0].online_until
        until(lambda: control._nodes()[0].online_until > first, "the next heartbeat is there too")
        self.came += [before.last_activated_at, control._nodes()[0].last_activated_at]
        control.close()


def take_part(server: Path, tell: Callable[[str], None]) -> bool:
    """`protofed client` in this process; it is ended when it takes too long."""
    with contextlib.closing(Alarm()):
        return client.run_client(
            bundle_of(server), data=None, model=None, min_count=0, state=None, dry_run=False, insecure=False,
            wait=PATIENCE, tell=tell,
        )  # fmt: skip


class Alarm:
    """SIGTERM to ourselves when a test takes too long."""

    def __init__(self) -> None:
        self._timer = threading.Timer(PATIENCE, os.kill, [os.getpid(), signal.SIGTERM])
        self._timer.start()

    def close(self) -> None:
        self._timer.cancel()


def test_faults_while_a_client_computes(server: Path) -> None:
    """The answer is pushed when the server is back, the client is known again, and what is asked twice counts once."""
    early = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=400)
    with (
        mock.patch("flwr.supernode.node_auth_http_interceptor.now", return_value=early),
        mock.patch.object(client, "AGAIN_SECONDS", 0.2),
        pytest.raises(diagnose.CannotJoin, match="did not accept the signature"),
    ):
        take_part(server, lambda line: None)
    faults, heard = Faults(server), list[str]()
    with mock.patch.object(client, "make_worker", faults.worker), mock.patch.object(client, "BEAT_SECONDS", 0.5):
        assert take_part(server, heard.append)
    assert faults.came[0] < faults.came[1]
    assert faults.asked.count(("train", 1)) == 1  # pushed after the SuperLink was back, and not computed again
    assert "the server is there" in heard
    lines = [json.loads(line) for line in (server / "run" / "rounds.jsonl").read_text().splitlines()]
    assert [line["clients"] for line in lines] == [1, 1, 1]
    assert sum(" trained" in line for line in heard) == 3


@pytest.mark.parametrize("size", [0, 5, parcel.SMALL, parcel.SMALL + 1, 12_000_000])
def test_bytes_of_any_size_travel_in_messages(size: int) -> None:
    """Through Flower's own parts and back, as they lie in its store; few parts for what is small."""
    blob = os.urandom(size)
    content = parcel.content_of(blob)
    parts = {name: part.deflate() for name, part in get_all_nested_objects(content).items()}
    assert len(parts) == 2 if size <= parcel.SMALL else len(parts) > 3
    assert parcel.unpacked(inflate_object_from_contents(content.object_id, parts)) == blob  # type: ignore[arg-type]


def test_calls_go_through_a_proxy(tmp_path: Path) -> None:
    """HTTPS_PROXY is asked for a tunnel; what goes through it is TLS."""
    asked = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def refuse() -> None:
            caller, _ = listener.accept()
            with caller:
                asked.append(caller.recv(1000))
                caller.sendall(b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=refuse, daemon=True)
        thread.start()
        (tmp_path / "key").write_bytes(make_client_key().key)
        proxy = {"HTTPS_PROXY": f"http://127.0.0.1:{listener.getsockname()[1]}", "NO_PROXY": ""}
        with mock.patch.dict(os.environ, proxy):
            fleet = Fleet("fed.example.org:8443", ssl.create_default_context(), load_key(tmp_path / "key"))
            with pytest.raises(ServerAway):
                fleet.join()
            thread.join(10)
    assert asked[0].startswith(b"CONNECT fed.example.org:8443 ")
