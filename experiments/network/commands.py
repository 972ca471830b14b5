"""Runs `ip` and `tc`, and says what they said."""

import os
import shutil
import subprocess

TOOLS = ("ip", "tc")
PLACES = f"{os.environ.get('PATH', os.defpath)}{os.pathsep}/usr/sbin{os.pathsep}/sbin"
TIMEOUT_S = 20.0


def absent() -> list[str]:
    """The tools that are not installed."""
    return [tool for tool in TOOLS if not shutil.which(tool, path=PLACES)]


def path(tool: str) -> str:
    """Where a tool is: often outside the PATH of a user."""
    return shutil.which(tool, path=PLACES) or tool


def run(command: str, check: bool = True, given: str = "") -> str:
    """Runs one command and returns what it printed.

    Args:
        command: Words, parted by spaces; the first is one of `TOOLS`.
        check: Whether a failure is an error.
        given: What it reads.

    Raises:
        RuntimeError: It failed.
    """
    tool, *arguments = command.split()
    ended = subprocess.run(
        [path(tool), *arguments],
        input=given,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        start_new_session=True,  # Ctrl-C must not end it half way
    )
    if check and ended.returncode:
        said = ended.stderr.strip() or f"exit code {ended.returncode}"
        raise RuntimeError(f"`{command}` was refused: {said}")
    return ended.stdout
