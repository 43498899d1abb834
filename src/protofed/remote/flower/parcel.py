"""Our bytes in Flower's messages. Flower stores every part of a message by itself, with two calls for each.

Flower names a part by its hash, and believes whoever names it first about what it consists of. So every part has a
salt: nobody can foresee the name of what the server will send, and spoil it in advance.
"""

import json
import secrets
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_object_body, get_object_head_values_from_object_content
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

KEY, FIELD, SALT = "protofed", "bytes", "salt"
SMALL = 1_048_576  # bytes that go as a setting, in three parts; as arrays they take five or more, but can be large
LONGEST = 2 * SMALL  # bytes of a part that is not a piece of an array
SALT_BYTES = 16
PIECE = 5_242_880 - SALT_BYTES  # with its salt, an array that Flower does not divide


def content_of(blob: bytes) -> RecordDict:
    """A message's content, whose parts nobody can foresee."""
    if len(blob) <= SMALL:
        return RecordDict({KEY: ConfigRecord({FIELD: blob, SALT: secrets.token_bytes(SALT_BYTES)})})
    pieces = [blob[at : at + PIECE] for at in range(0, len(blob), PIECE)]
    return RecordDict({KEY: ArrayRecord({f"{FIELD}-{number}": _salted(one) for number, one in enumerate(pieces)})})


def _salted(piece: bytes) -> Array:
    data = secrets.token_bytes(SALT_BYTES) + piece
    return Array("uint8", (len(data),), "safetensors", data)


def unpacked(content: RecordDict) -> bytes:
    """What was packed; a KeyError, TypeError or AttributeError where it was not by us."""
    record: Any = content[KEY]
    if isinstance(record, ArrayRecord):
        return b"".join(memoryview(piece.data)[SALT_BYTES:] for piece in record.values())
    if not isinstance(found := record[FIELD], bytes):
        raise TypeError(f"{type(found).__name__} in place of bytes")
    return found


def assembled(identifier: str, parts: dict[str, bytes], most: int) -> Any:
    """An object from its parts; a ValueError where its arrays are larger than `most` bytes.

    An array lists its pieces by number. A list of two megabytes can name a piece of 5 MB a million times.
    """
    size = 0
    for part in parts.values():
        kind, pieces, _ = get_object_head_values_from_object_content(part)
        if kind != "ArrayChunk" and len(part) > LONGEST:
            raise ValueError(f"a part of it has {len(part):,} bytes")
        if kind == "Array":
            size += sum(
                len(parts[pieces[number]]) for number in json.loads(get_object_body(part, Array))["arraychunk_ids"]
            )
    if size > most:
        raise ValueError(f"its arrays have {size:,} bytes, where at most {most:,} are allowed")
    return inflate_object_from_contents(identifier, parts)
