"""Paired timing: two programs in turn, in one run, compared by the median ratio.

Machines drift, and forced host devices share cores, so absolute times say little; the
ratio of neighbouring runs says more.
"""

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.rows import Row


def compare(
    name: str,
    ours: Callable[[], Any],
    theirs: Callable[[], Any],
    *,
    seconds: float,
    limit: float | None = None,
    renew: Callable[[], Any] = lambda: None,
) -> Row:
    """Times both in turn, the first of each pair alternating.

    Args:
        name: What is compared.
        ours: Runs our program once and returns its arrays.
        theirs: The same for what it is compared with.
        seconds: How long to go on; at least 20 pairs are counted, after three that are
            not.
        limit: The ratio that must not be passed; None if nothing is promised.
        renew: Called before every tenth pair: gives both programs new arrays.

    Returns:
        The ratio ours / theirs: median and quartiles of neighbouring runs.
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
    return Row.of(
        name,
        "ratio",
        ratios,
        limit=limit,
        ours_ms=1e3 * statistics.median(times[0]),
        theirs_ms=1e3 * statistics.median(times[1]),
    )


def compare_steps(
    name: str,
    steps: tuple[Callable, Callable],
    starts: tuple[Any, Any],
    *,
    seconds: float,
    limit: float | None,
) -> Row:
    """Compares two steps that donate their states.

    Args:
        name: What is compared.
        steps: Ours and the other, `state -> (state, arrays)`.
        starts: Their first states.
        seconds: How long to go on.
        limit: The ratio that must not be passed; None if nothing is promised.
    """
    states: list[Any] = [None, None]
    order = [0, 1]

    def renew():
        # A state is updated in place, step after step, and where it happens to lie in
        # memory changes a step by up to 7 %, for either program.
        states[:] = [None, None]
        for which in order:
            states[which] = jax.tree.map(jnp.copy, starts[which])
        order.reverse()

    def run(which):
        states[which], arrays = steps[which](states[which])
        return arrays

    return compare(
        name,
        lambda: run(0),
        lambda: run(1),
        seconds=seconds,
        limit=limit,
        renew=renew,
    )
