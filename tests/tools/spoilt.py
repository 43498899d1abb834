"""Ways to spoil a client's answer: what has the wrong form, and what has the right form and the wrong numbers."""

import json
import random
import re
import struct
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load, save
from torch.utils._pytree import tree_flatten, tree_unflatten

from protofed.engines.wire import decode, encode
from protofed.method import Mean
from protofed.remote.protocol import Message, pack_message

# Names, as JSON writes them: half of a surrogate, which no file takes; what clears a screen; what turns text around.
STEERING = ("\\ud800", "\\u001b[2J", "\\u202e", "a\\nb")


def raw(head: str, body: bytes) -> bytes:
    return struct.pack("<I", len(head.encode())) + head.encode() + body


def parts(body: bytes) -> tuple[dict[str, Any], bytes]:
    """A body's header, and the bytes behind it."""
    length = int.from_bytes(body[:8], "little")
    return json.loads(body[8 : 8 + length]), body[8 + length :]


def joined(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def with_header(body: bytes, changes: dict[str, Any], more: bytes = b"") -> bytes:
    """The body with other words in its safetensors header, and more behind it."""
    header, data = parts(body)
    return joined(json.dumps(header | changes).encode(), data + more)


def with_tensor(body: bytes, part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> bytes:
    """The body with one of its tensors changed."""
    header, tensors = parts(body)[0], load(body)
    return save({n: change(t) if n.endswith(part) else t for n, t in tensors.items()}, header["__metadata__"])


def worse(message: Message, pick: random.Random) -> bytes:
    """One way or another of spoiling an upload of FedProto, each of which must be refused."""
    head, body = dict(message.head), message.body
    up = decode(body)["prototypes"]
    text = json.dumps(head)
    held = up.weight.clone()
    held[pick.randrange(10)] = pick.choice([0.5, 1e-30, -1.0, 2.0, 5.0, 1e9, 1e30, float("nan"), float("inf")])
    number = pick.choice(["1e400", "NaN", "-Infinity", "1" * 400, "true", '"1"', "null", "[" * 900 + "]" * 900, "1e31"])
    header, data = parts(body)
    names = [name for name in header if name != "__metadata__"]
    name = pick.choice(names)
    extra = {"/extra": {"dtype": "F32", "shape": [2], "data_offsets": [len(data), len(data) + 8]}}
    lie = {name: header[name] | pick.choice([
        {"shape": [10**12]}, {"shape": [-1]}, {"shape": [0, 10**12]}, {"shape": "x"}, {"dtype": "F8_E4M3"},
        {"dtype": "BOOL"}, {"data_offsets": [0, 2**63]}, {"data_offsets": [-8, 0]}, {"data_offsets": [4, 0]},
        {"data_offsets": None}, {"shape": [1.5]}, {"shape": [True]},
    ])}  # fmt: skip
    trees = [
        "", "{}", "null", "[", "[" * 5000, '{"mean":null}', '{"dict":{}}', '{"dict":{"prototypes":null}}',
        '{"dict":{"prototypes":{"each":{"mean":{"rows":[10],"total":null}}}}}',
        '{"dict":{"prototypes":{"mean":{"rows":[1000000000],"total":null}}}}',
        '{"dict":{"prototypes":{"mean":{"rows":[10],"total":null},"mean":{"rows":[10],"total":null}}}}',
        '{"dict":{"__class__":{"mean":{"rows":[10],"total":null}}}}', '{"client":{"prototypes":null}}',
        *(shape.replace("NAME", pick.choice(STEERING)) for shape in (
            '{"NAME":null}', '{"dict":{"NAME":null}}', '{"dict":{"prototypes":{"NAME":null}}}',
        )),
    ]  # fmt: skip
    other = {
        "experiment": "0" * 64, "run": "f" * 16, "client": pick.choice([0, 2, -1, 1.0, "1", None, 10**15]),
        "round": pick.choice([0, 2, 99, "1", None, 1.5]), "protocol": pick.choice([0, 2, "1", None]),
    }  # fmt: skip
    key = pick.choice(list(other))
    ways: list[Callable[[], bytes]] = [
        lambda: pack_message(head, encode({"prototypes": Mean(up.total, held)}, whole=True)),
        lambda: pack_message(head, encode({"prototypes": Mean(up.total, torch.zeros(10))}, whole=True)),
        lambda: pack_message(head, encode({"prototypes": Mean(up.total.half(), up.weight)})),
        lambda: pack_message(
            head, encode({"prototypes": Mean(up.total[:, : pick.randrange(1, 32)].clone(), up.weight)})
        ),
        lambda: pack_message(head, encode(pick.choice([{}, [up], (up,), {"a": up}, {"prototypes": up, "b": up}, up]))),
        lambda: pack_message(head, with_header(body, extra, bytes(8))),
        lambda: pack_message(head, with_header(body, {"__metadata__": {}})),
        lambda: pack_message(head, with_header(body, lie)),
        lambda: pack_message(head, with_header(body, {json.loads(f'"{pick.choice(STEERING)}"'): {"shape": [10**9]}})),
        lambda: pack_message(head, with_header(body, {"__metadata__": {"tree": pick.choice(trees)}})),
        lambda: pack_message(head, with_tensor(body, "prototypes", lambda t: t[:1].clone())),
        lambda: pack_message(head, with_tensor(body, "prototypes", lambda t: t.double())),
        lambda: pack_message(head, with_tensor(body, "#n", lambda t: t[:1].clone())),
        lambda: pack_message(head, with_tensor(body, "#n", lambda t: t[0])),
        lambda: pack_message(head, with_tensor(body, "#n", lambda t: t * pick.choice([2, 7, 0.5, -1, float("nan")]))),
        lambda: pack_message(head, with_tensor(body, "#i", lambda t: t.long())),
        lambda: pack_message(head, with_tensor(body, "#i", lambda t: t.flip(0))),
        lambda: pack_message(head, with_tensor(body, "#i", lambda t: t * 0)),
        lambda: pack_message(head, with_tensor(body, "#i", lambda t: t + 200)),
        lambda: pack_message(head, body[: pick.randrange(len(body))]),
        lambda: pack_message(head, body + bytes(pick.randrange(1, 9))),
        lambda: pack_message(head, pick.choice([2**63, 2**31, 0, 100, len(body) * 2]).to_bytes(8, "little") + body[8:]),
        lambda: pack_message(head, joined(b"{" + b'"a":[],' * 20_000 + b'"b":1}', b"")),
        lambda: pack_message(head | {pick.choice("abcxyz"): 1}, body),
        lambda: pack_message(head | {"kind": pick.choice(["hello", "train", "", 1, None, "os:system"])}, body),
        lambda: pack_message(head | {key: other[key]}, body),
        lambda: raw(re.sub(r'"loss": \[[^,]*', lambda _: f'"loss": [{number}', text), body),
        lambda: pack_message(
            head | {"loss": pick.choice([[1, -1], [1.0], [1, 2, 3], {}, [1, 1e6], [1e30, 1], [[1], 1]])}, body
        ),
        lambda: raw(text[:-1] + ', "round": 1}', body),
        lambda: raw(text[: pick.randrange(len(text))], body),
        lambda: pick.randbytes(pick.randrange(200)),
    ]
    return pick.choice(ways)()


def poison(message: Message, pick: random.Random) -> bytes:
    """What has the right form: numbers of any size, as totals, counts, losses and tests."""
    tree = decode(message.body)
    leaves, form = tree_flatten(tree)
    size = pick.choice([1e30, -1e38, 1e6, 1e3, -20.0, 1e-45, -0.0, 0.0, 1e-30, 3e38, 1.0])
    at = pick.randrange(len(leaves))
    bent = [leaf * size if pick.random() < 0.5 else torch.full_like(leaf, size) for leaf in leaves]
    mixed = bent if pick.random() < 0.3 else [*leaves[:at], bent[at], *leaves[at + 1 :]]
    head = dict(message.head)
    if "loss" in head and pick.random() < 0.3:
        head["loss"] = [pick.choice([1e300, -1e30, 1e9, 0.0, 5e-324]), pick.choice([0, 1, 1e18, 2**53])]
    return pack_message(head, encode(tree_unflatten(mixed, form), whole=True))
