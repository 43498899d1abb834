"""A process that runs cells one after another, as told through a pipe; it ends when the other end is closed."""

import contextlib
import gc
import os
import queue
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from protofed.errors import UserError
from protofed.experiment import Experiment
from protofed.folder import Busy
from protofed.results import Watch
from protofed.run import Interrupted, run
from protofed.track import tracked


class Order(NamedTuple):
    """One cell to run."""

    experiment: dict[str, Any]
    folder: Path
    data_dir: Path | None
    cores: int
    command: list[str]


class _Tell(Watch):
    """Passes on what happens in a run."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def start(self, experiment: Experiment, done: int) -> None:
        self.pipe.send(("begun", done))

    def round(self, line: dict[str, Any]) -> None:
        self.pipe.send(("round", line))

    def note(self, text: str) -> None:
        self.pipe.send(("note", text))


def main() -> None:
    """Take orders until there are none."""
    handle = int(sys.argv[1])
    os.set_inheritable(handle, False)  # else a compiler that is still at work would keep the pipe open
    pipe = Connection(handle)
    torch.set_num_threads(1)
    _keep_to(float(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
    working = threading.Event()
    threading.Thread(target=_listen, args=(pipe, orders, working), daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        pipe.send(("ready",))
        while (order := orders.get()) is not None:
            working.set()
            ended = _one(order, _Tell(pipe))
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            working.clear()
            pipe.send(("ended", *ended))


def _keep_to(part: float) -> None:
    """Take no more than this part of a GPU's memory, so that all processes on it find some."""
    if part < 1:
        for number in range(torch.cuda.device_count()):
            torch.cuda.set_per_process_memory_fraction(part, number)


def _listen(pipe: Connection, orders: "queue.SimpleQueue[Order | None]", working: threading.Event) -> None:
    """When nobody is at the other end any more, end at once: what was saved is whole."""
    try:
        while True:
            orders.put(pipe.recv())
    except (EOFError, OSError):
        if working.is_set():
            os._exit(1)
        orders.put(None)


def _one(order: Order, tell: _Tell) -> tuple[str, str, dict[str, Any] | None]:
    """Status, reason and summary of one run. Whatever goes wrong in it is a reason, never the end of the sweep."""
    sys.argv = order.command  # what environment.json shall say
    try:
        experiment = Experiment.from_dict(order.experiment)
        watch = tracked(tell)
        result = run(experiment, order.folder, resume=True, data_dir=order.data_dir, watch=watch, cores=order.cores)
    except (Interrupted, KeyboardInterrupt) as stop:
        return "stopped", str(stop) or "stopped", None
    except Busy as error:
        return "busy", str(error), None
    except UserError as error:
        return "failed", str(error), None
    except Exception as error:
        first = (str(error).strip() or "no reason given").splitlines()[0]
        return "failed", f"{type(error).__name__}: {first}\n{traceback.format_exc()}", None
    return "done", "", result.summary


if __name__ == "__main__":
    main()
