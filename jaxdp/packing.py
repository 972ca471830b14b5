"""Trees in and out of the buffers that collectives move.

The leaves of one dtype travel together, as one `[chunks, length]` buffer. Leaves keep
their dtype; typed keys travel as the integers they are made of.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdp.buckets import by_dtype, is_key
from jaxdp.primitive import AxisName, Collective
from jaxdp.turns import InTurn

PyTree = Any


def axis_size(caller: str, axis_name: AxisName) -> int:
    """The number of devices on the axis; of several, on all together.

    Raises:
        ValueError: An axis is not bound here, or they are not in the mesh's order.
        TypeError: No axis.
    """
    sizes = axis_sizes(caller, axis_name)
    return lax.axis_size(axis_name) if sizes is None else math.prod(sizes)


def axis_sizes(caller: str, axis_name: AxisName) -> tuple[int, ...] | None:
    """The number of devices on each of several axes; None if one alone is named.

    Raises:
        ValueError: An axis is not bound here, or they are not in the mesh's order: for
            `lax.ppermute` ranks count in that order, whatever a tuple says.
        TypeError: No axis.
    """
    several = isinstance(axis_name, tuple)
    names = axis_name if several else (axis_name,)
    if not names or isinstance(axis_name, list) or None in names:
        raise TypeError(
            f"{caller} got axis_name={axis_name!r}. It must be the name of a mesh "
            "axis, such as 'data', or a tuple of several: their devices count as one "
            "row, ranks through the last axis first."
        )
    # An axis that vmap binds has a size too, but no devices.
    mesh = jax.sharding.get_abstract_mesh()
    missing = [name for name in names if name not in mesh.manual_axes]
    if missing:
        raise ValueError(
            f"{caller} got axis_name={axis_name!r}, and no axis of the name "
            f"{missing[0]!r} is bound where it was called. It must run inside "
            "jax.shard_map or jax.pmap over that axis. Call it there, with the axis "
            "name of that mesh or pmap."
        )
    order = tuple(name for name in mesh.axis_names if name in names)
    if order != names:
        raise ValueError(
            f"{caller} got axis_name={axis_name!r} on a mesh with axes "
            f"{mesh.axis_names}. It must name each axis once, in the mesh's order, in "
            f"which ranks count: {order}. Name them so, or make the mesh in the other "
            "order."
        )
    return tuple(map(lax.axis_size, names)) if several else None


def per_dtype(
    tree: PyTree,
    takes_part: Callable[[Any], bool],
    move: Callable[[list[jax.Array]], list[jax.Array]],
) -> PyTree:
    """Applies `move` to the leaves of each dtype; other leaves stay as they are."""
    leaves, structure = jax.tree.flatten(tree)
    for indices in by_dtype(leaves, takes_part):
        keys = [is_key(leaves[i]) for i in indices]
        arrays = [
            jax.random.key_data(leaves[i]) if key else jnp.asarray(leaves[i])
            for i, key in zip(indices, keys, strict=True)
        ]
        for i, key, moved in zip(indices, keys, move(arrays), strict=True):
            impl = jax.random.key_impl(leaves[i]) if key else None
            leaves[i] = jax.random.wrap_key_data(moved, impl=impl) if key else moved
    return jax.tree.unflatten(structure, leaves)


def concatenated(
    collective: Collective | InTurn, leaves: list[jax.Array]
) -> list[jax.Array]:
    """Runs on the concatenated leaves, cut into the schedule's chunks."""
    sizes = [leaf.size for leaf in leaves]
    flat = jnp.concatenate([leaf.reshape(-1) for leaf in leaves])
    result = collective(chunked(flat, collective.schedule.chunks)).reshape(-1)
    parts = jnp.split(result[: sum(sizes)], np.cumsum(sizes)[:-1])
    return [part.reshape(x.shape) for part, x in zip(parts, leaves, strict=True)]


def stacked(collective: Collective, leaves: list[jax.Array]) -> list[jax.Array]:
    """Runs on one row per leaf and device; a leaf `[...]` becomes `[N, ...]`."""
    columns = side_by_side(collective, [leaf.reshape(1, leaf.size) for leaf in leaves])
    return [
        column.reshape(collective.schedule.devices, *leaf.shape)
        for column, leaf in zip(columns, leaves, strict=True)
    ]


def side_by_side(
    move: Callable[[jax.Array], jax.Array], chunks: list[jax.Array]
) -> list[jax.Array]:
    """Runs a collective on `[rows, length]` matrices side by side."""
    lengths = [matrix.shape[1] for matrix in chunks]
    return apart(move(jnp.concatenate(chunks, axis=1)), lengths)


def apart(matrices: jax.Array, lengths: Sequence[int]) -> list[jax.Array]:
    """Takes `[rows, sum(lengths)]` apart."""
    return jnp.split(matrices, np.cumsum(lengths)[:-1], axis=1)


def unpadded(parts: jax.Array, like: Any) -> jax.Array:
    """A leaf of the shape of `like`, from its parts with zeros at the end."""
    return parts.reshape(-1)[: np.size(like)].reshape(np.shape(like))


def chunked(array: jax.Array, chunks: int) -> jax.Array:
    """Flattens and pads with zeros to `[chunks, ceil(size / chunks)]`."""
    flat = array.reshape(-1)
    return jnp.pad(flat, (0, -flat.size % chunks)).reshape(
        chunks, (flat.size + chunks - 1) // chunks
    )
