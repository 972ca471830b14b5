"""Collectives that sum: what devices contribute ends as one sum."""

import functools

import jax
from jax import lax

from jaxdp.buckets import is_summable
from jaxdp.executor import accumulation_dtype
from jaxdp.mesh import across_cpu_processes
from jaxdp.packing import (
    PyTree,
    axis_size,
    axis_sizes,
    chunked,
    concatenated,
    per_dtype,
    side_by_side,
)
from jaxdp.primitive import AxisName
from jaxdp.scheduled import Algorithm, scheduled
from jaxdp.turns import Turns


def all_reduce(
    tree: PyTree,
    axis_name: AxisName,
    algorithm: Algorithm = "ring",
    mean: bool = False,
    unroll: bool | None = None,
) -> PyTree:
    """Sums every leaf over the devices; all end with the same bits.

    Devices: before, each holds its own tree; after, all hold the sum. A ring reduces
    each chunk on one device and then spreads it, so replicas cannot drift apart.

    Cost: ring, 2 (N - 1) rounds, 2 (N - 1) K / N bytes sent per device (K padded to a
    multiple of N elements); star, 2 rounds, (N - 1) K bytes in and out of the root;
    recursive doubling, log2 N rounds of K bytes; native, XLA's choice. Of 16-bit
    leaves, partial sums travel as float32.

    Args:
        tree: Pytree of arrays of any shape.
        axis_name: The mesh axis, or a tuple of axes.
        algorithm: `"ring"`, `"star"`, `"halving_doubling"` or another name in
            `jaxdp.algorithms.SCHEDULES`; `"hierarchical"`, over two axes: hosts, and
            devices in a host; a `jaxdp.schedule.Schedule`; or `"native"`: `lax.psum`,
            by no rounds of ours.
            `"auto"` is the quickest by `jaxdp.choose_algorithm`, for the bytes of each
            buffer and the hardware of the mesh, known when it is traced. Between
            processes on CPUs it is the ring, and native between two: there gloo lets
            devices that swap take turns, which takes a ring of two twice the time.
        mean: Divides by N, before the sum is rounded to the leaf's dtype.
        unroll: Whether every round is written out; see above.

    Returns:
        The tree, with the same shapes and dtypes; replicated.

    Example:
        >>> import jax, jaxdp
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jaxdp.data_mesh(4)
        >>> total = jax.shard_map(
        ...     lambda x: jaxdp.all_reduce(x, "data"),
        ...     mesh=mesh, in_specs=P("data"), out_specs=P())
        >>> print(jax.jit(total)(jax.numpy.array([1.0, 20.0, 300.0, 4000.0])))
        [4321.]

    References:
        Patarasuk and Yuan, JPDC 2009, section 3 (ring).
    """
    return all_reduce_in_turn(Turns(None), tree, axis_name, algorithm, mean, unroll)


def all_reduce_in_turn(
    turns: Turns,
    tree: PyTree,
    axis_name: AxisName,
    algorithm: Algorithm,
    mean: bool,
    unroll: bool | None,
) -> PyTree:
    """As `all_reduce`, but each buffer that travels by rounds of ours takes its turn.

    Not differentiable, and not for `vmap`: for designs.

    Args:
        turns: Whose turn it is; the same object for all buffers of a program.
        tree: As for `all_reduce`, like all that follow.
        axis_name: The mesh axis, or several.
        algorithm: How it travels.
        mean: Whether the sum is divided by N.
        unroll: Whether every round is written out.

    Returns:
        The sum or the mean, replicated.
    """
    size = axis_size("all_reduce", axis_name)
    sizes = axis_sizes("all_reduce", axis_name)
    divisor = size if mean else 1

    def run_by(algorithm):
        if algorithm == "native":
            return functools.partial(_native_sum, axis_name, divisor)
        collective = scheduled(
            *("all_reduce", algorithm, axis_name, size, 0, divisor, unroll), sizes
        )
        return functools.partial(concatenated, turns.take(collective))

    if algorithm != "auto":
        return per_dtype(tree, is_summable, run_by(algorithm))
    return per_dtype(
        tree, is_summable, lambda leaves: run_by(_chosen(leaves, size))(leaves)
    )


