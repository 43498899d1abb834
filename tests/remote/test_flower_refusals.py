"""What is wrong is said in one line: certificates, addresses, ports, versions, clocks, settings."""

import base64
import email.utils
import json
import os
import shutil
import ssl
import stat
import subprocess
import time
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from unittest import mock

import pytest
from command import protofed

pytest.importorskip("flwr", reason="needs Flower: pip install 'protofed[flower]'")

import httpx
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.supercore.protobuf.client import ProtobufRequestContext
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from protofed.errors import UserError
from protofed.remote.flower import certificates, diagnose, installed, setup
from protofed.remote.flower.client import Node
from protofed.remote.flower.control import key_bytes
from protofed.remote.flower.door import Door
from protofed.remote.flower.processes import locked
from protofed.remote.flower.proxy import free_port, listen
from protofed.remote.settings import load_client, load_federation

pytestmark = pytest.mark.usefixtures("all_cores")

INIT = ("--clients", "north,south", "--experiment", "demo", "model=cnn_digits", "rounds=2")


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As an operator sets it up."""
    folder = tmp_path_factory.mktemp("set up") / "fed"
    done = protofed(
        "federation", "init", str(folder), "--host", "127.0.0.1,localhost", "--port", str(free_port()), *INIT
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def door(federation: Path, tmp_path: Path) -> Iterator[Door]:
    """A server's public side with nothing behind it; its folder is a copy."""
    folder = tmp_path / "server"
    shutil.copytree(federation / "server", folder)
    settings = load_federation(folder).federation
    inner = certificates.make_inner(folder / "flower")[0]
    made = Door(folder, listen("127.0.0.1", settings.port, "it"), "127.0.0.1:9", inner, settings.experiment, 10**6, [])
    made.relay.start()
    yield made
    made.relay.stop()


def join(bundle: Path, *words: str) -> str:
    """What a client says that cannot join: one line."""
    done = protofed("client", str(bundle), "--wait", "0", *words)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    return done.stderr


def bundle(federation: Path, tmp_path: Path, **client: str) -> Path:
    """A bundle with other words in client.toml."""
    copy = tmp_path / "bundle"
    shutil.copytree(federation / "clients" / "north", copy)
    text = (copy / "client.toml").read_text()
    for key, value in client.items():
        old = tomllib.loads(text)["client"][key]
        text = text.replace(f'{key} = "{old}"', f'{key} = "{value}"')
    (copy / "client.toml").write_text(text)
    return copy


def test_what_is_set_up(federation: Path) -> None:
    secret = [p for p in federation.rglob("*") if p.suffix in (".key", ".toml", ".crt") or p.name == "key"]
    assert len(secret) == 6 + 2 * 4
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in secret)
    assert certificates.hosts_of((federation / "server" / "server.crt").read_bytes()) == ["127.0.0.1", "localhost"]
    settings = load_federation(federation / "server")
    for member in settings.clients:
        folder = federation / "clients" / member.name
        assert (folder / "key.pub").read_text().strip() == member.public_key
        assert load_client(folder)[0].number == member.number
        assert not (folder / "ca.key").exists()
    assert b"protofed server" in (federation / "protofed-server.service").read_bytes()
    again = protofed("federation", "init", str(federation), "--host", "h", *INIT)
    assert again.returncode == 2
    assert "not overwritten" in again.stderr
    if shutil.which("openssl"):
        words = ["openssl", "verify", "-purpose", "sslserver", "-CAfile", "ca.crt", "server.crt"]
        assert subprocess.run(words, cwd=federation / "server", capture_output=True).returncode == 0
    if shutil.which("ssh-keygen"):
        words = ["ssh-keygen", "-y", "-f", str(federation / "clients" / "north" / "key")]
        public = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        assert public.split()[1] == settings.clients[0].public_key.split()[1]


def test_a_new_key_changes_nothing_else(federation: Path, tmp_path: Path) -> None:
    copy = tmp_path / "fed"
    shutil.copytree(federation, copy)
    shutil.rmtree(copy / "clients" / "north")  # it was brought to its site
    before = load_federation(copy / "server")
    with pytest.raises(UserError, match=r"names no client 'nort'\. It has north, south\."):
        setup.rekey(copy / "server", "nort")
    made = setup.rekey(copy / "server", "north")
    now = load_federation(copy / "server")
    assert now.clients[0].public_key == (made / "key.pub").read_text().strip() != before.clients[0].public_key
    assert stat.S_IMODE((made / "key").stat().st_mode) == 0o600
    assert (now.clients[1:], now.federation, now.rounds, now.task) == (
        before.clients[1:],
        before.federation,
        before.rounds,
        before.task,
    )


