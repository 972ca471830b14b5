"""Whether a host has the memory that an experiment is going to need."""

import pathlib

MEMORY = pathlib.Path("/proc/meminfo")
GIB = 2**30


def available_bytes() -> int | None:
    """What can be taken without swapping; None where it is not Linux that knows."""
    try:
        lines = MEMORY.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024 * int(found[0]) if found else None
