"""Collectives over pytrees, for use inside `shard_map` and `pmap`.

`N` is the number of devices on the axis, `K` the bytes of the tree. Every call packs
the leaves of one dtype into one flat buffer, cuts it into chunks and moves those by
explicit `ppermute` rounds (`jaxdp.algorithms`). JAX's own counterparts: `lax.psum`,
`lax.psum_scatter`, `lax.all_gather`; the rest has none.

Sums are made in float32 or wider, whatever the leaves' dtype, and rounded once. Summing
collectives leave integer, bool, key, `float0` and `None` leaves untouched; moving ones
move integers, bools and keys as they are. All are linear, and differentiate so in
forward and reverse mode, with `check_vma` on and off. With it on, what every device
ends with alike (`all_reduce`, `all_gather`, `broadcast`) is typed as replicated, so
`out_specs=P()` is accepted.

`axis_name` may be a tuple of mesh axes: their devices are N ranks in a row, counted
through the last axis first, as `lax.axis_index` counts them.

`unroll=True` writes every round of an algorithm out in the program. `unroll=False` runs
rounds that repeat in a loop, to the same bits: a ring is then a program of the same
size for any N, and halving-doubling, whose rounds all differ, stays as it is. XLA
overlaps nothing with a loop, so None, the default, makes loops only of schedules longer
than `jaxdp.executor.MOST_ROUNDS`.

Errors raised by all: ValueError for an unknown algorithm or axis, a root that is no
rank, or a call outside `shard_map` and `pmap`.
"""

import functools
import math
from typing import Any

import jax
import numpy as np
from jax import lax

from jaxdp.buckets import is_movable, is_summable
from jaxdp.executor import accumulation_dtype
from jaxdp.mesh import across_cpu_processes
from jaxdp.packing import (
    axis_size,
    axis_sizes,
    chunked,
    concatenated,
    per_dtype,
    side_by_side,
    stacked,
    unpadded,
)
from jaxdp.primitive import AxisName, scheduled
from jaxdp.schedule import Schedule
from jaxdp.turns import Turns

PyTree = Any
Algorithm = str | Schedule


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


def broadcast(
    tree: PyTree,
    axis_name: AxisName,
    root: int = 0,
    algorithm: Algorithm = "star",
    unroll: bool | None = None,
) -> PyTree:
    """Gives every device the root's tree.

    Cost: star, 1 round; the root sends (N - 1) K bytes, the others receive K each.

    Args:
        tree: Pytree of arrays of any shape and dtype; only the root's values matter.
        axis_name: The mesh axis, or a tuple of axes.
        root: Rank whose values go out.
        algorithm: `"star"`, another name in `jaxdp.algorithms.SCHEDULES`, or a
            `jaxdp.schedule.Schedule`.
        unroll: Whether every round is written out.

    Returns:
        The tree, with the same shapes and dtypes; replicated.
    """
    size = axis_size("broadcast", axis_name)
    collective = scheduled("broadcast", algorithm, axis_name, size, root, unroll=unroll)
    return per_dtype(tree, is_movable, functools.partial(concatenated, collective))


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


def all_gather(
    tree: PyTree,
    axis_name: AxisName,
    algorithm: Algorithm = "ring",
    like: PyTree | None = None,
    unroll: bool | None = None,
) -> PyTree:
    """Gives every device the leaves of all devices.

    Cost: ring, N - 1 rounds, (N - 1) K bytes sent per device, K those of one shard.

    Args:
        tree: Pytree of arrays of any shape and dtype.
        axis_name: The mesh axis, or a tuple of axes.
        algorithm: `"ring"`, another name in `jaxdp.algorithms.SCHEDULES`, or a
            `jaxdp.schedule.Schedule`.
        like: The tree that was given to `reduce_scatter`: undoes its padding, and
            leaves untouched what `reduce_scatter` left whole.
        unroll: Whether every round is written out.

    Returns:
        A leaf `[...]` becomes `[N, ...]`, entry r from rank r; with `like`, it gets the
        shape of the leaf of `like`. Replicated.

    Raises:
        ValueError: `like` has another structure, or a leaf that these shards do not
            fill.
    """
    size = axis_size("all_gather", axis_name)
    collective = scheduled("all_gather", algorithm, axis_name, size, unroll=unroll)
    move = functools.partial(stacked, collective)
    if like is None:
        return per_dtype(tree, is_movable, move)
    _check_like(tree, like, size)
    return jax.tree.map(_unpadded, tree, per_dtype(tree, is_summable, move), like)


