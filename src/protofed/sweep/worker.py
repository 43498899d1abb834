"""A process that runs cells one after another, as instructed through a pipe; it ends when the other end is closed."""

import contextlib
import gc
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from protofed.config.experiment import Experiment
from protofed.errors import UserError
from protofed.runs.folder import Busy, RunFolder
from protofed.runs.loop import Interrupted, run
from protofed.runs.measure import Result
from protofed.runs.probes import Probes
from protofed.runs.watch import Watch
from protofed.tracking.track import tracked


class CellOrder(NamedTuple):
    """One cell to run."""

    experiment: dict[str, Any]
    folder: Path
    data_dir: Path | None
    cores: int
    command: list[str]
    probes: Probes
    labels: dict[str, str]


class _Tell(Watch):
    """Passes on what happens in a run."""

    def __init__(self, send: Callable[..., None], number: int) -> None:
        """`number`: the place of its cell in the bundle."""
        self.send, self.number = send, number

    def start(self, experiment: Experiment, done: int) -> None:
        self.send("begun", self.number, done)

    def round(self, line: dict[str, Any]) -> None:
        self.send("round", self.number, line)

    def note(self, text: str) -> None:
        self.send("note", self.number, text)


def main() -> None:
    """Take orders until there are none left."""
    handle = int(sys.argv[1])
    os.set_inheritable(handle, False)  # else a compiler that is still at work would keep the pipe open
    pipe = Connection(handle)
    torch.set_num_threads(1)
    _keep_to(float(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    orders: queue.SimpleQueue[list[CellOrder] | None] = queue.SimpleQueue()
    said: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
    working = threading.Event()
    threading.Thread(target=_listen, args=(pipe, orders, working), daemon=True).start()
    speaker = threading.Thread(target=_speak, args=(pipe, said), daemon=True)
    speaker.start()

    def send(*message: Any) -> None:
        said.put(message)

    with contextlib.suppress(KeyboardInterrupt):
        send("ready")
        while (bundle := orders.get()) is not None:
            working.set()
            _bundle(bundle, send)
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            working.clear()
            send("free")
    said.put(None)
    speaker.join()


def _keep_to(part: float) -> None:
    """Take at most this part of a GPU's memory, so that all processes on it get some."""
    if part < 1:
        for number in range(torch.cuda.device_count()):
            torch.cuda.set_per_process_memory_fraction(part, number)


def _speak(pipe: Connection, said: "queue.SimpleQueue[tuple[Any, ...] | None]") -> None:
    """Pass on messages in their order. A separate thread does so because Ctrl-C may interrupt a speaker and then speak
    itself, which would wait for a lock forever, or cut a message in two."""
    try:
        while (message := said.get()) is not None:
            pipe.send(message)
    except OSError:
        return  # nobody is at the other end, which `_listen` notices too
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # else everybody would wait for what cannot be said


def _listen(pipe: Connection, orders: "queue.SimpleQueue[list[CellOrder] | None]", working: threading.Event) -> None:
    """End at once when nobody is at the other end any more: what was saved is whole."""
    try:
        while True:
            orders.put(pipe.recv())
    except (EOFError, OSError):
        if working.is_set():
            os._exit(1)
        orders.put(None)


def _bundle(orders: list[CellOrder], send: Callable[..., None]) -> None:
    """Run these cells, together if that pays. Whatever goes wrong in one becomes its reason; it never ends the
    sweep."""
    sys.argv = orders[0].command  # recorded in environment.json
    left = dict(enumerate(orders))
    stopped, before = False, 0
    while len(left) > 1 and len(left) != before and not stopped:
        before, stopped = len(left), _together(left, send)
    for number, order in left.items():
        if stopped:
            send("ended", number, "stopped", "not begun", None)
            continue
        ended = _outcome(order, partial(_run, order, _Tell(send, number)))
        stopped = ended[0] == "stopped"
        send("ended", number, *ended)


def _run(order: CellOrder, tell: _Tell) -> Result:
    return run(
        Experiment.from_dict(order.experiment),
        order.folder,
        resume=True,
        data_dir=order.data_dir,
        watch=tracked(tell),
        cores=order.cores,
        probes=order.probes,
    )


def _together(left: dict[int, CellOrder], send: Callable[..., None]) -> bool:
    """Train as many of these cells together as fit in memory, and remove those from the list. Returns whether the user
    stopped it."""
    from protofed.sweep import fused

    orders = list(left.items())
    plans = [(Experiment.from_dict(order.experiment), RunFolder(order.folder)) for _, order in orders]
    watches = [tracked(_Tell(send, number)) for number, _ in orders]
    given = [(*plan, watch) for plan, watch in zip(plans, watches, strict=True)]
    cores, probes = orders[0][1].cores, orders[0][1].probes
    seats = {}
    for (number, _), seat in zip(orders, fused.seats(given, orders[0][1].data_dir, cores, probes), strict=True):
        if not isinstance(seat, UserError):  # which it will meet again by itself
            seats[number] = seat
        if len(seats) >= 2 and len(seats) >= fused.that_fit(list(seats.values())):
            break
    numbers = list(seats)

    stopped = False

    def ended(place: int, found: Result | BaseException) -> None:
        nonlocal stopped
        outcome = _outcome(left.pop(numbers[place]), partial(_given, found))
        stopped |= outcome[0] == "stopped"
        send("ended", numbers[place], *outcome)

    fused.together([seats[number] for number in numbers], cores, probes, ended)
    return stopped


def _given(found: Result | BaseException) -> Result:
    if isinstance(found, BaseException):
        raise found
    return found


def _outcome(order: CellOrder, work: Callable[[], Result]) -> tuple[str, str, dict[str, Any] | None]:
    """Status, reason and summary of one run."""
    try:
        result = work()
    except (Interrupted, KeyboardInterrupt) as stop:
        return "stopped", str(stop) or "stopped", None
    except Busy as error:
        return "busy", str(error), None
    except UserError as error:
        return "failed", str(error), None
    except Exception as error:
        first = (str(error).strip() or "no reason given").splitlines()[0]
        return "failed", f"{type(error).__name__}: {first}\n{traceback.format_exc()}", None
    summary = {**result.summary, "labels": order.labels}  # so that it says by itself which of the runs it is of
    RunFolder(order.folder).write_json("summary.json", summary)
    return "done", "", summary


if __name__ == "__main__":
    main()
