"""Requests and answers as bytes: a small JSON head, and a tree of tensors as protofed/engines/wire.py writes it."""

import json
import struct
from typing import Any, NamedTuple

from torch.utils._pytree import tree_leaves

from protofed.engines.wire import encode
from protofed.method import Tree
from protofed.version import VERSION

PROTOCOL = 1
MOST_HEAD = 2**20  # bytes
WORDS = 300  # characters of a reason at most


class Refused(Exception):
    """Something of the other side is not accepted; its text is the reason."""


class Message(NamedTuple):
    """A request or an answer."""

    head: dict[str, Any]
    body: bytes  # a tree, or nothing


def pack(head: dict[str, Any], body: bytes = b"") -> bytes:
    """A message with this side's versions."""
    text = json.dumps({"protocol": PROTOCOL, "protofed": VERSION, **head}, separators=(",", ":")).encode()
    return struct.pack("<I", len(text)) + text + body


def unpack(message: bytes, most: int | None = None) -> Message:
    """What was packed; Refused where it is too large, no such thing, or of another version."""
    if most is not None and len(message) > most:
        raise Refused(f"{len(message):,} bytes, where at most {most:,} are allowed")
    try:
        (length,) = struct.unpack_from("<I", message)
        if length > MOST_HEAD or 4 + length > len(message):
            raise ValueError("its head is cut short")
        head = json.loads(message[4 : 4 + length])
        if not isinstance(head, dict):
            raise ValueError("its head is no table")
    except (struct.error, ValueError, RecursionError) as error:
        raise Refused(f"not a message of protofed ({error})") from None
    there = str(head.get("protofed", "unknown"))[:20]
    if head.get("protocol") != PROTOCOL or there.split(".")[:2] != VERSION.split(".")[:2]:
        raise Refused(
            f"the other side has protofed {there} (protocol {str(head.get('protocol'))[:10]}), this one {VERSION} "
            f"(protocol {PROTOCOL}). Install the same version on both"
        )
    return Message(head, message[4 + length :])


def body_of(tree: Tree) -> bytes:
    """A tree as bytes, as many as `wire.measure` says: none where it has no tensors."""
    return encode(tree) if tree_leaves(tree) else b""


def failure(reason: str, **head: Any) -> bytes:
    """The answer that says why there is none."""
    return pack({"kind": "error", "reason": one_line(reason), **head})


def one_line(text: Any) -> str:
    """Somebody else's words, fit for a log."""
    words = "".join(c if c.isprintable() else " " for c in str(text))
    return " ".join(words.split())[:WORDS]


def whole(head: dict[str, Any], key: str, least: int = 0, most: int = 10**9) -> int:
    """A whole number of a head, in its range."""
    value = head.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise Refused(f"{key} = {one_line(value)[:40]} is no whole number from {least} to {most}")
    return value
