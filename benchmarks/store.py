"""Client states in the log of segments (runs/store.py) and in sqlite, in turns: `python benchmarks/store.py`.

Both do the same work with the same cache in front. What is written to sqlite belongs to one transaction until the next
checkpoint, which is one commit; every record has its hash, which is checked when a run is resumed, as in the log.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

from protofed.engines.wire import decode, encode
from protofed.method import Client
from protofed.runs.folder import KEPT, RunFolder, State
from protofed.runs.store import ClientStore

SCHEMA = """
create table if not exists states (id integer primary key, client integer, round integer, sha blob, record blob);
create index if not exists latest on states (client, round);
create table if not exists checkpoints (round integer primary key, sha blob, server blob, totals text);
"""
LATEST = "select client, max(round), id from states where round <= ? group by client"


class SqliteStore(ClientStore):
    """The store with sqlite in the place of segments: `index` has the row of each client's latest state."""

    def __init__(self, path: Path, journal: str, limit: int | None = None) -> None:
        super().__init__(path, limit=limit)
        path.mkdir(parents=True, exist_ok=True)
        self.data = sqlite3.connect(path / "states.sqlite", isolation_level=None)
        for pragma in ("page_size = 16384", f"journal_mode = {journal}", "synchronous = full"):
            self.data.execute(f"pragma {pragma}")
        self.data.executescript(SCHEMA)
        self.rows: dict[int, int] = {}
        self.index = self.rows  # type: ignore[assignment]
        self.settled = self.since = 0

    def fetch(self, numbers: Iterable[int]) -> None:
        for row, number in sorted((self.rows[n], n) for n in numbers if n in self.rows and n not in self._memory):
            record = self.data.execute("select record from states where id = ?", (row,)).fetchone()[0]
            self._hold(number, tree_map(lambda tensor: tensor.to(self.device), decode(record)))

    def _settle(self) -> None:
        self.settled = self._put.round
        super()._settle()

    def _write(self, number: int) -> None:
        if number in self._dirty:
            self._transaction()
            record = encode(self._memory[number][0], whole=True)
            row = (number, self.settled, hashlib.sha256(record).digest(), record)
            done = self.data.execute("insert into states (client, round, sha, record) values (?, ?, ?, ?)", row)
            self.rows[number], self.since = int(done.lastrowid or 0), self.since + len(record)
            self._dirty.discard(number)

    def _transaction(self) -> None:
        if not self.data.in_transaction:
            self.data.execute("begin immediate")

    def save_all(self, state: State, kept: int) -> None:
        """One checkpoint, and the end of those that are too old with all that only they need."""
        if self._put.round <= state.round:
            self.begin(self._put.round)
        for number in sorted(self._dirty):
            self._write(number)
        self._transaction()
        server = encode(state.server, whole=True)
        row = (state.round, hashlib.sha256(server).digest(), server, json.dumps(state.totals))
        self.data.execute("insert or replace into checkpoints values (?, ?, ?, ?)", row)
        oldest = self.data.execute("select round from checkpoints order by round desc limit ?", (kept,)).fetchall()[-1]
        self.data.execute("delete from checkpoints where round < ?", oldest)
        old = "select 1 from states as newer where newer.client = states.client and newer.round <= ? and newer.id > "
        self.data.execute(f"delete from states where exists ({old} states.id)", oldest)
        self.data.execute("commit")
        self.since = 0

    @property
    def spilled(self) -> int:
        return self.since

    def close(self) -> None:
        if self.data.in_transaction:
            self.data.execute("rollback")
        self.data.close()


class SqliteFolder:
    """The part of a run's folder that keeps its state."""

    def __init__(self, path: Path, journal: str) -> None:
        self.path, self.journal = path, journal

    def store(self, device: str = "cpu", limit: int | None = None) -> SqliteStore:
        return SqliteStore(self.path, self.journal, limit)

    def save(self, state: State) -> None:
        clients = state.clients
        assert isinstance(clients, SqliteStore)
        clients.save_all(state, KEPT)

    def restore(self, device: str = "cpu", limit: int | None = None) -> tuple[State | None, list[str]]:
        remarks = []
        try:
            clients = self.store(device, limit)
            rounds = [round for (round,) in clients.data.execute("select round from checkpoints order by round desc")]
        except sqlite3.Error as error:
            return None, [str(error)]
        for round in rounds:
            try:
                return self._read(clients, round), remarks
            except (sqlite3.Error, ValueError, TypeError) as error:
                remarks.append(str(error))
        return None, remarks

    def _read(self, clients: SqliteStore, round: int) -> State:
        query = "select sha, server, totals from checkpoints where round = ?"
        sha, server, totals = clients.data.execute(query, (round,)).fetchone()
        found = clients.data.execute(LATEST, (round,)).fetchall()
        for seal, record in [(sha, server), *(self._record(clients, row) for _, _, row in found)]:
            if not isinstance(record, bytes) or hashlib.sha256(record).digest() != seal:
                raise ValueError("a record is not what was written")
        clients.rows.update({client: row for client, _, row in found})
        return State(round, decode(server), clients, json.loads(totals))

    def go_back(self, state: State) -> None:
        assert isinstance(state.clients, SqliteStore)
        for table in ("states", "checkpoints"):
            state.clients.data.execute(f"delete from {table} where round > ?", (state.round,))

    def _record(self, clients: SqliteStore, row: int) -> tuple[bytes, bytes]:
        query = "select sha, record from states where id = ?"
        found: tuple[bytes, bytes] | None = clients.data.execute(query, (row,)).fetchone()
        return found or (b"", b"")  # no hash: refused


