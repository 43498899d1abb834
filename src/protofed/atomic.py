"""Files that are written whole or not at all."""

import os
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Write all of it or nothing, even if the machine stops halfway."""
    scratch = path.with_name(f".{path.name}.partial")
    try:
        write_synced(scratch, content)
        scratch.replace(path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        error.filename = str(path)  # not the scratch file, which nobody named
        raise
    sync_folder(path.parent)


def write_synced(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
