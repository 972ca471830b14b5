"""Paired timing: two programs in turn, in one run, compared by the median ratio.

Machines drift, and forced host devices share cores, so absolute times say little; the
ratio of neighbouring runs says more.
"""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """One comparison.

    Attributes:
        name: What is compared.
        ours_ms: Median time of ours.
        theirs_ms: Median time of the program written by hand.
        pairs: How many pairs of runs were counted.
        ratio: Median of the ratios of neighbouring runs, ours / theirs.
        quartiles: First and third quartile of those ratios.
        limit: The ratio that must not be passed.
    """

    name: str
    ours_ms: float
    theirs_ms: float
    pairs: int
    ratio: float
    quartiles: tuple[float, float]
    limit: float

    @property
    def holds(self) -> bool:
        """Whether the median ratio keeps to the limit."""
        return self.ratio <= self.limit


def compare(
    name: str,
    ours: Callable[[], Any],
    theirs: Callable[[], Any],
    *,
    limit: float,
    seconds: float,
    renew: Callable[[], Any] = lambda: None,
) -> Pair:
    """Times both in turn, the first of each pair alternating.

    Args:
        name: What is compared.
        ours: Runs our program once and returns its arrays.
        theirs: The same for the program written by hand.
        limit: The ratio that must not be passed.
        seconds: How long to go on; at least 20 pairs are counted, after three that are
            not.
        renew: Called before every tenth pair: gives both programs new arrays.

    Returns:
        Medians in milliseconds and the ratio.
    """
    times: tuple[list[float], list[float]] = ([], [])
    begin = time.perf_counter()
    renew()
    for repeat in itertools.count(-3):
        if repeat >= 20 and time.perf_counter() - begin > seconds:
            break
        if repeat % 10 == 0:
            renew()
        order = (0, 1) if repeat % 2 else (1, 0)
        for which in order:
            start = time.perf_counter()
            jax.block_until_ready((ours, theirs)[which]())
            if repeat >= 0:
                times[which].append(time.perf_counter() - start)
    ratios = [a / b for a, b in zip(*times, strict=True)]
    first, _, third = statistics.quantiles(ratios, n=4)
    return Pair(
        name=name,
        ours_ms=1e3 * statistics.median(times[0]),
        theirs_ms=1e3 * statistics.median(times[1]),
        pairs=len(ratios),
        ratio=statistics.median(ratios),
        quartiles=(first, third),
        limit=limit,
    )
