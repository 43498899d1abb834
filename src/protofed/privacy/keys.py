"""Keys of a secure sum: agreements between members, sealed messages, and random numbers from a key.

Masks come from X25519 agreements of keys that are made for one sum. Shares are sealed with a key that mixes these with
an agreement of the members' lasting keys, which the server does not have. So only a member itself can read what is
sealed for it, and what opens shows that the other's key for this sum is its own.
"""

from collections.abc import Mapping

import numpy as np
from cryptography.exceptions import InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import ECDH, EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from protofed.privacy.fault import SumFault
from protofed.privacy.fixed import Grid, Whole

PUBLIC = 32  # bytes of a public key
TAG = 16  # bytes by which a sealed message is longer


class Identity:
    """A member's lasting key, and the public ones of the others."""

    def __init__(
        self,
        number: int,
        key: EllipticCurvePrivateKey | X25519PrivateKey,
        others: Mapping[int, EllipticCurvePublicKey | X25519PublicKey],
    ) -> None:
        self.number, self._key, self._others = number, key, others
        self._agreed: dict[int, bytes] = {}

    def agreed(self, number: int) -> bytes:
        """The secret that this member and another one have in common."""
        if number not in self._agreed:
            if number not in self._others:
                raise SumFault(f"the key of client {number} is not among the members' keys of this bundle", number)
            key, other = self._key, self._others[number]
            if isinstance(key, X25519PrivateKey) and isinstance(other, X25519PublicKey):
                self._agreed[number] = key.exchange(other)
            elif isinstance(key, EllipticCurvePrivateKey) and isinstance(other, EllipticCurvePublicKey):
                self._agreed[number] = key.exchange(ECDH(), other)
            else:
                raise SumFault(f"the key of client {number} is of another kind", number)
        return self._agreed[number]


def lasting_keys(numbers: list[int]) -> dict[int, Identity]:
    """New identities for members that are all in this process."""
    keys = {number: X25519PrivateKey.generate() for number in numbers}
    public = {number: key.public_key() for number, key in keys.items()}
    return {number: Identity(number, key, public) for number, key in keys.items()}


def member_identity(number: int, private: bytes, others: Mapping[int, str]) -> Identity:
    """A member of a federation from its key's file and the others' public keys; a ValueError if one cannot be read."""
    try:
        key = load_ssh_private_key(private, None)
        public = {other: load_ssh_public_key(text.encode()) for other, text in others.items()}
    except UnsupportedAlgorithm as error:
        raise ValueError(str(error)) from None
    if not isinstance(key, EllipticCurvePrivateKey):
        raise ValueError("it is not an EC key")
    elliptic = {other: one for other, one in public.items() if isinstance(one, EllipticCurvePublicKey)}
    if elliptic.keys() != public.keys() or any(one.curve.name != key.curve.name for one in elliptic.values()):
        raise ValueError("not all keys are EC keys of one curve")
    mine = elliptic.get(number)
    if mine is None or mine.public_numbers() != key.public_key().public_numbers():
        raise ValueError(f"the key listed for client {number} is not this client's own")
    return Identity(number, key, elliptic)


class SumKey:
    """A member's key for one sum, made from 16 secret bytes so that these can be shared."""

    def __init__(self, seed: bytes, context: bytes) -> None:
        self._key = X25519PrivateKey.from_private_bytes(derived(seed, context, b"key"))
        self.public: bytes = self._key.public_key().public_bytes_raw()

    def agreed(self, public: bytes) -> bytes:
        """The secret in common with the owner of a public key; a SumFault if it is none."""
        try:
            secret: bytes = self._key.exchange(X25519PublicKey.from_public_bytes(public))
            return secret
        except ValueError:
            raise SumFault("a public key is not one") from None


def refuse_weak(public: bytes) -> None:
    """A SumFault for a public key with which nobody can agree on a secret."""
    SumKey(bytes(16), b"weak").agreed(public)


def derived(secret: bytes, context: bytes, *purpose: bytes) -> bytes:
    """A key of 32 bytes for one purpose."""
    made: bytes = HKDF(hashes.SHA256(), 32, context, b"protofed secure sum/" + b"/".join(purpose)).derive(secret)
    return made


def pair(first: int, second: int) -> bytes:
    """Two members, in this order."""
    return first.to_bytes(4, "little") + second.to_bytes(4, "little")


def sealed(key: bytes, text: bytes, about: bytes) -> bytes:
    """A message that only who has the key can read or make; every key seals one message."""
    made: bytes = ChaCha20Poly1305(key).encrypt(bytes(12), text, about)
    return made


def unsealed(key: bytes, text: bytes, about: bytes) -> bytes:
    """A sealed message; a SumFault if it was not sealed with this key and about this."""
    try:
        made: bytes = ChaCha20Poly1305(key).decrypt(bytes(12), text, about)
        return made
    except InvalidTag:
        raise SumFault("it is not sealed with the key") from None


def add_stream(vector: Whole, key: bytes, sign: int, grid: Grid) -> None:
    """Add (or, with sign -1, subtract) the random numbers of a key to a vector, in place and modulo 2^bits."""
    nothing = bytes(len(vector) * vector.dtype.itemsize)
    drawn = Cipher(algorithms.ChaCha20(key, bytes(16)), None).encryptor().update(nothing)
    numbers = np.frombuffer(drawn, vector.dtype.newbyteorder("<"))
    (np.add if sign > 0 else np.subtract)(vector, numbers, out=vector)
    grid.reduced(vector)
