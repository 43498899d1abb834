"""The command line in the process of the tests, where torch is loaded already."""

import contextlib
import io
import os
import subprocess
import sys
from unittest import mock

from protofed.cli import main


def protofed(*words: str, env: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    """What `protofed WORDS` does, prints and ends with."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", ["protofed", *words]),
        mock.patch.dict(os.environ, env if env is not None else os.environ, clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())
