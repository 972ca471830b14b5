"""Runs a schedule inside `shard_map` or `pmap`: one `ppermute` per move.

All devices run one program, so "the chunk this device sends now" depends on its rank:
it is computed where a formula gives it, else looked up. `jaxdp.plan` tells where every
value lives: still in the input, or in the array that an earlier round produced. So a
chunk that was just received is sent on without being stored and sliced again, and the
output is written once, at the end.

What travels: a device's own contribution in its own dtype, a partial sum in the
accumulation dtype (float32 or wider), a complete chunk in the output dtype. bfloat16
and narrower floats travel as bits, because XLA on CPU would widen them to float32.

Why this way: writing every arrival into the output by `dynamic_update_slice` cost a
copy of the whole buffer (N = 2, 16 MiB, forced CPU devices: 8.4 ms against 6.1 ms). How
rows are put together is in `jaxdp.rows`.

Rounds are written out up to those of a ring of 64, which XLA can still compile: 40
buckets of it for H100 took 58 s on two busy cores (26 s of processor time), and 7 s in
loops; a ring of 256 in loops 12 s. Loops take longer to run: forced CPU devices, 16
MiB, 1.1 times as long for N = 2, 1.4 to 1.9 for N = 4 and 8, the same below 64 KiB; on
8 H100 the timeline of a small step of 6 buckets says 1.51 ms instead of 0.90 ms, for
the conditions of the loops, and nothing of the backward pass goes on beside a loop.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdp import rolled
from jaxdp.plan import Kind, Loop, Read, planned
from jaxdp.rows import Source, picked
from jaxdp.schedule import Schedule

MOST_ROUNDS = 126  # of a schedule that is unrolled unless one asks


def accumulation_dtype(dtype) -> np.dtype:
    """The dtype that sums of `dtype` are made in: float32 or wider."""
    if jnp.dtype(dtype).itemsize < 4:  # JAX promotes no 8-bit float by itself
        return jnp.dtype(jnp.float32)
    return jnp.promote_types(dtype, jnp.float32)


def execute(
    schedule: Schedule,
    chunks: jax.Array,
    axis_name: str | tuple[str, ...],
    finish: Callable[[jax.Array], jax.Array] = lambda complete: complete,
    unroll: bool | None = None,
) -> jax.Array:
    """Runs `schedule` over the devices of `axis_name`.

    Devices: the caller is inside `shard_map` or `pmap` over `axis_name`, which has
    `schedule.devices` devices.

    Args:
        schedule: A verified schedule.
        chunks: `[jaxdp.schedule.local_rows(schedule.starts), length]`, what this device
            starts with.
        axis_name: The mesh axis; of several, ranks count through the last one first.
        finish: Applied elementwise, once, to every complete chunk where it became
            complete: a division, a cast.
        unroll: True writes every round out; False makes loops of rounds that repeat;
            None does so above `MOST_ROUNDS` rounds. The bits are the same.

    Returns:
        `[jaxdp.schedule.local_rows(schedule.ends), length]`: what `schedule.ends`
        places on this device, zeros elsewhere.
    """
    return execute_after(None, schedule, chunks, axis_name, finish, unroll)[0]


def execute_after(
    after: jax.Array | None,
    schedule: Schedule,
    chunks: jax.Array,
    axis_name: str | tuple[str, ...],
    finish: Callable[[jax.Array], jax.Array] = lambda complete: complete,
    unroll: bool | None = None,
) -> tuple[jax.Array, list[jax.Array]]:
    """As `execute`, but sends nothing before something else is there.

    Args:
        after: `[]`, a bool that is never true, of what is waited for
            (`jaxdp.waiting.never`); None to wait for nothing.
        schedule: As for `execute`, like all that follow.
        chunks: What this device starts with.
        axis_name: The mesh axis.
        finish: Applied to complete chunks.
        unroll: Whether every round is written out.

    Returns:
        What `execute` returns; and what the last round has brought to this device, of
        which nothing is put together yet.
    """
    if unroll is None:
        unroll = len(schedule.rounds) <= MOST_ROUNDS
    widens = accumulation_dtype(chunks.dtype) != chunks.dtype
    plan = planned(schedule, widens, not unroll)
    sums = any(len(devices) > 1 for devices in schedule.starts)
    run = Execution(chunks, axis_name, finish, sums, after)
    for number, loop in enumerate(plan.loops):
        run.landed = []
        if loop.trips > 1:
            rolled.run_loop(run, loop, plan.reads_after(number))
        else:
            run.advance(loop)
        run.after = None  # later rounds wait for this one
    return run.output(plan.output), run.landed


@dataclasses.dataclass
class _Value:
    """An array of chunks: the input, or what one move made."""

    source: Source
    finished: Source | None = None  # its complete chunks, after `finish`


class Execution:
    """What there is while a schedule runs, by number of `jaxdp.plan`.

    Attributes:
        rank: Of this device.
        after: What is sent waits for this, a bool that is never true.
        landed: What was made last.
    """

    def __init__(
        self,
        chunks: jax.Array,
        axis_name: str | tuple[str, ...],
        finish: Callable[[jax.Array], jax.Array],
        sums: bool,
        after: jax.Array | None = None,
    ):
        """Starts with the input; `sums` says whether complete chunks are sums."""
        self.after = after
        self.landed = [chunks]
        self._chunks = chunks
        self._axis_name = axis_name
        self._finish = finish
        self._wide = accumulation_dtype(chunks.dtype)
        self._values = {0: _Value(Source(chunks))}
        self.rank = lax.axis_index(axis_name)
        dtype = self._wide if sums else chunks.dtype
        complete = jax.ShapeDtypeStruct((1, 1), dtype)
        self._complete = jnp.dtype(jax.eval_shape(finish, complete).dtype)

    def advance(self, loop: Loop) -> None:
        """Runs the only round: everything is sent before anything is applied."""
        (moves,) = loop.rounds
        sent = [self.sent(m.kind, self.read(m.sent, m.kind.complete)) for m in moves]
        for move, arrived in zip(moves, sent, strict=True):
            if move.own is not None:
                arrived = self.added(arrived, self.read(move.own))
            self.register(move.value, Source(arrived), move.kind.complete)

    def sent(self, kind: Kind, rows: jax.Array) -> jax.Array:
        """Moves rows along the pairs; devices that are no target get zeros."""
        rows = rows.astype(self._travels(kind))
        if self.after is not None:
            rows = jnp.where(self.after, 0, rows)
        wire = lax.bitcast_convert_type(rows, _wire_dtype(rows.dtype))
        moved = lax.ppermute(wire, self._axis_name, kind.pairs)
        return lax.bitcast_convert_type(moved, rows.dtype)

    def added(self, arrived: jax.Array, own: jax.Array) -> jax.Array:
        """What arrived, with a device's own added."""
        return arrived.astype(self._wide) + own.astype(self._wide)

    def made(self, kind: Kind) -> np.dtype:
        """The dtype of what a move makes."""
        return self._wide if kind.op == "add" else self._travels(kind)

    def _travels(self, kind: Kind) -> np.dtype:
        """The dtype of what a move sends."""
        dtypes = {"own": self._chunks.dtype, "partial": self._wide}
        return dtypes.get(kind.sends, self._complete)

    def read(self, read: Read, complete: bool = False) -> jax.Array:
        """Rows of values, finished ones if they are complete."""
        numbers = np.unique(read.value[read.value >= 0]).tolist()
        sources = {number: self.source(number, complete) for number in numbers}
        return picked(sources, read, self.rank)

    def output(self, read: Read) -> jax.Array:
        """Complete rows; zeros for rows of -1."""
        absent = read.value < 0
        numbers = np.unique(read.value[~absent]).tolist()
        sources = {number: self.source(number, True) for number in numbers}
        if absent.any():
            nothing = max(numbers) + 1
            sources[nothing] = Source(self.zeros(1, self._complete))
            value = np.where(absent, nothing, read.value)
            read = Read(value, np.where(absent, 0, read.row))
        return picked(sources, read, self.rank)

    def register(self, number: int, source: Source, complete: bool) -> None:
        """Adds a value."""
        self.landed.append(source.array)
        self._values[number] = _Value(source, source if complete else None)

    def source(self, number: int, complete: bool) -> Source:
        """A value, passed through `finish` if its chunks are complete."""
        value = self._values[number]
        if not complete:
            return value.source
        done = value.finished
        if done is None:
            array, first, _ = value.source
            done = value.finished = Source(self.finish(array), first)
        return done

    def finish(self, complete: jax.Array) -> jax.Array:
        """Complete chunks, as they travel and end."""
        return self._finish(complete).astype(self._complete)

    def zeros(self, rows: int, dtype) -> jax.Array:
        """Zeros, typed as what varies like the input."""
        zeros = jnp.zeros((rows, self._chunks.shape[1]), dtype)
        missing = jax.typeof(self._chunks).mat.varying - jax.typeof(zeros).mat.varying
        return lax.pcast(zeros, tuple(missing), to="varying") if missing else zeros


def _wire_dtype(dtype) -> np.dtype:
    """The dtype that carries `dtype` unchanged: unsigned bits for narrow floats."""
    if jnp.issubdtype(dtype, jnp.floating) and dtype != jnp.float16:
        width = jnp.dtype(dtype).itemsize
        if width < 4:
            return jnp.dtype(f"uint{8 * width}")
    return jnp.dtype(dtype)
