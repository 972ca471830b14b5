"""Schedules run in NumPy: the reference semantics of all collectives."""

from collections.abc import Iterator

import numpy as np

from jaxdp.schedule.data import Schedule


def simulate(schedule: Schedule, contributions: np.ndarray) -> Iterator[np.ndarray]:
    """Runs a schedule in NumPy: the reference semantics, in the order of additions.

    Args:
        schedule: The schedule to run.
        contributions: `[devices, chunks, ...]`, what each device starts with. Sums are
            made in its dtype.

    Yields:
        `[devices, chunks, ...]`: the buffers before the first round, then after each.
    """
    buffers = np.array(contributions)
    yield buffers.copy()
    for round_ in schedule.rounds:
        before = buffers.copy()
        for transfer in round_.transfers:
            (sources, targets), chunks = np.array(transfer.pairs).T, [*transfer.chunks]
            moved = before[sources, chunks]
            if transfer.op == "add":  # targets of a transfer are unique
                moved = buffers[targets, chunks] + moved
            buffers[targets, chunks] = moved
        yield buffers.copy()
