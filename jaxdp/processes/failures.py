"""How a process that fails ends, and what it tells the others.

Left to itself, a failed process waits in JAX's shutdown for processes that wait for it
in a collective. So it posts what happened and ends at once. The others hear of it, even
in a collective, and end too, saying on whose account. Who goes without a word, killed
or cut off, is named by JAX, which ends all others once its heartbeats are missing.
"""

import atexit
import json
import os
import re
import sys
import threading
import time
import traceback
from typing import Any

import jax

from jaxdp.processes import board

FIRST = "jaxdp/failures/first"
NOTICED = "jaxdp/failures/noticed"
NO_ANSWER = (
    "rank 0, which coordinates, does not answer: it was killed or stopped, or the link "
    "to it is down."
)
GRACE_S = 3.0  # for others to read what process 0 keeps, and to end by themselves
# What a process says whose peer has gone: it is not what failed first.
LOST = re.compile(r"gloo|connection (closed|reset)|broken pipe|nccl", re.IGNORECASE)


class Listener(threading.Thread):
    """Waits for the first failure of any process."""

    def __init__(self):
        """Not started."""
        super().__init__(daemon=True)
        self.heard = threading.Event()  # another process has failed
        self.ends = threading.Event()  # this one ends, as it should
        self.listens = True
        self.last_answer = time.monotonic()

    def run(self) -> None:
        """Listens, and ends this process if another has failed and it goes on."""
        first = ""
        while not first and not self.ends.is_set():
            try:
                first = board.look(FIRST)
                board.posted(NOTICED)  # does not return if the coordinator is stopped
            except jax.errors.JaxRuntimeError:
                return _say(NO_ANSWER)
            self.last_answer = time.monotonic()
        self.listens = False
        if first and json.loads(first)["rank"] != jax.process_index():
            self._end_too(**json.loads(first))

    def watch(self, timeout_s: float) -> None:
        """Says so if the coordinator is silent: JAX's own text would not name it."""
        while not self.ends.wait(board.SLICE_MS / 1000):
            silent_s = time.monotonic() - self.last_answer
            if self.listens and silent_s > timeout_s:
                return _say(NO_ANSWER)

    def _end_too(self, rank: int, text: str) -> None:
        """Leaves the main thread a moment to end by itself."""
        _say(f"rank {rank} failed first: {text}")
        self.heard.set()
        _post(f"{NOTICED}/{jax.process_index()}", "")
        if jax.process_index() == 0:
            _wait_until_noticed()
        time.sleep(GRACE_S)
        _end(1)


def install(heartbeat_timeout_s: float) -> None:
    """Lets failures of this process and of others end it as the module says."""
    shown = sys.excepthook
    listener = Listener()

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        shown(kind, error, trace)
        # The coordinator may be what has failed, and then its board never answers.
        limit_s = heartbeat_timeout_s + GRACE_S
        _within(limit_s, _tell, error, listener.heard, heartbeat_timeout_s)
        _end(130 if issubclass(kind, KeyboardInterrupt) else 1)

    def end() -> None:
        listener.ends.set()
        listener.join()

    sys.excepthook = hook
    atexit.register(end)
    listener.start()
    watching = threading.Thread(
        target=listener.watch, args=(heartbeat_timeout_s / 4,), daemon=True
    )
    watching.start()


def _tell(error: BaseException, heard: threading.Event, timeout_s: float) -> None:
    """Posts this failure, or waits to hear whose it is a consequence of."""
    text = "".join(traceback.format_exception_only(error)).strip()[:500]
    if not LOST.search(text):
        _post(FIRST, json.dumps({"rank": jax.process_index(), "text": text}))
    elif not heard.wait(timeout_s):
        _say("a peer has gone without a word: it was killed, or its link is down.")
    if jax.process_index() == 0:  # ends last, since the board ends with it
        _wait_until_noticed()


def _wait_until_noticed() -> None:
    """Waits until all other processes have heard of the first failure."""
    end = time.monotonic() + GRACE_S
    while time.monotonic() < end and len(board.posted(NOTICED)) < (
        jax.process_count() - 1
    ):
        time.sleep(0.1)


def _post(key: str, text: str) -> None:
    """Posts, unless somebody else was first or the board is gone."""
    try:
        board.post(key, text)
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            _say(NO_ANSWER)


def _say(text: str) -> None:
    """One line, in one piece."""
    line = f"jaxdp: rank {jax.process_index()} of {jax.process_count()}: {text}\n"
    print(line, end="", file=sys.stderr, flush=True)


def _within(seconds: float, function: Any, *arguments: Any) -> None:
    """Calls a function that may not return, and goes on without it."""
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    thread.join(seconds)


def _end(code: int) -> None:
    """Ends the process at once: JAX would wait for the others."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
