"""A state as it is now, kept while training goes on.

On CPUs nothing is copied: a NumPy view keeps the buffer, and JAX gives the next step,
to which the state is donated, another one. From accelerators all arrays travel to the
host at the same time. The views are put together, where an array lies in parts, by
whoever writes them.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdp import processes
from jaxdp.checkpoint.content import without_keys

PyTree = Any


class Captured(NamedTuple):
    """An array of the host in parts.

    Attributes:
        shape: Of the whole.
        parts: Where each part lies in it, and its elements.
    """

    shape: tuple[int, ...]
    parts: list[tuple[Any, np.ndarray]]

    def whole(self) -> np.ndarray:
        """In one; the part itself if there is one."""
        if len(self.parts) == 1:
            return self.parts[0][1]
        joined = np.empty(self.shape, self.parts[0][1].dtype)
        for index, part in self.parts:
            joined[index] = part
        return joined


def capture(tree: PyTree, writes: bool) -> PyTree:
    """The arrays of a tree, which may be donated after this.

    All processes must call it: an array of which this process has a part is gathered.

    Args:
        tree: Arrays; keys become the integers they are made of.
        writes: Whether this process needs them.

    Returns:
        `Captured` leaves, or None in a process that does not write.
    """
    tree = without_keys(tree)
    leaves = jax.tree.leaves(tree)
    if writes:
        for leaf in leaves:
            for _, shard in _shards(leaf):
                shard.copy_to_host_async()

    def one(leaf):
        if not (leaf.is_fully_replicated or leaf.is_fully_addressable):
            return Captured(leaf.shape, [((), processes.fetch(leaf))])
        if writes:
            parts = [(index, np.asarray(x)) for index, x in _shards(leaf)]
            return Captured(leaf.shape, parts)
        return None

    captured = jax.tree.map(one, tree)
    return captured if writes else None


def whole(captured: PyTree) -> PyTree:
    """The arrays in one, by whoever writes them."""
    return jax.tree.map(
        lambda leaf: leaf.whole(),
        captured,
        is_leaf=lambda leaf: isinstance(leaf, Captured),
    )


def _shards(leaf: jax.Array) -> list[tuple[Any, jax.Array]]:
    """The different parts that lie here, and where they lie in the array."""
    if leaf.is_fully_replicated:
        return [((), leaf.addressable_data(0))]
    if not leaf.is_fully_addressable:
        return []
    shards = leaf.addressable_shards
    return [(shard.index, shard.data) for shard in shards if shard.replica_id == 0]
