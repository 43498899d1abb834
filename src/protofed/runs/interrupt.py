"""Ctrl-C, answered by whoever is at work."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def on_interrupt(ask: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C calls `ask`, where it is ours to answer: in the main thread of a program that does not do so itself."""
    usual = signal.getsignal(signal.SIGINT)
    mine = threading.current_thread() is threading.main_thread() and usual is signal.default_int_handler
    if mine:
        signal.signal(signal.SIGINT, lambda number, frame: ask())
    try:
        yield
    finally:
        if mine:
            signal.signal(signal.SIGINT, usual)
