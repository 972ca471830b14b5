"""Starts a script or module in several processes: python -m jaxdp.launch -n 4 FILE."""

import argparse
import importlib.util
import pathlib
import sys
from collections.abc import Sequence

from jaxdp.launch import attempts, environment

DESCRIPTION = """\
Starts processes that jaxdp.initialize() joins, prints what they print with their rank
before each line, and ends them all when one fails: then it says which rank failed
first, how, and with which traceback. Nothing is left running, whatever happens.
"""
EPILOG = """\
Exit status: 0 if all processes ended with 0; else that of the rank that failed first
(128 and its number for a signal), 130 after Ctrl-C, 124 after --timeout-s, 2 for a
wrong command line, 1 if the system starts no more processes.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Launches what a command line asks for.

    Args:
        arguments: Of the command line; None takes those of the process.

    Returns:
        The exit status.
    """
    given = _parser().parse_args(arguments)
    try:
        shape = environment.shape(
            given.processes, given.devices_per_process, given.platform
        )
        limits = _limits(given)
        command = _command(given)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        return attempts.run(command, shape, limits)
    except (OSError, RuntimeError) as error:  # of the system: all it started is ended
        print(f"launch got no {shape.processes} processes: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxdp.launch",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("-n", "--processes", type=int, required=True, help="how many processes")
    add("--devices-per-process", type=int, help="default: 1")
    add(
        "--platform",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="auto: GPUs if this machine has any",
    )
    add(
        "--max-restarts",
        type=int,
        default=0,
        help="how often all are started again after a failure; JAXDP_RESTART counts",
    )
    add(
        "--grace-s",
        type=float,
        default=5.0,
        help="from asking a process to end until killing it (default: 5)",
    )
    add("--timeout-s", type=float, help="ends everything after so many seconds")
    add("-m", dest="module", action="store_true", help="run a module, as python -m")
    add("script", nargs="?", help="a Python file, or with -m a module")
    add("arguments", nargs=argparse.REMAINDER, help="of the script")
    return parser


def _limits(given: argparse.Namespace) -> attempts.Limits:
    """What the launcher puts up with, checked."""
    for name in ("max_restarts", "grace_s", "timeout_s"):
        value = getattr(given, name)
        if value is not None and not value >= 0:  # nor is not-a-number
            option = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"launch got {option} {value}. It must be a number of at least 0. "
                f"Leave {option} out for the default."
            )
    return attempts.Limits(given.max_restarts, given.grace_s, given.timeout_s)


def _command(given: argparse.Namespace) -> list[str]:
    """What each process runs."""
    script = given.script
    if not script:
        raise ValueError(
            "launch got no script. It starts a Python file or, with -m, a module. "
            "Write python -m jaxdp.launch -n 2 train.py, for example."
        )
    if given.module:
        package = script.partition(".")[0]
        if importlib.util.find_spec(package) is None:
            raise ValueError(
                f"launch got -m {script}, and there is no module {package!r} in "
                f"{pathlib.Path.cwd()} or among installed packages. Start from the "
                "folder that holds it, or install it."
            )
        return [sys.executable, "-m", script, *given.arguments]
    if not pathlib.Path(script).is_file():
        raise ValueError(
            f"launch got the script {script}, and there is no such file in "
            f"{pathlib.Path.cwd()}. Give the path of a Python file, or -m before a "
            "module."
        )
    return [sys.executable, script, *given.arguments]


if __name__ == "__main__":
    sys.exit(main())
