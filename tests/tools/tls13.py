"""Opens TLS 1.3 streams with the keys that one side wrote down ($SSLKEYLOGFILE)."""

import struct
from collections import defaultdict
from pathlib import Path

from capture import records
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

CIPHERS = {
    0x1301: (AESGCM, 16, hashes.SHA256()),
    0x1302: (AESGCM, 32, hashes.SHA384()),
    0x1303: (ChaCha20Poly1305, 32, hashes.SHA256()),
}
DATA = 23


class Secrets:
    """The lines of a key log: by connection, then by name."""

    def __init__(self, path: Path) -> None:
        self.known: dict[bytes, dict[str, bytes]] = defaultdict(dict)
        for line in path.read_text().splitlines():
            if line.startswith("#"):
                continue
            name, connection, secret = line.split()
            self.known[bytes.fromhex(connection)][name] = bytes.fromhex(secret)

    def of(self, to_server: bytes) -> bool:
        """Whether the keys of this connection were written down."""
        return next(records(to_server))[1][11:43] in self.known

    def open(self, to_server: bytes, to_client: bytes) -> tuple[bytes, bytes]:
        """What both sides said, in the clear; a KeyError where the keys are not known."""
        hello = next(records(to_server))[1]
        answer = next(records(to_client))[1]
        secrets = self.known[hello[11:43]]
        cipher = int.from_bytes(answer[44 + answer[43] : 46 + answer[43]], "big")
        return tuple(
            _open(stream, cipher, [secrets[f"{side}_HANDSHAKE_TRAFFIC_SECRET"], secrets[f"{side}_TRAFFIC_SECRET_0"]])
            for side, stream in (("CLIENT", to_server), ("SERVER", to_client))
        )  # type: ignore[return-value]


def _open(stream: bytes, cipher: int, secrets: list[bytes]) -> bytes:
    """A direction's data; its handshake has one key and all that follows another."""
    kind, size, hash_ = CIPHERS[cipher]
    keys = [(kind(_expand(secret, b"key", size, hash_)), _expand(secret, b"iv", 12, hash_)) for secret in secrets]
    said, number = bytearray(), 0
    for name, record in records(stream):
        if name != "data":
            continue
        while True:
            (key, salt), nonce = keys[0], struct.pack(">4xQ", number)
            try:
                inner = key.decrypt(bytes(a ^ b for a, b in zip(salt, nonce, strict=True)), record[5:], record[:5])
                break
            except InvalidTag:
                if len(keys) == 1:
                    raise
                del keys[0]
                number = 0
        number += 1
        inner = inner.rstrip(b"\0")
        if inner[-1] == DATA:
            said += inner[:-1]
    return bytes(said)


def _expand(secret: bytes, label: bytes, length: int, hash_: hashes.HashAlgorithm) -> bytes:
    name = b"tls13 " + label
    info = struct.pack(">HB", length, len(name)) + name + b"\0"
    return HKDFExpand(hash_, length, info).derive(secret)
