"""How a process that fails ends, and what it tells the others.

Left to itself, a failed process waits in JAX's shutdown for processes that wait for it
in a collective. So it posts what happened and ends at once; the others find their
connections closed, and say on whose account.
"""

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

FOLDER = "jaxdp/failures"
LINGER_S = 3.0  # for others to read what process 0 keeps for them
# What a process says whose peer has gone.
LOST = re.compile(r"gloo|connection (closed|reset)|broken pipe|NCCL", re.IGNORECASE)


def install(heartbeat_timeout_s: float) -> None:
    """Lets uncaught exceptions end this process as the module says."""
    shown = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        shown(kind, error, trace)
        if not board.is_running():
            return
        # The coordinator may be what has failed, and then its board never answers.
        told = threading.Thread(target=_tell, args=(error, heartbeat_timeout_s))
        told.daemon = True
        told.start()
        told.join(2 * heartbeat_timeout_s + LINGER_S)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130 if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = hook


def _tell(error: BaseException, heartbeat_timeout_s: float) -> None:
    """Posts this failure, and prints whose came first."""
    rank = jax.process_index()
    text = "".join(traceback.format_exception_only(error)).strip()
    is_consequence = LOST.search(text) is not None
    try:
        said = {"text": text[:500], "consequence": is_consequence, "time": time.time()}
        board.post(f"{FOLDER}/{rank}", json.dumps(said))
        if is_consequence:
            _say(_first_cause(heartbeat_timeout_s))
        if rank == 0:  # ends last, since the board ends with it
            _wait_for_all(LINGER_S)
    except jax.errors.JaxRuntimeError:
        _say("rank 0, which coordinates, does not answer: look at its output first.")


def _first_cause(timeout_s: float) -> str:
    """Who failed for a reason of its own; JAX itself names those that say nothing."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        said = _failures()
        causes = [rank for rank in said if not said[rank]["consequence"]]
        if causes:
            first = min(causes, key=lambda rank: said[rank]["time"])
            return f"rank {first} failed first: {said[first]['text']}"
        time.sleep(0.1)
    return "a peer has gone without a word: it was killed, or its link is down."


def _wait_for_all(timeout_s: float) -> None:
    """Waits until all have failed too."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end and len(_failures()) < jax.process_count():
        time.sleep(0.1)


def _failures() -> dict[int, dict[str, Any]]:
    """What was posted, by rank."""
    return {int(rank): json.loads(said) for rank, said in board.posted(FOLDER).items()}


def _say(text: str) -> None:
    """One line, in one piece."""
    line = f"jaxdp: rank {jax.process_index()} of {jax.process_count()}: {text}\n"
    print(line, end="", file=sys.stderr, flush=True)
