"""What the ServerApp does: run the federation, in a process that Flower starts and the supervisor watches."""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from protofed.atomic import write_atomically
from protofed.errors import UserError
from protofed.flower.door import pushed_file
from protofed.flower.processes import exists

FOLDER, SUPERVISOR = "PROTOFED_SERVER_FOLDER", "PROTOFED_SUPERVISOR"


def main(grid: Any) -> None:
    """Serve the folder named in the environment; how it went is left in a file for the supervisor."""
    folder = Path(os.environ[FOLDER])
    threading.Thread(target=_end_with, args=[int(os.environ[SUPERVISOR])], daemon=True).start()
    leave(folder, {"pid": os.getpid(), "run": grid.run.run_id})
    try:
        _serve(folder, grid)
    except UserError as error:
        leave(folder, {"pid": os.getpid(), "run": grid.run.run_id, "failed": str(error)})
        raise
    leave(folder, {"pid": os.getpid(), "run": grid.run.run_id, "finished": True})


def _serve(folder: Path, grid: Any) -> None:
    from protofed.federation.serve import serve
    from protofed.flower.transport import GridTransport

    numbers = {int(node): number for node, number in json.loads(nodes_file(folder).read_bytes()).items()}
    stamp = pushed_file(folder)
    with open(told_file(folder), "a", encoding="utf-8") as told:

        def tell(line: str) -> None:
            told.write(" ".join(line.split()) + "\n")
            told.flush()

        serve(folder, GridTransport(grid, numbers, stamp.touch), tell)


def leave(folder: Path, state: dict[str, Any]) -> None:
    write_atomically(state_file(folder), json.dumps(state).encode())


def state_file(folder: Path) -> Path:
    """Who the ServerApp is, and how it ended."""
    return folder / "flower" / "serverapp.json"


def nodes_file(folder: Path) -> Path:
    """Flower's node ids, and the clients' numbers."""
    return folder / "flower" / "nodes.json"


def told_file(folder: Path) -> Path:
    """What the federation tells, a line each."""
    return folder / "flower" / "told.log"


def _end_with(supervisor: int) -> None:
    while exists(supervisor):
        time.sleep(0.5)
    os._exit(1)
