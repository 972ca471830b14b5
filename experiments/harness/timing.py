"""Times variants against each other, interleaved in one run.

A machine's speed drifts. Variants that take turns drift together, so their ratio is
worth more than either time.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from experiments.harness import devices

REPEATS = 20
WARM_UP = 2


class Timing(NamedTuple):
    """Median and quartiles of the repeats, in milliseconds."""

    median_ms: float
    low_ms: float  # a quarter of the repeats are faster
    high_ms: float  # a quarter of the repeats are slower
    label: str  # what the times are worth


def interleaved(
    variants: Mapping[str, Callable[[], Any]],
    repeats: int = REPEATS,
    on_repeat: Callable[[], Any] = lambda: None,
) -> dict[str, Timing]:
    """Times every variant `repeats` times, in turns.

    Args:
        variants: Functions whose results are waited for.
        repeats: Measured calls of each, at least 2.
        on_repeat: Called after every turn: progress.
    """
    for variant in variants.values():
        for _ in range(WARM_UP):
            jax.block_until_ready(variant())
    seconds = {name: [] for name in variants}
    names = list(variants)
    for _ in range(repeats):
        for name in names:
            start = time.perf_counter()
            jax.block_until_ready(variants[name]())
            seconds[name].append(time.perf_counter() - start)
        names.reverse()  # nobody always follows the same variant
        on_repeat()
    label = f"median and quartiles of {repeats} repeats, in turns; {devices.label()}"
    return {name: _summary(times, label) for name, times in seconds.items()}


def _summary(seconds: list[float], label: str) -> Timing:
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Timing(1e3 * median, 1e3 * low, 1e3 * high, label)
