"""What is looked for in a federation's traffic: all that a site has and sends, and what the server has of it."""

import base64
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from capture import Search
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from torch.utils._pytree import tree_leaves

from protofed.runs.folder import RunFolder

WORDS = {
    "HTTP": [b"HTTP/1."],
    "a call": [b"POST /"],
    "a tree's head": [b"__metadata__"],
    "a message's head": [b'"protofed":'],
    "a site's name": [b'"north"'],
}


def samples(path: Path) -> dict[str, list[bytes]]:
    """A site's data as bytes, in every form in which somebody might send it."""
    with np.load(path) as data:
        arrays = dict(data)
    found: dict[str, list[bytes]] = {"samples": [], "labels": [], "file": [path.read_bytes()]}
    for part in ("train", "test"):
        x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
        scaled = ((x - arrays["mean"]) / arrays["std"]).astype(np.float32)  # as a model gets them
        grey = [(x * most).astype(np.uint8) for most in (16, 255)]
        for form in (x, scaled, x.astype(np.float64), *grey):
            found["samples"] += [row.tobytes() for row in form]
        found["labels"] += [y.astype(form).tobytes() for form in (np.int64, np.int32, np.uint8, np.float32)]
    return found


def private_key(path: Path) -> list[bytes]:
    """The secret number of a key, as bytes and as text."""
    key = load_ssh_private_key(path.read_bytes(), None)
    assert isinstance(key, EllipticCurvePrivateKey)
    number = key.private_numbers().private_value.to_bytes(48, "big")
    return [number, base64.b64encode(number)]


def uploads(bundle: Path) -> list[bytes]:
    """What a site answered in its last rounds."""
    return [path.read_bytes() for path in sorted(bundle.glob("state/*/round-*/answer.bin"))]


def sought(sites: Mapping[str, Path], server: Path) -> Search:
    """For samples, keys and uploads of sites (folders with NAME.npz and the bundle) and the server's prototypes."""
    secrets: dict[str, list[bytes]] = {"prototypes": [], "key": []}
    words = {name: list(some) for name, some in WORDS.items()}
    for name, folder in sites.items():
        for kind, parts in samples(folder / f"{name}.npz").items():
            (words if kind == "labels" else secrets).setdefault(kind, []).extend(parts)
        secrets["prototypes"] += uploads(folder / name)
        secrets["key"] += private_key(folder / name / "key")
    state = RunFolder(server / "run").restore()
    assert state is not None
    secrets["global prototypes"] = [leaf.numpy().tobytes() for leaf in tree_leaves(state[0].server)]
    return Search(secrets, words)