def reduce(
    tree: PyTree,
    axis_name: AxisName,
    root: int = 0,
    algorithm: Algorithm = "star",
    mean: bool = False,
    unroll: bool | None = None,
) -> PyTree:
    """Sums every leaf on the root; the other devices get zeros.

    Cost: star, 1 round; the root receives (N - 1) K bytes, the others send K each.

    Args:
        tree: Pytree of arrays of any shape.
        axis_name: The mesh axis, or a tuple of axes.
        root: Rank that ends with the sum.
        algorithm: `"star"`, another name in `jaxdp.algorithms.SCHEDULES`, or a
            `jaxdp.schedule.Schedule`.
        mean: Divides by N.
        unroll: Whether every round is written out.

    Returns:
        The tree, with the same shapes and dtypes; varying.
    """
    size = axis_size("reduce", axis_name)
    divisor = size if mean else 1
    collective = scheduled("reduce", algorithm, axis_name, size, root, divisor, unroll)
    return per_dtype(tree, is_summable, functools.partial(concatenated, collective))


def reduce_scatter(
    tree: PyTree,
    axis_name: AxisName,
    algorithm: Algorithm = "ring",
    mean: bool = False,
    unroll: bool | None = None,
) -> PyTree:
    """Sums every leaf and leaves each device its shard of the sum.

    Every leaf is flattened and padded with zeros to N equal chunks; rank r keeps chunk
    r. `all_gather(shards, axis_name, like=tree)` puts the leaves together again.

    Cost: ring, N - 1 rounds, (N - 1) K / N bytes sent per device.

    Args:
        tree: Pytree of arrays of any shape.
        axis_name: The mesh axis, or a tuple of axes.
        algorithm: `"ring"`, another name in `jaxdp.algorithms.SCHEDULES`, or a
            `jaxdp.schedule.Schedule`.
        mean: Divides by N.
        unroll: Whether every round is written out.

    Returns:
        A leaf of `size` elements becomes `[ceil(size / N)]`, of the same dtype;
        varying. Leaves that are not summed come back whole.
    """
    size = axis_size("reduce_scatter", axis_name)
    divisor = size if mean else 1
    collective = scheduled(
        "reduce_scatter", algorithm, axis_name, size, 0, divisor, unroll
    )

    def move(leaves):
        chunks = [chunked(leaf, size) for leaf in leaves]
        shards = side_by_side(collective, chunks)
        return [shard.reshape(-1) for shard in shards]

    return per_dtype(tree, is_summable, move)


def _chosen(leaves: list[jax.Array], devices: int) -> Algorithm:
    """What "auto" stands for, for leaves of one dtype."""
    from jaxdp.choice import choose_algorithm  # its hardware comes with what compiles

    if across_cpu_processes():  # gloo lets neighbours that swap take turns
        return "native" if devices == 2 else "ring"
    dtype = leaves[0].dtype
    return choose_algorithm(
        sum(leaf.size for leaf in leaves) * dtype.itemsize,
        devices,
        itemsize=dtype.itemsize,
        partial_itemsize=accumulation_dtype(dtype).itemsize,
    ).schedule


def _native_sum(
    axis_name: AxisName, divisor: int, leaves: list[jax.Array]
) -> list[jax.Array]:
    """Sums the leaves of one dtype by one `lax.psum`."""

    def total(flat):
        found = lax.psum(flat.astype(accumulation_dtype(flat.dtype)), axis_name)
        return (found / divisor if divisor > 1 else found).astype(flat.dtype)

    flat = side_by_side(total, [leaf.reshape(1, leaf.size) for leaf in leaves])
    return [x.reshape(leaf.shape) for x, leaf in zip(flat, leaves, strict=True)]
