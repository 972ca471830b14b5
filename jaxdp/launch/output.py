"""What the processes print, line by line, each line with its rank before it."""

import collections
import os
import threading
from collections.abc import Callable
from typing import BinaryIO, TextIO

COLOURS = (36, 33, 35, 32, 34, 31)  # of a terminal, by rank: cyan, yellow, magenta...
LONGEST = 2**16  # bytes; a longer line is cut into lines
KEPT = 400  # lines of each process, for the report of its failure


class Output:
    """Prints the lines of all processes, and keeps the last ones of each.

    A line is never torn: two processes that print at once print one after the other.
    """

    def __init__(self, stream: TextIO, on_closed: Callable[[], None]):
        """Prints to a stream.

        Args:
            stream: Where to; coloured if it is a terminal and `NO_COLOR` is not set.
            on_closed: Called from another thread when nobody reads it any more.
        """
        self._stream, self._on_closed = stream.buffer, on_closed
        self._colours = stream.isatty() and not os.environ.get("NO_COLOR")
        self._lock = threading.Lock()
        self._kept: dict[int, collections.deque[str]] = {}

    def follow(self, rank: int, pipe: BinaryIO) -> threading.Thread:
        """Prints a new process's output from a thread, until it closes."""
        self._kept[rank] = collections.deque(maxlen=KEPT)
        follower = threading.Thread(target=self._print, args=(rank, pipe), daemon=True)
        follower.start()
        return follower

    def last(self, rank: int) -> list[str]:
        """The last lines that a process has printed."""
        with self._lock:
            return [*self._kept.get(rank, ())]

    def _print(self, rank: int, pipe: BinaryIO) -> None:
        prefix = f"[{rank}] ".encode()
        if self._colours:
            colour = COLOURS[rank % len(COLOURS)]
            prefix = b"\x1b[%dm%b\x1b[0m" % (colour, prefix)
        with pipe:
            while line := pipe.readline(LONGEST):
                line = line.rstrip(b"\n")
                with self._lock:
                    self._kept[rank].append(line.decode(errors="replace").rstrip("\r"))
                    self._write(prefix + line + b"\n")

    def _write(self, line: bytes) -> None:
        """Writes at once; what nobody reads is read on, so that no process blocks."""
        try:
            self._stream.write(line)
            self._stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # Python flushes it once more
            os.close(nowhere)
            self._on_closed()
