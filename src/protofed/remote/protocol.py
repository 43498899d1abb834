"""Requests and answers as bytes: a small JSON head, and a tree of tensors as protofed/engines/wire.py writes it."""

import json
import math
import struct
from typing import Any, NamedTuple

from torch.utils._pytree import tree_leaves

from protofed.engines.wire import encode, strict_json
from protofed.method import Tree
from protofed.version import VERSION

PROTOCOL = 1
MOST_HEAD = 2**20  # bytes of a request's head, which names all classes
MOST_ANSWER = 2**14  # of an answer's, which has little to say
DEEPEST = 4  # tables and lists within each other
MANY = 64  # parts of a table or list in an answer
LARGEST = 2**53  # beyond it a whole number is none as float64
WORDS = 300  # characters of a reason at most
FIRST = ("protocol", "protofed", "kind", "experiment", "run", "client", "session", "round")  # in every answer
NAN = "no longer a number"  # what a client says of its loss where that is so
SPENT = "its privacy budget is spent"  # what a client says that sends nothing more


class Refused(Exception):
    """Something of the other side is not accepted; its text is the reason, in one line, whatever it quotes."""

    def __init__(self, reason: str) -> None:
        super().__init__(printable(reason))


class Message(NamedTuple):
    """A request or an answer."""

    head: dict[str, Any]
    body: bytes  # a tree, or nothing


def pack_message(head: dict[str, Any], body: bytes = b"") -> bytes:
    """A message with this side's versions."""
    text = json.dumps({"protocol": PROTOCOL, "protofed": VERSION, **head}, separators=(",", ":")).encode()
    return struct.pack("<I", len(text)) + text + body


def unpack_message(message: bytes, most: int | None = None) -> Message:
    """What was packed; Refused where it is too large, no such thing, or of another version.

    `most` is for answers, of which little is believed: bytes at most; None: a request of the server's.
    """
    if most is not None and len(message) > most:
        raise Refused(f"{len(message):,} bytes, where at most {most:,} are allowed")
    try:
        (length,) = struct.unpack_from("<I", message)
        if length > (MOST_HEAD if most is None else MOST_ANSWER) or 4 + length > len(message):
            raise ValueError("its head is cut short or too long")
        head = strict_json(message[4 : 4 + length])
        if not isinstance(head, dict):
            raise ValueError("its head is not a table")
        _check_head(head, MOST_HEAD if most is None else MANY)
    except (struct.error, ValueError, RecursionError) as error:
        raise Refused(f"not a message of protofed ({one_line(error)})") from None
    there = one_line(head.get("protofed", "unknown"))[:20]
    if head.get("protocol") != PROTOCOL or there.split(".")[:2] != VERSION.split(".")[:2]:
        raise Refused(
            f"the other side has protofed {there} (protocol {one_line(head.get('protocol'))[:10]}), this one {VERSION} "
            f"(protocol {PROTOCOL}). Install the same version on both"
        )
    return Message(head, message[4 + length :])


def _check_head(part: Any, many: int, deep: int = 0) -> None:
    """ValueError where a number is out of any range, or a part longer or deeper than anything that is ever told."""
    if isinstance(part, int | float) and not isinstance(part, bool):
        if isinstance(part, float) and not math.isfinite(part):
            raise ValueError("NaN or infinity is not a number")
        if isinstance(part, int) and abs(part) > LARGEST:
            raise ValueError("a whole number in its head is too large")
    elif isinstance(part, str):
        if len(part) > 1000:
            raise ValueError(f"{len(part):,} characters in one word of its head")
    elif isinstance(part, dict | list):
        if len(part) > many or deep >= DEEPEST:
            raise ValueError("its head has too many parts")
        for value in (*part, *part.values()) if isinstance(part, dict) else part:
            _check_head(value, many, deep + 1)


def check_answer(head: dict[str, Any], kind: str, *more: str) -> None:
    """Refused where an answer is of another kind, or tells more than this."""
    if head.get("kind") != kind:
        raise Refused(f"it answers with {one_line(head.get('kind'))[:20]!r}, where {kind!r} is expected")
    unknown = [key for key in head if key not in (*FIRST, *more)]
    if unknown:
        raise Refused(f"its head has a key that nobody asked for: {one_line(unknown[0])[:40]!r}")


def body_of(tree: Tree) -> bytes:
    """A tree as bytes, as many as `wire.encoded_size` says: none where it has no tensors."""
    return encode(tree) if tree_leaves(tree) else b""


def failure(reason: str, **head: Any) -> bytes:
    """The answer that says why there is none."""
    return pack_message({"kind": "error", "reason": one_line(reason), **head})


def one_line(text: Any) -> str:
    """Somebody else's words, fit for a log."""
    return printable(text)[:WORDS]


def printable(text: Any) -> str:
    """A text in one line, without what would steer a terminal or cannot be written at all, as half of a surrogate."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())


def whole_number(head: dict[str, Any], key: str, least: int = 0, most: int = 10**9) -> int:
    """A whole number of a head, in its range."""
    value = head.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise Refused(f"{key} = {one_line(value)[:40]} is not a whole number from {least} to {most}")
    return value
