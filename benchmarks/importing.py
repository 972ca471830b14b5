"""How long `import jaxdp` takes, beside the imports of JAX, Flax and optax."""

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from benchmarks.case import Case
from benchmarks.rows import Row

LIBRARIES = "import jax, flax, optax"
LIMIT = 1.5


def cases() -> Iterator[Case]:
    """One: everything else is imported when it is used."""
    name = f"import jaxdp / {LIBRARIES}"
    yield Case(name=name, group="importing", run=compared)


def compared(name: str, seconds: float) -> Iterator[Row]:
    """Starts Python with each in turn, and divides the times of each pair.

    Args:
        name: Of the row.
        seconds: For which pairs are started, at least five.
    """
    ours_s, theirs_s, start = [], [], time.perf_counter()
    while len(ours_s) < 5 or time.perf_counter() - start < seconds:
        theirs_s.append(_started(LIBRARIES))
        ours_s.append(_started("import jaxdp"))
    yield Row.of(
        name,
        "ratio",
        [ours / theirs for ours, theirs in zip(ours_s, theirs_s, strict=True)],
        limit=LIMIT,
        ours_ms=1e3 * statistics.median(ours_s),
        theirs_ms=1e3 * statistics.median(theirs_s),
    )


def _started(code: str) -> float:
    """Seconds until a new interpreter has run the code."""
    start = time.perf_counter()
    command = [sys.executable, "-c", code]
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start
