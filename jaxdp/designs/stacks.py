"""Stacked copies: leaves `[N, ...]`, one entry per device, and one array made of them.

NumPy arrays stay such, as views where they can.
"""

from typing import Any

import jax.numpy as jnp

from jaxdp.buckets import is_summable
from jaxdp.trees import module_of


def spread(leaf: Any, like: Any) -> Any:
    """A copy for every device: `[...]` becomes `[N, ...]`, the shape of `like`."""
    return module_of(leaf).broadcast_to(leaf, like.shape)


def averaged(leaf: Any) -> Any:
    """The mean over entries, summed in float32 or wider; the first of what has none."""
    if not is_summable(leaf):
        return leaf[0]
    wide = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
    return wide.mean(axis=0).astype(leaf.dtype)
