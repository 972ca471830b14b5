"""Signals that would end Python without cleaning up, or in the middle of it."""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

ENDING = (signal.SIGTERM, signal.SIGHUP)  # Python dies of these at once


def raise_on_ending() -> Callable[[], None]:
    """Has these signals raise `SystemExit`, where nobody else handles them.

    Returns:
        What undoes that.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in ENDING:
            if signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, _leave)

    def undo() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    return undo


@contextlib.contextmanager
def ignored() -> Iterator[None]:
    """Ignores them and Ctrl-C for a moment: a second one must not stop cleaning up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, *ENDING)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, frame: Any) -> None:
    """Ends Python with the exit code that the signal would have given."""
    del frame
    sys.exit(128 + number)
