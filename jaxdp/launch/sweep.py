"""Kills what a launcher has started; run by its path, also when the launcher is gone.

A launcher that is killed with SIGKILL can do nothing any more, so a process of this
file waits in a session of its own, with its standard input as the sign of life: when
that closes without a word, the launcher has died. It needs 10 ms and only modules that
Python has loaded anyway.

Process groups alone would miss a child's child in another session. On Linux all
processes inherit a cookie in their environment, and it is looked for in `/proc`.
"""

import contextlib
import os
import pathlib
import signal
import sys
import time
from collections.abc import Iterable

COOKIE = "JAXDP_LAUNCH"  # variable that all processes of a launcher inherit
DONE = "done"  # what a launcher says that has ended all processes itself
PAUSE_S = 0.02  # between two looks for what was just being started
LOOKS = 250  # at most: a process that waits in the kernel outlives even SIGKILL


def kill(groups: Iterable[int], cookie: str) -> None:
    """Kills process groups, and every process that has inherited a cookie.

    Args:
        groups: Of processes; those that have ended are no error.
        cookie: What the variable `COOKIE` holds in the processes' environments.
    """
    for group in groups:
        signal_group(group, signal.SIGKILL)
    quiet = 0
    for _ in range(LOOKS):
        found = having(cookie)
        for process in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        quiet = 0 if found else quiet + 1
        if quiet == 2:  # what was forked during the first look is found by the second
            return
        time.sleep(PAUSE_S)


def signal_group(group: int, number: int) -> None:
    """Sends a signal to a process group, unless it is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def having(cookie: str) -> list[int]:
    """Processes whose environment holds a cookie; zombies have none any more."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if cookie.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def watch(cookie: str) -> None:
    """Waits until the launcher ends; if it has not said `DONE`, kills its processes."""
    groups: list[int] = []
    for line in sys.stdin:  # a line names all process groups there are
        if line.strip() == DONE:
            return
        groups = [int(group) for group in line.split()]
    kill(groups, cookie)


if __name__ == "__main__":
    watch(sys.argv[1])
