"""Where the body of a loop finds what it reads, before anything is traced.

What a trip reads was there before the loop, or came in this trip, in the one before or
in an earlier one. Of those before, the last alone is carried, unless a trip reads
further back. A read that is handed what came in the trip before, and only at first
something from outside, is carried by itself and starts as that.
"""

from typing import NamedTuple

import numpy as np

from jaxdp.plan import Loop, Read

OUTSIDE, NOW, BEFORE, HANDED, EARLIER = range(5)
CARRIED = BEFORE, HANDED, EARLIER

Key = tuple[int, int, int]  # one of these, the value, and the read that is handed it


class Site(NamedTuple):
    """One read of the loop's body.

    Attributes:
        read: What it reads, by number in `keys`.
        keys: Where that is.
        start: What it reads in the first trip, from outside, if it is handed the rest.
    """

    read: Read
    keys: tuple[Key, ...]
    start: Read | None = None


def found_in(loop: Loop, read: Read, number: int, complete: bool = False) -> Site:
    """Finds where a read of the body finds what it reads.

    Args:
        loop: The loop.
        read: What is read in each trip.
        number: Of this read, different from those of the others.
        complete: Whether it reads complete chunks.
    """
    rows = {move.value: move.kind.rows for move in loop.moves}
    inside = np.isin(read.value, list(rows))
    made = np.ones(read.value.shape, int)  # rows that a trip makes of what is read
    for n, count in rows.items():
        made[read.value == n] = count
    trip = np.arange(loop.trips)[:, None, None]
    lag = np.where(inside, trip - read.row // made, -1)
    handed = _handed(rows, read, lag)
    # What is not finished yet cannot follow a finished chunk in one array.
    finished = {move.value for move in loop.moves if move.kind.complete}
    if handed is not None and (handed in finished) == complete:
        return _handed_on(read, (HANDED, handed, number))
    keys: list[Key] = []
    value, row = np.full(read.value.shape, -1), read.row.copy()
    for n in np.unique(read.value[read.value >= 0]).tolist():
        mine = read.value == n
        further = EARLIER if (lag[mine] > 1).any() else BEFORE
        for place, there in (
            (OUTSIDE, mine & ~inside),
            (NOW, mine & (lag == 0)),
            (further, mine & (lag > 0)),
        ):
            if there.any():
                value[there] = len(keys)
                keys.append((place, n, 0))
                if place in (NOW, BEFORE):
                    row[there] %= rows[n]
    return Site(Read(value, row), tuple(keys))


def _handed(rows: dict[int, int], read: Read, lag: np.ndarray) -> int | None:
    """The value that every trip after the first reads whole from the one before.

    Args:
        rows: How many each trip makes, of each value of the loop.
        read: What is read.
        lag: How many trips ago that came; -1 if from outside.
    """
    found = np.unique(read.value[1:][read.value[1:] >= 0]).tolist()
    if len(found) != 1 or found[0] not in rows:
        return None
    valid, columns = read.row[1:] >= 0, read.row.shape[2]
    place = np.where(valid, read.row[1:] % rows[found[0]], np.arange(columns))
    whole = columns == rows[found[0]] and (place == np.arange(columns)).all()
    follows = (lag[1:][valid] == 1).all() and (lag[0] < 0).all()
    return found[0] if whole and follows else None


def _handed_on(read: Read, key: Key) -> Site:
    """A read of a carried array as it is."""
    valid = read.value >= 0
    whole = np.where(valid, np.arange(read.row.shape[2]), -1)
    start = Read(read.value[:1], read.row[:1])
    return Site(Read(np.where(valid, 0, -1), whole), (key,), start)
