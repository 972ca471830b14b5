"""The tests that need no accelerator, run beside one."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
# Those that say most in half a minute.
FILES = (
    *("schedule", "algorithms", "executor", "mesh", "data", "buckets", "cost"),
    *("program_hlo", "program_traffic", "program_timeline", "targets_hardware"),
)
TINY_FILES = ("targets_hardware",)
NEEDED = ("pytest", "hypothesis")
COUNTED = ("passed", "failed", "error", "skipped")
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}


def run(tiny: bool, limit_s: float) -> dict[str, Any]:
    """A row with what passed and failed, or why nothing ran.

    Args:
        tiny: One file.
        limit_s: Tests that are not done by then are stopped.
    """
    names = TINY_FILES if tiny else FILES
    row = {"files": len(names), **dict.fromkeys(COUNTED, 0), "why": ""}
    if absent := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        return row | {"why": f"not run: {' and '.join(absent)} not installed"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"tests/{name}_test.py" for name in names]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=max(limit_s, 1.0),
        )
    except subprocess.TimeoutExpired:
        return row | {"why": f"stopped after {limit_s:.0f} s"}
    row |= counted(done.stdout)
    if done.returncode:
        row["why"] = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
    return row


def counted(output: str) -> dict[str, int]:
    """The counts in the last line of pytest."""
    last = output.strip().rpartition("\n")[2]
    return {
        kind: int(found[1])
        for kind in COUNTED
        if (found := re.search(rf"(\d+) {kind}", last))
    }
