"""The server's way to its clients and back, through a real SuperLink and the door, with clients that misbehave."""

import contextlib
import json
import math
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("flwr", reason="needs Flower: pip install 'protofed[flower]'")

import httpx
from flwr.app import Array
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import (
    add_header_to_object_body,
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)

from protofed.remote.flower.certificates import make_client_key, write_private
from protofed.remote.flower.claim import RunOver, claimed
from protofed.remote.flower.control import SuperLinkControl
from protofed.remote.flower.door import Door, pushed_file, waiting
from protofed.remote.flower.fleet import Fleet, ServerAway, Unwanted, WaitingRequest, load_key, reply_to
from protofed.remote.flower.installed import command, flower_environment
from protofed.remote.flower.parcel import PIECE, SMALL, assembled, content_of, unpacked
from protofed.remote.flower.processes import Child
from protofed.remote.flower.proxy import free_port, listen
from protofed.remote.flower.transport import GridTransport

pytestmark = pytest.mark.slow


class Place:
    """A SuperLink and the door before it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.superlink = folder, f"127.0.0.1:{free_port()}"
        (folder / "flower").mkdir()
        host, port = self.superlink.split(":")
        words = [command("flower-superlink"), "--host", host, "--port", port, "--isolation", "process", "--insecure",
                 "--disable-runtime-dependency-installation", "--database", str(folder / "superlink.db")]  # fmt: skip
        self.child = Child("superlink", words, flower_environment(folder / "flower"), folder / "superlink.log")
        self.control = SuperLinkControl(self.superlink, None)
        assert self.control.ready(lambda: self.child.alive), self.child.said()
        public = free_port()
        self.public = f"127.0.0.1:{public}"
        self.door = Door(folder, listen("127.0.0.1", public, "it"), self.superlink, None, "an experiment", 10**6, None)
        self.door.relay.start()

    def close(self) -> None:
        self.door.relay.stop()
        self.control.close()
        self.child.stop()

    @contextlib.contextmanager
    def run(self) -> Iterator[GridTransport]:
        """A new run, and its transport."""
        self.door.run = self.control.start()
        with claimed(self.superlink, None, self.door.run) as grid:
            yield GridTransport(grid, {}, pushed_file(self.folder).touch, self._waiting)

    def _waiting(self) -> dict[int, float]:
        self.door.look()
        return waiting(self.folder)

    def client(self) -> tuple[Fleet, int]:
        """A new client, which has joined."""
        path = self.folder / "key"
        write_private(path, make_client_key().key)
        fleet = Fleet(self.public, None, load_key(path))
        return fleet, fleet.join()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    made = Place(tmp_path_factory.mktemp("place"))
    yield made
    made.close()


@contextlib.contextmanager
def answering(place: Place, answer: Callable[[Fleet, int], None]) -> Iterator[int]:
    """A client that pulls, and does with every request whatever it likes; its node."""
    fleet, node = place.client()
    over = threading.Event()

    def serve() -> None:
        with contextlib.suppress(ServerAway, Unwanted):  # the end of the test
            while not over.is_set():
                answer(fleet, node)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield node
    finally:
        over.set()
        pushed_file(place.folder).touch()
        fleet.leave(node)


def answers(transport: GridTransport, node: int, request: bytes, deadline: float = 12.0) -> list[bytes | str | None]:
    return [reply.content or reply.error for reply in transport.exchange({node: request}, deadline)]


def test_a_client_that_answers_one_request_late_is_not_shut_out(place: Place) -> None:
    """What it answers late is an answer to a request that is asked for still, so it counts."""
    held = []

    def late(fleet: Fleet, node: int) -> None:
        if (asked := fleet.pull(node)) is None:
            return
        request = fleet.content(node, asked)
        fleet.confirm(node, asked)
        held.append(reply_to(asked, b"answer to " + request))
        if len(held) > 1:
            fleet.push(node, held.pop(0))

    with place.run() as transport, answering(place, late) as node:
        for request in (b"one", b"two", b"three"):
            assert answers(transport, node, request) == [b"answer to " + request]


def test_a_request_that_was_lost_on_its_way_is_sent_again(place: Place) -> None:
    """The SuperLink takes it to be delivered; but the client asks for work, so it cannot have it."""
    dropped = []

    def forgetful(fleet: Fleet, node: int) -> None:
        if (asked := fleet.pull(node)) is None:
            return
        if not dropped:
            dropped.append(asked)
            return
        fleet.push(node, reply_to(asked, b"here it is"))

    with place.run() as transport, answering(place, forgetful) as node:
        assert answers(transport, node, b"question") == [b"here it is"]
    assert dropped


def test_an_answer_that_is_announced_and_never_sent_keeps_nobody_waiting(place: Place) -> None:
    """Its upload broke off; the others' answers are taken meanwhile, and its own when it sends it after all."""
    announced = []

    def broken(fleet: Fleet, node: int) -> None:
        if (asked := fleet.pull(node)) is None:
            return
        reply = reply_to(asked, b"late")
        if announced:
            fleet.push(node, reply)
            return
        announced.append(asked)
        off = mock.patch.object(fleet.client, "PushObject", side_effect=httpx.ReadError("broken off"))
        with off, pytest.raises(ServerAway):
            fleet.push(node, reply)

    def honest(fleet: Fleet, node: int) -> None:
        if (asked := fleet.pull(node)) is not None:
            fleet.push(node, reply_to(asked, b"here"))

    with place.run() as transport, answering(place, broken) as one, answering(place, honest) as other:
        begun, came = time.monotonic(), {}
        for reply in transport.exchange({one: b"question", other: b"question"}, 40.0):
            came[reply.node] = reply.content, time.monotonic() - begun
        assert {node: content for node, (content, _) in came.items()} == {one: b"late", other: b"here"}
        assert max(seconds for _, seconds in came.values()) < 30.0  # Flower's grid waits for 180
    assert announced


