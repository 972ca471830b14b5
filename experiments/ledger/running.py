"""Runs experiments in processes of their own, and says how they ended.

What they print goes to a file each. None outlives this process: whatever ends it, an
exception or Ctrl-C, ends them first.
"""

import contextlib
import dataclasses
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from experiments.harness import show

COMMAND = (sys.executable, "-m", "experiments")
LIMIT_S = 3600.0  # after which an experiment counts as stuck
LAST_LINES = 8  # of what one has printed, in a message
POLL_S, PATIENCE_S = 0.2, 10.0


@dataclasses.dataclass(frozen=True)
class Job:
    """One experiment to run.

    Attributes:
        name: Of the experiment.
        options: Its command line.
        log: What it prints.
    """

    name: str
    options: Sequence[str]
    log: pathlib.Path


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a job ended.

    Attributes:
        seconds: It took.
        failure: What went wrong, with the last lines of its log; empty if nothing.
    """

    seconds: float
    failure: str


def run_all(
    jobs: Sequence[Job], at_once: int, limit_s: float = LIMIT_S
) -> dict[str, Ended]:
    """Runs jobs, so many at once; returns how each ended, by name."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    waiting, ended = [*jobs], {}
    active: list[_Running] = []
    with Progress(*columns, console=show.console) as bar:
        task = bar.add_task("", total=len(jobs))
        try:
            while waiting or active:
                while waiting and len(active) < at_once:
                    active.append(_Running(waiting.pop(0)))
                running = ", ".join(each.job.name for each in active)
                bar.update(task, description=running, completed=len(ended))
                time.sleep(POLL_S)
                for each in [each for each in active if each.over(limit_s)]:
                    active.remove(each)
                    ended[each.job.name] = each.end(limit_s)
                    _tell(each.job, ended[each.job.name])
            bar.update(task, description="", completed=len(ended))
        finally:
            for each in active:
                each.stop()
    return ended


class _Running:
    """A job that has started."""

    def __init__(self, job: Job):
        self.job, self._start = job, time.monotonic()
        job.log.parent.mkdir(parents=True, exist_ok=True)
        command = [*COMMAND, job.name, *job.options]
        with job.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def over(self, limit_s: float) -> bool:
        """Whether it has ended, or takes too long."""
        return self._process.poll() is not None or self._seconds() > limit_s

    def end(self, limit_s: float) -> Ended:
        """Says how it ended; stops it if it has not."""
        seconds, status = self._seconds(), self._process.poll()
        if status == 0:
            return Ended(seconds, "")
        self.stop()
        how = f"ended with status {status} after {seconds:.0f} s"
        if status is None:
            how = f"did not end within {limit_s:.0f} s"
        lines = self.job.log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = [line for line in lines if line.strip()][-LAST_LINES:]
        words = f"{how}; the last lines of {self.job.log}:"
        return Ended(seconds, "\n  ".join([words, *last]))

    def stop(self) -> None:
        """Interrupts it, as Ctrl-C does, so that it clears up; then ends it."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                try:
                    self._process.wait(PATIENCE_S)
                finally:  # also after a second Ctrl-C
                    self._process.kill()
        self._process.wait()

    def _seconds(self) -> float:
        return time.monotonic() - self._start


def _tell(job: Job, ended: Ended) -> None:
    """Prints a line when a job has ended."""
    how = "[red]failed[/]" if ended.failure else "ran"
    show.console.print(f"{job.name} {how}, {ended.seconds:.0f} s", highlight=False)
