"""The processes of one attempt: started together, waited for, ended together."""

import contextlib
import pathlib
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, NamedTuple

from jaxdp.launch import sweep
from jaxdp.launch.output import Output

KILLED_S = 10.0  # a process that outlives SIGKILL for so long waits in the kernel
FLUSHED_S = 2.0  # after which what a dead process's pipe still holds is given up


class End(NamedTuple):
    """How a process ended.

    Attributes:
        rank: Which one.
        returncode: Its exit code; negative, the number of the signal that killed it.
        after_s: When, after the start of the attempt.
        asked: Whether the launcher had begun to end the group.
    """

    rank: int
    returncode: int
    after_s: float
    asked: bool


class Interrupt(NamedTuple):
    """A signal to the launcher, which goes on to all processes."""

    number: int


class Outcome(NamedTuple):
    """What became of an attempt.

    Attributes:
        ends: Of the processes, in the order in which they ended.
        stopped: Ranks that were stopped (SIGSTOP, a debugger) when another one failed.
        interrupt: The number of the signal that ended it; None if none did.
        timed_out: Whether it was ended because it took too long.
    """

    ends: Sequence[End]
    stopped: frozenset[int]
    interrupt: int | None
    timed_out: bool

    @property
    def failed(self) -> bool:
        """Whether a process failed by itself."""
        ended = self.interrupt is not None or self.timed_out
        return not ended and any(end.returncode for end in self.ends)


Events = queue.SimpleQueue[End | Interrupt]


class Group:
    """Processes, each in a session of its own."""

    def __init__(
        self,
        events: Events,
        output: Output,
        cookie: str,
        grace_s: float,
        on_failure: Callable[[End], None],
    ):
        """Makes an empty group.

        Args:
            events: Brings signals to the launcher; ends of processes are added.
            output: Prints what they print.
            cookie: What their environments hold.
            grace_s: From asking a process to end until killing it.
            on_failure: Called when a process has failed and others are to be ended.
        """
        self._events, self._output = events, output
        self._on_failure = on_failure
        self._cookie, self._grace_s = cookie, grace_s
        self._processes: list[subprocess.Popen] = []
        self._followers: list[threading.Thread] = []
        self._ends: list[End] = []
        self._stopped: frozenset[int] = frozenset()
        self._start_s = time.monotonic()
        self._ending = False
        self._kill_at = self._give_up_at = float("inf")
        self._interrupt: int | None = None
        self._timed_out = False

    def run(
        self,
        command: Sequence[str],
        environments: Iterable[Mapping[str, str]],
        watcher: IO[str],
        deadline: float,
    ) -> Outcome:
        """Starts one process per environment, and waits until all have ended.

        Args:
            command: Of every process.
            environments: By rank.
            watcher: Is told which process groups there are.
            deadline: When all are ended, by `time.monotonic`.

        Raises:
            OSError: A process cannot be started.
        """
        try:
            for rank, environment in enumerate(environments):
                self._start(rank, command, environment)
                with contextlib.suppress(BrokenPipeError):  # somebody has killed it
                    print(*self._groups(), file=watcher, flush=True)
            while len(self._ends) < len(self._processes):
                self._turn(deadline)
        finally:
            sweep.kill(self._groups(), self._cookie)
            for follower in self._followers:
                follower.join(FLUSHED_S)
        return Outcome(self._ends, self._stopped, self._interrupt, self._timed_out)

    def _start(
        self, rank: int, command: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._processes.append(process)
        self._followers.append(self._output.follow(rank, process.stdout))  # type: ignore[arg-type]

        def wait():
            returncode = process.wait()
            after_s = time.monotonic() - self._start_s
            self._events.put(End(rank, returncode, after_s, self._ending))

        threading.Thread(target=wait, daemon=True).start()

    def _turn(self, deadline: float) -> None:
        """Waits for what happens next, and acts on it."""
        due = min(self._give_up_at, self._kill_at if self._ending else deadline)
        try:
            wait_s = min(max(due - time.monotonic(), 0), 3600)
            event = self._events.get(timeout=wait_s)
        except queue.Empty:
            self._is_due(deadline)
            return
        if isinstance(event, End):
            self._ends.append(event)
            if event.returncode and not self._ending and self._alive():
                self._on_failure(event)
                self._end(signal.SIGTERM)
        elif self._interrupt is None:
            self._interrupt = event.number
            unheard = event.number == signal.SIGPIPE  # which Python ignores
            self._end(signal.SIGTERM if unheard else event.number)
        elif event.number == signal.SIGINT:  # the second Ctrl-C
            self._kill_at = time.monotonic()

    def _is_due(self, deadline: float) -> None:
        """Does what was to be done by now."""
        now = time.monotonic()
        if now >= self._give_up_at:
            alive = [r for r, p in enumerate(self._processes) if p.poll() is None]
            raise RuntimeError(
                f"launch got no end of ranks {alive} within {KILLED_S:.0f} s of "
                "SIGKILL. A process ends then unless it waits in the kernel, for a "
                "disk or a driver. Look at them with ps -o pid,stat,wchan."
            )
        if now >= self._kill_at:
            self._signal(signal.SIGKILL, self._alive())
            self._kill_at = float("inf")
            self._give_up_at = now + KILLED_S
        elif now >= deadline and not self._ending:
            self._timed_out = True
            self._end(signal.SIGTERM)

    def _end(self, number: int) -> None:
        """Asks all processes to end; those that are stopped cannot hear it."""
        self._ending = True
        alive = self._alive()
        self._stopped |= {r for r in alive if is_stopped(self._processes[r].pid)}
        self._kill_at = time.monotonic() + self._grace_s
        self._signal(number, alive - self._stopped)
        self._signal(signal.SIGKILL, self._stopped)

    def _signal(self, number: int, ranks: Iterable[int]) -> None:
        for rank in ranks:
            sweep.signal_group(self._processes[rank].pid, number)

    def _alive(self) -> frozenset[int]:
        running = (r for r, p in enumerate(self._processes) if p.returncode is None)
        return frozenset(running)

    def _groups(self) -> list[int]:
        """Process groups: each process leads one, which bears its number."""
        return [process.pid for process in self._processes]


def is_stopped(process: int) -> bool:
    """Whether a process is stopped; always False where there is no `/proc`."""
    try:
        status = pathlib.Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    state, *_ = status.rpartition(")")[2].split()  # before it stands any name
    return state in "tT"