def pushed(fleet: Fleet, node: int, asked: WaitingRequest, content: bytes, copies: int = 1, **about: Any) -> None:
    """An answer about which the client writes whatever it likes; other parts of the call are as they should be."""
    reply = reply_to(asked, content)
    with no_object_id_recompute():
        one, parts = message_to_proto(remove_content_from_message(reply)), get_all_nested_objects(reply)
        seconds, tree = about.pop("seconds", 0.0), get_object_tree(reply)
        for number in range(about.pop("parts", 0)):
            tree.children.add().object_id = f"{number:064x}"
        tree.object_id = about.pop("root", tree.object_id)
        for key, value in about.items():
            setattr(one.metadata, key, value)
        request = PushMessagesRequest(
            node=Node(node_id=node), messages_list=[one] * copies, message_object_trees=[tree],
            clientapp_runtime_list=[seconds],
        )  # fmt: skip
        told = fleet.client.PushMessages(request)
        for name in told.objects_to_push:
            part = parts[name].deflate()
            fleet.client.PushObject(
                PushObjectRequest(
                    node=Node(node_id=node),
                    run_id=reply.metadata.run_id,
                    object_id=name,
                    object_content=part,
                    session_id=told.session_id,
                )
            )


@pytest.mark.parametrize(
    "about",
    [
        {"ttl": math.nan}, {"created_at": math.nan}, {"created_at": math.inf}, {"seconds": math.nan}, {"ttl": -1.0},
        {"src_node_id": 12345}, {"dst_node_id": 12345}, {"copies": 2}, {"parts": 16}, {"copies": 0}, {"root": "f" * 64},
    ],
)  # fmt: skip
def test_an_answer_about_which_a_client_writes_nonsense_is_refused_at_the_door(
    place: Place, about: dict[str, Any]
) -> None:
    fleet, node = place.client()
    with place.run() as transport:
        assert answers(transport, node, b"question", deadline=0.5) == []
        asked = fleet.pull(node)
        assert asked is not None
        with pytest.raises(httpx.HTTPStatusError, match="400"):
            pushed(fleet, node, asked, b"nonsense", **about)
        fleet.push(node, reply_to(asked, b"sense"))
        assert answers(transport, node, b"question") == [b"sense"]
    fleet.leave(node)


@pytest.mark.parametrize("key", ["ttl", "created_at"])
def test_an_answer_that_the_superlink_stumbles_over_is_one_clients_error(place: Place, key: str) -> None:
    """It is asked for the answers of all clients at once, and fails at the NaN that one of them wrote."""

    def spoilt(fleet: Fleet, node: int) -> None:
        if (asked := fleet.pull(node)) is not None:
            pushed(fleet, node, asked, b"spoilt", **{key: math.nan})

    def honest(fleet: Fleet, node: int) -> None:
        if (asked := fleet.pull(node)) is not None:
            fleet.push(node, reply_to(asked, b"here"))

    door = mock.patch("protofed.remote.flower.door.sound", return_value=True)
    with door, place.run() as transport, answering(place, spoilt) as one, answering(place, honest) as other:
        for question in (b"first", b"second"):
            came = {reply.node: reply for reply in transport.exchange({one: question, other: question}, 60.0)}
            assert came[other].content == b"here"
            assert came[one].content is None
            assert came[one].error is not None


