"""Values on the host, from arrays that span processes and back."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from jaxdp.buckets import is_key

PyTree = Any


def process_zero() -> bool:
    """Whether this is process 0, the one that logs.

    Everything else all processes must do, saving too: a collective or a checkpoint that
    only one process enters waits for the others for ever.
    """
    return jax.process_index() == 0


def fetch(tree: PyTree) -> PyTree:
    """The arrays of a tree as NumPy arrays, whole, on every process.

    All processes must call it if any array is split over several. Shapes do not depend
    on the number of processes.

    Cost: nothing travels for arrays that this process has whole; others are gathered.

    Args:
        tree: Arrays of any sharding; other leaves stay as they are, and keys become the
            integers they are made of.

    Returns:
        A tree of the same structure, the same on every process.
    """

    def whole(leaf):
        if is_key(leaf):
            leaf = jax.random.key_data(leaf)
        if not isinstance(leaf, jax.Array):
            return leaf
        if leaf.is_fully_addressable or leaf.is_fully_replicated:
            return np.asarray(leaf)
        return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))

    return jax.tree.map(whole, tree)


def copies_of_zero(tree: PyTree) -> PyTree:
    """The arrays of process 0, on all: for parameters that only it has made or read.

    All processes must call it, with trees of the same structure, shapes and dtypes.

    Cost: a broadcast of the tree.

    Args:
        tree: Arrays of the host or of this process.

    Returns:
        NumPy arrays, the same bits on every process.
    """
    if jax.process_count() == 1:
        return jax.tree.map(np.asarray, tree)
    return multihost_utils.broadcast_one_to_all(tree)


def on_all(tree: PyTree, sharding: NamedSharding) -> PyTree:
    """The same arrays on every device of a mesh, each process giving its own copy.

    Args:
        tree: Arrays of the host, of this process, or of a mesh.
        sharding: Replicated over the mesh.
    """
    if ranks_of(sharding.mesh)[1:]:
        return jax.tree.map(lambda leaf: _on_all(leaf, sharding), tree)
    return jax.device_put(tree, sharding)


@functools.lru_cache(maxsize=64)
def ranks_of(mesh: Mesh) -> tuple[int, ...]:
    """The processes that a mesh spans, in order.

    Devices that are not here, which a program is only compiled for, have no processes:
    of them this one speaks alone.
    """
    devices = {*mesh.devices.flat}
    if not devices <= {*jax.devices()}:
        return (jax.process_index(),)
    return tuple(sorted({device.process_index for device in devices}))


def devices_of_ranks(mesh: Mesh, ranks: Sequence[int]) -> list[int]:
    """How many devices of a mesh each process has."""
    owners = [device.process_index for device in mesh.devices.flat]
    return [owners.count(rank) for rank in ranks]


def _on_all(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """One leaf; `jax.device_put` would compare the copies by a collective."""
    if not getattr(leaf, "is_fully_addressable", True):
        return jax.device_put(leaf, sharding)
    if is_key(leaf):
        data = _on_all(jax.random.key_data(leaf), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    values = np.asarray(leaf)
    return jax.make_array_from_callback(values.shape, sharding, values.__getitem__)
