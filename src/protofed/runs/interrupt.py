"""Ctrl-C, handled by the code that is running."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def on_interrupt(ask: Callable[[], None]) -> Iterator[None]:
    """Let Ctrl-C call `ask`, if we may handle it: in the main thread of a program that does not handle it itself."""
    usual = signal.getsignal(signal.SIGINT)
    mine = threading.current_thread() is threading.main_thread() and usual is signal.default_int_handler
    if mine:
        signal.signal(signal.SIGINT, lambda number, frame: ask())
    try:
        yield
    finally:
        if mine:
            signal.signal(signal.SIGINT, usual)