KINDS: dict[str, Callable[[Path], Any]] = {
    "log": RunFolder,
    "sqlite wal": lambda path: SqliteFolder(path, "wal"),
    "sqlite truncate": lambda path: SqliteFolder(path, "truncate"),
}


class Case(NamedTuple):
    """How many clients of so many numbers each take part in how many rounds, and how often that is saved."""

    clients: int
    numbers: int
    cohort: int
    rounds: int
    every: int
    limit: int


CASES = {
    "10,000 small": Case(10_000, 1_000, 500, 30, 5, 16 * 2**20),
    "100 of 10 MB": Case(100, 2_621_440, 10, 15, 5, 64 * 2**20),
}


def state_of(number: int, round: int, numbers: int) -> Client:
    return Client({"body.weight": torch.full((numbers,), float(number + round / 64))}, {"head.bias": torch.ones(10)})


def cohort_of(case: Case, round: int) -> list[int]:
    """Everybody in turn, and then those again who came first."""
    return [(round * case.cohort + i) % case.clients for i in range(case.cohort)]


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def measure(kind: str, case: Case, path: Path) -> dict[str, float]:
    """Seconds to put, save, resume and read, and MB on disk."""
    folder = KINDS[kind](path)
    state = State(0, {"w": torch.zeros(100)}, folder.store(limit=case.limit), {})
    seconds, began = {"put": 0.0, "save": 0.0}, time.process_time()
    last: dict[int, int] = {}
    most = 0
    for round in range(case.rounds):
        members = cohort_of(case, round)
        last |= dict.fromkeys(members, round)
        fresh = {number: state_of(number, round, case.numbers) for number in members}
        start = time.perf_counter()
        state.clients.begin(round + 1)
        state.clients.update(fresh)
        seconds["put"] += time.perf_counter() - start
        state = state._replace(round=round + 1)
        if state.round % case.every == 0:
            start = time.perf_counter()
            folder.save(state)
            seconds["save"] += time.perf_counter() - start
            most = max(most, size_of(path))
    state.clients.close()
    start = time.perf_counter()
    state, remarks = KINDS[kind](path).restore(limit=case.limit)
    seconds["resume"] = time.perf_counter() - start
    assert state is not None
    assert not remarks
    start = time.perf_counter()
    for number, round in last.items():
        found = state.clients[number].params["body.weight"]
        assert found[0] == found[-1] == state_of(number, round, 1).params["body.weight"][0]
    seconds["read"] = time.perf_counter() - start
    state.clients.close()
    whole = {"all": sum(seconds.values()), "of a core": time.process_time() - began}
    return seconds | whole | {"MB at most": most / 2**20, "MB": size_of(path) / 2**20}


# killed at any moment


CRASH = Case(40, 500, 8, 0, 2, 8_000)  # with room for few: most is written before a checkpoint makes it count


def play(kind: str, path: Path) -> None:
    """Rounds without end, going on from the last checkpoint; a line for each that is saved."""
    folder = KINDS[kind](path)
    state, _ = folder.restore(limit=CRASH.limit)
    state = state or State(0, {"w": torch.zeros(10)}, folder.store(limit=CRASH.limit), {})
    folder.go_back(state)
    while True:
        state.clients.begin(state.round + 1)
        members = cohort_of(CRASH, state.round)
        state.clients.update({number: state_of(number, state.round, CRASH.numbers) for number in members})
        state = state._replace(round=state.round + 1)
        if state.round % CRASH.every == 0:
            folder.save(state)
            os.write(1, f"{state.round}\n".encode())


