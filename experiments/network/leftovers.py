"""Names of namespaces, and the end of those whose process has died.

A process that is killed cleans up nothing. Names hold the number of the process, so
that the next one to build hosts finds them and knows that nobody uses them.
"""

import contextlib
import os
import pathlib
import re
import shutil
import signal
from collections.abc import Collection

from experiments.network import commands

FILES = pathlib.Path("/etc/netns")  # FILES/NAME/hosts is /etc/hosts in NAME
NAMES = re.compile(r"jaxdp-(\d+)-(\d+)-\w+")


def name(network: int, member: str) -> str:
    """How a namespace of this process is called.

    Args:
        network: Numbers the networks of this process.
        member: Which of its namespaces.
    """
    return f"jaxdp-{os.getpid()}-{network}-{member}"


def existing() -> list[str]:
    """All namespaces with such names, and those of which only files are left."""
    listed = commands.run("ip netns list", check=False).split()
    files = [path.name for path in FILES.glob("jaxdp-*")]
    return sorted({each for each in [*listed, *files] if NAMES.fullmatch(each)})


def remove_dead(own: Collection[str]) -> None:
    """Removes what dead processes have left.

    Args:
        own: Names that are to be used now: a dead process had this one's number, if
            they exist.
    """
    for each in existing():
        match = NAMES.fullmatch(each)
        if each in own or (match and not _lives(int(match[1]))):
            remove(each)


def remove(namespace: str) -> None:
    """Ends all that runs in a namespace, and removes it with its files."""
    running = commands.run(f"ip netns pids {namespace}", check=False)
    for process in map(int, running.split()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    commands.run(f"ip netns del {namespace}", check=False)
    shutil.rmtree(FILES / namespace, ignore_errors=True)


def _lives(process: int) -> bool:
    """Whether there is a process of that number."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
