"""Why a server cannot be joined or reached, in one line, and what to do."""

import email.utils
import json
import socket
import ssl
import time
from pathlib import Path

import httpx

from protofed.errors import UserError
from protofed.remote.flower.agreed import ABOUT
from protofed.remote.flower.installed import NEWEST, OLDEST
from protofed.version import VERSION

AHEAD_SECONDS, BEHIND_SECONDS = 5.0, 300.0  # how far a client's clock may be off: Flower refuses older and newer calls
UNKNOWN_CA = {18, 19, 20, 21}  # OpenSSL's codes
EXPIRED, NOT_YET, WRONG_NAME, WRONG_ADDRESS = 10, 9, 62, 64


class CannotJoin(UserError):
    """Waiting does not help: something must be mended first."""


def look(address: str, authority: Path | None, experiment: str) -> None:
    """Look at the server before joining it; a Refused, or a UserError where it may only be away."""
    try:
        with httpx.Client(
            verify=ssl.create_default_context(cafile=authority) if authority else False, timeout=10
        ) as client:  # fmt: skip
            asked = time.time()
            answer = client.get(f"{'https' if authority else 'http'}://{address}{ABOUT}")
            about = json.loads(answer.content) if answer.status_code == 200 else None
    except httpx.InvalidURL as error:
        raise CannotJoin(f"{address!r} in client.toml is not an address ({error}). Write host:port.") from None
    except httpx.TransportError as error:
        raise UserError(explain_failure(error, address)) from None
    except (ValueError, RecursionError):
        about = None
    if not isinstance(about, dict) or "protofed" not in about:
        raise CannotJoin(
            f"what answers at {address} is not a protofed server. Check the address and port in client.toml."
        )
    _compare_clocks(answer.headers.get("date"), asked, time.time())
    _compare_versions(about)
    if about.get("experiment") and experiment and about["experiment"] != experiment:
        raise CannotJoin(
            f"the experiment of this bundle ({experiment[:12]}) is not the server's ({str(about['experiment'])[:12]}). "
            "Get the bundle of this federation again, or go to the server it was made for."
        )


def explain_failure(error: httpx.TransportError, address: str, joined: bool = False) -> str:
    """Why a server cannot be reached, in a line; a Refused if waiting does not help.

    A client that has joined waits where another would give up: if a name cannot be found, or somebody else's
    certificate is shown, the network may just not be back yet.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            if joined:  # a network's log-in page answers with a certificate of its own; it passes
                return f"{_certificate(cause, address)} This client has been there before, so it goes on trying."
            raise CannotJoin(_certificate(cause, address))
        if isinstance(cause, ssl.SSLError) and "WRONG_VERSION" in str(cause).upper():
            raise CannotJoin(
                f"what answers at {address} does not speak TLS. Check the address; if the server runs with --insecure, "
                "which no real federation should, the client needs it too."
            )
        if isinstance(cause, socket.gaierror):
            name = address.rsplit(":", 1)[0]
            reason = f"the server's name {name!r} cannot be found ({cause.strerror})"
            if joined:
                return reason
            raise CannotJoin(f"{reason}. Check client.toml and DNS.")
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, httpx.RemoteProtocolError):
        return f"{address} hung up: it may want TLS (leave --insecure away), or it was just stopped"
    detail = str(error) or type(error).__name__
    return f"nothing answers at {address} ({detail})"


def _certificate(error: ssl.SSLCertVerificationError, address: str) -> str:
    here = time.strftime("%Y-%m-%d %H:%M %Z")
    if error.verify_code == EXPIRED:
        return (
            f"the certificate of {address} has expired, or the clock here ({here}) is wrong. "
            "The server's operator makes a new one with 'protofed federation renew'; this bundle stays as it is."
        )
    if error.verify_code == NOT_YET:
        return f"the certificate of {address} is not valid yet: the clock here ({here}) or there is wrong. Set it."
    if error.verify_code in (WRONG_NAME, WRONG_ADDRESS):
        return (
            f"the certificate of {address} is not for that name ({error.verify_message}). Use the name it is for, or "
            "the operator runs 'protofed federation renew --host' with this one too."
        )
    if error.verify_code in UNKNOWN_CA:
        return (
            f"the certificate of {address} was not signed by this bundle's ca.crt: it is another server, or its "
            "federation was set up again. Check the address, or get a new bundle from its operator."
        )
    return f"the certificate of {address} is not valid ({error.verify_message}). Ask the server's operator."


def _compare_clocks(date: str | None, asked: float, heard: float) -> None:
    """The server wrote its date after it was asked and before it was heard, however long that took."""
    if date is None:
        return
    there = email.utils.parsedate_to_datetime(date).timestamp() + 0.5  # the date has whole seconds
    ahead = max(0.0, asked - there) + min(0.0, heard - there)
    if ahead > AHEAD_SECONDS or ahead < -BEHIND_SECONDS:
        how = f"{ahead:.0f} s ahead of" if ahead > 0 else f"{-ahead:.0f} s behind"
        raise CannotJoin(
            f"the clock here is {how} the server's, and signed calls would be refused. Set it, best by NTP "
            f"(it may be {AHEAD_SECONDS:.0f} s ahead, {BEHIND_SECONDS:.0f} s behind)."
        )


def _compare_versions(about: dict[str, str]) -> None:
    there = str(about["protofed"])
    if there.split(".")[:2] != VERSION.split(".")[:2]:
        raise CannotJoin(f"the server has protofed {there}, this client {VERSION}. Install {there} here: pip install "
                      f"'protofed[flower]=={there}'")  # fmt: skip
    flower = str(about.get("flwr", ""))
    parts = tuple(int(part) for part in flower.split(".")[:2] if part.isdigit())
    if not OLDEST <= parts <= NEWEST:
        raise CannotJoin(
            f"the server has flwr {flower or '?'}, and this client's protofed {VERSION} does not know it. "
            "Install the same versions on both sides."
        )
