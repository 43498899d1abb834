"""The states of all clients: those in use in memory, all of them on disk."""

import shutil
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map

from protofed.engines.resources import free
from protofed.engines.wire import decode, encode
from protofed.errors import UserError, option
from protofed.method import Client
from protofed.runs.segments import RecordPlace, Seal, Segments

SHARE = 8  # client states get 1 / SHARE of the free memory
MOST = 512 * 2**20  # bytes on a CPU, beyond which the system's own cache of files does as well
WASTE = 64 * 2**20  # bytes of outdated records that are not worth a rewriting
MANY = 256  # segments, from which on they are joined


class _Put(NamedTuple):
    """The states of the latest round, which may not be whole yet."""

    round: int
    states: Mapping[int, Client]


class ClientStore(MutableMapping[int, Client]):
    """Client states by number. Those used last are in memory, up to a limit; the others are read when asked for.

    What is put belongs to the round that was begun, and counts once the next is begun or that round is saved: so that
    whatever interrupts a round, the states of the one before are still there. For one thread.
    """

    def __init__(
        self,
        path: Path,
        device: torch.device | str = "cpu",
        limit: int | None = None,
        sealed: Mapping[int, Seal] | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.limit = _room(self.device) if limit is None else limit
        self.index: dict[int, RecordPlace] = {}
        self.segments = Segments(path, sealed)
        self.bytes = 0  # in memory
        self._memory: OrderedDict[int, tuple[Client, int]] = OrderedDict()  # with sizes, the longest unused first
        self._dirty: set[int] = set()  # in memory, but not as they are on disk
        self._put = _Put(0, {})

    # the mapping

    def __getitem__(self, number: int) -> Client:
        if number in self._put.states:
            return self._put.states[number]
        if number not in self._memory:
            self.fetch([number])
        self._memory.move_to_end(number)
        return self._memory[number][0]

    def __setitem__(self, number: int, client: Client) -> None:
        self.update({number: client})

    def update(self, states: Mapping[int, Client]) -> None:  # type: ignore[override]
        """Put these states, all at once."""
        self._put = _Put(self._put.round, {**self._put.states, **states})

    def __delitem__(self, number: int) -> None:
        raise TypeError("a client is never forgotten")

    def __contains__(self, number: object) -> bool:
        return number in self._put.states or number in self._dirty or number in self.index

    def __iter__(self) -> Iterator[int]:
        return iter(sorted({*self._put.states, *self._dirty, *self.index}))

    def __len__(self) -> int:
        return len({*self._put.states, *self._dirty, *self.index})

    # memory

    def fetch(self, numbers: Iterable[int]) -> None:
        """Bring those of these clients into memory that are only on disk, in the order in which they are stored."""
        missing = {self.index[n]: n for n in numbers if n in self.index and n not in self._memory}
        for place, record in self.segments.read(missing):
            try:
                client = decode(record)
            except ValueError as error:
                raise UserError(
                    f"the state of client {missing[place]} in {self.segments.path} is damaged ({error}). "
                    f"Go on with {option('resume', True)}, which looks for the last state that is whole."
                ) from None
            self._hold(missing[place], tree_map(lambda tensor: tensor.to(self.device), client))

    def _hold(self, number: int, client: Client) -> None:
        """Keep a state in memory; the states that were unused for longest make room for it."""
        size = _bytes(client)
        self.bytes += size - self._memory.get(number, (None, 0))[1]
        self._memory[number] = client, size
        self._memory.move_to_end(number)
        while self.bytes > self.limit and len(self._memory) > 1:
            oldest = next(iter(self._memory))
            self._write(oldest)
            self.bytes -= self._memory.pop(oldest)[1]

    def _write(self, number: int) -> None:
        if number in self._dirty:
            self.index[number] = self.segments.append(encode(self._memory[number][0], whole=True))
            self._dirty.discard(number)

    # rounds

    def begin(self, round: int) -> None:
        """Make what was put so far count; what is put from now on belongs to this round."""
        self._settle()
        self._put = _Put(round, {})

    def _settle(self) -> None:
        for number, client in self._put.states.items():
            self._hold(number, client)
            self._dirty.add(number)

    def save(self, round: int) -> None:
        """Put all states up to this round on disk, in sealed segments most of whose bytes are in use."""
        if self._put.round <= round:
            self.begin(self._put.round)
        for number in sorted(self._dirty):
            self._write(number)
        live = self._live()
        dead = sum(map(self.segments.size, live)) - live.total()
        if (dead > max(WASTE, live.total()) or len(live) > MANY) and fits(live.total(), self.segments.path):
            self._rewrite()
        self.segments.seal()
        self.segments.keep(self._live())

    def _live(self) -> Counter[int]:
        """For each segment, the bytes that hold a client's latest state."""
        live: Counter[int] = Counter()
        for place in self.index.values():
            live[place.segment] += place.length
        return live

    def _rewrite(self) -> None:
        """Write every client's latest state into the open segment, one at a time."""
        old = {place: number for number, place in self.index.items() if place.segment in self.segments.sealed}
        for place, record in self.segments.read(old):
            self.index[old[place]] = self.segments.append(record)

    @property
    def unsaved(self) -> int:
        """Bytes that are only in memory."""
        sizes = {number: self._memory[number][1] for number in self._dirty}
        sizes |= {number: _bytes(client) for number, client in self._put.states.items()}
        return sum(sizes.values())

    @property
    def spilled(self) -> int:
        """Bytes written since the last save."""
        return self.segments.written

    def close(self) -> None:
        """Discard what was written since the last save."""
        self.segments.close()


def _bytes(client: Client) -> int:
    return sum(tensor.nbytes for tensor in tree_leaves(client))


def fits(size: int, folder: Path) -> bool:
    """Whether a disk has room for this many bytes, and as many again for other programs that write there."""
    return not size or 2 * size <= shutil.disk_usage(folder).free


def _room(device: torch.device) -> int:
    """Bytes of memory that client states may take."""
    share = max(0, free(device) // SHARE)
    return share if device.type == "cuda" else min(MOST, share)
