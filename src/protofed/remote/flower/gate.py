"""Who may be connected at a time, so that nobody who opens connections without end uses up the files of this process.

A process may have a limited number of files open, and a connection is one, whoever made it. Where there is room for no
more, the oldest connection that asks for nothing makes room; one that has been asked something is not disturbed.
"""

import asyncio
import contextlib
import resource
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

BACKLOG = 256
MOST_CONNECTIONS, MOST_FILES = 4096, 16384
OWN_FILES = 100  # open files that are not for connections
HANDSHAKE_SECONDS, AGAIN_SECONDS = 20.0, 0.5
Place = Any  # where a connection comes from: an address and a port


class Gate:
    """Takes the connections of a listener."""

    def __init__(self, listener: socket.socket, room: int | None = None) -> None:
        self.listener, self.room = listener, connections_possible() if room is None else room
        self._open: dict[Place, socket.socket] = {}  # the oldest first
        self._asking: Counter[Place] = Counter()

    @contextlib.contextmanager
    def asking(self, place: Place) -> Iterator[None]:
        """Somebody whose connection must not be closed meanwhile."""
        self._asking[place] += 1
        try:
            yield
        finally:
            self._asking -= Counter([place])

    async def take(self, make: Callable[[], asyncio.Protocol], tls: ssl.SSLContext | None) -> None:
        """Take connections until this task is cancelled; `make` makes what speaks with each."""
        loop = asyncio.get_running_loop()
        self.listener.setblocking(False)
        begun: set[asyncio.Task[None]] = set()
        while True:
            try:
                one, place = await loop.sock_accept(self.listener)
            except OSError:  # the other side has gone, or too many files are open
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            if not self._make_room():
                one.close()
                continue
            self._open[place] = one
            begun.add(task := loop.create_task(_begin(one, make, tls)))
            task.add_done_callback(begun.discard)

    def _make_room(self) -> bool:
        """Whether there is room for one more; where there is none, the oldest that asks for nothing goes soon."""
        if len(self._open) < self.room:
            return True
        self._open = {place: one for place, one in self._open.items() if one.fileno() >= 0}
        if len(self._open) < self.room:
            return True
        oldest = next((place for place in self._open if not self._asking[place]), None)
        if oldest is None:
            return False
        with contextlib.suppress(OSError):
            self._open.pop(oldest).shutdown(socket.SHUT_RDWR)  # whoever speaks with it sees its end, and closes it
        return True


async def _begin(one: socket.socket, make: Callable[[], asyncio.Protocol], tls: ssl.SSLContext | None) -> None:
    seconds = HANDSHAKE_SECONDS if tls else None
    with contextlib.suppress(OSError):  # no TLS, or gone
        await asyncio.get_running_loop().connect_accepted_socket(make, one, ssl=tls, ssl_handshake_timeout=seconds)
        return
    one.close()


def connections_possible() -> int:
    """How many connections this process can have, each of which takes one more file to pass a call on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(8, min(MOST_CONNECTIONS, (soft - OWN_FILES) // 2))
