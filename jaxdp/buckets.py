"""Which leaves travel, and which travel together: flat buckets of one dtype.

A bucket packs several leaves into one flat buffer, so that a collective pays its rounds
once for all of them. Leaves keep their dtype: nothing is promoted to pack it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_key(leaf: Any) -> bool:
    """Whether a leaf is a typed PRNG key."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    )


def is_movable(leaf: Any) -> bool:
    """Whether a leaf holds values that can travel: numbers, bools and keys."""
    return getattr(leaf, "dtype", None) != jax.dtypes.float0


def is_summable(leaf: Any) -> bool:
    """Whether a leaf is differentiable, so that its sum is meant: float or complex."""
    if not is_movable(leaf) or is_key(leaf):
        return False
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def same_types(tree: Any, other: Any) -> bool:
    """Whether two trees of arrays agree in structure, shapes and dtypes."""
    types = [
        (jax.tree.structure(t), [(x.shape, x.dtype) for x in jax.tree.leaves(t)])
        for t in (tree, other)
    ]
    return types[0] == types[1]


def by_dtype(
    leaves: Sequence[Any], takes_part: Callable[[Any], bool]
) -> list[list[int]]:
    """Groups the indices of the leaves that take part by dtype, in order.

    Leaves without elements form groups of their own: of those nothing travels.
    """
    groups: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if takes_part(leaf):
            dtype = leaf.dtype if is_key(leaf) else jnp.result_type(leaf)
            groups.setdefault((dtype, np.size(leaf) == 0), []).append(i)
    return list(groups.values())


def assign(
    leaves: Sequence[Any], bucket_cap_mb: float | None = None
) -> list[list[int]]:
    """Assigns the summable leaves to buckets of at most `bucket_cap_mb` MiB.

    A bucket holds one dtype and takes leaves in order until the next would pass the
    cap; a leaf larger than the cap stands alone.

    Args:
        leaves: Arrays, or anything with `shape` and `dtype`.
        bucket_cap_mb: The cap in MiB; None packs each dtype into one bucket.

    Returns:
        For each bucket the indices of its leaves.
    """
    cap = float("inf") if bucket_cap_mb is None else bucket_cap_mb * 2**20
    buckets = []
    for group in by_dtype(leaves, is_summable):
        buckets.append([])
        filled = 0
        for i in group:
            nbytes = np.size(leaves[i]) * jnp.result_type(leaves[i]).itemsize
            if buckets[-1] and filled + nbytes > cap:
                buckets.append([])
                filled = 0
            buckets[-1].append(i)
            filled += nbytes
    return buckets
