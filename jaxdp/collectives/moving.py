"""Collectives that move values as they are, and the checks of what they are given."""

import functools
import math
from typing import Any

import jax
import numpy as np

from jaxdp.buckets import is_movable, is_summable
from jaxdp.packing import (
    PyTree,
    axis_size,
    concatenated,
    per_dtype,
    side_by_side,
    stacked,
    unpadded,
)
from jaxdp.primitive import AxisName
from jaxdp.scheduled import Algorithm, scheduled


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
