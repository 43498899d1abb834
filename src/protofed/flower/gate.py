"""A client's door: passes SuperNode's calls on to the server, waits while it is away, and says what is wrong."""

import asyncio
import email.utils
import json
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from protofed.errors import UserError
from protofed.flower import control
from protofed.flower.door import ABOUT, FINISHED, FLEET, HOLD_SECONDS, ROUTES, STRANGER, UNKNOWN, WITHOUT_KEYS
from protofed.flower.installed import NEWEST, OLDEST
from protofed.flower.proxy import Answer, Relay, Request, Upstream
from protofed.version import VERSION

AWAY_SECONDS = 20.0  # that a call waits for the server to come back, before SuperNode tries again by itself
AGAIN_SECONDS = 0.5
AHEAD_SECONDS, BEHIND_SECONDS = 5.0, 300.0  # how far a client's clock may be off: Flower refuses older and newer calls
STILL_THERE = 412  # SuperLink's answer to a SuperNode that it takes to be connected
UNKNOWN_CA = {18, 19, 20, 21}  # OpenSSL's codes
EXPIRED, NOT_YET, WRONG_NAME, WRONG_ADDRESS = 10, 9, 62, 64


class Refused(UserError):
    """Waiting does not help: something must be mended first."""


class Gate:
    """Between SuperNode and the network."""

    def __init__(
        self, address: str, authority: Path | None, listener: socket.socket, inner: tuple[Path, Path] | None,
        tell: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.address, self.tell = address, tell
        tls = ssl.create_default_context(cafile=authority) if authority else None
        self.upstream = Upstream(address, tls, timeout=HOLD_SECONDS + 20, by_environment=True)
        names = ROUTES if authority else ROUTES + WITHOUT_KEYS
        self.relay = Relay(
            listener, self._handle, routes={FLEET + name: "POST" for name in names}, limit=1 << 34,
            certificate=inner[0] if inner else None, key=inner[1] if inner else None,
        )  # fmt: skip
        self.refused: str | None = None  # why there is no point in going on
        self.joined = self.finished = False
        self.node = 0  # Flower's number for us
        self._away = False

    async def _handle(self, method: str, request: Request) -> Answer:
        end = time.monotonic() + AWAY_SECONDS
        while True:
            try:
                answer = await self.upstream.ask(request)
                if answer.status == STILL_THERE and request.route == FLEET + "activate-node":
                    reason = "this client is still connected, from before or with the same key elsewhere"
                elif answer.status in (502, 503, 504):
                    reason = "it is starting"
                else:
                    return self._looked_at(request.route.removeprefix(FLEET), answer)
            except httpx.TransportError as error:
                try:
                    reason = explain(error, self.address)
                except Refused as refused:
                    self.refused = str(refused)
                    return Answer(503)
            if not self._away:
                self._away = True
                self.tell(f"waiting for the server: {reason}")
            if time.monotonic() > end:
                return Answer(503)
            await asyncio.sleep(AGAIN_SECONDS)

    def _looked_at(self, call: str, answer: Answer) -> Answer:
        """The answer, if there is nothing wrong with it."""
        if self._away:
            self._away = False
            self.tell("the server is there")
        if answer.status == 401:
            self.refused = (
                "the server did not accept the signature of this client: its key was removed from the federation, or "
                f"the clocks differ (here it is {time.strftime('%Y-%m-%d %H:%M:%S %Z')}). Set it, or get a new bundle."
            )
        elif answer.status == UNKNOWN and (call == "activate-node" or answer.body == STRANGER):
            self.refused = (
                f"the server {self.address} does not know the key of this bundle, or no longer. Its operator makes a "
                "new one with 'protofed federation rekey', restarts the server, and gives you the bundle anew."
            )
        elif call == "get-fab" and answer.status == 200 and control.program_in(answer.body) != control.program():
            self.refused = (
                f"the server wants to run another program here than protofed {VERSION} brings along; it was not run. "
                "Install the same version of protofed on both sides."
            )
        elif call == "activate-node" and answer.status == 200:
            self.joined, self.node = True, control.node_in(answer.body)
        elif answer.status == FINISHED:
            self.finished = True
        return Answer(503) if self.refused else answer


def look(address: str, authority: Path | None, experiment: str) -> None:
    """Look at the server before joining it; a Refused, or a UserError where it may only be away."""
    try:
        with httpx.Client(
            verify=ssl.create_default_context(cafile=authority) if authority else False, timeout=10
        ) as client:  # fmt: skip
            answer = client.get(f"{'https' if authority else 'http'}://{address}{ABOUT}")
            about = json.loads(answer.content) if answer.status_code == 200 else None
    except httpx.InvalidURL as error:
        raise Refused(f"{address!r} in client.toml is no address ({error}). Write host:port.") from None
    except httpx.TransportError as error:
        raise UserError(explain(error, address)) from None
    except ValueError:
        about = None
    if not isinstance(about, dict) or "protofed" not in about:
        raise Refused(f"what answers at {address} is no server of protofed. Check the address and port in client.toml.")
    _compare_clocks(answer.headers.get("date"))
    _compare_versions(about)
    if about.get("experiment") and experiment and about["experiment"] != experiment:
        raise Refused(
            f"the experiment of this bundle ({experiment[:12]}) is not the server's ({str(about['experiment'])[:12]}). "
            "Get the bundle of this federation anew, or go to the server it was made for."
        )


def explain(error: httpx.TransportError, address: str) -> str:
    """Why a server cannot be reached, in a line; a Refused where waiting for it is of no use."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            raise Refused(_certificate(cause, address))
        if isinstance(cause, ssl.SSLError) and "WRONG_VERSION" in str(cause).upper():
            raise Refused(
                f"what answers at {address} does not speak TLS. Check the address; if the server runs with --insecure, "
                "which no real federation should, the client needs it too."
            )
        if isinstance(cause, socket.gaierror):
            name = address.rsplit(":", 1)[0]
            raise Refused(f"the server's name {name!r} cannot be found ({cause.strerror}). Check client.toml and DNS.")
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
            "federation was set up anew. Check the address, or get a new bundle from its operator."
        )
    return f"the certificate of {address} is not valid ({error.verify_message}). Ask the server's operator."


def _compare_clocks(date: str | None) -> None:
    if date is None:
        return
    ahead = time.time() - email.utils.parsedate_to_datetime(date).timestamp() - 0.5  # the date has whole seconds
    if ahead > AHEAD_SECONDS or ahead < -BEHIND_SECONDS:
        how = f"{ahead:.0f} s ahead of" if ahead > 0 else f"{-ahead:.0f} s behind"
        raise Refused(
            f"the clock here is {how} the server's, and signed calls would be refused. Set it, best by NTP "
            f"(it may be {AHEAD_SECONDS:.0f} s ahead, {BEHIND_SECONDS:.0f} s behind)."
        )


def _compare_versions(about: dict[str, str]) -> None:
    there = str(about["protofed"])
    if there.split(".")[:2] != VERSION.split(".")[:2]:
        raise Refused(f"the server has protofed {there}, this client {VERSION}. Install {there} here: pip install "
                      f"'protofed[flower]=={there}'")  # fmt: skip
    flower = str(about.get("flwr", ""))
    parts = tuple(int(part) for part in flower.split(".")[:2] if part.isdigit())
    if not OLDEST <= parts <= NEWEST:
        raise Refused(
            f"the server has flwr {flower or '?'}, and this client's protofed {VERSION} does not know it. "
            "Install the same versions on both sides."
        )