def kept_bytes(place: Place) -> int:
    """Bytes of messages that the SuperLink keeps."""
    with contextlib.closing(sqlite3.connect(place.folder / "superlink.db")) as database:
        return int(database.execute("select coalesce(sum(length(content)), 0) from objects").fetchone()[0])


def test_of_an_answer_that_cannot_be_used_nothing_is_kept(place: Place) -> None:
    """Whoever sends too much in every round would fill the disk."""

    def large(fleet: Fleet, node: int) -> None:
        if (asked := fleet.pull(node)) is not None:
            with contextlib.suppress(ServerAway, Unwanted):  # it is refused while it still comes
                fleet.push(node, reply_to(asked, bytes(900_000)))

    with place.run() as transport, answering(place, large) as node:
        transport.grid.most = 800_000
        before = kept_bytes(place)
        for number in range(3):
            (told,) = answers(transport, node, f"question {number}".encode(), deadline=30.0)
            assert "it failed" in str(told)
        assert kept_bytes(place) - before < 100_000


def test_nobody_can_spoil_a_request_to_another_client_by_foreseeing_it(place: Place) -> None:
    """The SuperLink keeps parts by their hash, with what they consist of; and fails where that is contradicted."""
    foreseen = [*get_all_nested_objects(content_of(b"question"))]

    def spoiling(fleet: Fleet, node: int) -> None:
        if (asked := fleet.pull(node)) is None:
            return
        reply = reply_to(asked, b"here")
        with no_object_id_recompute():
            tree = get_object_tree(reply)
            for number, name in enumerate(foreseen):
                part = tree.children.add(object_id=name)
                part.children.add(object_id=f"{number:064x}")
            one = message_to_proto(remove_content_from_message(reply))
            fleet.client.PushMessages(
                PushMessagesRequest(
                    node=Node(node_id=node),
                    messages_list=[one],
                    message_object_trees=[tree],
                    clientapp_runtime_list=[0.0],
                )
            )

    def honest(fleet: Fleet, node: int) -> None:
        if (asked := fleet.pull(node)) is not None:
            fleet.push(node, reply_to(asked, b"here"))

    with place.run() as transport, answering(place, spoiling) as one, answering(place, honest) as other:
        assert answers(transport, one, b"first", deadline=2.0) == []
        assert answers(transport, other, b"question") == [b"here"]


@pytest.mark.parametrize("size", [0, 10, SMALL, SMALL + 1, PIECE, 2 * PIECE + 1])
def test_no_part_of_a_message_can_be_foreseen(size: int) -> None:
    one, other = (set(get_all_nested_objects(content_of(bytes(size)))) for _ in range(2))
    assert not one & other
    assert len(one) == 2 + 2 * math.ceil(size / PIECE) * (size > SMALL)  # Flower divides no array further


def test_clients_get_nothing_of_a_run_that_is_over(place: Place) -> None:
    """A message that nobody had fetched when its run ended stays in Flower's database: the door throws it away."""
    fleet, node = place.client()
    with place.run() as transport:
        assert answers(transport, node, b"old", deadline=0.5) == []
    with place.run() as transport:
        assert answers(transport, node, b"new", deadline=0.5) == []
        asked = fleet.pull(node)
        assert asked is not None
        assert fleet.content(node, asked) == b"new"
    fleet.leave(node)


def test_a_new_run_ends_the_one_before_and_whoever_serves_it_hears_of_it(place: Place) -> None:
    fleet, node = place.client()
    with pytest.raises(RunOver), place.run() as transport, place.run():
        list(transport.exchange({node: b"question"}, 5.0))
    fleet.leave(node)


def test_parts_that_make_more_than_they_weigh_are_refused() -> None:
    for size in (10, SMALL, SMALL + 1, PIECE + 1):
        whole = content_of(bytes(size))
        parts = {name: one.deflate() for name, one in get_all_nested_objects(whole).items()}
        assert unpacked(assembled(whole.object_id, parts, size + SMALL)) == bytes(size)
    array = Array("uint8", (1000,), "safetensors", bytes(1000))
    parts = {name: one.deflate() for name, one in get_all_nested_objects(array).items()}
    often = {"dtype": "uint8", "shape": [1000], "stype": "safetensors", "arraychunk_ids": [0] * 10_000}
    parts["a"] = add_header_to_object_body(object_body=json.dumps(often).encode(), obj=array)
    with pytest.raises(ValueError, match="at most 5,000,000"):
        assembled("a", parts, 5_000_000)
    with pytest.raises(ValueError, match="a part of it has"):
        assembled("b", {"b": b"RecordDict  9\0" + bytes(3_000_000)}, 5_000_000)
