"""Steps of real processes against PyTorch's, as benchmarks; see `distributing`."""

import functools
from collections.abc import Iterator

from benchmarks import distributing
from benchmarks.case import Case
from benchmarks.rows import Row


def cases() -> Iterator[Case]:
    """All models and designs, on 2 and on 4 processes."""
    for count in (2, 4):
        yield Case(
            name=f"step / DistributedDataParallel, N = {count}",
            group="pytorch",
            run=functools.partial(measured, count),
            missing=distributing.missing,
        )


def measured(count: int, name: str, seconds: float) -> Iterator[Row]:
    """Prints what distributing costs; the rows are the plain ratios of steps.

    They have no limit: what is promised is that distributing costs no more, and the
    ratio compares the code that XLA and PyTorch run on one CPU, too.

    Args:
        count: How many processes.
        name: Of the benchmark; the rows say model and design.
        seconds: For each model; at least 20 blocks of steps.
    """
    costs = distributing.rows(seconds, [count])
    distributing.show(costs)
    for cost in costs:
        first, median, third = cost.ratio
        yield Row(
            name=f"{cost.design} {name}, {cost.model}",
            unit="ratio",
            value=median,
            quartiles=(first, third),
            repeats=cost.blocks,
            ours_ms=cost.ours_ms[1],
            theirs_ms=cost.theirs_ms[1],
        )
