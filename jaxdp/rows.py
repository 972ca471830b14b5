"""Rows out of several arrays, by rank: the cheapest way for each case.

Rows that lie together are one slice. A row that devices take from different arrays is
selected among a slice of each. Where many rows come from many arrays, the arrays are
concatenated and the rows looked up, which copies twice but reads each row once.

Why this way: on CPUs selecting among a few single rows is quicker, because a lookup
takes element by element: a ring of 4 forced devices and 16 MiB took 26 ms, and 32 ms by
a lookup. On GPUs selecting among N would read N times as much. Processes on CPUs have a
link each but share the memory, so there every device has a branch of its own that
copies each row once: a ring of 4 x 16 MiB at 400 Mbit/s took 537 ms, and 552 ms by a
lookup.
"""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdp.lookup import looked_up
from jaxdp.mesh import across_cpu_processes
from jaxdp.plan import Read

MOST_ORDERS = 256  # entries of a table for which a program may hold a branch each
MOST_SLICES = 64  # of a program that selects, on a CPU
MOST_PIECES = 8  # slices that are put together, where each row is read once


class Source(NamedTuple):
    """An array `[rows, length]` that rows are read from.

    Attributes:
        array: The array.
        first: The number of its first row.
        done: Applied to what is read.
    """

    array: jax.Array
    first: int = 0
    done: Callable[[jax.Array], jax.Array] = lambda rows: rows


class _Piece(NamedTuple):
    """Columns that are read together.

    Attributes:
        read: `[trips, devices, 1]`, the first of them.
        columns: How many; 1 if devices read from several sources.
        sources: Which.
    """

    read: Read
    columns: int
    sources: list[int]


def picked(
    sources: Mapping[int, Source], read: Read, rank: jax.Array, trip=None
) -> jax.Array:
    """Reads `[columns, length]`; devices that read nothing get anything.

    Args:
        sources: By number.
        read: Numbers of sources, and rows in them.
        rank: Of this device.
        trip: Of the loop around it; None if there is none.
    """
    pieces = _pieces(read)
    numbers = sorted({number for piece in pieces for number in piece.sources})
    pick = functools.partial(_together, sources, pieces, rank, trip)
    if read.value.shape[2] == 1 and len(numbers) <= MOST_PIECES:
        return pick()
    once = all(len(piece.sources) == 1 for piece in pieces)
    if once and len(pieces) <= MOST_PIECES:
        return pick()
    arrays = [sources[number].done(sources[number].array) for number in numbers]
    table = _table(sources, numbers, read)
    look_up = functools.partial(_looked_up, arrays, table, rank, trip)
    if across_cpu_processes():
        if trip is None and table.size <= MOST_ORDERS:
            return lax.switch(rank, [_order(row) for row in table[0]], arrays)
        return look_up()
    slices = sum(len(piece.sources) for piece in pieces)
    if slices <= MOST_SLICES and len(arrays) == sum(len(array) for array in arrays):
        return lax.platform_dependent(cpu=pick, default=look_up)
    return look_up()


def _pieces(read: Read) -> list[_Piece]:
    """Cuts the columns into runs that one slice reads on every device."""
    pieces = []
    for column in range(read.value.shape[2]):
        value, row = read.value[..., column], read.row[..., column]
        found = sorted(set(value[value >= 0].tolist()))
        if pieces and len(found) == 1 and pieces[-1].sources == found:
            before, width = pieces[-1].read, pieces[-1].columns
            follows = np.where(value >= 0, row - width, -1)
            if np.array_equal(follows, before.row[..., 0]):
                pieces[-1] = pieces[-1]._replace(columns=width + 1)
                continue
        pieces.append(_Piece(Read(value[..., None], row[..., None]), 1, found))
    return pieces


def _together(sources, pieces: list[_Piece], rank, trip) -> jax.Array:
    """The pieces, one below the other."""
    rows = [_selected(sources, piece, rank, trip) for piece in pieces]
    if len(rows) == 1:
        return rows[0]
    dtype = _widest(rows)
    return jnp.concatenate([row.astype(dtype) for row in rows])


def _selected(sources, piece: _Piece, rank, trip) -> jax.Array:
    """One piece: a slice, or one of several, by rank and trip."""
    slices = []
    for number in piece.sources:
        source, own = sources[number], piece.read.value == number
        starts = np.where(own, piece.read.row - source.first, -1)
        block = _block(source.array, starts, piece.columns, rank, trip)
        slices.append(source.done(block))
    if len(slices) == 1:
        return slices[0]
    which = np.searchsorted(piece.sources, piece.read.value)
    which = np.where(piece.read.value >= 0, which, -1)
    dtype = _widest(slices)
    slices = [x.astype(dtype) for x in slices]
    return lax.select_n(jnp.asarray(looked_up(which, rank, trip)), *slices)


def _block(array, starts: np.ndarray, rows: int, rank, trip) -> jax.Array:
    """So many rows, from where a table says."""
    found = np.unique(starts[starts >= 0])
    if len(found) == 1:
        start = int(found[0])
        return array if rows == array.shape[0] else array[start : start + rows]
    return lax.dynamic_slice_in_dim(
        array,
        looked_up(starts, rank, trip),
        rows,
        allow_negative_indices=False,
    )


def _table(sources, numbers: list[int], read: Read) -> np.ndarray:
    """Rows of all arrays, counted through."""
    table, end = np.full(read.row.shape, -1), 0
    for number in numbers:
        source = sources[number]
        own = read.value == number
        table[own] = read.row[own] - source.first + end
        end += source.array.shape[0]
    return table


def _looked_up(arrays: list[jax.Array], table: np.ndarray, rank, trip) -> jax.Array:
    """Rows of the concatenated arrays."""
    dtype = _widest(arrays)
    array = jnp.concatenate([a.astype(dtype) for a in arrays])
    rows = jnp.atleast_1d(looked_up(table, rank, trip))  # of one column: a number
    return jnp.take(array, rows, axis=0, mode="clip")


def _order(rows: np.ndarray) -> Callable[[list[jax.Array]], jax.Array]:
    """Puts rows of the arrays, counted through all of them, into this order."""

    def ordered(arrays):
        dtype = _widest(arrays)
        found = [row[None].astype(dtype) for array in arrays for row in array]
        return jnp.concatenate([found[max(i, 0)] for i in rows])

    return ordered


def _widest(arrays: list[jax.Array]) -> np.dtype:
    """The dtype that holds them all exactly."""
    return max((array.dtype for array in arrays), key=lambda dtype: dtype.itemsize)
