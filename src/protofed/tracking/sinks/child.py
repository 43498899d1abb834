"""The process next to a run: reports to the sinks until its stdin closes. Its arguments: RUN SECONDS SINK..."""

import os
import sys
import threading
import time
import traceback
from pathlib import Path

from protofed.tracking.sinks import SINKS
from protofed.tracking.sinks.follow import tell_all

WORK = 0.2  # seconds of a processor that are work, in a while
LONGEST = 120.0  # seconds for the end, on a machine that is busy with other things


def main() -> None:
    """Let the run go first: it gets the processor before this process, whose end is bounded."""
    os.nice(10)
    folder, seconds, names = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    over = threading.Event()
    threads = {name: threading.Thread(target=_tell, args=(name, folder, over), daemon=True) for name in names}
    for thread in threads.values():
        thread.start()
    sys.stdin.buffer.read()
    over.set()
    _wait(list(threads.values()), seconds)
    late = [name for name, thread in threads.items() if thread.is_alive()]
    if late:
        _say(f"{' and '.join(late)} did not take the last numbers")
        os._exit(0)  # what hangs must not keep the process


def _wait(threads: list[threading.Thread], seconds: float) -> None:
    """Wait until the sinks are done, or the process has been idle for so long that it must be waiting for something
    else."""
    began = since = time.monotonic()
    used = time.process_time()
    while any(thread.is_alive() for thread in threads) and time.monotonic() - began < LONGEST:
        time.sleep(0.05)
        if time.process_time() - used > WORK:
            since, used = time.monotonic(), time.process_time()
        if time.monotonic() - since > seconds:
            return


def _tell(name: str, folder: Path, over: threading.Event) -> None:
    """Report to a sink; after its first failure it gets nothing more."""
    try:
        tell_all(name, SINKS[name](), folder, over)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        _say(f"{name} failed ({type(error).__name__}: {' '.join(str(error).split())[:300]})")


def _say(reason: str) -> None:
    sys.stdout.write(f"{reason}\n")
    sys.stdout.flush()