def gather(
    tree: PyTree,
    axis_name: AxisName,
    root: int = 0,
    algorithm: Algorithm = "star",
    unroll: bool | None = None,
) -> PyTree:
    """Gives the root the leaves of all devices; the others get zeros.

    Cost: star, 1 round; the root receives (N - 1) K bytes, the others send K each.

    Args:
        tree: Pytree of arrays of any shape and dtype.
        axis_name: The mesh axis, or a tuple of axes.
        root: Rank that ends with all leaves.
        algorithm: `"star"`, another name in `jaxdp.algorithms.SCHEDULES`, or a
            `jaxdp.schedule.Schedule`.
        unroll: Whether every round is written out.

    Returns:
        A leaf `[...]` becomes `[N, ...]`, entry r from rank r; varying.
    """
    size = axis_size("gather", axis_name)
    collective = scheduled("gather", algorithm, axis_name, size, root, unroll=unroll)
    return per_dtype(tree, is_movable, functools.partial(stacked, collective))


def scatter(
    tree: PyTree,
    axis_name: AxisName,
    root: int = 0,
    algorithm: Algorithm = "star",
    unroll: bool | None = None,
) -> PyTree:
    """Gives rank r entry r of the root's leaves.

    Cost: star, 1 round; the root sends (N - 1) K / N bytes, the others receive K / N.

    Args:
        tree: Pytree of arrays `[N, ...]` of any dtype; only the root's values matter.
        axis_name: The mesh axis, or a tuple of axes.
        root: Rank whose values go out.
        algorithm: `"star"`, another name in `jaxdp.algorithms.SCHEDULES`, or a
            `jaxdp.schedule.Schedule`.
        unroll: Whether every round is written out.

    Returns:
        A leaf `[N, ...]` becomes `[...]`; varying.

    Raises:
        ValueError: A leaf whose leading axis is not N.
    """
    size = axis_size("scatter", axis_name)
    collective = scheduled("scatter", algorithm, axis_name, size, root, unroll=unroll)
    _check_leading_axis(tree, size, axis_name)

    def move(leaves):
        chunks = [leaf.reshape(size, leaf.size // size) for leaf in leaves]
        parts = side_by_side(collective, chunks)
        return [
            part.reshape(leaf.shape[1:])
            for part, leaf in zip(parts, leaves, strict=True)
        ]

    return per_dtype(tree, is_movable, move)


def _unpadded(shard: Any, gathered: Any, like: Any) -> Any:
    """A leaf as it was before `reduce_scatter`."""
    if not is_summable(shard):
        return gathered
    return unpadded(gathered, like)


def _check_like(tree: PyTree, like: PyTree, size: int) -> None:
    """Checks that `tree` holds the shards of a tree like `like`."""
    given, wanted = jax.tree.structure(tree), jax.tree.structure(like)
    if given != wanted:
        raise ValueError(
            f"all_gather got shards of structure {given} and a `like` of structure "
            f"{wanted}. They must be equal. Pass as `like` the tree that was given to "
            "reduce_scatter."
        )
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    bad = [
        f"{jax.tree_util.keystr(path) or 'the array'} has {np.size(shard)} elements, "
        f"not ceil({np.size(whole)} / {size}) = {math.ceil(np.size(whole) / size)}"
        for (path, shard), whole in zip(leaves, jax.tree.leaves(like), strict=True)
        if is_summable(shard) and np.size(shard) != math.ceil(np.size(whole) / size)
    ]
    if bad:
        raise ValueError(
            f"all_gather got shards that do not fill the leaves of `like` on {size} "
            f"devices: {'; '.join(bad)}. Pass as `like` the tree that was given to "
            "reduce_scatter."
        )


def _check_leading_axis(tree: PyTree, size: int, axis_name: AxisName) -> None:
    """Checks that every leaf of a scatter is `[N, ...]`."""
    bad = [
        f"{jax.tree_util.keystr(path) or 'the array'} {np.shape(leaf)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if is_movable(leaf) and np.shape(leaf)[:1] != (size,)
    ]
    if bad:
        raise ValueError(
            f"scatter got leaves whose leading axis is not the {size} devices on axis "
            f"{axis_name!r}: {', '.join(bad)}. Stack one entry per device along axis 0."
        )


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
