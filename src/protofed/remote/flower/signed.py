"""Whether a call to the door is signed with the key that it names.

The SuperLink checks that too, but after the door: until then whoever knows a member's public key could use up the calls
that this member may make at a time.
"""

import base64
import binascii
from functools import lru_cache

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature

from protofed.remote.flower.proxy import Headers

CALLER = FLEET_HTTP_PUBLIC_KEY_HEADER.encode()
TIME, SIGNATURE = TIMESTAMP_HEADER.encode(), FLEET_HTTP_SIGNATURE_HEADER.encode()


def named_key(headers: Headers) -> bytes:
    """The key that a call claims to be signed with, as base64; empty if it names none."""
    return _value(headers, CALLER)


def signed(headers: Headers) -> bool:
    """Whether the owner of the key that a call names has signed the time that it tells. The SuperLink looks whether
    that time is now."""
    try:
        signature = base64.b64decode(_value(headers, SIGNATURE), validate=True)
        return bool(verify_signature(_public(named_key(headers)), _value(headers, TIME), signature))
    except (ValueError, TypeError, UnsupportedAlgorithm, binascii.Error):
        return False


@lru_cache(maxsize=1024)
def _public(key: bytes) -> EllipticCurvePublicKey:
    return bytes_to_public_key(base64.b64decode(key, validate=True))


def _value(headers: Headers, wanted: bytes) -> bytes:
    return next((value for name, value in headers if name == wanted), b"")
