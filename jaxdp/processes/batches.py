"""Batches of processes that each have their own rows: sizes and ends, agreed first."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from jaxdp.processes.agreement import STEP_TIMEOUT_S, agree

Batch = TypeVar("Batch")


def together(
    batches: Iterable[Batch], timeout_s: float = STEP_TIMEOUT_S
) -> Iterator[Batch]:
    """Batches while all processes have another: all stop at once.

    A process with one batch more would wait for ever in the next step. What is left
    over is not trained on; `jaxdp.Sampler` gives every process equally many.

    Cost: one agreement per batch, see `jaxdp.processes.agree`.

    Args:
        batches: Of this process.
        timeout_s: How long to wait for the others' next batch, in seconds.

    Yields:
        The batches of this process, as many as the process with fewest has.

    Raises:
        TimeoutError: A process did not come; names all that did not.

    Example:
        >>> import jaxdp
        >>> list(jaxdp.together([1, 2, 3]))  # one process
        [1, 2, 3]
    """
    for batch, goes_on in _told(batches):
        if not all(agree("another batch", goes_on, timeout_s)):
            return
        yield batch


def _told(batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """The batches, each with True, and then one False."""
    for batch in batches:
        yield batch, True
    yield None, False


def agreed_rows(
    rows: int, workers: Sequence[int], ranks: Sequence[int], remainder: str, parts: int
) -> int:
    """Rows per working device, once all processes have said how many they have.

    Args:
        rows: What this process has.
        workers: By rank, how many devices of each process take rows.
        ranks: The processes that take part.
        remainder: "error", "pad" or "drop".
        parts: Micro-batches: rows per device are a multiple of it.

    Returns:
        What all have per device; with "pad" the most, and with "drop" the fewest.

    Raises:
        ValueError: With "error", processes have other numbers of rows per device.
        TimeoutError: A process did not come; names all that did not.
    """
    everyone = agree("rows of a batch", rows, STEP_TIMEOUT_S, ranks=ranks)
    working = [*zip(ranks, everyone, workers, strict=True)]
    working = [given for given in working if given[2]]
    slices = [has / (count * parts) for _, has, count in working]
    if remainder == "pad":
        return parts * math.ceil(max(slices))
    if remainder == "drop" and min(slices) >= 1:
        return parts * int(min(slices))
    if len({*slices}) == 1 and slices[0] >= 1 and slices[0].is_integer():
        return parts * int(slices[0])
    listed = ", ".join(
        f"rank {rank} has {has} rows for {count} device(s)"
        for rank, has, count in working
    )
    micro = f" and {parts} micro-batches on each" if parts > 1 else ""
    raise ValueError(
        f"shard_batch got a batch of which {listed}{micro}, with "
        f"remainder={remainder!r}. Every device takes equally many rows, at least "
        f"{parts}, on all processes. Give all processes batches of one size that their "
        "devices divide, as jaxdp.Sampler does, or use remainder='pad', which pads to "
        "the largest, or 'drop', which cuts to the smallest."
    )
