"""Runs a schedule inside `shard_map` or `pmap`: one `ppermute` per transfer.

All devices run one program, so "the chunk this device sends now" is a table looked up
by rank. Python follows, per device and chunk, where the value lives: still in the
input, or in the array that an earlier transfer produced. So a chunk that was just
received is sent on without being stored and sliced again, and the output is written
once, at the end.

What travels: a device's own contribution in its own dtype, a partial sum in the
accumulation dtype (float32 or wider), a complete chunk in the output dtype. bfloat16
and narrower floats travel as bits, because XLA on CPU would widen them to float32.

Why this way: writing every arrival into the output by `dynamic_update_slice` cost a
copy of the whole buffer (N = 2, 16 MiB, forced CPU devices: 8.4 ms against 6.1 ms).
Processes on CPUs have a link each but share the memory, so there every device has a
branch of its own that copies each row once: a ring of 4 x 16 MiB at 400 Mbit/s took
537 ms, and 552 ms by a lookup, which copies twice.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdp.mesh import across_cpu_processes
from jaxdp.schedule import (
    Holdings,
    Schedule,
    Transfer,
    holdings,
    local_row,
    local_rows,
)

MOST_ORDERS = 256  # entries of a table for which a program may hold a branch each


def accumulation_dtype(dtype) -> np.dtype:
    """The dtype that sums of `dtype` are made in: float32 or wider."""
    if jnp.dtype(dtype).itemsize < 4:  # JAX promotes no 8-bit float by itself
        return jnp.dtype(jnp.float32)
    return jnp.promote_types(dtype, jnp.float32)


def execute(
    schedule: Schedule,
    chunks: jax.Array,
    axis_name: str,
    finish: Callable[[jax.Array], jax.Array] = lambda complete: complete,
) -> jax.Array:
    """Runs `schedule` over the devices of `axis_name`.

    Devices: the caller is inside `shard_map` or `pmap` over `axis_name`, which has
    `schedule.devices` devices.

    Args:
        schedule: A verified schedule.
        chunks: `[jaxdp.schedule.local_rows(schedule.starts), length]`, what this device
            starts with.
        axis_name: The mesh axis.
        finish: Applied elementwise, once, to every complete chunk where it became
            complete: a division, a cast.

    Returns:
        `[jaxdp.schedule.local_rows(schedule.ends), length]`: what `schedule.ends`
        places on this device, zeros elsewhere.
    """
    run = _Execution(schedule, chunks, axis_name, finish)
    for round_, held in zip(schedule.rounds, holdings(schedule), strict=False):
        run.advance(round_.transfers, held)
    return run.output()


@dataclasses.dataclass
class _Value:
    """An array of chunks, `[rows, length]`: the input, or what one transfer made."""

    array: jax.Array
    finished: jax.Array | None = None  # its complete chunks, after `finish`


class _Execution:
    """Where every chunk lives while a schedule runs.

    `location[device, chunk]` indexes `values`; 0 is the input.
    """

    def __init__(self, schedule, chunks, axis_name, finish):
        self.schedule: Schedule = schedule
        self.axis_name = axis_name
        self.finish: Callable[[jax.Array], jax.Array] = finish
        self.rank = lax.axis_index(axis_name)
        self.values = [_Value(chunks)]
        self.location = np.zeros((schedule.devices, schedule.chunks), int)

    def advance(self, transfers: tuple[Transfer, ...], held: Holdings) -> None:
        """Runs one round: everything is sent before anything is applied.

        `held` is what every chunk sums up before the round.
        """
        complete = [self._is_complete(transfer, held) for transfer in transfers]
        sent = [self._send(*pair) for pair in zip(transfers, complete, strict=True)]
        for transfer, done, arrived in zip(transfers, complete, sent, strict=True):
            targets = {target: chunk for _, target, chunk in transfer}
            if transfer.op == "add":
                own = self._read([targets])
                dtype = accumulation_dtype(own.dtype)
                arrived = arrived.astype(dtype) + own.astype(dtype)
            for target, chunk in targets.items():
                self.location[target, chunk] = len(self.values)
            self.values.append(_Value(arrived, arrived if done else None))

    def output(self) -> jax.Array:
        """Collects the chunks of `schedule.ends` in one pass."""
        ends = self.schedule.ends
        rows = [{} for _ in range(local_rows(ends))]
        for chunk, devices in enumerate(ends):
            rows[local_row(ends, chunk)] |= dict.fromkeys(devices, chunk)
        return self._read(rows, finished=True, zeros=True)

    def _send(self, transfer: Transfer, complete: bool) -> jax.Array:
        """Moves `[1, length]` along the pairs; devices that are no target get zeros."""
        sources = {source: chunk for source, _, chunk in transfer}
        value = self._read([sources], finished=complete)
        wire = lax.bitcast_convert_type(value, _wire_dtype(value.dtype))
        moved = lax.ppermute(wire, self.axis_name, transfer.pairs)
        return lax.bitcast_convert_type(moved, value.dtype)

    def _is_complete(self, transfer: Transfer, held: Holdings) -> bool:
        """Whether what it sends sums up every contribution; all or none does."""
        starts = self.schedule.starts
        return all(held[s][c] == frozenset(starts[c]) for s, _, c in transfer)

    def _read(
        self, rows: list[dict[int, int]], finished: bool = False, zeros: bool = False
    ) -> jax.Array:
        """Row `i` of the result: on each device `d` of `rows[i]`, chunk `rows[i][d]`.

        Other devices read zeros if `zeros` is set, else whatever is cheapest.
        """
        blocks: dict[int, int] = {}  # index into `values` -> its first row
        table = np.full((self.schedule.devices, len(rows)), -1)
        end = 0
        for i, row in enumerate(rows):
            for device, chunk in row.items():
                number = int(self.location[device, chunk])
                if number not in blocks:
                    blocks[number] = end
                    end += self.values[number].array.shape[0]
                table[device, i] = blocks[number] + self._row(number, chunk)
        arrays = [self._array(number, finished) for number in blocks]
        if zeros and (table < 0).any():
            arrays.append(jnp.zeros_like(arrays[0][:1]))
            table[table < 0] = end
        for i in range(len(rows)):
            table[table[:, i] < 0, i] = table[:, i].max()
        return self._take(arrays, table)

    def _take(self, arrays: list[jax.Array], table: np.ndarray) -> jax.Array:
        """Takes rows `table[rank]` of the concatenated arrays."""
        dtype = max((a.dtype for a in arrays), key=lambda dtype: dtype.itemsize)
        array = arrays[0]
        if len(arrays) > 1:
            array = jnp.concatenate([a.astype(dtype) for a in arrays])
        if np.array_equal(table, [range(array.shape[0])] * len(table)):
            return array
        if table.shape[1] > 1:
            if table.size <= MOST_ORDERS and across_cpu_processes():
                orders = [functools.partial(_in_order, order) for order in table]
                return lax.switch(self.rank, orders, arrays)
            return jnp.take(array, jnp.asarray(table)[self.rank], axis=0, mode="clip")
        if (table == table[0]).all():
            return array[table[0, 0], None]
        row = jnp.asarray(table[:, 0])[self.rank]
        return lax.dynamic_slice_in_dim(array, row, 1)

    def _row(self, number: int, chunk: int) -> int:
        """The row of `values[number]` that holds `chunk`."""
        return local_row(self.schedule.starts, chunk) if number == 0 else 0

    def _array(self, number: int, finished: bool) -> jax.Array:
        """`values[number]`, passed through `finish` if its chunks are complete."""
        value = self.values[number]
        if not finished:
            return value.array
        done = value.finished
        if done is None:
            done = value.finished = self.finish(value.array)
        return done


def _in_order(order: np.ndarray, arrays: list[jax.Array]) -> jax.Array:
    """Rows of the arrays, counted through all of them, in this order."""
    dtype = max((a.dtype for a in arrays), key=lambda dtype: dtype.itemsize)
    rows = [row[None].astype(dtype) for array in arrays for row in array]
    return jnp.concatenate([rows[i] for i in order])


def _wire_dtype(dtype) -> np.dtype:
    """The dtype that carries `dtype` unchanged: unsigned bits for narrow floats."""
    if jnp.issubdtype(dtype, jnp.floating) and dtype != jnp.float16:
        width = jnp.dtype(dtype).itemsize
        if width < 4:
            return jnp.dtype(f"uint{8 * width}")
    return jnp.dtype(dtype)
