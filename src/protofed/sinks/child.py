"""The process beside a run: tells the sinks until its stdin closes. Its arguments: RUN SECONDS SINK..."""

import os
import sys
import threading
import time
import traceback
from pathlib import Path

from protofed.sinks import SINKS
from protofed.sinks.follow import tell


def main() -> None:
    """The run comes first: it has the processor before this, and the end of this is bounded."""
    os.nice(10)
    folder, seconds, names = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    over = threading.Event()
    threads = {name: threading.Thread(target=_tell, args=(name, folder, over), daemon=True) for name in names}
    for thread in threads.values():
        thread.start()
    sys.stdin.buffer.read()
    over.set()
    until = time.monotonic() + seconds
    for name, thread in threads.items():
        thread.join(max(0.0, until - time.monotonic()))
        if thread.is_alive():
            _say(f"{name} has not taken the last numbers within {seconds:.0f} s")
    if any(thread.is_alive() for thread in threads.values()):
        os._exit(0)  # what hangs must not keep the process


def _tell(name: str, folder: Path, over: threading.Event) -> None:
    """Tell a sink; its first failure is its last."""
    try:
        tell(name, SINKS[name](), folder, over)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        _say(f"{name} failed ({type(error).__name__}: {' '.join(str(error).split())[:300]})")


def _say(reason: str) -> None:
    sys.stdout.write(f"{reason}\n")
    sys.stdout.flush()
