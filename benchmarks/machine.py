"""Where and on which code a run happens: what is compared only with its like."""

import ctypes
import datetime
import os
import pathlib
import platform
import subprocess
from typing import Any

import jax

ROOT = pathlib.Path(__file__).parents[1]
CLASS = ("platform", "device_kind", "cpu", "cores", "jax")  # alike: comparable


def facts() -> dict[str, Any]:
    """The machine and what runs on it; starts JAX."""
    return {
        "jax": jax.__version__,
        "python": platform.python_version(),
        "platform": jax.default_backend(),
        "device_kind": jax.devices()[0].device_kind,
        "cores": cores(),
        "cpu": cpu(),
    }


def code() -> dict[str, Any]:
    """The commit and when it was made, None outside of git; and if it was changed.

    Files that git does not know do not count as changes.
    """
    commit, _, committed = _git("show", "-s", "--format=%H %cI").partition(" ")
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "commit": commit or None,
        "committed": utc(committed) if committed else None,
        "dirty": bool(changed),
    }


def utc(time: str) -> str:
    """A time in ISO 8601 as one of UTC, so that the order of texts is that of times."""
    moment = datetime.datetime.fromisoformat(time)
    return moment.astimezone(datetime.UTC).isoformat()


def now() -> str:
    """The time, likewise."""
    return datetime.datetime.now(datetime.UTC).isoformat()


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu() -> str:
    """The processor's model."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # no Linux
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2] for line in lines if line.startswith("model name")]
    return names[0].strip() if names else platform.machine()


def alike(run: dict[str, Any]) -> tuple[Any, ...]:
    """The machine class of a run: equal where rows can be compared."""
    return tuple(run[fact] for fact in CLASS)


def _git(*arguments: str) -> str:
    """What git answers; nothing outside of a checkout, or without git."""
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return asked.stdout.strip() if asked.returncode == 0 else ""


def keep_memory() -> bool:
    """Lets glibc keep what programs have given back, so that page faults are not timed.

    A CPU device asks for its temporaries in every run. If they are large, glibc returns
    them to the system each time, and a program with more of them, as a ring has beside
    `psum`, is timed by the system's pages.

    Returns:
        Whether that could be asked for; not of other libraries than glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # From malloc.h; more than 32 MiB is refused for the second.
    options = {-1: 2**30, -3: 2**25}  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
    return all([mallopt(*option) == 1 for option in options.items()])