@pytest.mark.parametrize(
    "words, said",
    [
        (("--clients", "0"), "from 1 to 10000"),
        (("--clients", "a,a"), "given twice"),
        (("--clients", "../up,b"), "not a name"),
        (("--clients", "3", "--host", "a b"), "neither a host name"),
        (("--clients", "3", "--minimum", "4"), "at most"),
        (("--clients", "3", "--shape", "1,8"), "belong together"),
        (("--clients", "3", "--shape", "x", "--classes", "3"), "channels,height,width"),
        (("--clients", "3", "--shape", "4", "--classes", "1"), "from 2 on"),
        (("--clients", "3", "data=nowhere"), "--shape 1,28,28"),
        (("--clients", "3", "clients=5"), "clients = 5"),
    ],
)
def test_a_wrong_setting_is_said_and_nothing_written(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    host = () if "--host" in words else ("--host", "fed.example.org")
    done = protofed("federation", "init", str(tmp_path / "fed"), "--experiment", "demo", *host, *words)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert said in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_server_with_a_wrong_certificate(federation: Path, door: Door, tmp_path: Path) -> None:
    """Another authority, one that has expired, one for another name; a renewed one is taken by a server that runs."""
    north = federation / "clients" / "north"
    other = bundle(federation, tmp_path)
    certificates.write_private(other / "ca.crt", certificates.make_authority("other").certificate)
    assert "was not signed by this bundle's ca.crt" in join(other)

    authority = certificates.Pair(*((door.folder / name).read_bytes() for name in ("ca.crt", "ca.key")))

    def use(made: certificates.Pair) -> None:
        certificates.write_private(door.folder / "server.key", made.key)
        certificates.write_private(door.folder / "server.crt", made.certificate)
        door.relay.reload()

    use(certificates.make_server(authority, ["127.0.0.1"], days=-0.5))
    assert "has expired" in join(north)
    done = protofed("server", str(door.folder))
    assert done.returncode == 2
    assert "federation renew" in done.stderr
    use(certificates.make_server(authority, ["127.0.0.1"], begin=2))
    assert "not valid yet: the clock" in join(north)
    use(certificates.make_server(authority, ["fed.example.org"]))
    assert "not for that name" in join(north)

    assert protofed("federation", "renew", str(door.folder), "--host", "127.0.0.1").returncode == 0
    door._looked = 0.0
    assert door.look()
    diagnose.look(f"127.0.0.1:{door.relay.listener.getsockname()[1]}", north / "ca.crt", door.experiment)


def test_a_wrong_address(federation: Path, door: Door, tmp_path: Path) -> None:
    assert "nothing answers" in join(bundle(federation, tmp_path / "a", server=f"127.0.0.1:{free_port()}"))
    assert "cannot be found" in join(bundle(federation, tmp_path / "b", server="no.such.host.invalid:8443"))
    assert "is not host:port" in join(bundle(federation, tmp_path / "c", server="127.0.0.1"))
    door.relay.routes.pop("/protofed")
    assert "is not a protofed server" in join(federation / "clients" / "north")


def test_insecure_must_be_asked_for_on_both_sides(federation: Path, door: Door, tmp_path: Path) -> None:
    north = federation / "clients" / "north"
    assert "may want TLS" in join(north, "--insecure")
    done = protofed("client", str(north), "--wait", "0", "--insecure")
    assert "nothing is encrypted" in done.stdout
    plain = Door(tmp_path, listen("127.0.0.1", 0, "it"), "127.0.0.1:9", None, "", 10**6, None)
    plain.relay.start()
    port = plain.relay.listener.getsockname()[1]
    try:
        assert "does not speak TLS" in join(bundle(federation, tmp_path, server=f"127.0.0.1:{port}"))
    finally:
        plain.relay.stop()


def signed(key: certificates.Pair, named: certificates.Pair) -> list[tuple[bytes, bytes]]:
    """A call's headers as Flower's clients write them, signed with one key, which names one."""
    called = ProtobufRequestContext("", None, httpx.Request("POST", "https://localhost"))
    owner, other = (load_ssh_private_key(pair.key, None) for pair in (key, named))
    NodeAuthHttpInterceptor(owner, other.public_key()).intercept(called, lambda context: httpx.Response(200))
    return [(name.lower(), value) for name, value in called.request.headers.raw]


def test_only_a_known_client_may_send_anything_and_only_a_piece_of_an_answer_may_be_long(door: Door) -> None:
    """A public key is no secret: whoever names another's key has not signed with it, and uses up none of its calls."""
    known, other = certificates.make_client_key(), certificates.make_client_key()
    door.keys = {base64.b64encode(key_bytes(known.certificate.decode(), "it"))}
    mine = signed(known, known)
    assert {door.relay.caller(mine)} == door.keys
    assert door.relay.caller([]) == door.relay.caller(signed(other, other)) == b""
    assert door.relay.caller(signed(other, known)) == b""
    for name, spoilt in [(b"flwr-signature", b"AAAA"), (b"flwr-signature", b"\xff"), (b"flwr-timestamp", b"\xff")]:
        assert door.relay.caller([(name, spoilt), *mine]) == b""
    for headers, status in [(signed(other, known), 401), (signed(other, other), 403)]:
        port = door.relay.listener.getsockname()[1]
        tls = ssl.create_default_context(cafile=door.folder / "ca.crt")
        told = httpx.post(f"https://127.0.0.1:{port}/v1/fleet/pull-messages", headers=headers, verify=tls)
        assert told.status_code == status
    assert door.relay.limit("/v1/fleet/push-messages") <= 2**20 < door.relay.limit("/v1/fleet/push-object") < 2**23


def test_another_experiment_version_or_clock(federation: Path, door: Door, tmp_path: Path) -> None:
    changed = bundle(federation, tmp_path)
    text = (changed / "experiment.toml").read_text()
    (changed / "experiment.toml").write_text(text.replace("rounds = 2", "rounds = 3"))
    assert "is not the server's" in join(changed)
    north = federation / "clients" / "north"
    with mock.patch("protofed.remote.flower.door.VERSION", "9.9.0"):
        assert "the server has protofed 9.9.0" in join(north)
    with mock.patch("protofed.remote.flower.door.need_flower", return_value="1.99.0"):
        assert "the server has flwr 1.99.0" in join(north)
    for seconds, how in ((60, "behind"), (-60, "ahead")):  # of the server, as the client sees it
        date = email.utils.formatdate(time.time() + 10 * seconds, usegmt=True)
        with pytest.raises(diagnose.CannotJoin, match=how):
            diagnose._compare_clocks(date, time.time(), time.time())
    now = time.time()
    diagnose._compare_clocks(email.utils.formatdate(now + 100, usegmt=True), now, now)  # Flower allows that
    for wrote in (0, 30, 60):  # a busy server takes a minute to answer: its clock is right, whenever it wrote its date
        diagnose._compare_clocks(email.utils.formatdate(now + wrote, usegmt=True), now, now + 60)
    with pytest.raises(diagnose.CannotJoin, match="ahead"):
        diagnose._compare_clocks(email.utils.formatdate(now - 10, usegmt=True), now, now + 60)
    with pytest.raises(diagnose.CannotJoin, match="behind"):
        diagnose._compare_clocks(email.utils.formatdate(now + 400, usegmt=True), now, now + 60)


def test_a_port_that_is_taken_and_a_second_server(federation: Path) -> None:
    server = federation / "server"
    with listen("127.0.0.1", load_federation(server).federation.port, "another") as other:
        other.listen()
        done = protofed("server", str(server))
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "address already in use" in done.stderr
    with locked(server / "server.pid", "it"):
        done = protofed("server", str(server))
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
        assert f"already running (process {os.getpid()})" in done.stderr
        assert json.loads(protofed("federation", "status", str(federation), "--json").stdout)["running"]
    assert "nothing was running" in protofed("federation", "stop", str(federation)).stdout


def test_flower_missing_or_of_another_version(federation: Path) -> None:
    with mock.patch.object(metadata, "version", side_effect=metadata.PackageNotFoundError("flwr")):
        for words in (("server", str(federation)), ("client", str(federation / "clients" / "north"))):
            done = protofed(*words)
            assert done.returncode == 2
            assert "pip install 'protofed[flower]'" in done.stderr
    with mock.patch.object(metadata, "version", return_value="2.0.0"), pytest.raises(UserError, match=r"flwr 2\.0\.0"):
        installed.need_flower()


def test_a_bundle_that_others_can_read_or_without_its_key(federation: Path, tmp_path: Path) -> None:
    copy = bundle(federation, tmp_path)
    (copy / "key").chmod(0o644)
    assert "chmod 600" in join(copy)
    (copy / "key").unlink()
    assert "is missing" in join(copy)


@pytest.mark.parametrize("place", ["state", "state/flower", "state/0123456789abcdef"])
def test_a_bundle_with_links_writes_nowhere_else(federation: Path, tmp_path: Path, place: str) -> None:
    given, elsewhere = bundle(federation, tmp_path), tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o755)
    shutil.rmtree(given / "state", ignore_errors=True)  # of a client that has joined before
    (given / place).parent.mkdir(exist_ok=True)
    (given / place).symlink_to(elsewhere)
    assert f"{place} is a link" in join(given)
    assert not list(elsewhere.iterdir())
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o755


@pytest.mark.parametrize("content, node", [(b"18446744073709551615", 2**64 - 1), (b"", 0), (b"\xff1", 0), (b"1x", 0)])
def test_a_damaged_note_of_the_node_that_a_client_was_is_left_out(tmp_path: Path, content: bytes, node: int) -> None:
    (tmp_path / "node").write_bytes(content)
    assert Node(mock.Mock(), tmp_path, mock.Mock(), print).node == node


def test_a_dry_run_says_what_would_leave_and_joins_nothing(federation: Path) -> None:
    done = protofed("client", str(federation / "clients" / "south"), "--dry-run")
    assert done.returncode == 0
    assert "prototypes" in done.stdout
    assert not list((federation / "clients" / "south").rglob("*.sock"))
