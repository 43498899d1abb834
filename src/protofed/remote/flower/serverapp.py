"""The ServerApp: the federation itself, in a process that `protofed server` starts and watches."""

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

from protofed.atomic import write_atomically
from protofed.errors import UserError

BEAT_SECONDS, LOOK_SECONDS = 1.0, 0.1
# Files in the server's folder, between `protofed server` and this process.
SUBMITTED = "flower/submitted.json"  # the run that was submitted last, and the process that shall claim it
NODES = "flower/nodes.json"  # Flower's node ids, and the clients' numbers
TOLD = "flower/told.log"  # what the federation tells, a line each
BEAT = "flower/beat"  # touched every second by a ServerApp that is neither stopped nor stuck
FINISHED, FAILED, AGAIN = 0, 1, 75  # how it ends; 75: not by its own fault, and a new run goes on


def main(folder: Path, address: str, authority: Path | None, supervisor: int) -> int:
    """Serve a folder in the run that is submitted for this process; how it went is left in a file."""
    threading.Thread(target=_beat, args=[folder, supervisor], name="beat file", daemon=True).start()
    signal.signal(signal.SIGTERM, _end)
    import protofed.remote.server.serve  # noqa: F401 - while the SuperLink starts
    from protofed.remote.flower.claim import RunOver, claimed
    from protofed.remote.flower.door import BESIDE
    from protofed.remote.settings import load_federation

    run = _submitted(folder)
    try:
        most = load_federation(folder).rounds.max_bytes + BESIDE
        with claimed(address, authority, run, most) as grid:
            leave(folder, {"pid": os.getpid(), "run": run})
            _serve(folder, grid)
    except UserError as error:
        leave(folder, {"pid": os.getpid(), "run": run, "failed": str(error)})
        return FAILED
    except Exception as error:
        traceback.print_exc()
        return AGAIN if isinstance(error, RunOver) else FAILED
    leave(folder, {"pid": os.getpid(), "run": run, "finished": True})
    return FINISHED


def _serve(folder: Path, grid: Any) -> None:
    from protofed.probes import PICTURES
    from protofed.remote.flower.door import pushed_file, waiting
    from protofed.remote.flower.transport import GridTransport
    from protofed.remote.protocol import printable
    from protofed.remote.server.serve import serve

    numbers = {int(node): number for node, number in json.loads((folder / NODES).read_bytes()).items()}
    stamp = pushed_file(folder)
    with open(folder / TOLD, "a", encoding="utf-8") as told:

        def tell(line: str) -> None:
            told.write(printable(line) + "\n")
            told.flush()

        serve(folder, GridTransport(grid, numbers, stamp.touch, lambda: waiting(folder)), tell, probes=PICTURES)


def _submitted(folder: Path) -> int:
    """The run that the supervisor submitted for this process, as soon as it has."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            submitted = json.loads((folder / SUBMITTED).read_bytes())
            if submitted["pid"] == os.getpid():
                return int(submitted["run"])
        time.sleep(LOOK_SECONDS)


def leave(folder: Path, state: dict[str, Any]) -> None:
    write_atomically(state_file(folder), json.dumps(state).encode())


def state_file(folder: Path) -> Path:
    """Who the ServerApp is, and how it ended."""
    return folder / "flower" / "serverapp.json"


def _end(number: int, frame: FrameType | None) -> None:
    """In good order: the status and the audit log say that the server was stopped."""
    sys.exit(AGAIN)


def _beat(folder: Path, supervisor: int) -> None:
    """Show that this process runs, and end it with its supervisor."""
    while os.getppid() == supervisor:
        (folder / BEAT).touch(mode=0o600)
        time.sleep(BEAT_SECONDS)
    os._exit(AGAIN)


if __name__ == "__main__":
    place, where, inner = sys.argv[1:]
    sys.exit(main(Path(place), where, Path(inner) if inner else None, os.getppid()))
