"""The processes of a sweep: each has its share of the machine, is replaced when it dies, and ends with the sweep."""

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
from protofed.runs.interrupt import on_interrupt
from protofed.runs.measure import Result
from protofed.runs.probes import NO_PROBES, Probes
from protofed.sweep.plan import Cell
from protofed.sweep.watch import SweepWatch
from protofed.sweep.worker import CellOrder

WORKER = "from protofed.sweep.worker import main; main()"
STARTS = 3  # of workers in a row that fail, before it is given up
BUSY_SECONDS = 1.0  # until a cell that another process is writing is tried again


class Placed(NamedTuple):
    """A cell and the folder it runs in."""

    cell: Cell
    folder: Path


class CellOutcome(NamedTuple):
    """How a cell ended."""

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
    """The part of the machine that a worker has."""

    cores: int
    gpu: str | None = None  # for CUDA_VISIBLE_DEVICES; None: all GPUs
    gpu_part: float = 1.0  # of a GPU's memory


class _Worker:
    """A process and the cells it runs."""

    def __init__(self, share: Share) -> None:
        self.share = share
        self.ready = False
        self.free = True  # for another bundle
        self.bundle: dict[int, Placed] = {}  # cells that have not ended
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

    def give(self, bundle: Sequence[Placed], data_dir: Path | None, probes: Probes) -> None:
        cores = self.share.cores
        self.pipe.send(
            [
                CellOrder(cell.experiment.to_dict(), folder, data_dir, cores, sys.argv, probes, cell.labels)
                for cell, folder in bundle
            ]
        )
        self.free, self.bundle = False, dict(enumerate(bundle))

    def interrupt(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGINT)

    def death(self) -> str:
        """Why it died, in words."""
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

    def __init__(
        self, shares: Sequence[Share], data_dir: Path | None, watch: SweepWatch, probes: Probes = NO_PROBES
    ) -> None:
        self.shares, self.data_dir, self.watch, self.probes = shares, data_dir, watch, probes
        self.workers: list[_Worker] = []
        self.asked = 0  # how often the user asked to stop
        self.stillborn = 0  # workers in a row that died while starting

    def work(self, bundles: Sequence[Sequence[Placed]]) -> Iterator[CellOutcome]:
        """Outcomes as they arrive; after Ctrl-C, running cells are saved and the others are left."""
        left = collections.deque(bundles)
        later: list[tuple[float, Placed]] = []  # cells that another process is writing, and when to look again
        with on_interrupt(self._stop):
            try:
                self.workers = [_Worker(share) for share in self.shares[: len(left)]]
                while self._at_work() or ((left or later) and not self.asked):
                    now = time.monotonic()
                    left.extend([placed] for due, placed in later if due <= now)
                    later = [(due, placed) for due, placed in later if due > now]
                    self._hand_out(left)
                    for worker, message in self._messages():
                        if message[0] == "gone":
                            yield from self._replace(worker, left)
                        elif message[0] == "ended" and message[2] == "busy":
                            later.append((now + BUSY_SECONDS, worker.bundle.pop(message[1])))
                        elif message[0] == "ended":
                            yield CellOutcome(*worker.bundle.pop(message[1]), *message[2:])
                        else:
                            self._take(worker, message)
            finally:
                for worker in self.workers:
                    worker.close()

    def _at_work(self) -> bool:
        return any(not worker.free for worker in self.workers)

    def _hand_out(self, left: "collections.deque[Sequence[Placed]]") -> None:
        for worker in self.workers:
            if left and not self.asked and worker.ready and worker.free:
                with contextlib.suppress(OSError):  # it has just died, which is noticed next; the cells are for another
                    worker.give(left[0], self.data_dir, self.probes)
                    left.popleft()

    def _messages(self) -> Iterator[tuple[_Worker, tuple[Any, ...]]]:
        """Messages of workers, and ("gone",) for one that died; another takes its place."""
        by_pipe = {worker.pipe: worker for worker in self.workers}
        for pipe in wait(list(by_pipe), timeout=0.5):
            worker = by_pipe[pipe]  # type: ignore[index]
            try:
                yield worker, worker.pipe.recv()
            except (EOFError, OSError):
                yield worker, ("gone",)

    def _take(self, worker: _Worker, message: tuple[Any, ...]) -> None:
        """Act on a message."""
        kind, about = message[0], message[1:]
        if kind == "ready":
            worker.ready, self.stillborn = True, 0
        elif kind == "free":
            worker.free = True
        elif kind == "begun":
            self.watch.begun(worker.bundle[about[0]].cell, about[1])
        elif kind == "round":
            self.watch.round(worker.bundle[about[0]].cell, about[1])
        elif kind == "note":
            self.watch.note(f"{worker.bundle[about[0]].cell.name}: {about[1]}")

    def _replace(self, worker: _Worker, left: "collections.deque[Sequence[Placed]]") -> Iterator[CellOutcome]:
        """Replace a worker that died. If it had several cells, nobody knows which was to blame: each is run once more,
        by itself."""
        reason, bundle = worker.death(), list(worker.bundle.values())
        self.workers.remove(worker)
        worker.close()
        self.stillborn += not worker.ready
        given_up = not worker.ready and self.stillborn >= STARTS  # those that did start go on alone
        if given_up and not any(other.ready for other in self.workers):
            raise UserError(f"workers cannot be started: {reason}. Try one of the cells with 'protofed run'.")
        if not self.asked and not given_up:
            self.workers.append(_Worker(worker.share))
        if len(bundle) > 1 and not self.asked:
            self.watch.note(f"{len(bundle)} cells that were trained together continue one by one: {reason}")
            left.extendleft([placed] for placed in reversed(bundle))
            return
        for placed in bundle:
            yield CellOutcome(*placed, "stopped" if self.asked else "failed", reason)

    def _stop(self) -> None:
        """The first Ctrl-C lets every cell finish its round and save it; the second saves at once, the third kills."""
        self.asked += 1
        if self.asked == 1:
            self.watch.note("stopping after the current rounds; Ctrl-C again stops at once")
        if self.asked > 2:
            raise KeyboardInterrupt
        for worker in self.workers:
            if not worker.free:
                worker.interrupt()
