"""The processes of a sweep: each with its share of the machine, replaced when it dies, gone when the sweep is."""

import collections
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal, NamedTuple

import protofed
from protofed.errors import UserError
from protofed.interrupt import on_interrupt
from protofed.results import Result
from protofed.sweep.plan import Cell
from protofed.sweep.watch import SweepWatch
from protofed.sweep.worker import Order

WORKER = "from protofed.sweep.worker import main; main()"
STARTS = 3  # of workers in a row that fail, before it is given up
BUSY_SECONDS = 1.0  # until a cell that another process is writing is tried again


class Placed(NamedTuple):
    """A cell and where it is run."""

    cell: Cell
    folder: Path


class Outcome(NamedTuple):
    """What became of a cell."""

    cell: Cell
    folder: Path
    status: Literal["done", "kept", "failed", "stopped"]  # kept: it was finished before
    reason: str = ""
    summary: dict[str, Any] | None = None

    @property
    def result(self) -> Result | None:
        """The finished run."""
        return None if self.summary is None else Result(self.folder, self.summary)


class Share(NamedTuple):
    """What of the machine a worker has."""

    cores: int
    gpu: str | None = None  # for CUDA_VISIBLE_DEVICES; None: whatever there is
    gpu_part: float = 1.0  # of a GPU's memory


class _Worker:
    """A process and the cell it runs."""

    def __init__(self, share: Share) -> None:
        self.share = share
        self.ready = False
        self.placed: Placed | None = None
        self.output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        self.pipe, theirs = Pipe()
        source = str(Path(protofed.__file__).parent.parent)
        env = os.environ | {"PYTHONPATH": os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])}
        if share.gpu is not None:
            env["CUDA_VISIBLE_DEVICES"] = share.gpu
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", WORKER, str(theirs.fileno()), str(share.gpu_part)],
            pass_fds=[theirs.fileno()],
            process_group=0,  # Ctrl-C reaches the sweep alone, which passes it on
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=self.output,
            env=env,
        )
        theirs.close()

    def give(self, placed: Placed, data_dir: Path | None) -> None:
        self.placed = placed
        self.pipe.send(Order(placed.cell.experiment.to_dict(), placed.folder, data_dir, self.share.cores, sys.argv))

    def interrupt(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGINT)

    def death(self) -> str:
        """Why it is gone, in words."""
        code = self.process.wait()
        if code == -signal.SIGKILL:
            return "its process was killed (signal 9): by hand, or because memory ran out"
        self.output.seek(0)
        last = self.output.read().decode(errors="replace").strip().splitlines()[-1:]
        how = f"by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"with exit code {code}"
        return f"its process ended {how}" + "".join(f": {line}" for line in last)

    def close(self) -> None:
        self.pipe.close()  # which ends it, at once where it is at work
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.output.close()


class Crew:
    """Works through cells on as many processes as there are shares."""

    def __init__(self, shares: Sequence[Share], data_dir: Path | None, watch: SweepWatch) -> None:
        self.shares, self.data_dir, self.watch = shares, data_dir, watch
        self.workers: list[_Worker] = []
        self.asked = 0  # how often the user asked to stop
        self.stillborn = 0  # workers in a row that died while starting

    def work(self, todo: Sequence[Placed]) -> Iterator[Outcome]:
        """Outcomes as they come; after Ctrl-C those at work are saved, and the others are left."""
        left = collections.deque(todo)
        later: list[tuple[float, Placed]] = []  # cells that another process is writing, and when to look again
        with on_interrupt(self._stop):
            try:
                self.workers = [_Worker(share) for share in self.shares[: len(left)]]
                while self._at_work() or ((left or later) and not self.asked):
                    now = time.monotonic()
                    left.extend(placed for due, placed in later if due <= now)
                    later = [(due, placed) for due, placed in later if due > now]
                    self._hand_out(left)
                    for worker, message in self._messages():
                        placed = worker.placed
                        outcome = self._take(worker, message)
                        if outcome is not None:
                            yield outcome
                        elif message[0] == "ended" and placed is not None:  # busy elsewhere
                            later.append((now + BUSY_SECONDS, placed))
            finally:
                for worker in self.workers:
                    worker.close()

    def _at_work(self) -> bool:
        return any(worker.placed is not None for worker in self.workers)

    def _hand_out(self, left: "collections.deque[Placed]") -> None:
        for worker in self.workers:
            if left and not self.asked and worker.ready and worker.placed is None:
                try:
                    worker.give(left[0], self.data_dir)
                    left.popleft()
                except OSError:  # it has just died, which is noticed next; the cell is for another
                    worker.placed = None

    def _messages(self) -> Iterator[tuple[_Worker, tuple[Any, ...]]]:
        """What workers say, and ("gone",) of one that died; its place is taken by another."""
        by_pipe = {worker.pipe: worker for worker in self.workers}
        for pipe in wait(list(by_pipe), timeout=0.5):
            worker = by_pipe[pipe]  # type: ignore[index]
            try:
                yield worker, worker.pipe.recv()
            except (EOFError, OSError):
                yield worker, ("gone",)

    def _take(self, worker: _Worker, message: tuple[Any, ...]) -> Outcome | None:
        """Act on a message; the outcome, if it says one."""
        kind, placed = message[0], worker.placed
        if kind == "ready":
            worker.ready, self.stillborn = True, 0
        elif kind == "begun" and placed:
            self.watch.begun(placed.cell, message[1])
        elif kind == "round" and placed:
            self.watch.round(placed.cell, message[1])
        elif kind == "note" and placed:
            self.watch.note(f"{placed.cell.name}: {message[1]}")
        elif kind == "ended" and placed:
            worker.placed = None
            status, reason, summary = message[1:]
            return None if status == "busy" else Outcome(*placed, status, reason, summary)
        elif kind == "gone":
            return self._replace(worker)
        return None

    def _replace(self, worker: _Worker) -> Outcome | None:
        reason, placed = worker.death(), worker.placed
        worker.placed = None
        self.workers.remove(worker)
        worker.close()
        self.stillborn += not worker.ready
        given_up = not worker.ready and self.stillborn >= STARTS  # those that did start go on alone
        if given_up and not any(other.ready for other in self.workers):
            raise UserError(f"workers cannot be started: {reason}. Try one of the cells with 'protofed run'.")
        if not self.asked and not given_up:
            self.workers.append(_Worker(worker.share))
        return Outcome(*placed, "stopped" if self.asked else "failed", reason) if placed else None

    def _stop(self) -> None:
        """The first Ctrl-C lets every cell finish its round and save it; the second saves at once, the third kills."""
        self.asked += 1
        if self.asked == 1:
            self.watch.note("stopping as soon as the rounds at work are whole; Ctrl-C again stops at once")
        if self.asked > 2:
            raise KeyboardInterrupt
        for worker in self.workers:
            if worker.placed is not None:
                worker.interrupt()
