"""The server: waits for clients, runs the rounds, and writes the run's folder and status.json."""

from collections.abc import Callable
from pathlib import Path

from protofed.federation.transport import Transport
from protofed.results import Result


def serve(folder: Path, transport: Transport, tell: Callable[[str], None]) -> Result:
    """Run the federation of a server's folder to its end, from where it stopped."""
    raise NotImplementedError
