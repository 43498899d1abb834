"""The line between the ClientApp's short processes and the worker: a Unix socket, one request at a time."""

import os
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

LONGEST = 100  # bytes of a socket's path


class Line:
    """Answers every request that comes in on a socket which only this user can reach."""

    def __init__(self, folder: Path, answer: Callable[[bytes], bytes]) -> None:
        self.answer = answer
        self._own = None if len(os.fsencode(folder.resolve())) < LONGEST - 12 else tempfile.TemporaryDirectory()
        home = Path(self._own.name) if self._own else folder.resolve()
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path = home / "worker.sock"
        self.path.unlink(missing_ok=True)
        self.answered = 0
        self._one = threading.Lock()  # requests of a run that was given up may still come in
        self._socket = socket.socket(socket.AF_UNIX)
        before = os.umask(0o177)
        try:
            self._socket.bind(str(self.path))
        finally:
            os.umask(before)
        self._socket.listen(8)
        threading.Thread(target=self._accept, name="line", daemon=True).start()

    def close(self) -> None:
        self._socket.close()
        self.path.unlink(missing_ok=True)
        if self._own:
            self._own.cleanup()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._socket.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=[caller], name="answer", daemon=True).start()

    def _serve(self, caller: socket.socket) -> None:
        with caller, caller.makefile("rwb") as line:
            length = int.from_bytes(line.read(8), "big")
            request = line.read(length)
            if not length or len(request) < length:
                return  # it was ended in the middle
            with self._one:
                answer = self.answer(request)
            try:
                line.write(len(answer).to_bytes(8, "big") + answer)
                line.flush()
            except OSError:
                return  # ended while we worked: the server asks again
            self.answered += 1
