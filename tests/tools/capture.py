"""All that goes over a bridge: heard, put together again as streams, and searched."""

import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

Returned = TypeVar("Returned")
ETH_P_ALL, IPV4, ARP, IPV6, TCP = 0x0003, 0x0800, 0x0806, 0x86DD, 6
SO_RCVBUFFORCE, SOL_PACKET, PACKET_STATISTICS = 33, 263, 6
SYN, ACK = 0x02, 0x10
BLOCK = 32  # bytes: any 64 in a row of a secret contain a block of it
VARIED = 4  # different bytes that a block must have: zeros are everywhere
TLS_KINDS = {20: "change cipher", 21: "alert", 22: "handshake", 23: "data"}


class Flow(NamedTuple):
    """One direction of a connection."""

    source: str
    source_port: int
    target: str
    target_port: int

    @property
    def back(self) -> "Flow":
        return Flow(self.target, self.target_port, self.source, self.source_port)


class Stream:
    """What was sent in one direction, in order."""

    def __init__(self, flow: Flow, begin: int) -> None:
        self.flow, self.begin = flow, begin
        self.parts: list[tuple[int, bytes]] = []
        self.back: Stream | None = None  # the other direction

    def content(self) -> bytes:
        """Its bytes; a ValueError where some are missing."""
        whole = bytearray()
        for at, part in sorted(self.parts):
            if at > len(whole):
                raise ValueError(f"{self.flow}: {at - len(whole)} bytes were not heard")
            whole += part[len(whole) - at :]
        return bytes(whole)


class Capture:
    """Hears every frame once, where it enters the bridge; in a thread, until `stop`."""

    def __init__(self, inside: Callable[[Callable[[], socket.socket]], socket.socket]) -> None:
        self.frames: list[bytes] = []
        self._socket = inside(_packet_socket)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._hear, name="capture", daemon=True)
        self._thread.start()

    def _hear(self) -> None:
        while True:
            try:
                frame, where = self._socket.recvfrom(1 << 18)
            except TimeoutError:
                if self._over.is_set():
                    return
                continue
            if where[2] != socket.PACKET_OUTGOING:
                self.frames.append(frame)

    def stop(self) -> int:
        """No more; returns how many frames were lost."""
        self._over.set()
        self._thread.join()
        lost = struct.unpack("II", self._socket.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))[1]
        self._socket.close()
        return int(lost)

    def beside(self) -> set[tuple[str, str]]:
        """Who sent something that is neither TCP nor talk between neighbours, and to whom."""
        found = set()
        for frame in self.frames:
            kind = int.from_bytes(frame[12:14], "big")
            if kind == IPV4 and frame[23] != TCP:
                found.add((socket.inet_ntoa(frame[26:30]), f"{socket.inet_ntoa(frame[30:34])} protocol {frame[23]}"))
            elif kind not in (IPV4, ARP, IPV6) or (kind == IPV6 and frame[20] not in (0, 58)):  # ICMPv6, with options
                found.add((frame[6:12].hex(":"), f"ethertype {kind:#06x}"))
        return found

    def streams(self) -> list[Stream]:
        """Every direction of every TCP connection."""
        found: list[Stream] = []
        now: dict[Flow, Stream] = {}
        for frame in self.frames:
            if int.from_bytes(frame[12:14], "big") != IPV4 or frame[23] != TCP:
                continue
            packet = frame[14 : 14 + int.from_bytes(frame[16:18], "big")]
            segment = packet[4 * (packet[0] & 15) :]
            ports, (number,) = struct.unpack_from(">HH", segment), struct.unpack_from(">I", segment, 4)
            flow = Flow(socket.inet_ntoa(packet[12:16]), ports[0], socket.inet_ntoa(packet[16:20]), ports[1])
            if segment[13] & SYN and not (flow in now and now[flow].begin == number + 1 & 0xFFFFFFFF):
                now[flow] = Stream(flow, number + 1 & 0xFFFFFFFF)
                found.append(now[flow])
                if segment[13] & ACK:
                    now[flow].back, now[flow.back].back = now[flow.back], now[flow]
            payload = segment[4 * (segment[12] >> 4) :]
            if payload:
                now[flow].parts.append((number - now[flow].begin & 0xFFFFFFFF, payload))
        return found


def _packet_socket() -> socket.socket:
    heard = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    heard.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 26)
    heard.settimeout(0.2)
    return heard


def records(stream: bytes) -> Iterator[tuple[str, bytes]]:
    """The records of a TLS stream with their heads; a ValueError where it is something else.

    The last may be cut short, as where a machine went down.
    """
    at = 0
    while at + 5 <= len(stream):
        kind, version, length = struct.unpack_from(">BHH", stream, at)
        if kind not in TLS_KINDS or version not in (0x0301, 0x0303) or length > 16640:
            raise ValueError(f"not TLS at byte {at}: {stream[at : at + 40]!r}")
        if at + 5 + length <= len(stream):
            yield TLS_KINDS[kind], stream[at : at + 5 + length]
        at += 5 + length


class Search:
    """Secrets, of which no 64 bytes in a row may be heard, and words, which may not be heard at all."""

    def __init__(self, secrets: Mapping[str, Iterable[bytes]], words: Mapping[str, Iterable[bytes]]) -> None:
        self.words = words
        self.blocks: dict[bytes, str] = {}
        for name, parts in secrets.items():
            blocks = (part[at : at + BLOCK] for part in parts for at in range(0, len(part) - BLOCK + 1, BLOCK))
            self.blocks |= {block: name for block in blocks if len(set(block)) >= VARIED}

    def found(self, heard: bytes) -> set[str]:
        """The names of those that are there."""
        pieces = (heard[at : at + BLOCK] for at in range(len(heard) - BLOCK + 1))
        hits = {self.blocks[piece] for piece in pieces if piece in self.blocks}
        return hits | {name for name, some in self.words.items() if any(word in heard for word in some)}
