"""Tables of rows, and how a program reads them: computed where a formula gives them.

An entry depends on the trip of a loop, on the rank and on the column. In a ring it is
(a rank + b trip + e column + c) mod m, so a program need not carry it: for 256 devices
that table would have 130,000 entries.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Formula(NamedTuple):
    """`base + stride * ((trip * b + rank * a + column * e + c) mod m)`; m = 0: no mod.

    Attributes:
        steps: b, a and e.
        c: What the entry at 0, 0, 0 would be.
        modulus: m.
        stride: What is common to all differences of entries.
        base: The smallest entry.
    """

    steps: tuple[int, int, int]
    c: int
    modulus: int
    stride: int
    base: int

    def at(self, *place):
        """The entry at `(trip, rank, column)`: numbers, or arrays that broadcast."""
        total = self.c
        for step, index in zip(self.steps, place, strict=True):
            if step:
                total = total + (index if step == 1 else step * index)
        if self.modulus and any(self.steps):
            total = _remainder(total, self.modulus)
        total = total if self.stride == 1 else self.stride * total
        return total + self.base if self.base else total


def formula(table: np.ndarray) -> Formula | None:
    """The formula of a table `[trips, devices, columns]`, or None if none is found.

    Entries of -1 may come out as anything.
    """
    places = np.argwhere(table >= 0)
    entries = table[tuple(places.T)]
    base = int(entries.min())
    stride = math.gcd(*(entries - base).tolist()) or 1
    values = (entries - base) // stride
    for modulus in _moduli(int(values.max()) + 1, table.shape):
        trip, rank, column = (
            _step(table, axis, base, stride, modulus) for axis in range(3)
        )
        steps = trip, rank, column
        c = int(values[0] - places[0] @ np.array(steps))
        if modulus:
            c %= modulus
        found = Formula(steps, c, modulus, stride, base)
        if (found.at(*places.T) == entries).all():
            return found
    return None


def looked_up(table: np.ndarray, rank: jax.Array, trip=None) -> jax.Array | int:
    """Entries `[columns]` of a table; a scalar, if there is one column only.

    Args:
        table: `[trips, devices, columns]`.
        rank: Of this device.
        trip: Which trip this is; None if there is one only.
    """
    one = table.shape[2] == 1
    found = formula(table)
    if found is not None:
        column: Any = 0 if one else jnp.arange(table.shape[2], dtype=jnp.int32)
        entries = found.at(0 if trip is None else trip, rank, column)
        return entries if one else jnp.broadcast_to(entries, column.shape)
    flat = np.maximum(table, 0).astype(np.int32).reshape(-1, table.shape[2])
    place = rank if trip is None else trip * table.shape[1] + rank
    (entries,) = lax.dynamic_slice_in_dim(flat, place, 1, allow_negative_indices=False)
    return entries[0] if one else entries


def _moduli(top: int, shape: tuple[int, ...]) -> Iterator[int]:
    """Which moduli to try: none, the number of different values, of devices."""
    return itertools.chain([0, top], {shape[1]} - {top})


def _step(table: np.ndarray, axis: int, base: int, stride: int, modulus: int) -> int:
    """How much entries differ from their neighbours along an axis; 0 if none have."""
    lower = np.moveaxis(table, axis, 0)[:-1]
    upper = np.moveaxis(table, axis, 0)[1:]
    both = np.argwhere((lower >= 0) & (upper >= 0))
    if not len(both):
        return 0
    place = tuple(both[0])
    step = int(upper[place] - lower[place]) // stride
    return step % modulus if modulus else step


def _remainder(total: Any, modulus: int) -> Any:
    """The remainder of numbers that are not negative, as all these are."""
    if isinstance(total, jax.Array):
        return lax.rem(total, jnp.asarray(modulus, total.dtype))
    return total % modulus
