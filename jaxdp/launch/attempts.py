"""Attempts: a group of processes, started again when one of them has failed."""

import contextlib
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import IO, NamedTuple

from jaxdp.launch import environment, report, sweep
from jaxdp.launch.environment import Shape
from jaxdp.launch.group import End, Events, Group, Interrupt, Outcome
from jaxdp.launch.output import Output

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TIMED_OUT = 124  # the exit status, as of timeout(1)


class Limits(NamedTuple):
    """What a launcher puts up with.

    Attributes:
        max_restarts: How often the group is started again.
        grace_s: From asking a process to end until killing it.
        timeout_s: After which all is ended, restarts included; None for never.
    """

    max_restarts: int = 0
    grace_s: float = 5.0
    timeout_s: float | None = None


def run(command: Sequence[str], shape: Shape, limits: Limits) -> int:
    """Runs a command in several processes until they have ended well, or too often.

    Args:
        command: Of every process.
        shape: How many processes, and their devices.
        limits: Of restarts and times.

    Returns:
        0; else the status of the rank that failed first (128 and the number of a
        signal), 128 and the number of the signal that interrupted it, or 124 if it took
        longer than it may.

    Raises:
        OSError: A process cannot be started.
        RuntimeError: A process outlives SIGKILL.
    """
    events: Events = queue.SimpleQueue()
    cookie = uuid.uuid4().hex
    start = time.monotonic()
    deadline = float("inf") if limits.timeout_s is None else start + limits.timeout_s
    # As to a program whose reader has gone: `| head` ends everything.
    output = Output(sys.stdout, lambda: events.put(Interrupt(signal.SIGPIPE)))

    def on_failure(end: End) -> None:
        _say(report.notice(end, shape.processes, limits.grace_s))

    with _watched(cookie) as watcher, _signals(lambda n, _: events.put(Interrupt(n))):
        for attempt in range(limits.max_restarts + 1):
            group = Group(events, output, cookie, limits.grace_s, on_failure)
            port = environment.free_port()
            each = environment.environments(shape, attempt, cookie, port)
            outcome = group.run(command, each, watcher, deadline)
            if not outcome.failed:
                return _unfailed(outcome, limits)
            _say(report.describe(outcome, output.last))
            if attempt < limits.max_restarts:
                _say(
                    f"restart {attempt + 1} of {limits.max_restarts}: starts all "
                    f"{shape.processes} again, {time.monotonic() - start:.1f} s after "
                    "the launch."
                )
    return report.status(outcome, output.last)


def _unfailed(outcome: Outcome, limits: Limits) -> int:
    """The status of a group in which nothing failed by itself."""
    if outcome.interrupt is not None:
        _say(
            f"ended by {report.signal_name(outcome.interrupt)}: all processes are gone."
        )
        return 128 + outcome.interrupt
    if outcome.timed_out:
        _say(
            f"ended after --timeout-s {limits.timeout_s:g}: all processes are gone. "
            "Give more seconds if that was too few."
        )
        return TIMED_OUT
    return 0


def _say(text: str) -> None:
    """Prints to stderr, with a prefix as those of the ranks."""
    with contextlib.suppress(OSError):  # nobody reads it any more
        for line in text.splitlines():
            print(f"[launch] {line}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _watched(cookie: str) -> Iterator[IO[str]]:
    """Has everything with the cookie killed if this process is."""
    watcher = subprocess.Popen(
        [sys.executable, "-I", "-S", sweep.__file__, cookie],
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,  # what ends this process must not end it
    )
    assert watcher.stdin is not None
    try:
        yield watcher.stdin
    finally:
        with contextlib.suppress(BrokenPipeError), watcher.stdin:
            print(sweep.DONE, file=watcher.stdin, flush=True)
        watcher.wait()


@contextlib.contextmanager
def _signals(handler: Callable[[int, object], None]) -> Iterator[None]:
    """Handles signals, where Python can: in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handled = [*SIGNALS]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        handled.remove(signal.SIGHUP)  # under nohup, which outlives the terminal
    before = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