def crash(kind: str, path: Path, kills: int, seed: int = 0) -> tuple[int, int]:
    """After each kill what was promised is there, to the bit: how many kills it took, and how far the run came."""
    moment, promised = random.Random(seed), 0
    for _ in range(kills):
        command = [sys.executable, __file__, "--play", kind, str(path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(moment.uniform(0, 0.3))
        process.kill()
        lines = process.stdout.read().split()
        assert process.wait() == -signal.SIGKILL
        promised = max([promised, *map(int, lines)])
        state, remarks = KINDS[kind](path).restore(limit=CRASH.limit)
        assert state is not None
        assert not remarks
        assert state.round >= promised, (kind, promised, state.round)
        last = {number: round for round in range(state.round) for number in cohort_of(CRASH, round)}
        assert sorted(state.clients) == sorted(last)
        for number, round in last.items():
            assert encode(state.clients[number], whole=True) == encode(
                state_of(number, round, CRASH.numbers), whole=True
            )
        state.clients.close()
        promised = state.round
    return kills, promised


# looked at while it is written, and damaged


def some_rounds(kind: str, path: Path, saved: int, more: int) -> State:
    """A run with rounds that are saved and, written for want of memory, some that are not."""
    folder = KINDS[kind](path)
    state = State(0, {"w": torch.zeros(10)}, folder.store(limit=CRASH.limit), {})
    for _ in range(saved + more):
        members = cohort_of(CRASH, state.round)
        state.clients.begin(state.round + 1)
        state.clients.update({number: state_of(number, state.round, CRASH.numbers) for number in members})
        state = state._replace(round=state.round + 1)
        if state.round <= saved and state.round % CRASH.every == 0:
            folder.save(state)
    return state


READ = """
import runpy, sys
from pathlib import Path
kinds = runpy.run_path(sys.argv[1])["KINDS"]
state, remarks = kinds[sys.argv[2]](Path(sys.argv[3])).restore()
print(state and state.round, *remarks)
"""


def looked_at(kind: str, path: Path) -> str:
    """What another process reads of a run that goes on, between two checkpoints."""
    state = some_rounds(kind, path, 4, 1000)  # more than sqlite keeps in its cache
    done = subprocess.run([sys.executable, "-c", READ, __file__, kind, str(path)], capture_output=True, text=True)
    state.clients.close()
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


def damaged(kind: str, path: Path, times: int = 200, seed: int = 0) -> dict[str, int]:
    """What is read after one sector of 512 bytes anywhere in the folder was spoilt."""
    some_rounds(kind, path / "whole", 20, 0).clients.close()
    files = [file for file in sorted((path / "whole").rglob("*")) if file.is_file() and file.stat().st_size]
    chance, found = random.Random(seed), dict.fromkeys(("newest", "the one before", "nothing", "wrong"), 0)
    for _ in range(times):
        shutil.copytree(path / "whole", path / "copy")
        file = (
            path
            / "copy"
            / chance.choices(files, [file.stat().st_size for file in files])[0].relative_to(path / "whole")
        )
        content = bytearray(file.read_bytes())
        at = 512 * chance.randrange(-(-len(content) // 512))
        content[at : at + 512] = chance.randbytes(len(content[at : at + 512]))
        file.write_bytes(content)
        state, _ = KINDS[kind](path / "copy").restore(limit=CRASH.limit)
        if state is None:
            found["nothing"] += 1
        else:
            last = {number: round for round in range(state.round) for number in cohort_of(CRASH, round)}
            right = sorted(state.clients) == sorted(last) and all(
                encode(state.clients[number]) == encode(state_of(number, round, CRASH.numbers))
                for number, round in last.items()
            )
            found[("newest" if state.round == 20 else "the one before") if right else "wrong"] += 1
            state.clients.close()
        shutil.rmtree(path / "copy")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--play", nargs=2)
    asked = parser.parse_args()
    if asked.play:
        play(asked.play[0], Path(asked.play[1]))
    for name, case in CASES.items() if asked.times else ():
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
        for _ in range(asked.times):
            for kind in KINDS:
                at = Path(tempfile.mkdtemp())
                found[kind].append(measure(kind, case, at / "run"))
                shutil.rmtree(at)
        for kind, rows in found.items():
            print(
                f"{name:13} {kind:16}",
                *(f"{k} {statistics.median(r[k] for r in rows):.2f}" for k in rows[0]),
                flush=True,
            )
    for kind in KINDS if asked.kills else ():
        at = Path(tempfile.mkdtemp())
        print(f"while it runs {kind:16} {looked_at(kind, at / 'looked')}", flush=True)
        print(f"damaged       {kind:16} {damaged(kind, at / 'damaged')}", flush=True)
        print(f"killed        {kind:16} {crash(kind, at / 'run', asked.kills)}", flush=True)
        shutil.rmtree(at)


if __name__ == "__main__":
    main()
